"""95 % intervals from runs of drawn clusters."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.intervals import Interval
from paceenv.core.student_t import student_t_quantile

LEVEL: Final = 0.95

Array = NDArray[np.float64]
Ends = tuple[float, float]
"""How far the two ends of an unknown move a number."""


def widened(interval: Interval, ends: Collection[Ends], *, by_factors: bool) -> Interval:
    """An interval that also holds what one size leaves open.

    Ends are not errors: the truth may be at one end of each unknown, so the ends add up.
    """
    if not ends or not interval.is_bounded:
        return interval
    low, high = (math.log(x) if by_factors else x for x in interval[1:])
    low += sum(min(0.0, *moved) for moved in ends)
    high += sum(max(0.0, *moved) for moved in ends)
    return Interval(interval.value, *((math.exp(low), math.exp(high)) if by_factors else (low, high)))


def of_runs(value_DS: Array) -> Interval:
    """What one more run of one more drawn cluster would give: ``value_DS`` are S runs of each of D clusters.

    Positive numbers vary by factors, so their interval is one of logarithms.
    """
    value = float(value_DS.mean())
    if value_DS.size < 2:
        return Interval(value)
    by_factors = bool((value_DS > 0.0).all())
    x_DS = np.log(value_DS) if by_factors else value_DS
    between, within = _variances(x_DS)
    draws = len(x_DS)
    count = draws if draws > 1 else x_DS.size
    sd = math.sqrt((between + within) * (1.0 + 1.0 / count))
    half = student_t_quantile(0.5 * (1.0 - LEVEL), count - 1) * sd
    low, high = float(x_DS.mean()) - half, float(x_DS.mean()) + half
    if by_factors:
        low, high = math.exp(low), math.exp(high)
    return Interval(value, min(low, value), max(high, value))


def one_more(value_N: Array) -> Interval:
    """The mean of a sample; one more value lies between the ends with a probability of 95 %."""
    n, average = len(value_N), float(value_N.mean())
    if n < 2:
        return Interval(average)
    half = student_t_quantile(0.5 * (1.0 - LEVEL), n - 1) * float(value_N.std(ddof=1)) * math.sqrt(1.0 + 1.0 / n)
    return Interval(average, average - half, average + half)


def _variances(x_DS: Array) -> tuple[float, float]:
    """Variance between clusters, without that of their few runs, and variance between runs of one cluster."""
    draws, runs = x_DS.shape
    within = float(x_DS.var(axis=1, ddof=1).mean()) if runs > 1 else 0.0
    between = float(x_DS.mean(axis=1).var(ddof=1)) - within / runs if draws > 1 else 0.0
    return max(between, 0.0), within
