"""CMA-ES (package ``cmaes``)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from cmaes import CMA, SepCMA
from numpy.typing import NDArray

from paceenv.sim.cluster import Cluster
from paceenv.trainers.training.algorithm_configs import CmaEs
from paceenv.trainers.training.algorithms.learner import Curve, Saved
from paceenv.trainers.training.algorithms.search_learner import SearchLearner
from paceenv.trainers.training.train_config import TrainConfig


class CmaEsLearner(SearchLearner):
    """The policy is the mean of the distribution."""

    label = "CMA-ES, cmaes"
    section: CmaEs

    def __init__(self, config: TrainConfig, clusters: Mapping[str, Cluster] | None, curve: Curve) -> None:
        super().__init__(config, clusters, curve)
        kind = SepCMA if self.section.separable else CMA
        size = self.section.population_size
        self.search = kind(self._start(), self.section.sigma, seed=config.seed, population_size=size)

    def _tried(self) -> int:
        return self.section.population_size

    def _generation(self) -> list[float]:
        # the package has no public way to seed a generation, which a resumed run needs
        self.search._rng = np.random.RandomState([self.config.seed, self.generation])
        tried = [self.search.ask() for _ in range(self.section.population_size)]
        rewards = self._rewards(tried)
        self.search.tell([(x, -reward) for x, reward in zip(tried, rewards, strict=True)])
        return rewards

    def _found(self) -> NDArray[np.float64]:
        return np.asarray(self.search.mean)

    def state(self) -> Saved:
        common, search = super().state(), vars(self.search)
        arrays = {name: value for name, value in search.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in search.items() if isinstance(value, (int, float))}
        return Saved({**common.arrays, **arrays}, {**common.plain, "search": plain})

    def restore(self, saved: Saved) -> None:
        super().restore(saved)
        self._fits(saved.arrays["_mean"])
        arrays = {name: value.copy() for name, value in saved.arrays.items() if name != "multiplier"}
        vars(self.search).update(arrays)
        vars(self.search).update(saved.plain["search"])
