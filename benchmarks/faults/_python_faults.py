"""Faults of Python objects: odd optimizers and models, bad policies, broken logging, leaks."""

# mypy: disable-error-code="no-untyped-call,misc,assignment"
from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.faults._fault import Job, Start, fault


class Refuses(Exception):
    """What odd objects raise."""


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Refuses


@fault("a step that uses the agent", "detaches attaches summary marks ticks", attach=True)
def step_uses_agent(job: Job) -> None:
    job.begin()
    model = job.ddp()
    optimizer = job.optimizer(model)
    agent = [job.attach(optimizer)]

    def use(*args: Any) -> None:
        one = agent[0]
        if one is None:
            return
        if job.variant == "detaches":
            one.detach()
        elif job.variant == "attaches":
            one.detach()
            agent[0] = job.attach(optimizer)
        elif job.variant == "summary":
            one.summary(compare=True)
        elif job.variant == "marks":
            with one.mark("evaluation"):
                one.tick()
        else:
            one.tick()

    optimizer.register_step_pre_hook(use)
    optimizer.register_step_post_hook(use)
    job.train(model, optimizer)


POLICIES = "raises slow nan shape none text exits recursion evil_repr huge deletes threads seeds_random"


@fault("bad policy", POLICIES, ranks=2, attach=True)
def bad_policy(job: Job) -> None:
    """A KeyboardInterrupt is not among these: it cannot be told from the user's own, which has to end the job."""
    job.begin()
    model = job.ddp()
    if job.agent:
        import numpy as np

        from paceenv.policies.base import Policy

        class Bad(Policy):
            name = "bad"

            def act(self, signals_BO: Any) -> Any:
                good = np.tile(np.array([0.01, 0.4]), (len(signals_BO), 3, 1))
                return _bad_acts(job.variant, good)

            __repr__ = __str__ = __eq__ = _refuse if job.variant == "evil_repr" else object.__repr__
            __hash__ = object.__hash__

        short = {"quiet_first": 0, "interval_iterations": 4, "block_iterations": 8, "cap_share": 0.5}
        known = __import__("dataclasses").fields(__import__("paceenv.live.options", fromlist=["Options"]).Options)
        short = {k: v for k, v in short.items() if k in {f.name for f in known}}
        job.attach(model, policy=Bad(), mode=("active", "shadow", "canary")[job.seed % 3], **short)
    job.train(model, iterations=150)


def _bad_acts(how: str, good: Any) -> Any:
    import random

    import numpy as np

    if how == "raises":
        raise Refuses
    if how == "exits":
        sys.exit(13)
    if how == "slow":
        time.sleep(0.7)
    if how == "recursion":
        return _bad_acts(how, good)
    if how == "threads":
        threading.Thread(target=_refuse, daemon=True).start()
    if how == "seeds_random":
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  # as bad as can be
    odd: dict[str, Any] = {"nan": good * np.nan, "shape": good[0], "none": None, "text": "fast", "huge": good * 1e300}
    odd["evil_repr"] = type("Odd", (), {"__array__": _refuse, "__repr__": _refuse, "__len__": _refuse})()
    return odd.get(how, good)


@fault(
    "options that cannot be followed",
    {
        "port taken": Start(options=("--metrics-port", "1")),
        "port": Start(options=("--metrics-port", "65535")),
        "active": Start(options=("--mode", "active", "--policy", "static:mechanism=slack,threshold=0.02,window=0.4")),
        "probe": Start(options=("--mode", "probe")),
        "canary": Start(options=("--mode", "canary", "--policy", "paper")),
    },
    ranks=2,
)
def options(job: Job) -> None:
    job.begin()
    job.train(iterations=100)


class _Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise SystemExit(17) if record.name.startswith("paceenv") and os.environ.get("EXITS") else Refuses("no log")


@fault(
    "broken logging",
    {
        **dict.fromkeys(
            ["handler", "filter", "factory", "none", "closed", "object", "disabled", "formatter", "locked"], Start()
        ),
        "exits": Start(environ={"EXITS": "1"}),
        "stdout none": Start(),
    },
)
def broken_logging(job: Job) -> None:
    job.begin()
    root = logging.getLogger()
    if job.variant in ("handler", "exits"):
        root.addHandler(_Raises())
    elif job.variant == "filter":
        root.addHandler(handler := logging.StreamHandler())
        handler.addFilter(_refuse)
        logging.raiseExceptions = True
    elif job.variant == "formatter":
        logging.basicConfig(format="%(nothing)s")
    elif job.variant == "factory":
        logging.setLogRecordFactory(_refuse)
    elif job.variant == "disabled":
        logging.disable(logging.CRITICAL)
    elif job.variant == "locked":
        root.addHandler(handler := logging.StreamHandler())
        handler.createLock()
        threading.Thread(target=_hold, args=(handler,), daemon=True).start()
        time.sleep(0.1)
    elif job.variant == "none":
        sys.stderr = None
    elif job.variant == "closed":
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        sys.stderr.close()
    elif job.variant == "object":
        sys.stderr = type("Odd", (), {"write": _refuse, "flush": _refuse})()
    model = job.ddp()
    if job.variant == "stdout none":
        stream, sys.stdout = sys.stdout, None
        job.train(model, before=lambda i: setattr(sys, "stdout", stream) if i == 39 else None)
    else:
        job.train(model)


def _hold(handler: logging.Handler) -> None:
    """Another thread is in the handler for two seconds."""
    with handler.lock:  # type: ignore[union-attr]
        time.sleep(2.0)


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@fault("20,000 iterations", "sizes groups tags threads")
def leaks(job: Job) -> None:
    """Says how much memory the second half took; 8 MiB are no leak, but 1 KiB an iteration is."""
    import torch
    import torch.distributed as dist

    job.begin()
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    payload = torch.zeros(40000)
    group = dist.new_group([0])
    begun = 0.0
    for i in range(20000):
        if job.variant == "sizes":
            dist.all_reduce(payload[: 1 + (i * 7919) % 40000])
        elif job.variant == "groups":
            if i % 50 == 0:
                dist.destroy_process_group(group)
                group = dist.new_group([0])
            dist.all_reduce(payload[:10], group=group)
        elif job.variant == "threads":
            if i % 20 == 0:
                thread = threading.Thread(target=dist.all_reduce, args=(payload[:7],))
                thread.start()
                thread.join()
            dist.all_reduce(payload[:10], async_op=True).wait()
        else:
            dist.all_reduce(payload[:10], async_op=True)  # never waited for
            dist.barrier()
        weight.grad = torch.ones(4)
        optimizer.step()
        if i == 10000:
            gc.collect()
            begun = _rss_mib()
    gc.collect()
    grown = _rss_mib() - begun
    (job.folder / "memory.json").write_text(json.dumps({"grown_mib": grown}))
    print("grew" if grown > 8.0 else "flat")
    job.told([weight])
