"""What Ray Tune runs: :class:`StaticTrial` and :class:`TrainingTrial`, and the spaces that it draws them from.

They fit into any ``tune.Tuner``::

    static = Static(suite="demo", splits=["held-out"], mechanisms=["slack"])
    tuner = tune.Tuner(tune.with_parameters(StaticTrial, task=StaticTask.of(static)), param_space=static_space(static))

Or, for a training config that has a selection::

    sweep = TrainingSweep(train="ppo", hyperparameters={"sb3.learning_rate": {"loguniform": [1e-4, 1e-2]}})
    tuner = tune.Tuner(
        tune.with_parameters(TrainingTrial, task=TrainingTask.of(sweep)),
        param_space=training_space(sweep.hyperparameters),
        tune_config=tune.TuneConfig(metric="score", mode="max"),
    )

A task is what all trials share; it is loaded on the driver, so that it needs no file on the nodes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import tune

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.core.pacing import Candidate
from paceenv.policies.names import spelled
from paceenv.trainers.evaluation.static_search import Problem
from paceenv.trainers.evaluation.suites import Case, load_suite
from paceenv.trainers.sweep.sweep_config import (
    FIRST_SEED,
    MAX_STATIC_THRESHOLD,
    SIGNIFICANT,
    Range,
    Static,
    SweepConfig,
    TrainingSweep,
)
from paceenv.trainers.training.selection import Validation
from paceenv.trainers.training.train_config import TrainConfig, load_train_config
from paceenv.ui import config_files

if TYPE_CHECKING:
    from paceenv.trainers.training.training_run import Run


@dataclass(frozen=True)
class StaticTask:
    """Clusters of a suite, their weights, and the same episodes without pacing."""

    static: Static
    cases: tuple[Case, ...]
    problem: Problem

    @classmethod
    def of(cls, static: Static) -> StaticTask:
        """Load the clusters and simulate them without pacing."""
        suite = load_suite(static.suite).only(static.splits)
        seeds = FIRST_SEED + np.arange(static.seeds)
        problem = Problem([case.load() for case in suite.cases], seeds, static.iterations, limits=suite.limits)
        return cls(static, tuple(suite.cases), problem)

    def setting(self, config: Mapping[str, float]) -> Candidate:
        """The setting that normalised actions stand for."""
        action_1A = np.array([[config[key] for key in _keys(self.static)]])
        decoded = pacing.decode_action(action_1A, self.static.mechanisms)[0]
        setting = dict[str, tuple[float, float]]()
        for mechanism in self.static.mechanisms:
            threshold, window = (float(f"{v:.{SIGNIFICANT}g}") for v in decoded[pacing.MECHANISMS.index(mechanism)])
            if window > 0.0:
                setting[mechanism] = min(threshold, MAX_STATIC_THRESHOLD), window
        return setting

    def score(self, config: Mapping[str, float]) -> dict[str, Any]:
        """A setting's name and its values: means over seeds, then weighted means over clusters."""
        setting = self.setting(config)
        weight_C = np.array([case.weight for case in self.cases])
        gain, cv = (float(weight_C @ x_SCE[0].mean(axis=1) / weight_C.sum()) for x_SCE in self.problem.score([setting]))
        return {"policy": spelled(setting), "throughput": gain, "cv": cv}


class StaticTrial(tune.Trainable):  # type: ignore[misc]
    """One static setting, in the normalised actions of a policy, on all clusters of a task: one step."""

    def setup(self, config: dict[str, Any], task: StaticTask) -> None:
        self._task = task

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        return True  # an actor that is used again has loaded and compiled code

    def step(self) -> dict[str, Any]:
        return {**self._task.score(self.config), "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: a step is the whole trial."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing."""


def _keys(static: Static) -> list[str]:
    return [f"{mechanism}.{what}" for mechanism in static.mechanisms for what in ("threshold", "window")]


def static_space(static: Static) -> dict[str, Any]:
    """Actions in [-1, 1] for Optuna, or the grid's."""
    if static.optuna is not None:
        return {key: tune.uniform(-1.0, 1.0) for key in _keys(static)}
    space: dict[str, Any] = {}
    for m, grid in static.grids().items():
        space[f"{m}.threshold"] = tune.grid_search([pacing.encode_action(m, value, 0.0)[0] for value in grid.threshold])
        space[f"{m}.window"] = tune.grid_search([pacing.encode_action(m, 0.0, value)[1] for value in grid.window])
    return space


def _changed(train: TrainConfig, changes: Mapping[str, Any], where: str) -> TrainConfig:
    data = train.model_dump(mode="json")
    for key, value in changes.items():
        config_files.set_value(data, f"{key}={json.dumps(value)}", where)
    return config_files.parse(TrainConfig, data, where)


@dataclass(frozen=True)
class TrainingTask:
    """A training config and the seeds that each trial trains with."""

    train: TrainConfig
    count: int

    @classmethod
    def of(cls, sweep: TrainingSweep) -> TrainingTask:
        """Resolve the training config. Raises InputError where its trials could not be scored, or would all fail."""
        base = load_train_config(config_files.find("train", sweep.train).absolute())  # Ray's workers change folders
        if base.selection is None and not any(key.startswith("selection") for key in sweep.set):
            allowed = "a training config with a section selection, such as ppo"
            raise InputError(f"train: {sweep.train}: has no selection, which scores the trials; allowed: {allowed}")
        train = _changed(base, sweep.set, f"{sweep.train}, set")
        if sweep.asha is not None and sweep.asha.grace_period > train.total_timesteps:
            asked, most = sweep.asha.grace_period, train.total_timesteps
            raise InputError(f"asha.grace_period = {asked}; allowed: at most {most}, the decisions of a training")
        for key in sweep.hyperparameters:
            section, _, name = key.partition(".")
            known = sorted(train.model_dump(mode="json")[section] or {})
            if name not in known and not key.startswith("sb3.arguments."):
                allowed = ", ".join(f"{section}.{one}" for one in known) or f"keys of {train.algorithm}"
                raise InputError(f"hyperparameter {key}; allowed: {allowed}")
        return cls(train, sweep.seeds)

    @property
    def seeds(self) -> range:
        """Those of every trial."""
        return range(self.train.seed, self.train.seed + self.count)

    def config(self, hyperparameters: Mapping[str, Any], seed: int) -> TrainConfig:
        """The training config of one seed of a trial. Raises InputError for a value that it does not allow."""
        changes = {**hyperparameters, "seed": seed, "environment.threads": 1}
        return _changed(self.train, changes, "hyperparameters")

    @functools.cached_property
    def validation(self) -> Validation:
        """What trials are scored on, with the look-ahead plans that take a minute to find."""
        assert self.train.selection is not None  # as :meth:`of` has checked
        return Validation(self.train.selection, self.train.environment.limits, threads=1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "validation": self.validation}  # found on the driver, once for all trials


def make_task(config: SweepConfig) -> StaticTask | TrainingTask:
    """What the trials of a config share. Raises InputError for a suite or training config that cannot be used."""
    if config.static is not None:
        return StaticTask.of(config.static)
    assert config.training is not None  # one of the two, as the config has checked
    return TrainingTask.of(config.training)


class TrainingTrial(tune.Trainable):  # type: ignore[misc]
    """One training with several seeds; a step is a segment of each.

    Reports ``score`` and ``latest``, the medians over seeds of the best and the latest validation score, ``decisions``,
    and the ``scores`` themselves; ``error`` for hyperparameters that the training config does not allow. Goes on from a
    checkpoint of other hyperparameters, as populations do.
    """

    def setup(self, config: dict[str, Any], task: TrainingTask) -> None:
        self._task = task
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._runs: list[Run] = []
        return True

    def _begun(self) -> list[Run]:
        if not self._runs:
            from paceenv.trainers.training.training_run import Run  # PyTorch, which static settings do not need

            configs = [self._task.config(self.config, seed) for seed in self._task.seeds]
            self._runs = [Run(config, validation=self._task.validation) for config in configs]
        return self._runs

    def step(self) -> dict[str, Any]:
        try:
            runs = self._begun()
        except InputError as error:  # no failure, which Tune would repeat
            return {"error": str(error), "score": math.nan, "latest": math.nan, "decisions": 0, "done": True}
        for run in runs:
            if run.goes_on():
                run.advance()
        scores = [float(run.best_score) for run in runs]
        return {
            "score": float(np.median(scores)),
            "latest": float(np.median([run.latest_score for run in runs])),
            "decisions": max(run.timesteps for run in runs),
            "scores": scores,
            "done": not any(run.goes_on() for run in runs),
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        for seed, run in zip(self._task.seeds, self._runs, strict=False):  # none of a trial that has an error
            run.save(checkpoint_of(Path(checkpoint_dir), seed))

    def load_checkpoint(self, checkpoint: Any) -> None:
        for seed, run in zip(self._task.seeds, self._begun(), strict=True):
            run.restore(checkpoint_of(Path(checkpoint), seed), may_differ=True)


def checkpoint_of(folder: Path, seed: int) -> Path:
    """Where a checkpoint of a trial keeps that of a seed."""
    return folder / f"seed-{seed}.safetensors"


def training_space(ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Ray's name for each range."""
    return {key: _domain(one) for key, one in ranges.items()}


def _domain(one: Range) -> Any:
    if one.choice is not None:
        return tune.choice(one.choice)
    return tune.uniform(*one.uniform) if one.uniform is not None else tune.loguniform(*(one.loguniform or ()))


def mutations(ranges: Mapping[str, Range]) -> dict[str, Any]:
    """As PopulationBasedTraining takes them: it goes to the next one of a list, and would multiply a ``choice``."""
    return {key: one.choice or _domain(one) for key, one in ranges.items()}


def within(config: dict[str, Any], ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Hyperparameters in their ranges, which PopulationBasedTraining's factors leave."""
    bounded = dict(config)
    for key, one in ranges.items():
        if one.ends:
            bounded[key] = min(max(bounded[key], one.ends[0]), one.ends[1])
    return bounded
