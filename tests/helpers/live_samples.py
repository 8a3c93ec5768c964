"""Samples for the tests of what a live rank writes: batches, snapshots, and real faults of a disk."""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import commands
import numpy as np

from paceenv.core.trace import Trace, read_trace
from paceenv.live.observe.batch import ITERATION, OPERATION, Batch, Kind
from paceenv.live.record.merge_segments import write_merged
from paceenv.live.record.rank_sets import verdict_of
from paceenv.live.record.recorder import TraceRecorder
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.snapshot import SCHEMA

STEP_S = 0.1
ATTEMPT = "20261123T053000-3f2a91"


KINDS = (Kind("all_reduce", 0, 4096), Kind("barrier", -1, 0))
MARKS = ("", "checkpoint", "evaluation")


def batch(
    number: int, *, rank: int = 0, clock_s: float = 0.0, delay_s: float = 0.0, first: int = 0, drift: float = 0.0
) -> Batch:
    """Steps of 100 ms: a delay, some 50 ms of compute, an all_reduce, and a barrier that all ranks leave together.

    Times are on a clock that showed ``clock_s`` at the start and gains ``drift`` seconds per second.
    """
    compute_s_T = 0.05 * (1.0 + 0.05 * np.random.default_rng(rank).standard_normal(number))
    iteration_T = np.arange(first, first + number)
    begin_s_T = iteration_T * STEP_S
    stamps = begin_s_T, begin_s_T + delay_s, begin_s_T + delay_s + compute_s_T, begin_s_T + 0.09, begin_s_T + STEP_S
    begin, go, enter, done, end = (clock_s + t * (1.0 + drift) for t in stamps)
    return make_batch(
        [(int(i), b, e, b, g) for i, b, e, g in zip(iteration_T, begin, end, go, strict=True)],
        [(i, *parts) for i in range(number) for parts in ((0, enter[i], done[i]), (1, done[i], end[i]))],
    )


def make_batch(
    iterations: Sequence[tuple[int, float, float, float, float]],
    operations: Sequence[tuple[int, int, float, float]] = (),
    *,
    kinds: Sequence[Kind] = KINDS,
    mark: int = 0,
    barrier_s: float = 0.0,
    still_s: float = math.nan,
    ticks: int = 1,
) -> Batch:
    """A batch of (iteration, start, end, start of the delay, its end) and (place, kind, start, end)."""
    rows = [(*row, barrier_s, still_s, ticks, mark, not mark) for row in iterations]
    operations_N = np.array([(place, kind, start_s, end_s) for place, kind, start_s, end_s in operations], OPERATION)
    return Batch(np.array(rows, ITERATION), operations_N, kinds, MARKS)


def recorder(
    folder: Path, *, rank: int = 0, world_size: int = 1, clock: str = "c", host: str = "node0", **options: Any
) -> TraceRecorder:
    attempt, job = options.pop("attempt", ATTEMPT), {"name": options.pop("job", "job"), "ranks": world_size}
    target = TraceRecorder(folder, job, {"rank": rank, "clock": clock, "host": host}, **options)
    target.attempt = attempt
    return target


def record(folder: Path, number: int = 20, *, rank: int = 0, **options: Any) -> TraceRecorder:
    """A rank's whole trace in ``folder``: :func:`batch` through a :func:`recorder`."""
    steps = {name: options.pop(name) for name in ("clock_s", "delay_s", "first", "drift") if name in options}
    target = recorder(folder, rank=rank, **options)
    target.add(batch(number, rank=rank, **steps))
    target.write(True)
    return target


def segment_files(folder: Path) -> list[Path]:
    """All segments in a run's folder."""
    return sorted(folder.glob("*/*.pace"))


def snapshot(rank: int = 0, **changed: Any) -> dict[str, Any]:
    """A whole snapshot; ``changed`` replaces top-level entries."""
    host = f"node{rank // 2}"
    who = {"schema": SCHEMA, "job": "job", "rank": rank, "world_size": 4, "host": host, "attempt": ATTEMPT}
    state = {"unix_time_s": 1.7e9, "final": True, "mode": "canary", "state": "canary", "reason": ""}
    counts: dict[str, Any] = {"iterations": 1200, "regular": 1190, "irregular": 10, "still_s": 0.0}
    counts |= {"stopped": {"count": 1, "total_s": 60.0, "longest_s": 60.0, "unix_time_s": 1.7e9}}
    pacing = {"asked": 600, "taken": 590, "mean_s": 0.002, "max_s": 0.01, "total_s": 1.2, "ineffective": 3}
    canary = {"verdict": "helps", "text": "helps by 8.1 % [7.2, 9.0]", "gain": 0.081, "low": 0.072, "high": 0.09}
    measured = {
        "step": {"mean_s": 0.1, "cv": 0.04, "p50_s": 0.099, "p99_s": 0.14, "baseline_s": 0.095},
        "parts": {"compute_s": 0.07, "collective_s": 0.02, "barrier_s": 0.008, "pacing_s": 0.002},
        "wait": {"mean_s": 0.01},
        "arrival": verdict_of("on time"),
        "pacing": pacing | {"holds": 40, "held": 80, "held_s": 0.4, "held_max_s": 0.02},
        "canary": canary | {"pairs": 16},
        "overhead": {"mean_s": 2e-5},
        "policy": {"name": "slack", "source": "rule", "sha256": "ab" * 32},
        "locality": {"host": host},
        "trace": {"rows": 5000, "dropped": 0, "segments": 2},
        "events": [{"unix_time_s": 1.7e9, "text": "canary from now on"}],
    }
    return who | state | counts | measured | changed


def run_python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that imports this checkout, with a deadline."""
    return commands.python("-c", code, *arguments, folder=Path.cwd(), **variables)


def merge_trace(run: RunFolder) -> Trace:
    """The merged trace of a run, in memory."""
    with tempfile.TemporaryDirectory() as place:
        write_merged(run, Path(place) / "merged.parquet")
        return read_trace(Path(place) / "merged.parquet")
