"""A sweep: its ledger, its search, and the trials between them; ``ray_trials`` runs the trials on Ray.

The ledger is the record: a header, then a line of JSON for every trial that has ended, each on disk before the next. A
resumed sweep needs nothing else, and it is data only: Ray's own state is a pickle and is never read. A line that was
cut short by a kill does not count, and its trial runs again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.trainers.sweep.searches import AshaSearch, GridSearch, PbtSearch, Search, Trial
from paceenv.trainers.sweep.sweep_config import Asha, Grid, SweepConfig
from paceenv.trainers.sweep.trial import Row, StaticTask, TrainingTask
from paceenv.ui.run_directory import first_difference

LIBRARIES = ("paceenv", "numpy", "numba", "ray", "optuna", "torch", "stable-baselines3")
LEDGER_FORMAT = "paceenv.sweep/1"
LEDGER = "ledger.jsonl"


class Ledger:
    """The ledger of a run directory."""

    def __init__(self, folder: Path, header: Mapping[str, Any], rows: Mapping[int, Row]) -> None:
        self.header, self.rows = dict(header), dict(rows)
        self.folder, self.path = folder, folder / LEDGER

    @classmethod
    def begin(cls, folder: Path, header: Mapping[str, Any]) -> Ledger:
        """A new ledger. Raises InputError where it cannot be written."""
        plain = {"format": LEDGER_FORMAT, **header}
        atomic_write(folder / LEDGER, _line(plain))
        return cls(folder, json.loads(_line(plain)), {})

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """The ledger that is there; nothing is changed. Raises InputError."""
        header, rows, _ = _read(folder / LEDGER)
        return cls(folder, header, rows)

    @classmethod
    def resume(cls, folder: Path, header: Mapping[str, Any]) -> Ledger:
        """The ledger that is there, to be written on: of the same sweep, and without a line that was cut short.

        Raises InputError, which names the first thing that differs from ``header``.
        """
        theirs, rows, length = _read(folder / LEDGER)
        for part in ("config", "inputs"):
            if changed := first_difference(theirs.get(part), json.loads(_line(header[part]))):
                raise InputError(f"{folder}: begun with {changed}; allowed: the same, or another folder")
        if length < (folder / LEDGER).stat().st_size:
            os.truncate(folder / LEDGER, length)
        return cls(folder, theirs, rows)

    def add(self, row: Row) -> None:
        """Append a trial and sync it to the disk, whole or not at all. Raises InputError where that fails."""
        assert row["trial"] not in self.rows, f"trial {row['trial']} was recorded already"
        line = _line(row)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            before = os.fstat(descriptor).st_size
            try:
                if (written := os.write(descriptor, line)) < len(line):
                    os.write(descriptor, line[written:])  # raises with the reason
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, before)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.rows[row["trial"]] = json.loads(line)

    def result(self, number: int) -> dict[str, Any] | None:
        """The result of a recorded trial; None where it failed."""
        found: dict[str, Any] | None = self.rows[number].get("result")
        return found


def _line(data: Any) -> bytes:
    return (json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _read(path: Path) -> tuple[dict[str, Any], dict[int, Row], int]:
    """Header, rows, and the length in bytes of all complete lines."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path.parent}: holds no sweep; allowed: the folder of one") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    length = content.rfind(b"\n") + 1
    lines = content[:length].splitlines()
    try:
        header, *rows = (json.loads(line) for line in lines)
        if header["format"] != LEDGER_FORMAT:
            raise ValueError(f"format {header['format']!r}; allowed: {LEDGER_FORMAT!r}")
        return header, {row["trial"]: row for row in rows}, length
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a sweep's ledger: {error}") from None


@dataclass
class Sweep:
    """A sweep under way. Trials come from :meth:`next`, and every one of them goes to :meth:`record`.

    ``waiting`` are trials that were handed out by the search and not yet by the sweep, ``running`` those that were.
    """

    config: SweepConfig
    task: StaticTask | TrainingTask
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


def open_sweep(config: SweepConfig, task: StaticTask | TrainingTask, folder: Path) -> Sweep:
    """Begin a sweep in a folder, or go on with the one there; InputError where the folder holds another sweep."""
    search = make_search(config, task)
    header = {
        "config": config.model_dump(mode="json"),
        "inputs": task.inputs(),
        "versions": {"python": platform.python_version()} | dict(_versions()),
    }
    ledger = Ledger.resume(folder, header) if (folder / LEDGER).exists() else Ledger.begin(folder, header)
    return Sweep(config, task, ledger, search)


def make_task(config: SweepConfig, folder: Path) -> StaticTask | TrainingTask:
    """What the trials of a config share; InputError for a suite or training config that cannot be used."""
    if config.static is not None:
        return StaticTask.of(config.static)
    assert config.training is not None  # one of the two, as the config has checked
    return TrainingTask.of(config.training, folder)


def make_search(config: SweepConfig, task: StaticTask | TrainingTask) -> Search:
    """The search of a config, at its beginning."""
    if isinstance(task, StaticTask):
        assert config.static is not None
        chosen = config.static.search
        if isinstance(chosen, Grid):
            return GridSearch(config.static, chosen, task.names, task.weight_C)
        from paceenv.trainers.sweep.optuna_search import OptunaSearch  # which the grid does not need

        return OptunaSearch(config.static, chosen, task.names, task.weight_C, config.seed)
    assert config.training is not None
    ranges, decisions = config.training.hyperparameters, task.train.total_timesteps
    if isinstance(config.training.search, Asha):
        return AshaSearch(config.training.search, ranges, decisions, config.seed)
    return PbtSearch(config.training.search, ranges, decisions, config.seed)


def _versions() -> Iterator[tuple[str, Any]]:
    for name in LIBRARIES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
