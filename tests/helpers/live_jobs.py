"""Real multi-process jobs for the tests of the live agent: N ranks on gloo over loopback, with a deadline.

:func:`run_ranks` runs a function of another module in N processes, forked from a server that has PyTorch loaded
(``live_forkserver``), so that they start in a fraction of a second.
A job that is not through by its deadline is killed, and the test fails with what every rank printed, stacks included.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HELPERS = Path(__file__).parent
DEADLINE_S = 180.0
"""For a job that hangs, on a machine with other work; no test waits for it otherwise."""
GLOO_TIMEOUT_S = 120.0
_STACKS_BEFORE_S = 2.0
_SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_ports = itertools.count(20_000)


@dataclass(frozen=True)
class Ended:
    """How one rank ended: exit code (negative: killed by that signal), what its body returned, what it printed."""

    rank: int
    exit_code: int
    result: Any
    output: str


class ForkServer:
    """The server process; started on first use, shared by all jobs of a test session."""

    def __init__(self) -> None:
        paths = (str(HELPERS.parent), os.environ.get("PYTHONPATH"))  # what a rank runs may be in a test itself
        self._process = subprocess.Popen(
            [sys.executable, str(HELPERS / "live_forkserver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _SETTINGS | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self._pending = b""
        self._started: list[int] = []
        self.exit_codes: dict[int, int] = {}
        """Of the ranks that have ended, by process id."""
        atexit.register(self._close)

    def start(self, request: Mapping[str, Any]) -> int:
        """Fork a rank; returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        deadline_s = time.monotonic() + DEADLINE_S  # of the very first: PyTorch is being imported
        while not self._started:
            assert time.monotonic() < deadline_s, "the fork server does not answer"
            self.read(1.0)
        return self._started.pop()

    def read(self, timeout_s: float) -> None:
        """Take in what the server tells, waiting at most ``timeout_s``."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], max(timeout_s, 0.0))[0]:
            return
        data = os.read(descriptor, 1 << 16)
        assert data, f"the fork server ended with exit code {self._process.wait()}"
        *lines, self._pending = (self._pending + data).split(b"\n")
        for event in map(json.loads, lines):
            if "exit_code" in event:
                self.exit_codes[event["pid"]] = event["exit_code"]
            else:
                self.exit_codes.pop(event["pid"], None)  # of an earlier process with this id
                self._started.append(event["pid"])

    def _close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


_fork_server = functools.cache(ForkServer)


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    folder: Path,
    *,
    deadline_s: float = DEADLINE_S,
    environ: Mapping[str, str] | None = None,
    backend: str = "gloo",
    **parameters: Any,
) -> list[Any]:
    """What ``body(**parameters)`` returns on every rank of a job; parameters and results are JSON.

    The environment is torchrun's. ``folder`` takes logs and results. A rank that fails fails the test.
    """
    server, folder = _fork_server(), folder / f"job{next(_ports)}"
    folder.mkdir(parents=True)
    common = {"body": f"{body.__module__}:{body.__qualname__}", "parameters": parameters}
    common |= {"backend": backend, "store": str(folder / "store"), "timeout_s": GLOO_TIMEOUT_S}
    common |= {"stacks_after_s": deadline_s - _STACKS_BEFORE_S}
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": folder.name[3:], "TORCHELASTIC_RUN_ID": folder.name}
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    pids = []
    for rank in range(world_size):
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
        files = {"log": str(folder / f"rank{rank}.log"), "result": str(folder / f"rank{rank}.json")}
        pids.append(server.start(common | files | {"environ": launch | sizes | names | dict(environ or {})}))
    in_time = _wait(server, pids, deadline_s)
    ended = [_ended(folder, rank, server.exit_codes.pop(pid)) for rank, pid in enumerate(pids)]
    assert in_time, f"not through after {deadline_s:g} s\n{printed(ended)}"
    assert not any(rank.exit_code for rank in ended), f"a rank failed\n{printed(ended)}"
    return [rank.result for rank in ended]


def _wait(server: ForkServer, pids: Sequence[int], deadline_s: float) -> bool:
    """Wait for ranks; past the deadline, kill them. Returns whether they were in time."""
    until_s, killed_s, in_time = time.monotonic() + deadline_s, 0.0, True
    while running := [pid for pid in pids if pid not in server.exit_codes]:
        left_s = until_s - time.monotonic()
        if left_s <= 0.0:
            in_time, until_s = False, float("inf")
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            killed_s = time.monotonic()
        assert in_time or time.monotonic() < killed_s + DEADLINE_S, f"killed, and still there: {running}"
        server.read(min(max(left_s, 0.0), 1.0))
    return in_time


def _ended(folder: Path, rank: int, exit_code: int) -> Ended:
    result, log = folder / f"rank{rank}.json", folder / f"rank{rank}.log"
    return Ended(
        rank,
        exit_code,
        json.loads(result.read_text()) if result.exists() else None,
        log.read_text(errors="replace") if log.exists() else "",
    )


def root_and(*tools: str) -> None:
    """Skip the test without root or one of ``tools``; in CI, where both must be there, fail it."""
    missing = [tool for tool in tools if shutil.which(tool) is None] + (["root"] if os.geteuid() else [])
    if missing:
        reason = f"needs root and {', '.join(tools)}; missing: {', '.join(missing)}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def printed(ended: Sequence[Ended]) -> str:
    """What the ranks of a job printed, for a failure's message."""
    return "\n".join(f"--- rank {rank.rank}, exit code {rank.exit_code}\n{rank.output}" for rank in ended)
