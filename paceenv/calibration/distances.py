"""Distances between distributions of held-out and of predicted values, with what chance alone would give.

Axes: T steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import metrics

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Distance:
    """Kolmogorov-Smirnov distance between held-out values of a quantity and simulated ones.

    ``chance`` is what chance alone exceeds in 5 % of cases with so many ``values``, of which neighbours may be alike.
    """

    quantity: str
    values: int
    distance: float
    chance: float

    @classmethod
    def between(cls, quantity: str, held_out_TR: Array, simulated: Sequence[Array]) -> Distance:
        """The distance of ``(T, R)`` held-out values (R may be 1) to all simulated ones together."""
        distance = metrics.ks_distance(held_out_TR.ravel(), np.concatenate([values.ravel() for values in simulated]))
        steps, ranks = held_out_TR.shape
        step_T = held_out_TR.mean(axis=1)
        within = float(held_out_TR.var(axis=1, ddof=1).mean()) if ranks > 1 else 0.0
        common = max(float(step_T.var(ddof=1)) - within / ranks, 0.0) if ranks > 1 else 1.0
        alike = common / (common + within) if common + within > 0.0 else 1.0  # of the ranks of one step
        independent = steps * ranks / (1.0 + (ranks - 1) * alike) / metrics.correlation_length(step_T)
        return cls(quantity, held_out_TR.size, distance, metrics.ks_chance(max(independent, 1.0)))

    def to_record(self) -> dict[str, Any]:
        """As plain data, to four digits."""
        numbers = {"distance": self.distance, "chance": self.chance}
        return {"quantity": self.quantity, "values": self.values} | {k: float(f"{x:.4g}") for k, x in numbers.items()}

    @property
    def text(self) -> str:
        """For people."""
        verdict = "no more than chance" if self.distance <= self.chance else "more than chance"
        return (
            f"Kolmogorov-Smirnov distance of the {self.quantity}: {self.distance:.1%}, {verdict} (up to "
            f"{self.chance:.1%} with {self.values} values)"
        )
