"""What of the variation recurs or grows: periods of outliers and of patterns, a steady change. Axes: V values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.core.student_t import student_t_quantile

MAX_PERIOD: Final = 128
MAX_VALUES: Final = 20_000
"""Values of which a pattern's period is looked for."""
_ALPHA = 1e-4

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Period:
    """Something that happens every ``steps`` steps; ``share`` of its occurrences keep to it.

    For a pattern of ordinary steps ``share`` is the share of their variance that it explains.
    """

    steps: int
    share: float


def outlier_period(step_V: Integers, outlier_V: NDArray[np.bool_]) -> Period | None:
    """How many steps lie between outliers, if most keep to one period and most of its places have one."""
    at = step_V[outlier_V]
    if len(at) < 4:
        return None
    gap = max(int(np.median(np.diff(step_V))) if len(step_V) > 1 else 1, 1)
    gaps = np.diff(at)
    periods: list[Period] = []
    for steps in np.unique(gaps[gaps > 0])[:200].tolist():
        if steps < 2 * gap:
            continue
        phase = at % steps
        # A logged value covers the steps since the last one, so phases within a logging interval are one.
        nearest = np.minimum(np.abs(phase[:, None] - phase[None, :]), steps - np.abs(phase[:, None] - phase[None, :]))
        members = int((nearest < gap).sum(axis=1).max()) if len(at) <= 2000 else 0
        places = (at[-1] - at[0]) / steps + 1.0
        chance = min(2.0 * gap / steps, 1.0)
        unlikely = float(stats.binom.sf(members - 2, len(at) - 1, chance)) < 1e-2 / len(gaps)
        if members >= 0.7 * len(at) and members >= 0.7 * places and unlikely:
            periods.append(Period(int(steps), members / len(at)))
    return max(periods, key=lambda period: (period.share, period.steps), default=None)


def pattern_period(values: Array, gap: int) -> Period | None:
    """The period of ordinary steps that take turns, as every k-th one being longer; None if there is none."""
    values = values[:MAX_VALUES]
    n, total = len(values), float(((values - values.mean()) ** 2).sum())
    if n < 16 or not total > 1e-18 * n * float(values.mean()) ** 2:
        return None
    best: Period | None = None
    periods = range(2, min(MAX_PERIOD, n // 4) + 1)
    for period in periods:
        phase = np.arange(n) % period
        means = np.bincount(phase, values, period) / np.bincount(phase, minlength=period)
        between = float((np.bincount(phase, minlength=period) * (means - values.mean()) ** 2).sum())
        ratio = (between / (period - 1)) / max((total - between) / (n - period), 1e-300)
        adjusted = 1.0 - (total - between) / (n - period) / (total / (n - 1))
        clear = float(stats.f.sf(ratio, period - 1, n - period)) < _ALPHA / len(periods) and adjusted > 0.1
        # A multiple of the period explains as much; it must explain clearly more to be the better answer.
        if clear and (best is None or adjusted > 1.1 * best.share + 0.02):
            best = Period(period * gap, adjusted)
    return best


_BLOCKS = 10
_SMALLEST_DRIFT = 0.002


@dataclass(frozen=True)
class Drift:
    """Change of the level from the beginning to the end, relative, with the half width of its 95 % interval.

    ``ends_s`` are the beginning and the end of the line, seconds.
    """

    change: float
    half_width: float
    ends_s: tuple[float, float]


def drift(values: Array) -> Drift | None:
    """A steady change from the beginning to the end, by a line through the means of ten blocks, or fewer of few values.

    None if it cannot be told from 0, is below 0.2 %, or for fewer than 12 values.
    """
    n = len(values)
    if n < 12:
        return None
    blocks = _BLOCKS if n >= 3 * _BLOCKS else n // 3
    mean_s = float(values.mean())
    means = np.array([block.mean() for block in np.array_split(values, blocks)]) / mean_s
    x = (np.arange(blocks) - (blocks - 1) / 2.0) / blocks
    slope = float(x @ means / (x @ x))
    left = means - means.mean() - slope * x
    # Neighbouring blocks of a slow variation are alike, so that a line fits them by chance more often.
    memory = max(float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300), 0.0)
    error = math.sqrt(float(left @ left) / (blocks - 2) / float(x @ x)) * math.sqrt((1.0 + memory) / (1.0 - memory))
    half_width = error * student_t_quantile(0.025, blocks - 2)
    if abs(slope) < max(1.5 * half_width, _SMALLEST_DRIFT):
        return None
    half_s = 0.5 * (n - 1) * float(np.polyfit(np.arange(n), values, 1)[0])
    return Drift(slope, half_width, (max(mean_s - half_s, 0.0), max(mean_s + half_s, 0.0)))
