"""Finds values beyond the tail of their bulk (stalls), from quantiles that stalls do not move."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from paceenv.core.operation_matrix import Array

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


_SKEWS: Final = np.linspace(0.02, 2.0, 200)
_LOW, _MIDDLE, _HIGH = _gamma((4.0 / _SKEWS**2)[:, None], _DECILES).T
_SKEW_OF_QUANTILES: Final = (_HIGH + _LOW - 2.0 * _MIDDLE) / (_HIGH - _LOW), _SKEWS
"""A gamma's skewness by (q90 + q10 - 2 q50) / (q90 - q10), which stalls do not move."""
