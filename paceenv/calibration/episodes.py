"""Episodes in series: how many, how long, how often; ``levels`` finds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Episodes:
    """Time spent on the higher of two levels over series ``(T, N)``; episodes cut off by either end count as running.

    ``share`` and ``mean_iterations`` come with 95 % intervals from the number of episodes seen, taken as Poisson; the
    time they add up to varies twice as much as their number, relative to it, as their lengths are geometric.
    """

    on_TN: NDArray[np.bool_]
    count: int
    share: float
    share_interval: tuple[float, float]
    mean_iterations: float
    mean_iterations_interval: tuple[float, float]


def find_episodes(on_TN: NDArray[np.bool_]) -> Episodes | None:
    """Episodes of several series; None if there is none, or if nothing is ever off."""
    if not on_TN.any() or on_TN.all():
        return None
    starts = int((on_TN[1:] & ~on_TN[:-1]).sum())
    ends = int((~on_TN[1:] & on_TN[:-1]).sum())
    count = max(starts + int(on_TN[0].sum()), 1)
    cells, share = int(on_TN.sum()), float(on_TN.mean())
    mean = cells / max(ends, 1)  # ends come at a constant rate: maximum likelihood with episodes that still run
    low, high = _poisson_interval(count / 2.0)
    return Episodes(
        on_TN,
        count,
        share,
        (share * 2.0 * low / count, min(share * 2.0 * high / count, 0.99)),
        mean,
        (
            mean * max(ends, 1) / _poisson_interval(max(ends, 1))[1],
            mean * max(ends, 1) / max(_poisson_interval(max(ends, 1))[0], 0.05),
        ),
    )


def _poisson_interval(count: float) -> tuple[float, float]:
    """Exact 95 % interval of a Poisson mean; with half a count, the one between."""
    return float(stats.chi2.ppf(0.025, 2 * count) / 2.0), float(stats.chi2.ppf(0.975, 2 * count + 2) / 2.0)
