"""Configs of training runs: clusters, mechanisms, reward, limits, and the algorithm with its hyperparameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from paceenv.core.errors import InputError
from paceenv.core.limits import LIMITS, Limits
from paceenv.policies.networks.observation_average import MAX_INTERVALS, time_scales
from paceenv.sim.engine.simulator import MAX_RUN_SEED
from paceenv.trainers.evaluation.suites import REPORTED, ClusterShare, load_suites
from paceenv.trainers.training.algorithm_configs import (
    SECTIONS,
    Algorithm,
    Ars,
    CmaEs,
    CrossQ,
    Distill,
    Ppo,
    RecurrentPpo,
    Sac,
    Tqc,
)
from paceenv.ui import config_files
from paceenv.ui.config_files import AnyMechanism, Config

_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Environment(Config):
    """Clusters, mechanisms and reward of a training; see ``paceenv.envs.pacing_env.PacingEnv``."""

    clusters: list[ClusterShare] = Field([], description="clusters that episodes draw from; empty: those of the suites")
    suites: list[str] = Field([], description="suites whose training clusters episodes draw from")
    mechanisms: list[AnyMechanism] = Field(min_length=1, description="which of them the policy sets, in this order")
    interval_iterations: int = Field(20, ge=1, description="iterations of a control interval")
    episode_intervals: int = Field(64, ge=1, description="length of an episode")
    cv_weight: _Weight | tuple[_Weight, _Weight] = Field(0.5, description="or lowest and highest: it becomes an input")
    preference: _Weight | None = Field(None, description="the policy's default; None: middle of the range")
    memory_intervals: int | list[int] = Field(
        0, description="control intervals over which the policy averages its views, one or several; 0: no averages"
    )
    change_intervals: int = Field(
        0, ge=0, le=MAX_INTERVALS, description="the same for the mean change of its views; 0: not"
    )
    limits: Limits = Field(LIMITS, description="of every delay; the defaults are those of a live job")
    environments: int = Field(256, ge=1, description="rows of the batch")
    threads: int = Field(2, ge=1, description="threads that share the batch")
    randomize: bool = Field(True, description="false: what clusters draw is at the middle of its range, for comparison")
    pool_segments: int = Field(
        0,
        ge=0,
        description="segments after which episodes come again, whose unpaced twins are then known; 0: never",
    )
    paired: bool = Field(True, description="reward as the difference to the same episodes without pacing")

    @model_validator(mode="after")
    def _one_source(self) -> Environment:
        if bool(self.clusters) == bool(self.suites):
            raise ValueError("clusters or suites, one of the two")
        return self

    @model_validator(mode="after")
    def _memory_fits(self) -> Environment:
        try:
            time_scales(self.memory_intervals)
        except InputError as error:
            raise ValueError(str(error).partition(": ")[2]) from None
        return self

    @model_validator(mode="after")
    def _preference_fits(self) -> Environment:
        if isinstance(self.cv_weight, tuple):
            low, high = self.cv_weight
            if not low < high:
                raise ValueError(f"cv_weight = [{low:g}, {high:g}]; allowed: a number, or two, the lower one first")
            if self.preference is not None and not low <= self.preference <= high:
                raise ValueError(
                    f"preference = {self.preference:g}; allowed: {low:g} to {high:g}, the range of cv_weight"
                )
        elif self.preference is not None:
            raise ValueError(
                f"preference = {self.preference:g}; allowed: without preference, as cv_weight is one number"
            )
        return self

    @property
    def preference_range(self) -> tuple[float, float] | None:
        """The weights that episodes draw from; None where all have the same."""
        return self.cv_weight if isinstance(self.cv_weight, tuple) else None

    @property
    def default_preference(self) -> float | None:
        """The trained policy's preference unless it is given another; None for a policy without that input."""
        if self.preference is not None or self.preference_range is None:
            return self.preference
        return sum(self.preference_range) / 2.0

    def shares(self) -> list[ClusterShare]:
        """The clusters that episodes draw from, each with a name of its own."""
        if self.clusters:
            return list(self.clusters)
        return list(load_suites(self.suites, "train").only(["train"]).cases)


class Constraint(Config):
    """The limit on a policy's cost where pacing cannot help, held by a Lagrange multiplier for each such cluster."""

    limit: float = Field(0.002, ge=0, le=1, description="share of mean step time; below the 0.5 % that is promised")
    rate: float = Field(2.0, ge=0, description="how much a multiplier grows for each rollout and share over the limit")
    most: float = Field(20.0, ge=0, description="the largest multiplier")


class Selection(Config):
    """How a training run is scored while it runs: on validation clusters, every rank deciding for itself."""

    suites: list[str] = Field(
        list(REPORTED), min_length=1, description="suites whose validation clusters score the policy"
    )
    every: int = Field(
        10, ge=1, description="rollouts between two evaluations; each evaluation also writes a checkpoint"
    )
    patience: int = Field(6, ge=1, description="evaluations without a better score after which training stops")
    seeds: int = Field(8, ge=2, description="episodes on each cluster")
    iterations: int = Field(800, ge=40, description="length of each episode, iterations")


class TrainConfig(Config):
    """A training run."""

    name: str
    description: str = ""
    seed: int = Field(0, ge=0, le=MAX_RUN_SEED, description="of everything that is drawn")
    environment: Environment
    constraint: Constraint | None = None
    selection: Selection | None = None
    algorithm: Algorithm = Field("ppo", description="what learns; its hyperparameters are the section of its name")
    ppo: Ppo | None = None
    recurrent_ppo: RecurrentPpo | None = None
    distill: Distill | None = None
    sac: Sac | None = None
    tqc: Tqc | None = None
    crossq: CrossQ | None = None
    cma_es: CmaEs | None = None
    ars: Ars | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_section(cls, data: Any) -> Any:
        """Fill the section of the algorithm in, so that a config need not name what it does not change."""
        if not isinstance(data, dict):
            return data
        algorithm = data.get("algorithm", "ppo")
        if not isinstance(algorithm, str) or algorithm not in SECTIONS:
            return data  # which the field itself refuses
        others = [name for name in SECTIONS if name != algorithm and data.get(name) is not None]
        if others:
            allowed = f"{algorithm}, the section of the algorithm, or algorithm: {others[0]}"
            raise ValueError(f"section {others[0]} with algorithm: {algorithm}; allowed: {allowed}")
        if algorithm == "distill" and data.get("constraint") is not None:
            raise ValueError("constraint with algorithm: distill; allowed: distill.null_limit, which does the same")
        return data if data.get(algorithm) is not None else {**data, algorithm: {}}

    @property
    def total_timesteps(self) -> int:
        """Decisions that the training may take."""
        return int(getattr(self, self.algorithm).total_timesteps)

    def with_timesteps(self, total_timesteps: int) -> TrainConfig:
        """This config with another length of training."""
        section = getattr(self, self.algorithm).model_copy(update={"total_timesteps": total_timesteps})
        return self.model_copy(update={self.algorithm: section})

    def beside(self, path: Path) -> TrainConfig:
        """This config, read from ``path``, with the clusters and suites that lie beside that file found there."""
        given, selection = self.environment, self.selection
        clusters = [share.beside(path) for share in given.clusters]
        suites = [config_files.resolve_sibling(path, suite) for suite in given.suites]
        environment = given.model_copy(update={"clusters": clusters, "suites": suites})
        if selection is not None:
            selection = selection.model_copy(
                update={"suites": [config_files.resolve_sibling(path, suite) for suite in selection.suites]}
            )
        return self.model_copy(update={"environment": environment, "selection": selection})


def with_algorithm(data: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """A config's data with another algorithm and its default hyperparameters, unless it is the config's own.

    Args:
        data: of a config file.
        algorithm: name of the other algorithm.
    """
    if algorithm == data.get("algorithm", "ppo"):
        return dict(data)
    left_out = (*SECTIONS, *(["constraint"] if algorithm == "distill" else []))  # distill has a limit of its own
    return {**{key: value for key, value in data.items() if key not in left_out}, "algorithm": algorithm}


def load_train_config(name: str | os.PathLike[str]) -> TrainConfig:
    """A training config by file or by name in ``configs/train``; files it names may lie beside it."""
    path = config_files.find("train", name)
    return config_files.load(TrainConfig, "train", path).beside(path)
