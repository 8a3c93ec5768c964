"""Starts the ranks of jobs, as forks of an interpreter that has imported PyTorch or as new interpreters.

One request is a line of JSON on the standard input; the answer, a line on the standard output, has the exit codes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import runpy
import signal
import sys
import time
from typing import Any

NOBODY = 65534
_NEW_MOUNTS, _REMOUNT_READ_ONLY, _PRIVATE = 0x20000, 0x21, 0x44000


def main() -> None:
    """Serve requests; in a fork, run the script and return to the interpreter as a script's main module does."""
    import numpy  # noqa: F401
    import safetensors.numpy  # noqa: F401
    import torch._dynamo  # with every optimizer, and slow
    import torch.distributed
    import torch.nn.parallel  # noqa: F401
    import typer  # noqa: F401

    gc.freeze()  # else each fork copies what its collector looks at
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        ranks: list[int] = []
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                answers.close()
                _become(request, rank)
                return
            ranks.append(pid)
        answers.write(json.dumps(_wait(ranks, request["deadline_s"])) + "\n")
        answers.flush()


def _wait(ranks: list[int], deadline_s: float) -> list[int | None]:
    """Exit codes, negative for a signal; None for a rank that had to be killed."""
    codes: dict[int, int | None] = {}
    until_s = time.monotonic() + deadline_s
    while len(codes) < len(ranks) and time.monotonic() < until_s:
        for pid in set(ranks) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also what the rank has left behind
        if pid not in codes:
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in ranks]


def _become(request: dict[str, Any], rank: int) -> None:
    """This fork becomes a rank of the job."""
    os.setsid()
    folder = f"{request['folder']}/rank{rank}"
    os.makedirs(folder, exist_ok=True)
    for descriptor, name in ((0, os.devnull), (1, f"{folder}/out"), (2, f"{folder}/err")):
        new = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(new, descriptor)
        os.close(new)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the request's reader has a buffer of its own
    environ = request["environ"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for name, value in environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if request["mounts"]:
        _mount(request["mounts"])
    for name, limit in request["limits"].items():
        which = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(which, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request["nobody"]:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    arguments = [text.replace("{rank}", str(rank)) for text in request["arguments"]]
    if request["fresh"]:
        os.execv(sys.executable, [sys.executable, *request["flags"], *arguments])
    _, module, *rest = arguments  # the first is -m
    sys.argv[:] = ["-m", *rest]
    names = vars(sys.modules["__main__"])
    for name in set(names) - {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtins__"}:
        del names[name]
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # as the interpreter does


def _mount(mounts: dict[str, str]) -> None:
    """Mount small file systems that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    check(libc.unshare(_NEW_MOUNTS))
    check(libc.mount(b"none", b"/", None, _PRIVATE, None))
    for place, options in mounts.items():
        os.makedirs(place, exist_ok=True)
        given = b"size=16k" if options == "ro" else options.encode()
        check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, given))
        if options == "ro":
            check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", _REMOUNT_READ_ONLY, None))
