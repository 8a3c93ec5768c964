"""Projection: rolls the calibrated simulator ahead from situations like a rank's own and picks the best setting.

The rollouts are made beforehand (``paceenv.policies.situations``). They contain the views of ranks in many simulated
situations of this cluster, and the gain of each candidate setting, held for several control intervals from there. At
each decision a rank looks up the situations with views most like its own and weighs them by likeness. For every
candidate this gives a projected gain over no pacing, with its standard error. The rank changes its setting only when
another one is better by more than that error, and paces only for a gain of at least ``MARGIN``. It does not pace

- on a cluster where no candidate helps in any simulated situation,
- while its view is unlike anything simulated, as projections do not hold there.

Every rank decides alone, from its own views. It knows the cluster's config with its ranges, but not what the episode
drew. Legend: B rows, K neighbours, C candidates, F features, N remembered views.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from paceenv.core.errors import out_of_range
from paceenv.core.limits import LIMITS, Limits
from paceenv.policies import situations
from paceenv.policies.base import Policy
from paceenv.policies.networks.observation_average import ObservationEMA
from paceenv.sim.cluster import Cluster

NEIGHBOURS = 50
"""Remembered views that are looked up for a decision; the nearer half counts most."""
MARGIN = 0.001
"""Projected gain below which pacing is left alone."""
ERRORS = 1.0
"""Standard errors by which another setting must be better than the present one."""
UNLIKE = 1.5
"""How many times farther from all that is remembered than nearly all remembered views are from each other."""
_SAMPLE = 1000
"""Remembered views from which that distance is taken."""
_TINY = 1e-9


class Projection(Policy):
    """The policy for one cluster; building it simulates a few million iterations.

    Args:
        cluster: the calibrated cluster it will run on.
        episodes: simulated episodes to remember; None: as many as a few seconds allow at this number of ranks.
        threads: threads that simulate; the policy does not depend on it.
        limits: of every delay; the defaults are those of a live job.

    Raises:
        InputError: for less than one episode.
    """

    name = "projection"

    def __init__(
        self, cluster: Cluster, *, episodes: int | None = None, threads: int = 1, limits: Limits = LIMITS
    ) -> None:
        if episodes is not None and episodes < 1:
            raise out_of_range("episodes", episodes, "at least 1", "policy projection")
        count = situations.affordable_episodes(cluster.ranks) if episodes is None else episodes
        self._bank = situations.build(cluster, count, threads, limits)
        if len(self._bank.settings_CM2) > 1:
            self._neighbours = min(NEIGHBOURS, len(self._bank.features_NF))
            self._tree = cKDTree(self._bank.features_NF)
            some_NF = self._bank.features_NF[:: max(1, len(self._bank.features_NF) // _SAMPLE)]
            self._reach = UNLIKE * float(np.quantile(self._look_up(some_NF)[2], 0.99))
        self.reset(0)

    @property
    def candidates(self) -> NDArray[np.float64]:
        """The settings ``(C, M, 2)`` it chooses from; the first is off."""
        return self._bank.settings_CM2

    def constant(self) -> NDArray[np.float64] | None:
        return self.candidates[0] if len(self.candidates) == 1 else None

    def reset(self, rows: int) -> None:
        self._memory = ObservationEMA(situations.LONG_MEMORY_INTERVALS)
        self._choice_B = np.zeros(rows, np.int64)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        if len(self.candidates) > 1:
            self._choose(situations.features(self._memory, signals_BO))
        return self.candidates[self._choice_B]

    def _choose(self, features_BF: NDArray[np.float64]) -> None:
        index_BK, weight_BK, distance_B = self._look_up(features_BF)
        gain_BKC = self._bank.gain_NC[index_BK]
        projected_BC = np.einsum("bk,bkc->bc", weight_BK, gain_BKC)
        is_worth_it = projected_BC > MARGIN
        is_worth_it[:, 0] = True
        rows, best_B = np.arange(len(features_BF)), np.where(is_worth_it, projected_BC, -np.inf).argmax(axis=1)
        better_BK = gain_BKC[rows, :, best_B] - gain_BKC[rows, :, self._choice_B]
        mean_B = np.einsum("bk,bk->b", weight_BK, better_BK)
        spread_B = np.einsum("bk,bk->b", weight_BK, (better_BK - mean_B[:, None]) ** 2)
        # the ranks watched in one situation share its gains: as many fewer independent neighbours
        error_B = np.sqrt(spread_B * np.einsum("bk,bk->b", weight_BK, weight_BK) * self._bank.watched)
        self._choice_B = np.where(mean_B > ERRORS * error_B, best_B, self._choice_B)
        self._choice_B[distance_B > self._reach] = 0

    def _look_up(
        self, features_BF: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """The nearest remembered views ``(B, K)``, their weights, and how far the middle one is ``(B,)``."""
        nearest = np.arange(1, self._neighbours + 1)
        distance_BK, index_BK = self._tree.query(features_BF, nearest)
        middle_B = np.maximum(distance_BK[:, self._neighbours // 2], _TINY)
        weight_BK = np.exp(-0.5 * (distance_BK / middle_B[:, None]) ** 2)
        return index_BK, weight_BK / weight_BK.sum(axis=1, keepdims=True), middle_B
