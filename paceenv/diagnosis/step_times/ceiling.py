"""The ceiling: at most this much throughput could be won by removing all variation of step times.

It is the mean over the first percentile, less one: if every step took as long as the fastest hundredth. Nothing that
only makes steps more even gives more. Contention or a late rank in every step is no part of it: the fastest steps have
it, too. Axes: V values in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.core.intervals import Interval
from paceenv.core.metrics import correlation_length

MIN_VALUES: Final = 8
"""Values that an interval needs."""
PERCENTILE: Final = 0.01
MANY: Final = 300
"""Values from which on their own first percentile counts; of fewer, it is extrapolated from the lower half."""
_Z: Final = -float(stats.norm.ppf(PERCENTILE))
_ROUNDING: Final = 1e-12
_RESAMPLES: Final = 200
_MAX_CELLS: Final = 1_000_000
_MAX_VALUES: Final = 50_000
"""Values of a resample; of more, evenly spread blocks are taken."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ceiling:
    """``gain`` is relative throughput with its 95 % interval; ``from_outliers`` the part of it that outliers cost.

    ``hidden`` is the gain if the steps within one logged value vary independently of each other, which averaging would
    hide; equal to ``gain`` where a value is one step, and not-a-number where the log does not tell.
    """

    gain: Interval
    from_outliers: float
    hidden: float


def ceiling(step_s_V: Array, plain_V: NDArray[np.bool_], averaged: float) -> Ceiling | None:
    """The ceiling of values after the warm-up; None for fewer than :data:`MIN_VALUES`.

    Args:
        step_s_V: step times, seconds, in order.
        plain_V: which are no outliers.
        averaged: steps that a value averages over; 0 if unknown.
    """
    if len(step_s_V) < MIN_VALUES or plain_V.sum() < MIN_VALUES:
        return None
    gain = float(_gain(step_s_V))
    low, high = _resampled(step_s_V, gain)
    mean_s, plain_mean_s = float(step_s_V.mean()), float(step_s_V[plain_V].mean())
    from_outliers = max((mean_s - plain_mean_s) * (1.0 + gain) / mean_s, 0.0)
    hidden = math.nan if averaged <= 0.0 else gain
    if averaged > 1.0:
        single_cv = single_step_cv(step_s_V[plain_V], averaged)
        hidden = max(gain, 1.0 / max(1.0 - _Z * single_cv, 0.05) - 1.0 + from_outliers)
    return Ceiling(Interval(gain, low, high), from_outliers, hidden)


def single_step_cv(step_s_V: Array, averaged: float) -> float:
    """CV of single steps behind means over ``averaged`` steps, if what has no memory varies from step to step.

    Args:
        step_s_V: values of the log, seconds.
        averaged: steps that each value averages over.
    """
    centred = step_s_V - step_s_V.mean()
    variance = float((centred**2).mean())
    lags = range(1, min(4, len(centred) // 4))
    remembered = float(np.mean([(centred[k:] * centred[:-k]).mean() for k in lags])) if len(lags) else 0.0
    remembered = min(max(remembered, 0.0), variance)
    return math.sqrt(remembered + averaged * (variance - remembered)) / float(step_s_V.mean())


def _first_percentile(step_s_V: Array) -> Array:
    """Along the last axis."""
    quantile = np.quantile(step_s_V, PERCENTILE, axis=-1)
    if step_s_V.shape[-1] >= MANY:
        return np.asarray(quantile)
    # The least of few values lies above the first percentile of what they were drawn from.
    lower, middle = np.quantile(step_s_V, [0.16, 0.5], axis=-1)
    extrapolated = middle - _Z * (middle - lower) / 0.9945
    return np.asarray(np.maximum(np.minimum(quantile, extrapolated), 0.05 * middle))


def _gain(step_s_V: Array) -> Array:
    """Along the last axis."""
    gain = step_s_V.mean(axis=-1) / _first_percentile(step_s_V) - 1.0
    return np.where(gain > _ROUNDING, gain, 0.0)


def _resampled(step_s_V: Array, gain: float) -> tuple[float, float]:
    """Ends of the 95 % interval, from resampled blocks of neighbours, whose length follows the autocorrelation."""
    if len(step_s_V) > _MAX_VALUES:
        starts = np.linspace(0, len(step_s_V) - 500, _MAX_VALUES // 500).astype(np.int64)
        step_s_V = np.concatenate([step_s_V[s : s + 500] for s in starts])
    n = len(step_s_V)
    length = int(min(max(round(correlation_length(step_s_V)) * 2, round(n ** (1 / 3)), 1), max(n // 5, 1)))
    random = np.random.default_rng(0)
    around = np.concatenate([step_s_V, step_s_V[: length - 1]])  # blocks go around the end, so that all count alike
    resamples = _RESAMPLES if n <= 5000 else _RESAMPLES // 2
    lows, highs = np.zeros(resamples), np.zeros(resamples)
    for part in np.array_split(np.arange(resamples), max(resamples * n // _MAX_CELLS, 1)):
        starts = random.integers(0, n, (len(part), -(-n // length)))
        drawn = around[(starts[:, :, None] + np.arange(length)).reshape(len(part), -1)[:, :n]]
        lows[part] = drawn.mean(axis=1) / np.quantile(drawn, PERCENTILE, axis=1) - 1.0
        highs[part] = _gain(drawn)
    low, high = float(np.quantile(lows, 0.025)), float(np.quantile(highs, 0.975))
    independent = max(n / correlation_length(step_s_V), 3.0)
    if independent < MANY:
        # Quantiles of few values vary more than resampling shows; the chi-square law of a spread, for the upper end.
        high = max(high, gain * math.sqrt((independent - 1.0) / float(stats.chi2.ppf(0.025, independent - 1.0))))
    return min(max(low, 0.0), gain), max(high, gain)
