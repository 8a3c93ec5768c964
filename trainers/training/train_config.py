"""Configs of training runs: clusters, mechanisms, reward, limits, and the algorithm with its hyperparameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from paceenv.core.limits import LIMITS, Limits
from paceenv.policies.networks import MAX_INTERVALS, time_scales
from paceenv.sim.engine.simulator import MAX_RUN_SEED
from paceenv.trainers.evaluation.suites import REPORTED, Case, beside, load_suites
from paceenv.ui import config_files
from paceenv.ui.config_files import AnyMechanism, Config

DISTILL = "distill"
"""The algorithm that is ours; all others are classes of Stable-Baselines3 or sb3-contrib."""
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _for_training(cases: list[Case]) -> list[Case]:
    return [case.model_copy(update={"split": "train"}) for case in cases]


class Environment(Config):
    """Clusters, mechanisms and reward of a training; see ``paceenv.envs.pacing_env.PacingEnv``."""

    clusters: Annotated[list[Case], AfterValidator(_for_training)] = Field(
        [], description="clusters that episodes draw from; empty: those of the suites"
    )
    suites: list[str] = Field([], description="suites whose training clusters episodes draw from")
    mechanisms: list[AnyMechanism] = Field(min_length=1, description="mechanisms that the policy sets, in this order")
    interval_iterations: int = Field(20, ge=1, description="iterations of a control interval")
    episode_intervals: int = Field(64, ge=1, description="length of an episode")
    cv_weight: _Weight | tuple[_Weight, _Weight] = Field(0.5, description="with distill also lowest and highest")
    preference: _Weight | None = Field(None, description="the policy's default; None: middle of the range")
    memory_intervals: int | list[int] = Field(
        0, description="control intervals over which the policy averages its views, one or several; 0: no averages"
    )
    change_intervals: int = Field(
        0, ge=0, le=MAX_INTERVALS, description="the same for the mean change of its views; 0: no averages"
    )
    limits: Limits = Field(LIMITS, description="limits of every delay; by default those of a live job")
    environments: int = Field(256, ge=1, description="rows of the batch")
    threads: int = Field(2, ge=1, description="threads that share the batch")
    pool_segments: int = Field(
        0,
        ge=0,
        description="segments after which episodes come again, whose unpaced copies are then known; 0: never",
    )

    @model_validator(mode="after")
    def _fits(self) -> Environment:
        if bool(self.clusters) == bool(self.suites):
            raise ValueError("clusters or suites, one of the two")
        time_scales(self.memory_intervals)
        ends, preference = self.preference_range, self.preference
        if ends is not None and not ends[0] < ends[1]:
            raise ValueError(f"cv_weight = {list(ends)}; allowed: a number, or two, the lower one first")
        if preference is not None and not (ends is not None and ends[0] <= preference <= ends[1]):
            raise ValueError(f"preference = {preference:g}; allowed: within the range of cv_weight, if it is one")
        return self

    @property
    def preference_range(self) -> tuple[float, float] | None:
        """The weights between which the policy can be told one; None where it has but one."""
        return self.cv_weight if isinstance(self.cv_weight, tuple) else None

    @property
    def default_preference(self) -> float | None:
        """The trained policy's preference unless it is given another; None for a policy without that input."""
        if self.preference is not None or self.preference_range is None:
            return self.preference
        return sum(self.preference_range) / 2.0

    def shares(self) -> list[Case]:
        """The clusters that episodes draw from, each with a name of its own."""
        if self.clusters:
            return list(self.clusters)
        return list(load_suites(self.suites, "train").only(["train"]).cases)


class Selection(Config):
    """How a training run is scored while it runs: on validation clusters, every rank deciding for itself."""

    suites: list[str] = Field(
        list(REPORTED), min_length=1, description="suites whose validation clusters, and no others, score the policy"
    )
    every: int = Field(
        10, ge=1, description="rollouts between two evaluations; each evaluation also writes a checkpoint"
    )
    patience: int = Field(6, ge=1, description="evaluations without a better score after which training stops")
    seeds: int = Field(8, ge=2, description="episodes on each cluster")
    iterations: int = Field(800, ge=40, description="length of each episode, iterations")


class Sb3(Config):
    """What the algorithms of Stable-Baselines3 and sb3-contrib share; everything else is an argument of the class."""

    learning_rate: float = Field(1e-3, gt=0, le=1, description="rate at the start; falls linearly to zero")
    net_arch: list[int] = Field([64, 64], min_length=1, description="hidden layers of the actor")
    arguments: dict[str, Any] = Field(
        {}, description="of the algorithm's class, by its own names; the others are DEFAULTS of sb3_learner"
    )


class Distill(Config):
    """Distillation of a teacher that knows the future, by rounds of DAgger."""

    rounds: int = Field(16, ge=1, description="the first is driven at random, the others by the student")
    candidates: int = Field(24, ge=1, le=200, description="settings that the student chooses from, without off")
    horizon_intervals: int = Field(6, ge=1, description="how long the teacher holds a setting on the true future")
    episode_intervals: int = Field(80, ge=2, description="control intervals of an episode")
    every_intervals: int = Field(8, ge=1, description="control intervals between two questions to the teacher")
    watched_ranks: int = Field(8, ge=1, description="ranks of a job whose views are kept at each question")
    random_clusters: int = Field(
        0,
        ge=0,
        description="random clusters that each round draws anew, for an episode each, as in suite random; the other "
        "episodes are of the environment's clusters",
    )
    n_epochs: int = Field(4, ge=1, description="passes in each round, over the views of all rounds so far")
    batch_size: int = Field(1024, ge=2, description="views in one update")
    learning_rate: float = Field(2e-3, gt=0, le=1, description="at the start of a round; falls linearly to zero")
    always: Mapping[AnyMechanism, tuple[float, float]] = Field(
        {},
        description="threshold and window of mechanisms that hold whatever the student chooses, such as defer, which "
        "judges itself and does nothing where no transfer can wait",
    )
    net_arch: list[int] = Field([128, 128], min_length=1, description="units of the hidden layers")
    margins: list[_Weight] = Field(
        [0.05, 0.1, 0.2, 0.4],
        min_length=1,
        description="% of the step, increasing; the first one is taken with which none of the training nulls that a "
        "round tries loses 0.2 %",
    )
    hysteresis: _Weight = Field(0.1, description="% of the step")


class TrainConfig(Config):
    """A training run."""

    name: str
    description: str = ""
    seed: int = Field(0, ge=0, le=MAX_RUN_SEED, description="seed of all draws")
    environment: Environment
    selection: Selection | None = None
    algorithm: str = Field(
        "PPO", description=f"the learner: {DISTILL}, or a class of stable_baselines3 or sb3_contrib, such as SAC"
    )
    total_timesteps: int = Field(1_000_000, ge=1, description="decisions, summed over rows")
    sb3: Sb3 | None = Field(None, description="hyperparameters of all algorithms but distill")
    distill: Distill | None = Field(None, description="hyperparameters of distill")

    @model_validator(mode="before")
    @classmethod
    def _own_section(cls, data: Any) -> Any:
        """Fill the section of the algorithm in, so that a config need not name what it does not change."""
        if not isinstance(data, dict):
            return data
        algorithm = data.get("algorithm", "PPO")
        own, other = (DISTILL, "sb3") if algorithm == DISTILL else ("sb3", DISTILL)
        if data.get(other) is not None:
            raise ValueError(f"section {other} with algorithm: {algorithm}; allowed: {own}")
        return data if data.get(own) is not None else {**data, own: {}}

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.distill is None and self.environment.preference_range is not None:
            raise ValueError(f"cv_weight with algorithm {self.algorithm}; allowed: one number")
        if self.distill is not None and self.distill.random_clusters:
            drawn = self.distill.random_clusters
            decisions = self.distill.rounds * drawn * self.distill.episode_intervals
            if decisions >= self.total_timesteps:
                allowed = f"fewer than total_timesteps, {self.total_timesteps}"
                raise ValueError(f"random_clusters = {drawn}: {decisions} decisions in all; allowed: {allowed}")
        return self


def with_algorithm(data: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """A config's data with another algorithm and its default hyperparameters, unless it is the config's own."""
    if algorithm == data.get("algorithm", "PPO"):
        return dict(data)
    return {**{key: value for key, value in data.items() if key not in ("sb3", DISTILL)}, "algorithm": algorithm}


def load_train_config(
    name: str | os.PathLike[str], changes: Sequence[str] = (), algorithm: str | None = None
) -> TrainConfig:
    """A training config by file or by name in ``configs/train``; files it names may lie beside it.

    Args:
        changes: ``key=value`` each, of values that differ.
        algorithm: learns instead of the config's own.
    """
    path = config_files.find("train", name)
    data = config_files.read_yaml(path)
    data = data if algorithm is None else with_algorithm(data, algorithm)
    for assignment in changes:
        config_files.set_value(data, assignment)
    return config_files.parse(TrainConfig, beside(data, path), str(path))
