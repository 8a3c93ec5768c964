"""Samples for the tests of what a live rank writes: iterations, snapshots, and real faults of a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceenv.core.trace import Trace, read_trace
from paceenv.live.observe.iteration import Iteration, Operation
from paceenv.live.record.merge_segments import write_merged
from paceenv.live.record.recorder import TraceRecorder, rank_metadata
from paceenv.live.record.run_folder import RunFolder

DEADLINE_S = 300.0
"""For a process of a test that hangs, which then fails; no test waits for it otherwise."""
STEP_S = 0.1


def iterations(
    number: int, *, rank: int = 0, clock_s: float = 0.0, delay_s: float = 0.0, first: int = 0, drift: float = 0.0
) -> Iterator[Iteration]:
    """Steps of 100 ms: a delay, some 50 ms of compute, an all_reduce, and a barrier that all ranks leave together.

    Times are on a clock that showed ``clock_s`` at the start and gains ``drift`` seconds per second.
    """
    random = np.random.default_rng(rank)
    for i in range(first, first + number):
        start_s, compute_s = i * STEP_S, 0.05 * (1.0 + 0.05 * float(random.standard_normal()))
        stamps = start_s, start_s + delay_s, start_s + delay_s + compute_s, start_s + 0.09, start_s + STEP_S
        begin, go, entry, done, end = (clock_s + t * (1.0 + drift) for t in stamps)
        operations = Operation("all_reduce", 0, 4096, entry, done), Operation("barrier", -1, 0, done, end)
        yield Iteration(i, begin, end, begin, go, operations, done - entry, end - done, True, "")


def recorder(folder: Path, *, rank: int = 0, world_size: int = 1, clock: str = "c", **options: Any) -> TraceRecorder:
    """A recorder whose problems fail the test, unless ``problem`` takes them."""
    attempt = options.pop("attempt", 0)
    metadata = rank_metadata("job", rank=rank, world_size=world_size, attempt=attempt, locality={"clock": clock})
    return TraceRecorder(folder, metadata, rank=rank, attempt=attempt, **({"problem": pytest.fail} | options))


def record(folder: Path, number: int = 20, *, rank: int = 0, **options: Any) -> None:
    """A rank's whole trace in ``folder``: :func:`iterations` through a :func:`recorder`."""
    steps = {name: options.pop(name) for name in ("clock_s", "delay_s", "first", "drift") if name in options}
    target = recorder(folder, rank=rank, **options)
    for iteration in iterations(number, rank=rank, **steps):
        target.append(iteration)
    target.write(True)


def snapshot(rank: int = 0, **changed: Any) -> dict[str, Any]:
    """A whole snapshot; ``changed`` replaces top-level entries."""
    return {
        "schema": "paceenv.live/1",
        "job": "job",
        "rank": rank,
        "world_size": 4,
        "host": f"node{rank // 2}",
        "pid": 100 + rank,
        "attempt": 0,
        "unix_time_s": 1.7e9,
        "final": True,
        "mode": "canary",
        "state": "canary",
        "reason": "",
        "iterations": 1200,
        "regular": 1190,
        "irregular": 10,
        "step": {"mean_s": 0.1, "cv": 0.04, "p50_s": 0.099, "p99_s": 0.14, "baseline_s": 0.095},
        "parts": {"compute_s": 0.07, "collective_s": 0.02, "barrier_s": 0.008, "pacing_s": 0.002},
        "wait": {"mean_s": 0.01, "p50_s": 0.009, "p95_s": 0.02, "baseline_s": 0.004},
        "arrival": {"verdict": "on time", "early_s": 0.0, "late_s": 0.0, "share": 0.97, "evidence": "1190 steps"},
        "pacing": {"asked": 600, "taken": 590, "mean_s": 0.002, "max_s": 0.01, "total_s": 1.2, "ineffective": 3},
        "canary": {
            "verdict": "helps",
            "text": "helps by 8.1 % [7.2, 9.0]",
            "gain": 0.081,
            "low": 0.072,
            "high": 0.09,
            "pairs": 16,
        },
        "overhead": {"mean_s": 2e-5, "p99_s": 6e-5},
        "policy": {"name": "slack", "source": "rule", "sha256": "ab" * 32},
        "locality": {"host": f"node{rank // 2}"},
        "trace": {"rows": 5000, "dropped": 0, "segments": 2},
        "events": [{"unix_time_s": 1.7e9, "text": "canary from now on"}],
    } | changed


def run_python(
    code: str, *arguments: str, prefix: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that imports this checkout and these samples, with a deadline."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    command = [*prefix, sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ | variables | {"PYTHONPATH": path}
    )


def on_mount(mount: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where the shell commands ``mount`` have put a file system at ``folder`` (``$FOLDER``), for it alone.

    Needs mount namespaces, as root or by a user namespace; where there are none the test is skipped, except in CI.
    """
    options = "-m" if os.geteuid() == 0 else "-rm"
    tried = subprocess.run(["unshare", options, "true"], capture_output=True) if shutil.which("unshare") else None
    if tried is None or tried.returncode:
        if os.environ.get("CI"):
            pytest.fail("no mount namespaces here (unshare -m)")
        pytest.skip("no mount namespaces here (unshare -m)")
    inside = ("env", f"FOLDER={folder}", "unshare", options, "sh", "-ec", f'{mount}; exec "$@"', "sh")
    return run_python(code, str(folder), prefix=inside)


def merge_trace(run: RunFolder) -> Trace:
    """The merged trace of a run, in memory."""
    with tempfile.TemporaryDirectory() as place:
        write_merged(run, Path(place) / "merged.parquet")
        return read_trace(Path(place) / "merged.parquet")
