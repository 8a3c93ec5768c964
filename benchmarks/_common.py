"""What the benchmarks share: the clock, campaigns, and the parts of pages that they write.

Time is CPU time of the process, so that a machine shared with others measures the same, and contestants take turns, so
that what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import typer

from paceenv.core.files import atomic_write
from paceenv.core.trace import Trace, read_trace
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.cluster.environment import Noise
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.ui import output

NOISE = Noise(
    jitter_cv=0.05,
    common_cv=0.01,
    persistent_cv=0.02,
    imbalance_cv=0.03,
    fail_slow_share=0.01,
    fail_slow_factor=1.5,
    drift_cv=0.02,
    stall_rate=1e-4,
    stall_mean_s=0.1,
)
"""Every kind of noise at once; ``imbalance_skew`` stays 1, a gamma."""


LEAST_S = 0.04
"""Seconds of a contestant's turn, about."""


def measure(
    contestants: Mapping[str, Callable[[], object]], units: Mapping[str, int], turns: int = 5
) -> dict[str, float]:
    """Units of work per CPU second of each contestant, medians over the turns that they take.

    Each is called twice beforehand, then so often in a turn that it takes :data:`LEAST_S`. ``units`` is how many units
    of work a call of each does.
    """
    calls: dict[str, int] = {}
    for name, function in contestants.items():
        function()
        calls[name] = max(1, round(LEAST_S / max(_seconds(function, 1), 1e-9)))
    seconds = {name: np.empty(turns) for name in contestants}
    for turn in range(turns):
        for name, function in contestants.items():
            seconds[name][turn] = _seconds(function, calls[name]) / (calls[name] * units[name])
    return {name: 1.0 / float(np.median(of_turns)) for name, of_turns in seconds.items()}


def _seconds(function: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return time.process_time() - start


def recorded(cluster: Cluster, seed: int, iterations: int) -> Trace:
    """The trace of a cluster without pacing, as ``paceenv simulate --trace`` writes it."""
    simulator = start(cluster, [seed])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        with RecordingWriter(path, simulator, "known") as writer:
            writer.add(simulator.record(simulator.off(), iterations))
        return read_trace(path)


def campaign(
    runs: Sequence[Any], out: Path, measure: Callable[[Any, Path], dict[str, Any]], *, only: str, jobs: int = 1
) -> list[dict[str, Any]]:
    """The results of the runs that a regular expression finds by name, so many ``jobs`` at a time; a line for each.

    A run is a dataclass, and its name that of its folder. What is there already is not run again.
    """

    def kept(run: Any) -> Any:
        file = out.resolve() / run.name / "result.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(asdict(run) | measure(run, file.parent), indent=1))
        return json.loads(file.read_text())

    chosen = [run for run in runs if re.search(only, run.name)]
    if not chosen:
        names = ", ".join(run.name for run in runs[:: max(len(runs) // 8, 1)])
        output.say(f"error: --only {only!r}: no such run; allowed: part of a name such as {names}")
        raise typer.Exit(2)
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(jobs) as pool, output.progress("jobs", len(chosen)) as done:
        futures = {pool.submit(kept, run): run.name for run in chosen}
        for future in as_completed(futures):
            name = futures[future]
            found = results[name] = future.result()
            done(len(results))
            output.say(f"{len(results)}/{len(chosen)} {name}: {found['verdict']} {found['why']}".rstrip())
    return [results[run.name] for run in chosen]


EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence"


def put(page: str, command: str, lines: Sequence[str]) -> None:
    """Replace what stands on a page of evidence between ``<!-- begin: COMMAND -->`` and ``<!-- end -->``.

    The lines are followed by the day and the machine.
    """
    path, begin, end = EVIDENCE / page, f"<!-- begin: {command} -->", "<!-- end -->"
    head, found, rest = path.read_text(encoding="utf-8").partition(begin)
    assert found, f"{page} has no part {begin}"
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    here = f"{len(os.sched_getaffinity(0))} cores{f' ({cpu[1]})' if cpu else ''}"
    made = f"Made on {datetime.date.today()} by `{command}`, on {here}."
    atomic_write(path, "\n".join([f"{head}{begin}", "", *lines, "", made, "", f"{end}{rest.partition(end)[2]}"]))
    output.say(f"wrote {path}")


def figure(value: float) -> str:
    """A number with three digits and a thousands prefix, such as ``52.3 M``."""
    scale, prefix = next((one for one in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if abs(value) >= one[0]), (1.0, ""))
    digits = value / scale
    return f"{digits:.0f}{prefix}" if abs(digits) >= 100 else f"{digits:.3g}{prefix}"
