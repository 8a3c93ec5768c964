"""How near predicted values are to held-out ones: single numbers, and whole distributions beside what chance gives.

Axis: T steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.measurements import ROUNDING
from paceenv.core import metrics
from paceenv.core.intervals import Interval

Array = NDArray[np.float64]
CLOSE: Final = 0.1
"""A distance that exceeds what chance gives by no more is close."""


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
    def between(cls, quantity: str, held_out_T: Array, simulated: Sequence[Array]) -> Distance:
        """The distance of held-out values to all simulated ones together."""
        distance = metrics.ks_distance(held_out_T, np.concatenate([values.ravel() for values in simulated]))
        is_constant = np.ptp(held_out_T) <= ROUNDING * abs(float(held_out_T.mean()))
        independent = 1.0 if is_constant else len(held_out_T) / metrics.correlation_length(held_out_T)
        return cls(quantity, len(held_out_T), distance, metrics.ks_chance(max(independent, 1.0)))

    def to_record(self) -> dict[str, Any]:
        """As plain data, to four digits."""
        numbers = {"distance": self.distance, "chance": self.chance}
        rounded = {k: float(f"{x:.4g}") for k, x in numbers.items()}
        return {"quantity": self.quantity, "values": self.values, **rounded, "verdict": self.verdict}

    @property
    def verdict(self) -> str:
        """``agrees`` up to what chance gives, ``close`` up to ``CLOSE`` beyond it, else ``off``."""
        beyond = self.distance - self.chance
        return "agrees" if beyond <= 0.0 else "close" if beyond <= CLOSE else "off"

    @property
    def text(self) -> str:
        """For people."""
        said = "no more than chance" if self.verdict == "agrees" else f"more than chance, {self.verdict}"
        return (
            f"Kolmogorov-Smirnov distance of the {self.quantity}: {self.distance:.1%}, {said} (chance: up to "
            f"{self.chance:.1%} with {self.values} values)"
        )


@dataclass(frozen=True)
class Line:
    """One quantity: its value on held-out steps, and the mean and the central 95 % of simulated runs.

    ``tolerance`` is how far off still counts as close: relative, or for the CV absolute. ``unit`` is "s" or empty.
    """

    quantity: str
    unit: str
    held_out: float
    simulated: Interval
    tolerance: float

    @property
    def is_absolute(self) -> bool:
        """Whether error and tolerance are differences: a CV is relative already."""
        return self.quantity.startswith("CV")

    @property
    def error(self) -> float:
        """Relative, or for the CV absolute; 0 where both are 0."""
        difference = self.simulated.value - self.held_out
        if self.is_absolute or not difference:
            return difference
        return difference / self.held_out if self.held_out else math.inf

    @property
    def verdict(self) -> str:
        """``agrees`` inside the interval, ``close`` outside of it but within the tolerance, else ``off``."""
        if self.held_out in self.simulated:
            return "agrees"
        return "close" if abs(self.error) <= self.tolerance else "off"


@dataclass(frozen=True)
class HeldOutCheck:
    """The lines, how many steps the fit behind them saw and did not see, and distances of whole distributions."""

    fitted_steps: int
    held_out_steps: int
    lines: tuple[Line, ...]
    distances: tuple[Distance, ...] = ()

    @property
    def good(self) -> bool:
        """Whether nothing is off, neither a line nor a distribution."""
        return "off" not in [*(line.verdict for line in self.lines), *(d.verdict for d in self.distances)]

    def to_record(self) -> dict[str, Any]:
        """As plain data, to four digits."""
        names = ("held_out", "simulated", "low", "high")
        lines = [
            {"quantity": line.quantity, "unit": line.unit}
            | {n: float(f"{x:.4g}") for n, x in zip(names, (line.held_out, *line.simulated), strict=True)}
            | {"verdict": line.verdict}
            for line in self.lines
        ]
        return {
            "split": "fitted to the first steps, held against the rest; the cluster itself is fitted to all steps",
            "fitted_steps": self.fitted_steps,
            "held_out_steps": self.held_out_steps,
            "good": self.good,
            "lines": lines,
            "ks_distances": [distance.to_record() for distance in self.distances],
        }
