"""Whether a series moves between two levels and stays there. NumPy only: whoever just asks need not wait for SciPy."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SMOOTH: Final = 5
"""Iterations of the running median that makes single outliers vanish; shorter episodes are noise."""
MIN_ITERATIONS: Final = 3
"""On either level, for it to count as one."""
_SEPARATION = 5.0

Array = NDArray[np.float64]


def fit_two_states(x_T: Array, least_jump: float) -> NDArray[np.bool_]:
    """When a series is on the higher of two levels, ``(T,)``; nowhere if it does not stay on two that differ.

    The levels differ by ``least_jump`` or more, and by several times what the series does on either.
    """
    smooth_T = _running_median(x_T)
    low, high = smooth_T.min(), smooth_T.max()
    on_T = np.zeros(len(x_T), np.bool_)
    for _ in range(20):
        if high - low < least_jump:
            return np.zeros(len(x_T), np.bool_)
        now_T = smooth_T > (low + high) / 2.0
        if np.array_equal(now_T, on_T):
            break
        on_T, low, high = now_T, float(np.median(smooth_T[~now_T])), float(np.median(smooth_T[now_T]))
    spread = max(_deviation(x_T[on_T]), _deviation(x_T[~on_T]))
    enough = min(on_T.sum(), (~on_T).sum()) >= MIN_ITERATIONS
    return on_T if enough and high - low > _SEPARATION * spread else np.zeros(len(x_T), np.bool_)


def _running_median(x_T: Array) -> Array:
    padded = np.pad(x_T, SMOOTH // 2, mode="edge")
    smooth_T: Array = np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTH), axis=-1)
    return smooth_T


def _deviation(x: Array) -> float:
    """Standard deviation of the bulk, from the median absolute deviation."""
    return float(1.4826 * np.median(np.abs(x - np.median(x)))) if len(x) else 0.0
