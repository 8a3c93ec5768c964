"""Faults of processes, signals, threads and of the interpreter itself."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.faults._fault import Job, Start, fault

PLAIN = Start(fresh=True)


def _flags(*flags: str, **environ: str) -> Start:
    return Start(fresh=True, flags=flags, environ=environ)


@fault(
    "interpreter's flags",
    {
        "-O": _flags("-O"),
        "-OO": _flags("-OO"),
        "-X dev": _flags("-X", "dev"),
        "-W error": _flags("-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"),
        "-W error::ResourceWarning": _flags("-X", "dev", "-W", "error::ResourceWarning"),
        "-B -u": _flags("-B", "-u"),
        "-X importtime": _flags("-X", "importtime"),
        "-X tracemalloc": _flags("-X", "tracemalloc"),
        "debug": _flags(PYTHONMALLOC="debug"),
        "hash seed": _flags(PYTHONHASHSEED="0"),
        "int digits": _flags("-X", "int_max_str_digits=640"),
    },
)
def flags(job: Job) -> None:
    job.begin()
    job.train()


class Unrelated(Exception):
    """What the job's own handlers raise."""


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


@fault("ended by a signal", "SIGTERM SIGINT SIGHUP SIGKILL SIGSEGV SIGABRT SIGQUIT SIGPIPE SIGXCPU SIGUSR1")
def ended_by_signal(job: Job) -> None:
    number = getattr(signal, job.variant)
    job.begin()
    if job.variant == "SIGPIPE":
        signal.signal(number, signal.SIG_DFL)

    def end(i: int) -> None:
        if i == 20:
            os.kill(os.getpid(), number)

    job.train(before=end)


@fault("SIGTERM and a handler of its own", "exits raises ignores wakeup before later", ranks=2)
def own_sigterm(job: Job) -> None:
    def exits(number: int, frame: Any) -> None:
        if job.variant == "raises":
            raise Unrelated
        if job.variant not in ("ignores", "wakeup"):
            print("asked to end", flush=True)
            sys.exit(7)

    read, write = os.pipe()
    os.set_blocking(write, False)
    if job.variant != "later":
        signal.signal(signal.SIGTERM, exits)
    if job.variant == "wakeup":
        signal.set_wakeup_fd(write)
    job.begin()

    def end(i: int) -> None:
        if i == 10 and job.variant == "later":
            signal.signal(signal.SIGTERM, exits)
        if i == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        job.train(before=end)
    except Unrelated:
        print("raised", flush=True)
        os._exit(5)
    if job.variant == "wakeup":
        print(os.read(read, 10))


@fault("stopped and continued", "once often", ranks=2)
def stopped(job: Job) -> None:
    job.begin()

    def stop(i: int) -> None:
        if job.rank == 1 and (i == 20 or (i % 8 == 0 and job.variant == "often")):
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    job.train(before=stop)


@fault("fork in the midst", "exits os_exits trains many", ranks=2)
def forks(job: Job) -> None:
    import torch

    job.begin()

    def fork(i: int) -> None:
        if i != 20 and not (job.variant == "many" and i > 20):
            return
        pid = os.fork()
        if pid == 0:
            if job.variant in ("os_exits", "many"):
                os._exit(3)
            if job.variant == "trains":
                weight = torch.zeros(3, requires_grad=True)
                optimizer = torch.optim.SGD([weight], lr=1.0)
                for _ in range(5):
                    (weight.sum()).backward()
                    optimizer.step()
                os._exit(4)
            sys.exit(4)
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

    job.train(before=fork)


@fault(
    "an end in the midst", "os_exit exit raises exec exec_itself step_exits step_raises hook_exits atexit stdout_closed"
)
def ends(job: Job) -> None:
    import atexit

    import torch

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
        elif job.variant == "exec_itself":
            os.execv(sys.executable, [sys.executable, "-c", "import torch; torch.optim.SGD([torch.zeros(1)], 1.0)"])
        elif job.variant.startswith("step"):
            optimizer.register_step_post_hook(out)
        elif job.variant == "hook_exits":
            model.module.register_full_backward_hook(out)
        elif job.variant == "atexit":
            atexit.register(out)
        elif job.variant == "stdout_closed":
            job.told(model.parameters())
            sys.stdout.close()
        else:
            out()

    assert torch.is_grad_enabled()
    if job.variant == "stdout_closed":
        told = job.told
        job.told = lambda parameters: None if sys.stdout.closed else told(parameters)  # type: ignore[method-assign]
    job.train(model, optimizer, before=end)


@fault("a rank ends early", "killed raises exits os_exits", ranks=2, code_only=True)
def rank_ends(job: Job) -> None:
    job.begin(20.0)

    def end(i: int) -> None:
        if i == 20 and job.rank == 1:
            if job.variant == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if job.variant == "raises":
                raise Unrelated
            if job.variant == "exits":
                sys.exit(3)
            os._exit(4)

    job.train(before=end)


def _context(name: str) -> Any:
    return multiprocessing.get_context(name)


def _square(x: int) -> int:
    return x * x


@fault("child processes", "fork spawn forkserver pool system python")
def children(job: Job) -> None:
    job.begin()

    def start(i: int) -> None:
        if i != 10:
            return
        if job.variant == "system":
            print(os.system("exit 3"), flush=True)
        elif job.variant == "python":
            code = "import sys; print(sorted(m for m in sys.modules if m.startswith('paceenv')))"
            print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, flush=True)
        elif job.variant == "pool":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(pool.map(_square, range(5)), flush=True)
        else:
            process = _context(job.variant).Process(target=_square, args=(3,))
            process.start()
            process.join()
            print(process.exitcode, flush=True)

    job.train(before=start)


@fault("a data loader's workers", "fork spawn persistent raise killed")
def loader(job: Job) -> None:
    from torch.utils.data import DataLoader

    job.begin()
    model = job.ddp()
    optimizer = job.optimizer(model)
    context = "spawn" if job.variant == "spawn" else "fork"
    data: Any = _Data(job.variant)
    loader: Any = DataLoader(
        data, 4, num_workers=2, multiprocessing_context=context, persistent_workers=job.variant == "persistent"
    )
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    job.told(model.parameters())


class _Data:
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
