"""Episodes in a series: whether it moves between two levels and stays there, how long, how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]

SMOOTH: Final = 5
"""Iterations of the running median that makes single outliers vanish; shorter episodes are noise."""
LEAST_ITERATIONS: Final = 3
"""On either level, for it to count as one."""
_SEPARATION = 5.0


@dataclass(frozen=True)
class Episodes:
    """Time spent on the higher of two levels over series ``(T, N)``; episodes cut off by either end count as running.

    ``share`` and ``mean_iterations`` come with 95 % intervals from the number of episodes seen, taken as Poisson.
    """

    on_TN: NDArray[np.bool_]
    count: int
    share: float
    share_interval: tuple[float, float]
    mean_iterations: float
    mean_iterations_interval: tuple[float, float]


def two_levels(x_T: Array, least_jump: float) -> NDArray[np.bool_]:
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
    enough = min(on_T.sum(), (~on_T).sum()) >= LEAST_ITERATIONS
    return on_T if enough and high - low > _SEPARATION * spread else np.zeros(len(x_T), np.bool_)


def find_episodes(on_TN: NDArray[np.bool_]) -> Episodes | None:
    """Episodes of several series; None if there is none, or if nothing is ever off."""
    if not on_TN.any() or on_TN.all():
        return None
    starts = int((on_TN[1:] & ~on_TN[:-1]).sum())
    ends = int((~on_TN[1:] & on_TN[:-1]).sum())
    count = max(starts + int(on_TN[0].sum()), 1)
    cells, share = int(on_TN.sum()), float(on_TN.mean())
    mean = cells / max(ends, 1)  # ends come at a constant rate: maximum likelihood with episodes that still run
    low, high = _poisson_interval(count)
    return Episodes(
        on_TN,
        count,
        share,
        (share * low / count, min(share * high / count, 0.99)),
        mean,
        (
            mean * max(ends, 1) / _poisson_interval(max(ends, 1))[1],
            mean * max(ends, 1) / max(_poisson_interval(max(ends, 1))[0], 0.05),
        ),
    )


def _poisson_interval(count: int) -> tuple[float, float]:
    """Exact 95 % interval of a Poisson mean."""
    return float(stats.chi2.ppf(0.025, 2 * count) / 2.0), float(stats.chi2.ppf(0.975, 2 * count + 2) / 2.0)


def _running_median(x_T: Array) -> Array:
    padded = np.pad(x_T, SMOOTH // 2, mode="edge")
    smooth_T: Array = np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTH), axis=-1)
    return smooth_T


def _deviation(x: Array) -> float:
    """Standard deviation of the bulk, from the median absolute deviation."""
    return float(1.4826 * np.median(np.abs(x - np.median(x)))) if len(x) else 0.0
