"""CMA-ES (package ``cmaes``): every network of a generation drives the same episodes; no gradient, no critic."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from cmaes import CMA, SepCMA
from numpy.typing import NDArray

from paceenv.policies.learned import Learned
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine.simulator import training_seed
from paceenv.trainers.training.algorithm_configs import CmaEs
from paceenv.trainers.training.algorithms.learner import Curve, Layers, Learner, Saved
from paceenv.trainers.training.algorithms.sb3_learner import RANGE_SEED, network_policy, range_in
from paceenv.trainers.training.batches import training_envs
from paceenv.trainers.training.train_config import TrainConfig

START_OFF = -1.0
"""Bias of the window actions at the start: networks that do not see a reason to pace do not pace."""


class CmaEsLearner(Learner):
    """A generation is a rollout; the policy is the mean of the distribution.

    Args:
        config: of the training.
        clusters: replaces configs by name, for example by a fresh calibration.
        curve: where rows go.
    """

    label = "CMA-ES, cmaes"

    def __init__(self, config: TrainConfig, clusters: Mapping[str, Cluster] | None, curve: Curve) -> None:
        self.config, self.curve = config, curve
        assert config.cma_es is not None  # as the config has filled in
        self.section: CmaEs = config.cma_es
        self.envs = training_envs(config, clusters)
        inputs, outputs = self.envs.observation_space.shape, self.envs.action_space.shape
        assert inputs is not None
        assert outputs is not None
        self._widths = (inputs[0], *self.section.net_arch, outputs[0])
        self._shapes = list(itertools.pairwise(self._widths))
        self.rollout_timesteps = self.section.population_size * self.section.intervals * self.envs.num_envs
        self.generation = 0
        kind = SepCMA if self.section.separable else CMA
        self.search = kind(
            self._start(), self.section.sigma, seed=config.seed, population_size=self.section.population_size
        )

    def _start(self) -> NDArray[np.float64]:
        """Random hidden layers, an output layer of zeros, and biases that leave pacing off."""
        rng, parts = np.random.default_rng(self.config.seed), []
        for place, (a, b) in enumerate(self._shapes, 1):
            last = place == len(self._shapes)
            bias = np.zeros(b)
            bias[1::2] = START_OFF if last else 0.0
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
            # the package has no public way to seed a generation, which a resumed run needs
            self.search._rng = np.random.RandomState([self.config.seed, self.generation])
            tried = [self.search.ask() for _ in range(self.section.population_size)]
            rewards = [self._reward(self.with_layers(self._layers(x), {})) for x in tried]
            self.search.tell([(x, -reward) for x, reward in zip(tried, rewards, strict=True)])
            self.generation += 1
            costs = self.envs.constraint.update() if self.envs.constraint is not None else {}
            self.curve.add(self.timesteps, reward=float(np.mean(rewards)), best_reward=max(rewards), **costs)
            self.curve.logger.dump(self.timesteps)

    def _reward(self, policy: Learned) -> float:
        """Mean reward of a network on the episodes of this generation."""
        self.envs.seed(training_seed(self.config.seed, self.generation * 16 * self.envs.num_envs))
        observation, rewards = self.envs.reset(), []
        for _ in range(self.section.intervals):
            observation, reward, *_ = self.envs.step(np.clip(policy.action(observation), -1.0, 1.0))  # type: ignore[assignment]
            rewards.append(float(reward.mean()))
        return float(np.mean(rewards))

    def policy(self) -> Learned:
        return self.with_layers(self._layers(self.search.mean), {})

    def with_layers(self, layers: Layers, options: Mapping[str, Any]) -> Learned:
        return network_policy(self.config, layers)

    def calibrated_range(self, policy: Learned) -> dict[str, tuple[float, float]]:
        return range_in(self.envs, policy, training_seed(self.config.seed, RANGE_SEED))

    def state(self) -> Saved:
        state = vars(self.search)
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in state.items() if isinstance(value, (int, float))}
        if self.envs.constraint is not None:
            arrays["multiplier"] = self.envs.constraint.multiplier_C
        return Saved(arrays, {"generation": self.generation, "search": plain})

    def restore(self, saved: Saved) -> None:
        self.generation = int(saved.plain["generation"])
        arrays = dict(saved.arrays)
        if self.envs.constraint is not None:
            self.envs.constraint.multiplier_C[:] = arrays.pop("multiplier")
        if len(arrays["_mean"]) != self.search.dim:
            raise ValueError(f"{len(arrays['_mean'])} weights; allowed: {self.search.dim}")
        vars(self.search).update({name: value.copy() for name, value in arrays.items()})
        vars(self.search).update(saved.plain["search"])
