"""A sweep: its search, its ledger, and the trials between them.

``paceenv.trainers.sweep.tune`` runs the trials on Ray; :func:`run_here` runs them one after the other in this process,
for comparison.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.trainers.sweep.ledger import NAME, Ledger, Row
from paceenv.trainers.sweep.searches.asha import AshaSearch
from paceenv.trainers.sweep.searches.pbt import PbtSearch
from paceenv.trainers.sweep.searches.search import GridSearch, Search, Trial
from paceenv.trainers.sweep.sweep_config import Asha, Grid, SweepConfig
from paceenv.trainers.sweep.trial import PpoTask, StaticTask, run_trial

LIBRARIES = ("paceenv", "numpy", "numba", "ray", "optuna", "torch", "stable-baselines3")


@dataclass
class Sweep:
    """A sweep under way. Trials come from :meth:`next`, and every one of them goes to :meth:`record`.

    ``waiting`` are trials that were handed out by the search and not yet by the sweep, ``running`` those that were.
    """

    config: SweepConfig
    task: StaticTask | PpoTask
    ledger: Ledger
    search: Search
    waiting: deque[Trial] = field(default_factory=deque)
    running: dict[int, Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._look()

    def next(self) -> Trial | None:
        """A trial to run; None while there is none, or if the sweep :meth:`is_over`."""
        if not self.waiting:
            return None
        trial = self.waiting.popleft()
        self.running[trial.number] = trial
        return trial

    def record(self, row: Row) -> None:
        """Put a trial that has ended on record, and let the search know. Raises InputError where that fails."""
        self.ledger.add(row)
        trial = self.running.pop(row["trial"])
        self.search.tell(trial, self.ledger.result(trial.number))
        self._look()

    def give_back(self, number: int) -> None:
        """Put back a trial that was begun and did not end; it is the next to run."""
        self.waiting.appendleft(self.running.pop(number))

    def is_over(self) -> bool:
        """Whether every trial has ended, and no other will come."""
        return not self.waiting and not self.running

    def _look(self) -> None:
        """Take the search's next trials, and give it at once the results that the ledger already has."""
        while found := self.search.ready():
            for trial in found:
                row = self.ledger.rows.get(trial.number)
                if row is None:
                    self.waiting.append(trial)
                    continue
                if row["work"] != trial.work:
                    raise InputError(
                        f"{self.ledger.path}: trial {trial.number} is not the one that this version would run; "
                        f"allowed: the versions it was begun with, {self.ledger.header['versions']}"
                    )
                self.search.tell(trial, self.ledger.result(trial.number))


def open_sweep(config: SweepConfig, task: StaticTask | PpoTask, folder: Path, *, resume: bool = False) -> Sweep:
    """Begin a sweep in a run directory, or go on with the one there.

    Args:
        config: of the sweep.
        task: what its trials share.
        folder: the run directory.
        resume: go on where the ledger ends, if there is one.

    Raises:
        InputError: where the directory holds another sweep, or one and ``resume`` is not set.
    """
    search = make_search(config, task)
    header = {
        "config": config.model_dump(mode="json"),
        "inputs": task.inputs(),
        "versions": {"python": platform.python_version()} | dict(_versions()),
    }
    going_on = resume and (folder / NAME).exists()
    ledger = Ledger.resume(folder, header) if going_on else Ledger.begin(folder, header)
    return Sweep(config, task, ledger, search)


def make_task(config: SweepConfig, folder: Path, threads: int = 1) -> StaticTask | PpoTask:
    """What the trials of a config share.

    Args:
        config: of the sweep.
        folder: the run directory, which keeps checkpoints of training.
        threads: threads that simulate the clusters without pacing.

    Raises:
        InputError: for a suite or training config that cannot be used.
    """
    if config.static is not None:
        return StaticTask.of(config.static, threads)
    assert config.ppo is not None  # one of the two, as the config has checked
    return PpoTask.of(config.ppo, folder)


def make_search(config: SweepConfig, task: StaticTask | PpoTask) -> Search:
    """The search of a config, at its beginning.

    Args:
        config: of the sweep.
        task: what a trial does.
    """
    if isinstance(task, StaticTask):
        assert config.static is not None
        chosen = config.static.search
        if isinstance(chosen, Grid):
            return GridSearch(config.static, chosen, task.names, task.weight_C)
        from paceenv.trainers.sweep.searches.optuna_search import OptunaSearch  # which the grid does not need

        return OptunaSearch(config.static, chosen, task.names, task.weight_C, config.seed)
    assert config.ppo is not None
    ranges, decisions = config.ppo.hyperparameters, task.train.total_timesteps
    if isinstance(config.ppo.search, Asha):
        return AshaSearch(config.ppo.search, ranges, decisions, config.seed)
    return PbtSearch(config.ppo.search, ranges, decisions, config.seed)


def run_here(sweep: Sweep, threads: int = 1, on_row: Callable[[Row], None] = lambda row: None) -> None:
    """Run what is left of a sweep in this process, one trial after the other.

    Args:
        sweep: the sweep.
        threads: threads of each trial; results do not depend on it.
        on_row: called with every trial's record.
    """
    while (trial := sweep.next()) is not None:
        row = run_trial(sweep.task, trial, threads)
        sweep.record(row)
        on_row(row)


def _versions() -> Iterator[tuple[str, Any]]:
    for name in LIBRARIES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
