"""Finds values beyond the tail of their bulk (stalls), from quantiles that stalls do not move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from paceenv.core.warm_up import unlike_values
from paceenv.diagnosis.operation_matrix import Array
from paceenv.importers.step_log import StepLog

MIN_STALL: Final = 0.1
"""A stall is at least this share of its operation's usual time."""
FALSE_STALLS: Final = 0.1
"""Share of stalls that may be the bulk's own tail."""
MAX_STALLS: Final = 0.1
"""Share of operations; more frequent ones are no stalls."""


def stall_threshold(v: Array) -> float:
    """The smallest stall among values ``v``, of which 1 is usual; infinite if there is none.

    The bulk is a shifted gamma with the quantiles of ``v`` at 10, 50 and 90 %.
    """
    x = np.sort(v.ravel())
    low, middle, high = np.quantile(x, (0.1, 0.5, 0.9))
    if middle <= 0.0:
        return np.inf  # most take no time, so none is usual
    if high - low <= 1e-9:
        low, high = middle * (1.0 - 1e-3), middle * (1.0 + 1e-3)
    skew = float(np.interp((high + low - 2.0 * middle) / (high - low), *_SKEW_OF_QUANTILES))
    shape = 4.0 / skew**2
    z_low, z_middle, z_high = _gamma(shape, _DECILES)
    tail = x[max(len(x) - int(MAX_STALLS * len(x)), 0) :]
    expected = len(x) * _beyond(shape, (tail - middle) * (z_high - z_low) / (high - low) + z_middle)
    beyond = len(tail) - np.arange(len(tail))
    good = (expected <= FALSE_STALLS * beyond) & (tail > 1.0 + MIN_STALL)
    return float(tail[int(np.argmax(good))]) * (1.0 - 1e-12) if good.any() else np.inf


_DECILES = np.array([-1.2815515655446004, 0.0, 1.2815515655446004])
"""Of a standard normal: 10, 50 and 90 %."""


def _gamma(shape: float | Array, z: Array) -> Array:
    """Quantiles of a gamma at those of a standard normal (Wilson and Hilferty 1931)."""
    return np.asarray(shape * (1.0 - 1.0 / (9.0 * shape) + z / (3.0 * np.sqrt(shape))) ** 3)


def _beyond(shape: float, x: Array) -> Array:
    """Probability that a gamma exceeds ``x``, in the same approximation."""
    z = (np.cbrt(np.maximum(x, 0.0) / shape) - 1.0 + 1.0 / (9.0 * shape)) * 3.0 * math.sqrt(shape)
    return np.array([0.5 * math.erfc(value / math.sqrt(2.0)) for value in z.tolist()])


def _skew_table() -> tuple[Array, Array]:
    skew = np.linspace(0.02, 2.0, 200)
    low, middle, high = _gamma((4.0 / skew**2)[:, None], _DECILES).T
    return np.asarray((high + low - 2.0 * middle) / (high - low)), skew


_SKEW_OF_QUANTILES = _skew_table()
"""A gamma's skewness by (q90 + q10 - 2 q50) / (q90 - q10), which stalls do not move."""


WINDOW: Final = 51
"""Values of the running median that an outlier is compared with."""
MAX_WARM_UP: Final = 0.1
"""Share of a run that can be warm-up, beyond its first three values; and at most 100 values."""
OUTLIER: Final = 8.0
MIN_OUTLIER: Final = 0.03
"""An outlier is so many robust deviations above the usual value, and by at least this share of it."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Ordinary:
    """The values of a log in classes, ``(V,)`` each: ``warm_up_V``, ``outlier_V``, and their usual level, seconds."""

    log: StepLog
    warm_up_V: Flags
    outlier_V: Flags
    level_s_V: Array

    @property
    def steady_V(self) -> Flags:
        """After the warm-up."""
        return ~self.warm_up_V

    @property
    def plain_V(self) -> Flags:
        """After the warm-up, and no outlier."""
        return ~self.warm_up_V & ~self.outlier_V


def split(log: StepLog) -> Ordinary:
    """Find warm-up and outliers of every run of a log."""
    V = len(log.step_s_V)
    warm_up_V, outlier_V, level_s_V = np.zeros(V, bool), np.zeros(V, bool), log.step_s_V.copy()
    bounds = np.flatnonzero(np.diff(log.run_V, prepend=log.run_V[0] - 1))
    for start, end in zip(bounds, [*bounds[1:], V], strict=True):
        step_s_v = log.step_s_V[start:end]
        warm_up_V[start : start + _warm_up(step_s_v)] = True
        level_s_V[start:end] = running_median(step_s_v)
    if (~warm_up_V).sum() >= 10:
        relative = log.step_s_V / level_s_V
        outlier_V = ~warm_up_V & (relative >= _longest_ordinary(relative[~warm_up_V]))
    return Ordinary(log, warm_up_V, outlier_V, level_s_V)


def _longest_ordinary(relative: Array) -> float:
    """The least outlier among values of which 1 is usual: beyond the tail of the bulk, or many deviations away."""
    deviation = 1.4826 * float(np.median(np.abs(relative - 1.0)))
    far = 1.0 + max(OUTLIER * deviation, MIN_OUTLIER)
    return min(stall_threshold(relative), far if float((relative >= far).mean()) <= MAX_STALLS else math.inf)


def running_median(values: Array) -> Array:
    """The median of the values around each; of few values that of all."""
    if len(values) < 2 * WINDOW:
        return np.full(len(values), float(np.median(values)))
    return np.asarray(ndimage.median_filter(values, size=WINDOW, mode="nearest"), np.float64)


def _warm_up(step_s_v: Array) -> int:
    """How many values at the beginning are unlike those that follow."""
    most = min(max(3, int(MAX_WARM_UP * len(step_s_v))), 100, len(step_s_v) // 3)
    if most < 1:
        return 0
    unlike = unlike_values(step_s_v, most)[:most]
    return int(np.argmin(unlike)) if not unlike.all() else most
