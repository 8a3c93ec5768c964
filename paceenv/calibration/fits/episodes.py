"""Episodes in series: how many, how long, how often; ``levels`` finds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.core.intervals import Interval

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Episodes:
    """Time spent on the higher of two levels over series ``(T, N)``; episodes cut off by either end count as running.

    ``share`` and ``mean_iterations`` come with 95 % intervals: episodes end at a constant rate, so that the number of
    ends in the time on is Poisson; the odds of being on are a rate of starts, of which as many were seen as there are
    episodes, times a mean length, neither of which is known: their ratio to what was seen has an F distribution.
    """

    on_TN: NDArray[np.bool_]
    count: int
    share: Interval
    mean_iterations: Interval


def find_episodes(on_TN: NDArray[np.bool_]) -> Episodes | None:
    """Episodes of several series; None if there is none, or if nothing is ever off."""
    if not on_TN.any() or on_TN.all():
        return None
    starts = int((on_TN[1:] & ~on_TN[:-1]).sum())
    ends = int((~on_TN[1:] & on_TN[:-1]).sum())
    count, ended = max(starts + int(on_TN[0].sum()), 1), max(ends, 1)
    cells, share = int(on_TN.sum()), float(on_TN.mean())
    fewest, most = _poisson_interval(ended)
    odds = share / (1.0 - share) * (1.0 + 0.5 / count)
    low, high = (odds * float(stats.f.ppf(q, 2 * count + 1, 2 * ended)) for q in (0.025, 0.975))
    return Episodes(
        on_TN,
        count,
        Interval(share, low / (1.0 + low), min(high / (1.0 + high), 0.99)),
        Interval(cells / ended, cells / most, cells / fewest),  # maximum likelihood with episodes that still run
    )


def _poisson_interval(count: int) -> tuple[float, float]:
    """Exact 95 % interval of a Poisson mean."""
    return float(stats.chi2.ppf(0.025, 2 * count) / 2.0), float(stats.chi2.ppf(0.975, 2 * count + 2) / 2.0)
