"""Tells the ordinary steps of a log from its warm-up and from outliers. Axes: V logged values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from paceenv.core.warm_up import unlike_values
from paceenv.diagnosis.components.outliers import MAX_STALLS, stall_threshold
from paceenv.importers.step_log import StepLog

WINDOW: Final = 51
"""Values of the running median that an outlier is compared with."""
MAX_WARM_UP: Final = 0.1
"""Share of a run that can be warm-up, beyond its first three values; and at most 100 values."""
OUTLIER: Final = 8.0
MIN_OUTLIER: Final = 0.03
"""An outlier is so many robust deviations above the usual value, and by at least this share of it."""

Array = NDArray[np.float64]
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
