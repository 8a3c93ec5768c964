"""An hour of a host with 8 of 1,000 ranks at 10 steps per second: files, bytes and memory; and rank 0's findings.

The accounts, the recorder and the status files are the agent's own and write real files. Only the clock is left out:
what is due in an hour is done one after the other.

    python -m benchmarks.jobs.thousand_ranks
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from paceenv.live.observe.batch import Batch, Kind
from paceenv.live.record.findings import ALONE, find
from paceenv.live.record.findings_file import findings_period_s, write_findings
from paceenv.live.record.history import History
from paceenv.live.record.recorder import TraceRecorder, rank_header
from paceenv.live.record.run_folder import RunFolder, status_period_s, write_status
from paceenv.live.record.snapshot import SCHEMA
from paceenv.live.reporting import SEGMENT_S
from paceenv.ui import output

RANKS, PER_HOST, STEPS_PER_S, HOUR_S = 1000, 8, 10, 3600
ATTEMPT = "20261123T000000-000001"
KINDS = (Kind("all_reduce", 0, 1 << 25), Kind("all_reduce", 1, 4), Kind("barrier", 0, 0))


def _batch(first: int, steps: int, late_s: float, random: np.random.Generator) -> Batch:
    """Steps of 100 ms with three collectives; a late rank works longer and is blocked for less."""
    step_s = 1.0 / STEPS_PER_S
    start_s_T: NDArray[np.float64] = step_s * np.arange(first, first + steps, dtype=np.float64)
    own_s_T = 0.05 + late_s + 1e-3 * random.random(steps)
    exit_s_TK = start_s_T[:, None] + np.array([0.0775, 0.0795, step_s])
    entry_s_TK = np.concatenate([(start_s_T + own_s_T)[:, None], exit_s_TK[:, :2] + 1e-3], axis=1)
    return Batch(
        np.arange(first, first + steps),
        start_s_T,
        start_s_T + step_s,
        start_s_T,
        start_s_T,
        np.ones(steps, bool),
        np.zeros(steps, np.uint8),
        np.repeat(np.arange(steps), 3),
        np.tile(np.arange(3), steps).astype(np.uint16),
        entry_s_TK.ravel(),
        exit_s_TK.ravel(),
        KINDS,
        ("",),
    )


def _snapshot(rank: int, history: History, unix_time_s: float) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "job": "job",
        "rank": rank,
        "world_size": RANKS,
        "host": f"host{rank // PER_HOST}",
        "attempt": ATTEMPT,
        "unix_time_s": unix_time_s,
        "final": False,
        "iterations": history.count,
        "agents": {"count": RANKS, "complete": True, "reason": ""},
        "step": history.step(),
        "parts": history.parts(),
        "own": history.own(),
        "collectives": history.collectives(),
        "groups": {str(g): {"name": str(g), "ranks": f"0-{RANKS - 1}", "member": rank, "size": RANKS} for g in (0, 1)},
        "unseen": [],
        "side": history.side(),
        "step_iterations": 1,
        "arrival": ALONE,
    }


def _counting() -> Counter[str]:
    """Counts the files that this process makes from now on; each status is one, which replaces the last."""
    seen: Counter[str] = Counter()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(arguments[0], int) and int(arguments[2] or 0) & os.O_CREAT:
            seen["created"] += 1

    sys.addaudithook(hook)
    return seen


def _memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def run(folder: Path) -> dict[str, float]:
    """The numbers of an hour; files go to ``folder``."""
    random, late = np.random.default_rng(0), 3
    histories, recorders = [History() for _ in range(PER_HOST)], []
    for rank in range(PER_HOST):
        place = {"host": "host0", "clock": "c", "device": "cpu"}
        header = rank_header("job", rank=rank, world_size=RANKS, attempt=ATTEMPT, locality=place)
        recorders.append(TraceRecorder(folder, header, problem=print, flush_s=HOUR_S))
    seen, before_mb = _counting(), _memory_mb()
    period_s = round(status_period_s(RANKS))
    flush_s = max(SEGMENT_S, period_s)
    for second in range(0, HOUR_S, 10):
        for rank in range(PER_HOST):
            batch = _batch(second * STEPS_PER_S, 10 * STEPS_PER_S, 0.02 * (rank == late), random)
            histories[rank].add(batch, np.zeros(100), np.zeros(100), np.ones(100, np.int64))
            recorders[rank].add(batch)
            if second % flush_s < 10:
                recorders[rank].flush()
            if second % period_s < 10:
                write_status(folder, _snapshot(rank, histories[rank], float(second)))
    for recorder in recorders:
        recorder.flush()
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = {
        "files made or replaced per host and hour": float(seen["created"]),
        "files left on the host": float(len(files)),
        "MB on disk per host and hour": sum(path.stat().st_size for path in files) / 1e6,
        "MB of memory for 8 ranks": _memory_mb() - before_mb,
    }
    for rank in range(PER_HOST, RANKS):
        write_status(folder, _snapshot(rank, histories[rank % PER_HOST * (rank % PER_HOST != late)], float(HOUR_S)))
    start_s, before_mb = time.process_time(), _memory_mb()
    findings = find(RunFolder(folder).statuses(ATTEMPT))
    write_findings(folder / ATTEMPT, findings)
    found |= {
        "CPU seconds of rank 0's findings": time.process_time() - start_s,
        "MB of memory of them": _memory_mb() - before_mb,
        "seconds between two findings": findings_period_s(RANKS),
    }
    named = [
        (found_late["rank"], round(found_late["late_s"], 3))
        for group in findings["sets"]
        for found_late in group["late"]
    ]
    assert named == [(late, 0.02)], named
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [(name, f"{value:,.3g}") for name, value in run(Path(folder)).items()]
    output.print_table("1,000 ranks, 125 hosts, 10 steps per second", ("quantity", "value"), rows)


if __name__ == "__main__":
    typer.run(main)
