"""Step times of MLPerf Training submissions as step logs: one per system and benchmark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.importers.log_text.conversion import Number, convert
from paceenv.importers.log_text.log_lines import Stamp
from paceenv.importers.log_text.tables import Mllog
from paceenv.importers.step_log import StepLog

DATA: Final = Path(os.environ.get("PACEENV_DATA_DIR") or Path(__file__).resolve().parents[3] / "shared" / "data")
"""The folder of data that others recorded."""
FOLDER: Final = "mlperf-v5.1"
MIN_VALUES: Final = 30
MIN_IN_RUN: Final = 10
"""Values of a run, of which fewer do not tell its warm-up from the rest."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class System:
    """A submitted system on one benchmark; ``nodes`` as its platform says, 0 if it does not."""

    submitter: str
    system: str
    benchmark: str
    nodes: int
    logs: tuple[StepLog, ...]

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.submitter} {self.system}"


def systems(data: Path = DATA, least: int = MIN_VALUES) -> Iterator[System]:
    """Every system and benchmark with at least so many values in all its runs, in the data's order.

    Raises InputError where the data are missing.
    """
    folder = data / FOLDER
    if not (folder / "steps.parquet").is_file():
        raise InputError(f"{folder}: no such data; allowed: --data or PACEENV_DATA_DIR with the folder that has it")
    table = pq.read_table(folder / "steps.parquet").to_pydict()
    about: dict[tuple[Any, ...], dict[str, Any]] = {
        (r["submitter"], r["system"], r["benchmark"], r["run"]): r
        for r in json.loads((folder / "runs.json").read_text())
    }
    rows: dict[tuple[Any, ...], dict[int, list[tuple[Any, ...]]]] = {}
    names = ("submitter", "system", "benchmark", "run", "step", "samples", "step_time_s", "time_ms")
    for submitter, system, benchmark, run, *row in zip(*(table[name] for name in names), strict=True):
        rows.setdefault((submitter, system, benchmark), {}).setdefault(run, []).append(tuple(row))
    for key, runs in rows.items():
        logs = [_log(key, run, found, about.get((*key, run), {})) for run, found in runs.items()]
        kept = tuple(log for log in logs if log is not None)
        if sum(len(log.step_V) for log in kept) >= least:
            submitter, system, benchmark = key
            yield System(submitter, system, benchmark, _nodes(about.get((*key, 0), {})), kept)


def _log(key: tuple[Any, ...], run: int, rows: list[tuple[Any, ...]], about: dict[str, Any]) -> StepLog | None:
    """One run; means of whole blocks count only where steps are not logged."""
    mine = Mllog()
    mine.batch = float(about.get("global_batch_size") or 0.0)
    for step, samples, seconds, time_ms in rows:
        stamp = Stamp(time_ms / 1e3, 1e-3)
        if step is not None:
            mine.timed.add(float(step), Number("step time", seconds, 1e-9), stamp)
        elif samples is not None:
            mine.summary.add(float(samples), Number("step time", seconds, 1e-9), stamp)
    column = mine.timed if len(mine.timed.value) >= 4 else mine.summary
    try:
        steps = convert(mine.in_steps(column), " ".join(key))
    except InputError:
        return None
    if len(steps.step_V) < MIN_IN_RUN:
        return None
    return StepLog(f"{' '.join(key)} run {run}", "MLPerf", *steps[:6], notes=steps.notes)


def _nodes(about: dict[str, Any]) -> int:
    count = str(about.get("submission_platform", "")).partition("x")[0]
    return int(count) if count.isdecimal() else 0


def pooled(system: System) -> StepLog:
    """All runs as one log; each relative to its own median, so that differences between runs are no variation.

    Runs are on nodes that the scheduler chose, so that no policy makes their levels equal.
    """
    medians = [float(np.median(log.step_s_V[len(log.step_s_V) // 10 :])) for log in system.logs]
    usual = float(np.median(medians))
    first = system.logs[0]

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(log, name) for log in system.logs])

    step_s_V = np.concatenate([log.step_s_V * usual / m for log, m in zip(system.logs, medians, strict=True)])
    run_V = np.concatenate([np.full(len(log.step_V), i) for i, log in enumerate(system.logs)])
    return StepLog(system.name, first.source, joined("step_V"), step_s_V, joined("steps_V"), joined("clock_s_V"), run_V)
