"""Sweeps in this process, without Ray: begun in a folder, run there, and what they came to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.trainers.sweep.sweep_run import Ledger, Sweep, make_task, open_sweep
from paceenv.trainers.sweep.trial import Row, run_trial


def begun(config: SweepConfig, folder: Path) -> Sweep:
    """A sweep in a folder, from its beginning or from where it was."""
    folder.mkdir(exist_ok=True)
    return open_sweep(config, make_task(config, folder), folder)


def run_here(sweep: Sweep, on_row: Callable[[Row], None] = lambda row: None) -> None:
    """Run what is left of a sweep, one trial after the other."""
    while (trial := sweep.next()) is not None:
        row = run_trial(sweep.task, trial)
        sweep.record(row)
        on_row(row)


def ended(folder: Path) -> dict[int, Any]:
    """Work and result of every trial that has ended, by its number."""
    return {n: (row["work"], row.get("result")) for n, row in Ledger.read(folder).rows.items()}
