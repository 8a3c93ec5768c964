"""On/off differences: what pacing does to mean step time, from steps with it and steps without it.

In blocks, for a running job (``paceenv.live.decide.experiment``) and for its analysis afterwards, the measure is the
logarithm of the ratio of two blocks' mean step times, pair by pair: noise that is common to both blocks of a pair
cancels, and so does most of the drift in a shared cluster. The interval is Student's t over the pairs. Rules compare
single iterations (``paceenv.core.switchback``). No clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from paceenv.core.intervals import Interval
from paceenv.core.student_t import student_t_quantile

CLIP_MEDIANS = 4.0
"""A step longer than this many medians of its pair counts as this many, so that one stall decides nothing."""

Array = NDArray[np.float64]


def most_s(step_s_N: Array) -> Array:
    """What a step counts as at most: ``CLIP_MEDIANS`` of the median, seconds; over the last axis, which stays."""
    return np.asarray(CLIP_MEDIANS * np.sort(step_s_N, axis=-1)[..., step_s_N.shape[-1] // 2, None])


def mean_s(step_s_N: Array, most_s: Array, weight_N: Array | None = None) -> Array:
    """Mean step, seconds, over the last axis; each counts as at most ``most_s``."""
    return np.asarray(np.average(np.minimum(step_s_N, most_s), axis=-1, weights=weight_N))


def log_ratio(
    off_s_N: Array, on_s_M: Array, off_weight_N: Array | None = None, on_weight_M: Array | None = None
) -> Array:
    """Logarithm of the mean step with pacing over that without, of one pair of blocks; over the last axis."""
    most = most_s(np.concatenate([off_s_N, on_s_M], axis=-1))
    return np.asarray(np.log(mean_s(on_s_M, most, on_weight_M) / mean_s(off_s_N, most, off_weight_N)))


def gain(log_ratio: Interval) -> Interval:
    """The relative fall of mean step time that a log ratio stands for."""
    return Interval(-math.expm1(log_ratio.value), -math.expm1(log_ratio.high), -math.expm1(log_ratio.low))


class Mean:
    """Running mean of independent values, such as the log ratios of pairs."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.count, self.value, self.squares = 0, 0.0, 0.0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Take in a value."""
        self.count += 1
        moved = value - self.value
        self.value += moved / self.count
        self.squares += moved * (value - self.value)

    @property
    def deviation(self) -> float:
        """Standard deviation of the values; infinite before there are two."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else math.inf

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite before there are two values."""
        return self.deviation / math.sqrt(max(self.count, 1))

    def interval(self, error_share: float) -> Interval:
        """The mean with Student's interval, which misses the truth with that probability; unbounded for one value."""
        if self.count < 2:
            return Interval(self.value if self.count else math.nan)
        half = student_t_quantile(0.5 * error_share, self.count - 1) * self.error
        return Interval(self.value, self.value - half, self.value + half)
