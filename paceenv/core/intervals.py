"""A number with its 95 % interval: the one type that estimates, predictions and measured effects share."""

from __future__ import annotations

import math
from typing import NamedTuple


class Interval(NamedTuple):
    """A number and the ends of its 95 % interval, all in the unit of ``value``.

    Attributes:
        value: the estimate itself.
        low: lower end; not-a-number where there is no interval.
        high: upper end; not-a-number where there is no interval.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_bounded(self) -> bool:
        """Whether there is an interval at all."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def __format__(self, digits: str) -> str:
        """``0.1 [0.05, 0.15]``, every number in the format given; the value alone where there is no interval."""
        value, low, high = (format(x, digits) for x in self)
        return f"{value} [{low}, {high}]" if self.is_bounded else value

    def __contains__(self, value: object) -> bool:
        """Whether ``value`` lies between the ends, the ends included."""
        return isinstance(value, (int, float)) and self.low <= value <= self.high
