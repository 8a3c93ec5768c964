"""The interface between a training run and what learns: segments of rollouts, the present policy, a state to keep.

:class:`paceenv.trainers.training.training_run.Run` seeds, evaluates, selects and writes checkpoints for all algorithms
alike; a learner only learns. Everything that randomness touches in a segment must follow from torch's and numpy's
global generators, which the run seeds before it, or from the number of the segment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.logger import Logger

from paceenv.policies.learned import Learned

Layers = list[tuple[NDArray[np.float32], NDArray[np.float32]]]


@dataclass
class Curve:
    """The learning curve: rows of plain numbers, each also in TensorBoard's event file.

    Every row has ``timesteps`` and ``reward``; after an evaluation also what validation found.
    """

    logger: Logger
    on_progress: Callable[[float], None] = lambda timesteps: None
    rows: list[dict[str, float]] = field(default_factory=list)

    def add(self, timesteps: int, **values: float) -> None:
        """Add a row; whoever drives the logger writes it out."""
        self.rows.append({"timesteps": timesteps, **values})
        for name, value in self.rows[-1].items():
            self.logger.record(f"pacing/{name}", value)
        self.on_progress(timesteps)


@dataclass(frozen=True)
class Saved:
    """The state of a learner between two segments: arrays by name, and plain JSON data."""

    arrays: dict[str, NDArray[Any]]
    plain: dict[str, Any]


class Learner(ABC):
    """What learns in a run; ``label`` is the algorithm and its library, for the policy file."""

    label: str
    rollout_timesteps: int  # decisions, the unit in which ``selection.every`` counts
    timesteps: int  # decisions taken so far

    @abstractmethod
    def advance(self, segment: int, rollouts: int) -> None:
        """Learn for some rollouts, in new episodes that follow from the segment's number."""

    @abstractmethod
    def policy(self) -> Learned:
        """The policy as it stands, as it would be deployed: without exploration."""

    @abstractmethod
    def with_layers(self, layers: Layers, options: Mapping[str, Any]) -> Learned:
        """A policy of this run from the weights and :meth:`options` that a checkpoint has of it."""

    def options(self, policy: Learned) -> dict[str, Any]:
        """What a policy of this run consists of beside its weights; plain data."""
        return {}

    @abstractmethod
    def calibrated_range(self, policy: Learned) -> dict[str, tuple[float, float]]:
        """For each signal, between which values it lies while the policy is running on the training clusters."""

    @abstractmethod
    def state(self) -> Saved:
        """Everything that the next segment depends on."""

    @abstractmethod
    def restore(self, saved: Saved) -> None:
        """Go on from a state; ValueError, KeyError or RuntimeError where it does not fit."""
