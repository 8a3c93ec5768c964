"""Configs of sweeps: settings or hyperparameters to try, search, objectives. Files in ``configs/sweeps``."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from paceenv.core import pacing
from paceenv.trainers.evaluation.static_search import GRID
from paceenv.trainers.evaluation.suites import ALL, Split
from paceenv.ui.config_files import Config, Mechanism

Objective = Literal["throughput", "cv"]
MAX_STATIC_THRESHOLD = 1.0
"""The largest threshold of a static policy; a learned one can set stagger's up to 2."""
FIRST_SEED = 4_000_000
"""First episode of a search; the score table uses others."""
SIGNIFICANT = 4
"""Digits of a setting that a search draws, as many as its spelling shows."""
MAX_GRID = 4096
"""Settings of a grid; more are a mistake: the default grids of four mechanisms have 69,120."""


class GridOf(Config):
    """Thresholds and windows of one mechanism that are tried, each with each."""

    threshold: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        min_length=1, description="values to try"
    )
    window: list[Annotated[float, Field(ge=0, le=pacing.MAX_WINDOW)]] = Field(
        min_length=1, description="values to try; at 0 the mechanism is off"
    )


DEFAULT_GRID = {m: GridOf(threshold=list(both[0]), window=list(both[1])) for m, both in GRID.items()}


class Optuna(Config):
    """Settings that Ray's OptunaSearch asks for, over the whole range that a policy can set."""

    num_samples: int = Field(256, ge=1, description="settings tried")
    sampler: Literal["tpe", "nsga2"] = Field("tpe", description="Optuna's own name")
    n_startup_trials: int = Field(48, ge=0, description="settings drawn at random before the sampler learns")


class Static(Config):
    """Thresholds and windows of pacing mechanisms on the clusters of a suite; one setting is one trial."""

    suite: str = Field(ALL, description="a suite: a file, a name in configs/suites, or all")
    splits: list[Split] = Field(["train", "validation"], min_length=1, description="splits of the suite to search on")
    mechanisms: list[Mechanism] = Field(
        ["slack", "phase_shift", "stagger", "mean_slack"],
        min_length=1,
        description="rules whose settings are searched",
    )
    grid: dict[Mechanism, GridOf] = Field(
        {}, description="without optuna, each combination of these is tried; mechanisms not named have a default"
    )
    optuna: Optuna | None = None
    objectives: list[Objective] = Field(
        ["throughput", "cv"], min_length=1, description="the first one names the winner"
    )
    seeds: int = Field(8, ge=1, description="episodes on each cluster")
    iterations: int = Field(1600, ge=40, description="length of each episode, iterations")

    @model_validator(mode="after")
    def _fits(self) -> Static:
        for name in ("splits", "mechanisms", "objectives"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} = {values}; allowed: each once")
        if self.grid and self.optuna is not None:
            raise ValueError("grid or optuna, one of the two")
        for mechanism, grid in self.grids().items():
            most = min(pacing.MAX_THRESHOLD[pacing.MECHANISMS.index(mechanism)], MAX_STATIC_THRESHOLD)
            if max(grid.threshold) > most:
                raise ValueError(f"threshold of {mechanism} = {max(grid.threshold):g}; allowed: 0 to {most:g}")
        if self.optuna is None and self.num_samples > MAX_GRID:
            allowed = f"at most {MAX_GRID}, by fewer mechanisms or values, or optuna: {{}}"
            raise ValueError(f"a grid of {self.num_samples} settings; allowed: {allowed}")
        return self

    def grids(self) -> dict[Mechanism, GridOf]:
        """The values of each mechanism that a grid search tries."""
        return {mechanism: self.grid.get(mechanism, DEFAULT_GRID[mechanism]) for mechanism in self.mechanisms}

    @property
    def num_samples(self) -> int:
        """Settings tried in one search."""
        if self.optuna is not None:
            return self.optuna.num_samples
        return math.prod(len(grid.threshold) * len(grid.window) for grid in self.grids().values())


class Range(Config):
    """Where a hyperparameter is drawn from; as in cluster configs, one of three."""

    uniform: tuple[float, float] | None = Field(None, description="evenly between two numbers")
    loguniform: tuple[float, float] | None = Field(None, description="evenly in the logarithm")
    choice: list[Any] | None = Field(None, min_length=1, description="one of these")

    @model_validator(mode="after")
    def _one(self) -> Range:
        given = [name for name in ("uniform", "loguniform", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'nothing'}; allowed: one of uniform, loguniform, choice")
        least = 0.0 if self.loguniform else -math.inf
        if self.ends and not least < self.ends[0] < self.ends[1] < math.inf:
            allowed = f"two numbers, the lower one first and more than {least:g}"
            raise ValueError(f"{given[0]} = {list(self.ends)}; allowed: {allowed}")
        return self

    @property
    def ends(self) -> tuple[float, float] | None:
        """Of a range of numbers; None of a choice."""
        return self.uniform or self.loguniform


class Asha(Config):
    """Arguments of Ray's ASHAScheduler; time is counted in decisions, and ends with the training config's."""

    grace_period: int = Field(ge=1, description="decisions before a trial may be stopped")
    reduction_factor: float = Field(4.0, gt=1, description="of the trials that got as far, one in so many goes on")


class Pbt(Config):
    """Arguments of Ray's PopulationBasedTraining; time is counted in decisions."""

    perturbation_interval: int = Field(ge=1, description="decisions between two comparisons of the population")


def _checked_key(key: str) -> str:
    section, _, name = key.partition(".")
    if section not in ("sb3", "distill", "environment") or not name:
        allowed = "sb3., distill. or environment. and a key of that section"
        raise ValueError(f"hyperparameter {key}; allowed: {allowed}")
    return key


_Key = Annotated[str, AfterValidator(_checked_key)]
PBT_KEYS = ("sb3.learning_rate", *(f"sb3.arguments.{name}" for name in ("gamma", "gae_lambda", "ent_coef", "n_epochs")))
"""Hyperparameters that may change during a training run, which keeps its network, its episodes and its schedule."""


class TrainingSweep(Config):
    """Hyperparameters of a training config, scored on its validation clusters."""

    train: str = Field(description="a training config: a file, or a name in configs/train")
    set: dict[str, Any] = Field({}, description="values that differ from it in every trial: total_timesteps: 100000")
    hyperparameters: dict[_Key, Range] = Field(min_length=1, description="range of each hyperparameter, by its name")
    num_samples: int = Field(9, ge=1, description="trials; with pbt the population")
    asha: Asha | None = Field(None, description="stops trials early; without asha and pbt each runs to its end")
    pbt: Pbt | None = Field(None, description="changes hyperparameters during the training")
    seeds: int = Field(3, ge=1, le=99, description="of each trial, whose score is their median")

    @model_validator(mode="after")
    def _can_change(self) -> TrainingSweep:
        if self.asha is not None and self.pbt is not None:
            raise ValueError("asha or pbt, one of the two")
        if self.pbt is not None and (fixed := sorted(self.hyperparameters.keys() - set(PBT_KEYS))):
            raise ValueError(f"hyperparameter {fixed[0]} with PBT; allowed: {', '.join(PBT_KEYS)}")
        return self


class SweepConfig(Config):
    """A sweep: either over static settings or over hyperparameters of a training run."""

    name: str
    description: str = ""
    seed: int = Field(0, ge=0, description="seed of the search; simulations have seeds of their own")
    static: Static | None = None
    training: TrainingSweep | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> SweepConfig:
        if (self.static is None) == (self.training is None):
            raise ValueError("static or training, one of the two")
        return self
