"""Faults of Python objects: odd optimizers and models, bad policies, broken logging, leaks."""

# mypy: disable-error-code="no-untyped-call,misc,assignment"
from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import logging
import os
import pickle
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults._fault import Job, Start, fault


class Refuses(Exception):
    """What odd objects raise."""


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Refuses


class _Metaclass(type):
    __eq__ = _refuse
    __hash__ = type.__hash__
    __instancecheck__ = __subclasscheck__ = _refuse


def _optimizers() -> dict[str, Any]:
    import torch

    base: Any = torch.optim.SGD

    @dataclass
    class Unhashable(base):
        parameters: Any

        def __post_init__(self) -> None:
            base.__init__(self, self.parameters, lr=0.05)

    def odd(name: str, **methods: Any) -> Any:
        return lambda parameters: type(name, (base,), methods)(parameters, lr=0.05)

    def attribute(self: Any, name: str) -> Any:
        if name in ("__class__", "__weakref__", "__hash__", "optimizer"):
            raise Refuses
        return object.__getattribute__(self, name)

    class Inner(base):
        def step(self, closure: Any = None) -> Any:
            super().step()
            super().step()

    return {
        "unhashable": Unhashable,
        "compares": odd("Compares", __eq__=_refuse, __ne__=_refuse, __hash__=None),
        "hashes": odd("Hashes", __hash__=_refuse),
        "class": odd("Class", __class__=property(_refuse)),
        "attributes": odd("Attributes", __getattribute__=attribute),
        "false": odd("False_", __bool__=_refuse, __len__=_refuse),
        "repr": odd("Repr", __repr__=_refuse, __str__=_refuse, __format__=_refuse),
        "nested": lambda parameters: Inner(parameters, lr=0.05),
    }


@fault("odd optimizer", "unhashable compares hashes class attributes false repr nested")
def odd_optimizer(job: Job) -> None:
    job.begin()
    model = job.ddp()
    other = job.network()
    optimizer = _optimizers()[job.variant](list(model.parameters()))
    second = _optimizers()[job.variant](list(other.parameters()))

    def step(i: int) -> None:
        for one, m in ((second, other), (optimizer, model)):
            one.zero_grad()
            m(job.inputs(i)).square().mean().backward()
            one.step()

    job.train(model, optimizer, step=step)


@fault("odd parameter groups", "empty later raising generator strings none")
def odd_groups(job: Job) -> None:
    import torch

    job.begin()
    model = job.ddp()
    optimizers = [job.optimizer(model), torch.optim.SGD(job.network().parameters(), lr=0.1)]
    groups: dict[str, Any] = {"empty": [], "raising": _Lazy(), "generator": iter(()), "strings": ["x"], "none": None}
    job.optimizer(model).step()

    def step(i: int) -> None:
        optimizers[0].zero_grad()
        model(job.inputs(i)).square().mean().backward()
        optimizers[0].step()
        if i == 10:
            odd: Any = optimizers[1]
            odd.__dict__["param_groups"] = [] if job.variant == "later" else groups[job.variant]
            type(odd).step = _nothing if i else None
        if i >= 10:
            optimizers[1].step()

    kept = torch.optim.SGD.step
    _nothing: Any = torch.optim.Optimizer.profile_hook_step(lambda self, closure=None: None)
    optimizers[1].__class__ = type("Odd", (torch.optim.SGD,), {"step": kept})
    job.train(model, optimizers[0], step=step)


class _Lazy:
    __iter__ = __getitem__ = __len__ = _refuse


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


@fault("marks that fail", "object raises generator", attach=True)
def odd_marks(job: Job) -> None:
    job.begin()
    model = job.ddp()
    agent = job.attach(model)

    def mark(i: int) -> None:
        if agent is None:
            return
        if job.variant == "object":
            kind: Any = type("Odd", (), {"__str__": _refuse, "__eq__": _refuse, "__hash__": None})()
            with agent.mark(kind):
                pass
        elif job.variant == "generator":
            agent.mark("never entered")
            agent.mark("never left").__enter__()
        else:
            try:
                with agent.mark("\ud800" * 1000):
                    raise Refuses
            except Refuses:
                pass

    job.train(model, before=mark)


@fault("copies and pickles", "optimizer model ddp state saved agent", attach=True)
def copies(job: Job) -> None:
    import torch

    job.begin()
    model = job.ddp()
    optimizer = job.optimizer(model)
    agent = job.attach(optimizer)

    def copied(i: int) -> None:
        if i % 10 != 5:
            return
        if job.variant == "optimizer":
            clone = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
            print(len(pickle.dumps(optimizer)), len(clone.param_groups), flush=True)
            clone.step()
        elif job.variant == "model":
            print(len(pickle.dumps(copy.deepcopy(model.module))), flush=True)
        elif job.variant == "ddp":
            clone = copy.deepcopy(model)
            clone(job.inputs(i)).sum().backward()
            print(clone.module[0].weight.grad.sum().item(), flush=True)
        elif job.variant == "state":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif job.variant == "saved":
            buffer = io.BytesIO()
            torch.save({"m": model, "o": optimizer}, buffer)
            print(len(buffer.getvalue()), flush=True)
        elif agent is not None:
            for function in (copy.copy, copy.deepcopy, pickle.dumps):
                with contextlib.suppress(TypeError, pickle.PicklingError, AttributeError):
                    function(agent)

    job.train(model, optimizer, before=copied)


@fault("odd model", "getattr bool eq output lazy slots_output hook_raises")
def odd_model(job: Job) -> None:
    import torch
    from torch import nn

    class Odd(nn.Module):
        def __init__(self, network: Any) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Any) -> Any:
            y = self.network(x)
            return _Output(y) if job.variant in ("output", "slots_output") else y

        def __getattr__(self, name: str) -> Any:
            if job.variant == "getattr" and name not in self.__dict__.get("_modules", {}) and not name.startswith("_"):
                raise Refuses(name)
            return super().__getattr__(name)

        if job.variant == "bool":
            __bool__ = __len__ = _refuse
        if job.variant == "eq":
            __eq__ = _refuse
            __hash__ = nn.Module.__hash__

    class _Output:
        __slots__ = ("y",)

        def __init__(self, y: Any) -> None:
            self.y = y

        if job.variant == "output":
            __iter__ = __getitem__ = __len__ = __eq__ = __repr__ = _refuse
            __dataclass_fields__ = property(_refuse)

    job.begin()
    network = job.network()
    model = job.ddp(Odd(network), find_unused_parameters=job.variant != "lazy")
    optimizer = job.optimizer(model)
    if job.variant == "hook_raises":
        calls = [0]

        def hook(*args: Any) -> None:
            calls[0] += 1
            if calls[0] == 20:
                raise Refuses

        optimizer.register_step_post_hook(hook)
    caught = 0

    def step(i: int) -> None:
        nonlocal caught
        optimizer.zero_grad()
        y = model(job.inputs(i))
        y = getattr(y, "y", y)
        y.square().mean().backward()
        try:
            optimizer.step()
        except Refuses:
            caught += 1

    job.train(model, optimizer, step=step)
    print(caught, torch.is_grad_enabled())


@fault("odd objects in memory", "class getattribute proxies metaclass lazy_module del")
def odd_objects(job: Job) -> None:
    def attribute(self: Any, name: str) -> Any:
        raise Refuses

    kept: list[Any] = []
    for _ in range(100):
        if job.variant == "class":
            kept.append(type("Odd", (), {"__class__": property(_refuse)})())
        elif job.variant == "getattribute":
            kept.append(type("Odd", (), {"__getattribute__": attribute, "__eq__": _refuse, "__hash__": None})())
        elif job.variant == "proxies":
            thing = type("Thing", (), {})()
            kept.append(weakref.proxy(thing))
        elif job.variant == "metaclass":
            kept.append(_Metaclass("Odd", (), {})())
        elif job.variant == "lazy_module":
            module = type("Module", (type(sys),), {"__getattr__": _refuse})(f"lazy{len(kept)}")
            sys.modules[module.__name__] = module
        else:
            cycle = type("Odd", (), {"__del__": _refuse})()
            cycle.me = cycle
            kept.append(cycle)
    sys.unraisablehook = lambda unraisable: None
    job.begin()
    job.train(before=lambda i: kept.clear() if i == 20 else gc.collect() if i == 25 else None)


@fault("tensor subclasses", "parameters gradients outputs mode dispatch")
def tensor_subclasses(job: Job) -> None:
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Odd(torch.Tensor):
        __eq__ = __bool__ = __len__ = __repr__ = _refuse
        __hash__ = torch.Tensor.__hash__

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    job.begin()
    network = job.network()
    model = job.ddp(network, find_unused_parameters=True)
    optimizer = job.optimizer(model)

    def step(i: int) -> None:
        optimizer.zero_grad()
        x = job.inputs(i)
        y = model(x.as_subclass(Odd) if job.variant in ("outputs", "parameters") else x)
        y.as_subclass(torch.Tensor).square().mean().backward()
        if job.variant == "gradients":
            for p in model.parameters():
                p.grad = p.grad.as_subclass(Odd)
        optimizer.step()

    if job.variant in ("mode", "dispatch"):
        with Functions() if job.variant == "mode" else Dispatches():
            job.train(model, optimizer, step=step)
    else:
        job.train(model, optimizer, step=step)


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
        "sinks": Start(options=("--sinks", "tensorboard,wandb,mlflow")),
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
