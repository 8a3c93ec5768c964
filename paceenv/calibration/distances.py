"""How near predicted quantities are to held-out ones, and what that says of a fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceenv.core.intervals import Interval


@dataclass(frozen=True)
class Line:
    """One quantity: its value on held-out steps, and the mean and the central 95 % of simulated runs.

    Of a distance between distributions chance takes the place of runs. ``tolerance`` is how far off still counts as
    close: relative, or for CV and distance absolute. ``unit`` is "s" or empty.
    """

    quantity: str
    unit: str
    held_out: float
    simulated: Interval
    tolerance: float

    @property
    def is_absolute(self) -> bool:
        """Whether error and tolerance are differences: a CV or a distance is relative already."""
        return self.quantity.startswith(("CV", "KS"))

    @property
    def error(self) -> float:
        """Relative, or for CV and distance absolute; 0 where both are 0."""
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
    """The lines, and how many steps the fit behind them saw and did not see."""

    fitted_steps: int
    held_out_steps: int
    lines: tuple[Line, ...]

    @property
    def good(self) -> bool:
        """Whether nothing is off."""
        return "off" not in [line.verdict for line in self.lines]

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
        }
