"""Configs of training runs: which clusters, which mechanisms, which reward, which PPO."""

from __future__ import annotations

import os
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceenv import configs
from paceenv.configs import Config


class ClusterShare(Config):
    """One cluster of a mix and how often an episode draws it."""

    cluster: str
    weight: float = Field(1.0, gt=0)


_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Environment(Config):
    """What is trained on; see ``paceenv.env.PacingEnv``."""

    clusters: list[ClusterShare] = Field(min_length=1)
    mechanisms: list[Literal["slack", "slide", "paper", "stagger"]] = Field(min_length=1)
    interval_iterations: int = Field(20, ge=1)
    episode_intervals: int = Field(64, ge=1)
    cv_weight: _Weight | tuple[_Weight, _Weight] = Field(0.5, description="or lowest and highest: it becomes an input")
    preference: _Weight | None = Field(None, description="the policy's unless told another; None: middle of the range")
    environments: int = Field(256, ge=1, description="rows of the batch")
    threads: int = Field(2, ge=1)
    paired: bool = Field(True, description="reward as the difference to the same episodes without pacing")

    @model_validator(mode="after")
    def _preference_fits(self) -> Self:
        if isinstance(self.cv_weight, tuple):
            low, high = self.cv_weight
            if not low < high:
                raise ValueError(f"cv_weight = [{low:g}, {high:g}]; allowed: a number, or two, the lower one first")
            if self.preference is not None and not low <= self.preference <= high:
                raise ValueError(f"preference = {self.preference:g}; allowed: {low:g} to {high:g}, as cv_weight says")
        elif self.preference is not None:
            raise ValueError(f"preference = {self.preference:g}; allowed: none, as cv_weight is one number")
        return self

    @property
    def preference_range(self) -> tuple[float, float] | None:
        """The weights that episodes draw from; None where all have the same."""
        return self.cv_weight if isinstance(self.cv_weight, tuple) else None

    @property
    def default_preference(self) -> float | None:
        """What the trained policy follows unless told another; None for a policy without that input."""
        if self.preference is not None or self.preference_range is None:
            return self.preference
        return sum(self.preference_range) / 2.0


class Ppo(Config):
    """Hyperparameters of Stable-Baselines3's PPO, by its own names."""

    total_timesteps: int = Field(1_000_000, ge=1, description="decisions, summed over rows")
    n_steps: int = Field(32, ge=1)
    batch_size: int = Field(2048, ge=2)
    n_epochs: int = Field(4, ge=1)
    learning_rate: float = Field(1e-3, gt=0, le=1, description="at the start; falls linearly to zero")
    gamma: float = Field(0.9, ge=0, le=1)
    gae_lambda: float = Field(0.9, ge=0, le=1)
    ent_coef: float = Field(0.0, ge=0)
    log_std_init: float = -0.5
    average_last: float = Field(0.3, ge=0, lt=1, description="the policy is the mean of the actor over this last share")
    net_arch: list[int] = Field([64, 64], min_length=1)


class TrainConfig(Config):
    """A training run."""

    name: str
    description: str = ""
    seed: int = Field(0, ge=0)
    environment: Environment
    ppo: Ppo = Ppo()


class SuiteCase(Config):
    """One cluster of a suite: its weight in the suite's mean, and whether pacing must not matter there."""

    cluster: str
    weight: float = Field(1.0, gt=0)
    null_case: bool = False


class Suite(Config):
    """Clusters on which policies are compared."""

    name: str
    description: str = ""
    cases: list[SuiteCase] = Field(min_length=1)
    mechanisms: list[Literal["slack", "slide", "stagger"]] = Field(
        ["slack", "slide"], min_length=1, description="those whose settings the search for the best static one tries"
    )
    iterations: int = Field(1280, ge=40)
    seeds: int = Field(64, ge=2)
    first_seed: int = Field(1_000_000, ge=0, description="far from the seeds that training uses")


def load_train_config(name: str | os.PathLike[str]) -> TrainConfig:
    """A training config by file or by name in ``configs/train``."""
    return configs.load(TrainConfig, "train", name)


def load_suite(name: str | os.PathLike[str]) -> Suite:
    """A suite by file or by name in ``configs/suites``."""
    return configs.load(Suite, "suites", name)
