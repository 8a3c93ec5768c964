"""Two-state fit: when a series is on the higher of two levels, how many episodes of that it has and how long; timeouts.

SciPy is imported only where it is needed: the diagnosis uses the first part and must start fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.intervals import Interval

SMOOTH: Final = 5
"""Iterations of the running median, which removes single outliers; shorter episodes are noise."""
MIN_ITERATIONS: Final = 3
"""A level needs so many iterations to count."""
MIN_TIMEOUT_S: Final = 0.1
"""Modes closer than this are no timeout: TCP's shortest is 200 ms in Linux."""
_SEPARATION = 5.0

Array = NDArray[np.float64]


def fit_two_states(x_T: Array, min_jump: float) -> NDArray[np.bool_]:
    """When a series ``(T,)`` is on the higher of two levels; nowhere if it does not stay on two that differ.

    The levels differ by ``min_jump`` or more, and by several times the spread on either.
    """
    padded = np.pad(x_T, SMOOTH // 2, mode="edge")
    smooth_T = np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTH), axis=-1)
    low, high = smooth_T.min(), smooth_T.max()
    on_T = np.zeros(len(x_T), np.bool_)
    for _ in range(20):
        if high - low < min_jump:
            return np.zeros(len(x_T), np.bool_)
        now_T = smooth_T > (low + high) / 2.0
        if np.array_equal(now_T, on_T):
            break
        on_T, low, high = now_T, float(np.median(smooth_T[~now_T])), float(np.median(smooth_T[now_T]))
    spread = max(_deviation(x_T[on_T]), _deviation(x_T[~on_T]))
    enough = min(on_T.sum(), (~on_T).sum()) >= MIN_ITERATIONS
    return on_T if enough and high - low > _SEPARATION * spread else np.zeros(len(x_T), np.bool_)


def timed_out(lasts_T: Array) -> NDArray[np.bool_]:
    """Which collectives took a timeout longer than the others; none where durations have one mode."""
    ordered = np.sort(lasts_T)
    inner = ordered[MIN_ITERATIONS - 1 : len(ordered) - MIN_ITERATIONS + 1]
    gap = int(np.argmax(np.diff(inner))) if len(inner) > 1 else 0  # the widest one, whichever mode has more steps
    late_T = lasts_T > inner[gap : gap + 2].sum() / 2.0
    if min(late_T.sum(), (~late_T).sum()) < MIN_ITERATIONS:
        return np.zeros(len(lasts_T), np.bool_)
    apart_s = np.median(lasts_T[late_T]) - np.median(lasts_T[~late_T])
    is_clear = apart_s >= MIN_TIMEOUT_S and apart_s > 3.0 * lasts_T[~late_T].std()
    return np.asarray(late_T & is_clear)


def _deviation(x: Array) -> float:
    """Standard deviation of the bulk, from the median absolute deviation."""
    return float(1.4826 * np.median(np.abs(x - np.median(x)))) if len(x) else 0.0


@dataclass(frozen=True)
class Episodes:
    """Time on the higher of two levels in series ``(T, N)``; episodes cut off by either end count as running.

    ``share`` and ``mean_iterations`` have 95 % intervals. Episodes end at a constant rate, so the number of ends in the
    time on is Poisson. The odds of being on are a rate of starts times a mean length; both are estimated from few
    episodes, so their ratio to the observed odds has an F distribution.
    """

    count: int
    share: Interval
    mean_iterations: Interval


def find_episodes(on_TN: NDArray[np.bool_]) -> Episodes | None:
    """Episodes of several series; None if there is none, or if nothing is ever off."""
    if not on_TN.any() or on_TN.all():
        return None
    from scipy import stats

    starts = int((on_TN[1:] & ~on_TN[:-1]).sum())
    ends = int((~on_TN[1:] & on_TN[:-1]).sum())
    count, ended = max(starts + int(on_TN[0].sum()), 1), max(ends, 1)
    cells, share = int(on_TN.sum()), float(on_TN.mean())
    # exact 95 % interval of the mean of a Poisson number
    fewest, most = (float(stats.chi2.ppf(q, n) / 2.0) for q, n in ((0.025, 2 * ended), (0.975, 2 * ended + 2)))
    odds = share / (1.0 - share) * (1.0 + 0.5 / count)
    low, high = (odds * float(stats.f.ppf(q, 2 * count + 1, 2 * ended)) for q in (0.025, 0.975))
    return Episodes(
        count,
        Interval(min(share, 0.99), low / (1.0 + low), min(high / (1.0 + high), 0.99)),
        Interval(cells / ended, cells / most, cells / fewest),  # maximum likelihood with episodes that still run
    )
