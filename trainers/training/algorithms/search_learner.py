"""What searches without gradients share: every network of a generation drives the same episodes; no critic."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.policies.learned import Learned
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine.simulator import training_seed
from paceenv.trainers.training.algorithms.learner import Curve, Layers, Learner, Saved
from paceenv.trainers.training.algorithms.sb3_learner import RANGE_SEED, network_policy, range_in
from paceenv.trainers.training.batches import training_envs
from paceenv.trainers.training.train_config import TrainConfig

START = pacing.OFF_BELOW
"""Bias of the window actions at the start: still off, but any push turns pacing on. From -1 all networks of the first
generations were off, and the search had nothing to compare."""


class SearchLearner(Learner):
    """A search in the space of a network's weights; a generation is a rollout.

    Args:
        config: of the training.
        clusters: replaces configs by name, for example by a fresh calibration.
        curve: where rows go.
    """

    def __init__(self, config: TrainConfig, clusters: Mapping[str, Cluster] | None, curve: Curve) -> None:
        self.config, self.curve, self.section = config, curve, getattr(config, config.algorithm)
        self.envs = training_envs(config, clusters)
        inputs, outputs = self.envs.observation_space.shape, self.envs.action_space.shape
        assert inputs is not None
        assert outputs is not None
        self.inputs = inputs[0]
        self._shapes = list(itertools.pairwise((inputs[0], *self.section.net_arch, outputs[0])))
        self.rollout_timesteps = self._tried() * self.section.intervals * self.envs.num_envs
        self.generation = 0

    @abstractmethod
    def _tried(self) -> int:
        """Networks that a generation tries."""

    @abstractmethod
    def _generation(self) -> list[float]:
        """Try networks and move on; the rewards."""

    @abstractmethod
    def _found(self) -> NDArray[np.float64]:
        """The weights as they stand."""

    def _start(self) -> NDArray[np.float64]:
        """Random hidden layers, an output layer of zeros, and biases that leave pacing off."""
        rng, parts = np.random.default_rng(self.config.seed), []
        for place, (a, b) in enumerate(self._shapes, 1):
            last = place == len(self._shapes)
            bias = np.zeros(b)
            bias[1::2] = START if last else 0.0
            parts += [np.zeros(a * b) if last else rng.normal(0.0, a**-0.5, a * b), bias]
        return np.concatenate(parts)

    def _layers(self, x: NDArray[np.float64]) -> Layers:
        layers, at = list[tuple[NDArray[np.float32], NDArray[np.float32]]](), 0
        for a, b in self._shapes:
            weight, bias = x[at : at + a * b].reshape(b, a), x[at + a * b : at + (a + 1) * b]
            layers.append((weight.astype(np.float32), bias.astype(np.float32)))
            at += (a + 1) * b
        return layers

    @property
    def timesteps(self) -> int:  # type: ignore[override]
        return self.generation * self.rollout_timesteps

    def advance(self, segment: int, rollouts: int) -> None:
        for _ in range(rollouts):
            rewards = self._generation()
            self.generation += 1
            costs = self.envs.constraint.update() if self.envs.constraint is not None else {}
            self.curve.add(self.timesteps, reward=float(np.mean(rewards)), best_reward=max(rewards), **costs)
            self.curve.logger.dump(self.timesteps)

    def _rewards(self, tried: Sequence[NDArray[np.float64]]) -> list[float]:
        """Mean rewards of networks on the episodes of this generation, by their weights."""
        return [self._reward(self.with_layers(self._layers(x), {})) for x in tried]

    def _reward(self, policy: Learned) -> float:
        self.envs.seed(training_seed(self.config.seed, self.generation * 16 * self.envs.num_envs))
        observation, rewards = self.envs.reset(), []
        for _ in range(self.section.intervals):
            self._see(observation)
            observation, reward, *_ = self.envs.step(np.clip(policy.action(observation), -1.0, 1.0))  # type: ignore[assignment]
            rewards.append(float(reward.mean()))
        return float(np.mean(rewards))

    def _see(self, observation_EI: NDArray[np.float32]) -> None:
        """Take notice of what a network was shown."""

    def policy(self) -> Learned:
        return self.with_layers(self._layers(self._found()), {})

    def with_layers(self, layers: Layers, options: Mapping[str, Any]) -> Learned:
        return network_policy(self.config, layers)

    def calibrated_range(self, policy: Learned) -> dict[str, tuple[float, float]]:
        return range_in(self.envs, policy, training_seed(self.config.seed, RANGE_SEED))

    def state(self) -> Saved:
        arrays = {} if self.envs.constraint is None else {"multiplier": self.envs.constraint.multiplier_C}
        return Saved(arrays, {"generation": self.generation})

    def restore(self, saved: Saved) -> None:
        self.generation = int(saved.plain["generation"])
        if self.envs.constraint is not None:
            self.envs.constraint.multiplier_C[:] = saved.arrays["multiplier"]

    def _fits(self, weights: NDArray[Any]) -> NDArray[np.float64]:
        """A copy of weights from a checkpoint; ValueError where they are of another network."""
        wanted = sum((a + 1) * b for a, b in self._shapes)
        if weights.shape != (wanted,):
            raise ValueError(f"{weights.shape} weights; allowed: ({wanted},)")
        return np.array(weights, np.float64)
