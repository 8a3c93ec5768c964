"""Safety while training: what pacing may cost where it cannot help, held by Lagrange multipliers.

For each null cluster c the cost is the mean step with pacing over that of the same episodes without, less 1. The reward
of its rows loses ``multiplier[c]`` times that cost, and after every rollout ``multiplier[c]`` grows with what the mean
cost was above the limit, and shrinks with what it was below (dual ascent). Costs are those of the exploring policy, so
they overstate what the deterministic one will cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.trainers.training.train_config import Constraint


class NullConstraint:
    """Multipliers and running costs of C clusters, of which those in ``is_null`` are limited."""

    def __init__(self, config: Constraint, names: Sequence[str], is_null: Sequence[bool]) -> None:
        self.config, self.names = config, list(names)
        self.is_null_C = np.array(is_null, bool)
        self.multiplier_C = np.zeros(len(names))
        self._sum_C, self._count_C = np.zeros(len(names)), np.zeros(len(names), np.int64)

    def penalty(self, cluster_E: NDArray[np.int64], cost_E: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the reward of each row loses, ``(E,)``; takes the costs into account for the next :meth:`update`."""
        np.add.at(self._sum_C, cluster_E, cost_E)
        np.add.at(self._count_C, cluster_E, 1)
        return np.where(self.is_null_C[cluster_E], self.multiplier_C[cluster_E] * cost_E, 0.0)

    def update(self) -> dict[str, float]:
        """Move the multipliers after a rollout; the mean and the worst cost of a null, and the largest multiplier."""
        seen = self.is_null_C & (self._count_C > 0)
        mean_C = self._sum_C / np.maximum(self._count_C, 1)
        step_C = np.where(seen, self.config.rate * (mean_C - self.config.limit), 0.0)
        self.multiplier_C = np.clip(self.multiplier_C + step_C, 0.0, self.config.most)
        self._sum_C[:], self._count_C[:] = 0.0, 0
        if not seen.any():
            return {}
        return {
            "null_cost": float(mean_C[seen].mean()),
            "null_cost_worst": float(mean_C[seen].max()),
            "multiplier": float(self.multiplier_C.max()),
        }
