"""The work of a trial: settings on clusters, or a piece of a training run.

A result depends only on the trial's work, on the content of the task and, for a training run, on its parent's
checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.trainers.evaluation.comparison import digest
from paceenv.trainers.evaluation.suites import Case, load_suite, load_suites
from paceenv.trainers.sweep.searches import Result, Trial, Work, settings_of
from paceenv.trainers.sweep.static_search import Problem
from paceenv.trainers.sweep.sweep_config import FIRST_SEED, Static, TrainingSweep
from paceenv.trainers.training.selection import Validation
from paceenv.trainers.training.train_config import TrainConfig, load_train_config, share_name
from paceenv.ui import config_files

QUARTILES = (25, 75)
Row = dict[str, Any]
"""``trial`` (its number), ``work``, ``status`` (done or failed), ``result`` or ``error``, and ``ran``: how it went."""


class Task(Protocol):
    """What all trials of a sweep share."""

    def run(self, number: int, work: Work, threads: int) -> Result:
        """The result of a trial, as plain JSON data.

        Args:
            threads: threads of the engine; the result does not depend on it.
        """

    def seeds(self) -> Sequence[int]:
        """Those of every trial."""


def run_trial(task: Task, trial: Trial, threads: int = 1) -> Row:
    """Run a trial and return its record; an exception is part of the record."""
    began, row = time.perf_counter(), {"trial": trial.number, "work": dict(trial.work), "seeds": list(task.seeds())}
    try:
        row |= {"status": "done", "result": task.run(trial.number, trial.work, threads)}
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        row |= {"status": "failed", "error": said, "traceback": traceback.format_exc()}
    return row | {"ran": {"wall_s": round(time.perf_counter() - began, 3), "host": socket.gethostname()}}


@dataclass(frozen=True)
class StaticTask:
    """Static settings on clusters; results are medians or means over seeds, ``(S, C)``, gains with their quartiles."""

    cases: tuple[Case, ...]
    problem: Problem
    average: Literal["median", "mean"]

    @classmethod
    def of(cls, static: Static) -> StaticTask:
        """Loads the clusters and simulates them without pacing."""
        suite = load_suite(static.suite).only(static.splits)
        clusters = [case.load() for case in suite.cases]
        seeds = FIRST_SEED + np.arange(static.seeds)
        problem = Problem.of(clusters, seeds, static.iterations, limits=suite.limits)
        unknown = [np.isnan(passive[2]).any() for passive in problem.passive]
        if "energy" in static.objectives and (any(unknown) if static.scope == "each" else all(unknown)):
            which = "not every" if static.scope == "each" else "no"
            raise InputError(
                f"objectives: energy on suite {suite.name}: {which} cluster has power figures; allowed: others"
            )
        return cls(tuple(suite.cases), problem, static.average)

    @property
    def names(self) -> list[str]:
        """Of the clusters."""
        return [case.name for case in self.cases]

    @property
    def weight_C(self) -> NDArray[np.float64]:
        """Of the clusters."""
        return np.array([case.weight for case in self.cases])

    def inputs(self) -> dict[str, Any]:
        """What results depend on beside the config: the cases, and a digest of every resolved cluster."""
        return {
            "cases": [case.model_dump(mode="json") for case in self.cases],
            "clusters": {c.name: digest(k) for c, k in zip(self.cases, self.problem.clusters, strict=True)},
            "limits": dataclasses.asdict(self.problem.limits),
        }

    def seeds(self) -> Sequence[int]:
        found: list[int] = self.problem.seeds_E.tolist()
        return found

    def run(self, number: int, work: Work, threads: int) -> Result:
        """Simulate the trial's settings; parameters as in :meth:`Task.run`."""
        where = [self.names.index(name) for name in work["clusters"]]
        scores = self.problem.score(settings_of(work), where, threads=threads)
        low_SC, high_SC = np.percentile(scores.gain_SCE, QUARTILES, axis=2)
        average = np.mean if self.average == "mean" else np.median
        averages = {name: average(getattr(scores, f"{name}_SCE"), axis=2) for name in ("gain", "cv", "energy")}
        return {name: _plain(found) for name, found in {**averages, "gain_low": low_SC, "gain_high": high_SC}.items()}


@dataclass(frozen=True)
class TrainingTask:
    """Pieces of training runs, each with several seeds; the result is the median of their validation scores.

    ``score`` is of the best policies since the run's first piece, which a policy file gets; ``latest`` is of the last
    evaluations.

    Checkpoints lie in ``folder``, which every node must see: trial 7 keeps those of its seeds in ``trials/0007``.
    """

    train: TrainConfig
    count: int
    folder: Path

    @classmethod
    def of(cls, sweep: TrainingSweep, folder: Path) -> TrainingTask:
        """Resolve the training config. Raises InputError where it has no selection to score its trials."""
        base = load_train_config(config_files.find("train", sweep.train).absolute())  # Ray's workers change folders
        data = base.model_dump(mode="json")
        for key, value in sweep.set.items():
            config_files.set_value(data, f"{key}={json.dumps(value)}", "set")
        train = config_files.parse(TrainConfig, data, f"{sweep.train}, set")
        if train.selection is None:
            raise InputError(f"{sweep.train}: has no selection to score trials; allowed: a training config with one")
        for key in sweep.hyperparameters:  # a wrong name would fail in every trial
            section, _, name = key.partition(".")
            if section == "constraint" or key.startswith("sb3.arguments."):
                continue
            if name not in (known := sorted(train.model_dump(mode="json")[section] or {})):
                allowed = ", ".join(f"{section}.{one}" for one in known) or f"keys of {train.algorithm}"
                raise InputError(f"hyperparameter {key}; allowed: {allowed}")
        return cls(train, sweep.seeds, folder.absolute())

    def inputs(self) -> dict[str, Any]:
        """What results depend on beside the config: the resolved config and the clusters of training and validation."""
        shares, selection = self.train.environment.shares(), self.train.selection
        assert selection is not None  # as :meth:`of` has checked
        digests = {share_name(share): digest(share.load()) for share in shares}
        cases = load_suites(selection.suites, "validation").only(["validation"]).cases
        validation = {case.name: digest(case.load()) for case in cases}
        return {"train": self.train.model_dump(mode="json"), "clusters": digests, "validation": validation}

    def seeds(self) -> Sequence[int]:
        return range(self.train.seed, self.train.seed + self.count)

    def config(self, work: Work, seed: int, threads: int = 1) -> TrainConfig:
        """The training config of one seed of a trial.

        Raises:
            InputError: for a value that the config does not allow.
        """
        data = self.train.model_dump(mode="json")
        for key, value in work["hyperparameters"].items():
            config_files.set_value(data, f"{key}={json.dumps(value)}", "hyperparameters")
        data["seed"], data["environment"]["threads"] = seed, threads
        return config_files.parse(TrainConfig, data, "hyperparameters")

    def place(self, number: int, seed: int) -> Path:
        """Where a seed of a trial keeps its checkpoint."""
        return self.folder / "trials" / f"{number:04d}" / f"seed-{seed}"

    def run(self, number: int, work: Work, threads: int) -> Result:
        """Train the trial's seeds up to its length; parameters as in :meth:`Task.run`."""
        from paceenv.trainers.training import training_run  # PyTorch, which static settings do not need

        validation = _validation(self.train.model_dump_json(), threads)
        scores, latest, decisions = [], [], []
        for seed in self.seeds():
            folder = self.place(number, seed)
            folder.mkdir(parents=True, exist_ok=True)
            run = training_run.Run(self.config(work, seed, threads), folder=folder, validation=validation)
            if (folder / training_run.CHECKPOINT).exists():  # of this trial, when it was interrupted
                run.restore(folder / training_run.CHECKPOINT)
            elif work["from"] is not None:
                run.restore(self.place(work["from"], seed) / training_run.CHECKPOINT, changed=True)
            while run.timesteps < work["until"] and run.goes_on():
                run.advance(work["until"])
            run.close()
            scores.append(float(run.best_score))
            latest.append(float(run.latest_score))
            decisions.append(run.timesteps)
        medians = {"score": float(np.median(scores)), "latest": float(np.median(latest))}
        return {**medians, "scores": scores, "decisions": decisions}


@functools.cache
def _validation(train_json: str, threads: int) -> Validation:
    """Of a training config's selection; once in a process, as bounds take seconds to find."""
    config = TrainConfig.model_validate_json(train_json)
    assert config.selection is not None  # as the task has checked
    return Validation(config.selection, config.environment.limits, threads)


def _plain(found_SC: NDArray[np.float64]) -> list[list[float | None]]:
    return [[None if np.isnan(value) else float(value) for value in row] for row in found_SC]
