"""Augmented random search, version V2-t (Mania, Guy, Recht: arXiv 1803.07055, algorithm 2).

Each direction is tried both ways, the best directions move the weights, the step is divided by the spread of their
rewards, and inputs are standardised by the mean and spread of all that any network was shown so far.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.running_mean_std import RunningMeanStd

from paceenv.sim.cluster import Cluster
from paceenv.trainers.training.algorithm_configs import Ars
from paceenv.trainers.training.algorithms.learner import Curve, Layers, Saved
from paceenv.trainers.training.algorithms.search_learner import SearchLearner
from paceenv.trainers.training.train_config import TrainConfig

MIN_SPREAD = 0.02
"""Inputs that vary less than this are not blown up."""
_TINY = 1e-6


class ArsLearner(SearchLearner):
    """The policy is the network that directions start from, with the standardisation folded into its first layer."""

    label = "ARS-V2, paceenv"
    section: Ars

    def __init__(self, config: TrainConfig, clusters: Mapping[str, Cluster] | None, curve: Curve) -> None:
        super().__init__(config, clusters, curve)
        self.weights = self._start()
        self.seen = RunningMeanStd(shape=(self.inputs,))
        self._scale()

    def _scale(self) -> None:
        """Standardise by what was seen so far: once a generation, so that all its networks are alike."""
        spread_I = np.maximum(np.sqrt(self.seen.var), MIN_SPREAD)
        self.mean_I, self.spread_I = np.array(self.seen.mean), spread_I

    def _tried(self) -> int:
        return 2 * self.section.n_delta

    def _generation(self) -> list[float]:
        if not self.generation:  # the first step would otherwise be taken on another scale than all others
            self._rewards([self.weights])
            self._scale()
        section, rng = self.section, np.random.default_rng([self.config.seed, self.generation])
        delta_DX = rng.standard_normal((section.n_delta, len(self.weights)))
        way_DX = section.delta_std * delta_DX
        rewards = self._rewards([*(self.weights + way_DX), *(self.weights - way_DX)])
        plus_D, minus_D = np.reshape(rewards, (2, section.n_delta))
        top = np.argsort(-np.maximum(plus_D, minus_D), kind="stable")[: section.n_top]
        spread = np.concatenate([plus_D[top], minus_D[top]]).std()
        step = section.learning_rate / (section.n_top * spread + _TINY)
        self.weights = self.weights + step * ((plus_D - minus_D)[top] @ delta_DX[top])
        self._scale()
        return rewards

    def _see(self, observation_EI: NDArray[np.float32]) -> None:
        self.seen.update(observation_EI)

    def _layers(self, x: NDArray[np.float64]) -> Layers:
        (a, b), first = self._shapes[0], x.copy()
        weight_BA = x[: a * b].reshape(b, a) / self.spread_I
        first[: a * b] = weight_BA.ravel()
        first[a * b : (a + 1) * b] -= weight_BA @ self.mean_I
        return super()._layers(first)

    def _found(self) -> NDArray[np.float64]:
        return self.weights

    def state(self) -> Saved:
        common, seen = super().state(), self.seen
        arrays = {"weights": self.weights, "mean": seen.mean, "variance": seen.var}
        return Saved({**common.arrays, **arrays}, {**common.plain, "count": float(seen.count)})

    def restore(self, saved: Saved) -> None:
        super().restore(saved)
        self.weights = self._fits(saved.arrays["weights"])
        self.seen.mean, self.seen.var = np.array(saved.arrays["mean"]), np.array(saved.arrays["variance"])
        self.seen.count = float(saved.plain["count"])
        self._scale()
