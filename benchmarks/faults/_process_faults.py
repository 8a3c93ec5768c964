"""Faults of processes, signals and threads, of policies and of logging."""

# mypy: disable-error-code="no-untyped-call,misc,assignment"
from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.faults._fault import Job, breaks, fault


class Unrelated(Exception):
    """What the job's own code raises."""


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Unrelated


@fault("a handler that raises at random moments", "SIGUSR1 SIGALRM SIGINT SIGTERM", seeds=3, code_only=True)
def raising_handler(job: Job) -> None:
    job.begin()
    model = job.ddp()
    optimizer = job.optimizer(model)
    number, armed = getattr(signal, job.variant), False
    error = KeyboardInterrupt if job.variant == "SIGINT" else Unrelated

    def handler(number: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise error

    def send() -> None:
        while True:
            time.sleep(job.random.uniform(0.001, 0.02))
            os.kill(os.getpid(), number)

    signal.signal(number, handler)
    threading.Thread(target=send, daemon=True).start()
    i, rebuild = 0, False
    while i < 300:
        try:
            if rebuild:  # DDP was left in the midst of a backward pass
                model, rebuild = job.ddp(job.network()), False
                optimizer = job.optimizer(model)
            while i < 300:
                i += 1
                armed = True
                optimizer.zero_grad()
                model(job.inputs(i)).square().mean().backward()
                optimizer.step()
            armed = False
        except error:
            rebuild = True
    armed = False
    print("through", flush=True)


@breaks("ended by a signal", "SIGTERM SIGINT SIGHUP SIGKILL SIGSEGV SIGABRT SIGQUIT SIGXCPU SIGUSR1")
def ended_by_signal(job: Job, i: int) -> None:
    if i == 20:
        os.kill(os.getpid(), getattr(signal, job.variant))


@fault("SIGTERM and a handler of its own", "exits raises ignores before later", ranks=2)
def own_sigterm(job: Job) -> None:
    def handler(number: int, frame: Any) -> None:
        if job.variant == "raises":
            raise Unrelated
        if job.variant != "ignores":
            print("asked to end", flush=True)
            sys.exit(7)

    if job.variant == "before":
        signal.signal(signal.SIGTERM, handler)

    def end(i: int) -> None:
        if i == (10 if job.variant == "later" else 0) and job.variant != "before":
            signal.signal(signal.SIGTERM, handler)
        if i == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        job.train(before=end)
    except Unrelated:
        print("raised", flush=True)
        os._exit(5)


@breaks("stopped and continued", "once often", ranks=2)
def stopped(job: Job, i: int) -> None:
    if job.rank == 1 and (i == 20 or (i % 8 == 0 and job.variant == "often")):
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


@breaks("fork in the midst", "exits trains many", ranks=2)
def forks(job: Job, i: int) -> None:
    import torch

    if i != 20 and not (job.variant == "many" and i > 20):
        return
    pid = os.fork()
    if pid:
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    else:
        if job.variant == "trains":
            weight = torch.zeros(3, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=1.0)
            for _ in range(5):
                weight.sum().backward()
                optimizer.step()
        os._exit(3)


@fault("an end in the midst", "os_exit exit raises exec step_exits step_raises hook_exits atexit")
def ends(job: Job) -> None:
    job.begin()
    model = job.ddp()
    optimizer = job.optimizer(model)

    def out(*args: Any) -> None:
        if job.variant.endswith("raises"):
            raise Unrelated
        sys.exit(9)

    def end(i: int) -> None:
        if i != 20:
            return
        if job.variant == "os_exit":
            os._exit(3)
        elif job.variant == "exec":
            os.execv("/bin/echo", ["echo", "another program"])
        elif job.variant.startswith("step"):
            optimizer.register_step_post_hook(out)
        elif job.variant == "hook_exits":
            model.module.register_full_backward_hook(out)
        elif job.variant == "atexit":
            atexit.register(out)
        else:
            out()

    job.train(model, optimizer, before=end)


@breaks("a rank ends early", "killed raises exits os_exits", ranks=2, code_only=True)
def rank_ends(job: Job, i: int) -> None:
    if i == 20 and job.rank == 1:
        if job.variant == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if job.variant == "raises":
            raise Unrelated
        if job.variant == "exits":
            sys.exit(3)
        os._exit(4)


class _Data:
    """A data set of which one item does not come."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        import torch

        if i == 17 and self.what == "raise":
            raise Unrelated
        if i == 17 and self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((16,), i / 24)


@fault("a data loader's workers", "fork spawn persistent raise killed")
def loader(job: Job) -> None:
    from torch.utils.data import DataLoader

    job.begin()
    model = job.ddp()
    optimizer = job.optimizer(model)
    context, data = "spawn" if job.variant == "spawn" else "fork", _Data(job.variant)
    workers: Any = {"num_workers": 2, "multiprocessing_context": context}
    loader: Any = DataLoader(data, 4, persistent_workers=job.variant == "persistent", **workers)  # type: ignore[arg-type]
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    job.told(model.parameters())


@fault("bad policy", "raises exits slow nan shape none text huge", ranks=2, attach=True, seeds=3)
def bad_policy(job: Job) -> None:
    """A KeyboardInterrupt is not among these: it cannot be told from the user's own, which has to end the job."""
    job.begin()
    model = job.ddp()
    if job.agent:
        import numpy as np

        from paceenv import live
        from paceenv.policies.base import Policy

        class Bad(Policy):
            name = "bad"

            def act(self, signals_BO: Any) -> Any:
                good = np.tile(np.array([0.01, 0.4]), (len(signals_BO), 3, 1))
                if job.variant == "raises":
                    raise Unrelated
                if job.variant == "exits":
                    sys.exit(13)
                if job.variant == "slow":
                    time.sleep(0.7)
                odd = {"nan": good * np.nan, "shape": good[0], "none": None, "text": "fast", "huge": good * 1e300}
                return odd.get(job.variant, good)

        mode = ("active", "shadow", "canary")[job.seed % 3]
        short = {"quiet_first": 0, "block_iterations": 8, "cap_share": 0.5}
        live.attach(model, policy=Bad(), mode=mode, out=str(job.live), **short)
    job.train(model, iterations=150, pause_s=0.01)


class _Raises(logging.Handler):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self.error if record.name.startswith("paceenv") else Unrelated


@breaks("broken logging", "handler exits filter factory formatter none closed locked")
def broken_logging(job: Job, i: int) -> None:
    if i:
        return
    root = logging.getLogger()
    if job.variant in ("handler", "exits"):
        root.addHandler(_Raises(SystemExit(17) if job.variant == "exits" else Unrelated()))
    elif job.variant == "formatter":
        logging.basicConfig(format="%(nothing)s")
    elif job.variant == "factory":
        logging.setLogRecordFactory(_refuse)
    elif job.variant == "none":
        sys.stderr = None
    elif job.variant == "closed":
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        sys.stderr.close()
    else:
        root.addHandler(handler := logging.StreamHandler())
        if job.variant == "filter":
            handler.addFilter(_refuse)
        else:
            handler.createLock()
            threading.Thread(target=_hold, args=(handler,), daemon=True).start()
            time.sleep(0.1)


def _hold(handler: logging.Handler) -> None:
    """Another thread is in the handler for two seconds."""
    with handler.lock:  # type: ignore[union-attr]
        time.sleep(2.0)
