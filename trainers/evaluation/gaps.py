"""How much of what can be won a policy wins: its gain over the best gain of any policy in the table, with intervals.

No policy is a bound by itself: one that looks ahead tries few settings and gives all ranks the same one, so others
exceed it now and then. The *bound* of a cluster is therefore the best mean gain of all policies and settings that ran
on it. It counts as known only where one of them looked ahead.

Intervals are those of a hierarchical bootstrap: clusters are drawn again, and within each of them seeds, the same for
all policies. The bound is found anew in every resample. Axes: P policies, E seeds, C clusters, B resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core.intervals import Interval

RESAMPLES = 1000
_LEVEL_PERCENT = (2.5, 97.5)
_LEAST = 0.005
"""A bound in a resample counts as at least this, as where it is less there is nothing to win."""

Array = NDArray[np.float64]


def share_of_best(gain_PE: Array, policy: int, *, seed: int = 0) -> tuple[float, Array]:
    """The gain of one policy as a share of the best one on a cluster, and the same in resamples of the seeds, ``(B,)``.

    Args:
        gain_PE: gains of all policies of the table, a relative gain of throughput each.
        policy: which of them.
        seed: of the resampling.
    """
    seeds = gain_PE.shape[1]
    picks_BE = np.random.default_rng(seed).integers(0, seeds, (RESAMPLES, seeds))
    mean_PB = gain_PE[:, picks_BE].mean(axis=2)
    best_B = np.maximum(mean_PB.max(axis=0), _LEAST)
    mean_P = gain_PE.mean(axis=1)
    return float(mean_P[policy] / mean_P.max()), np.asarray(mean_PB[policy] / best_B)


def interval(value: float, samples_B: Array) -> Interval:
    """A share with the 95 % percentile interval of its resamples.

    Args:
        value: the share itself.
        samples_B: the share in each bootstrap resample.
    """
    low, high = np.percentile(samples_B, _LEVEL_PERCENT)
    return Interval(value, float(low), float(high))


def mean_share(shares: Sequence[tuple[float, Array]], *, seed: int = 0) -> Interval:
    """The mean over clusters of what :func:`share_of_best` gives for each; clusters are drawn again, too.

    Args:
        shares: of each cluster, at least one.
        seed: of the resampling.
    """
    samples_CB = np.stack([samples_B for _, samples_B in shares])
    rng, shape = np.random.default_rng(seed), (RESAMPLES, len(shares))
    picks_BC, inner_BC = rng.integers(0, len(shares), shape), rng.integers(0, RESAMPLES, shape)
    return interval(float(np.mean([value for value, _ in shares])), samples_CB[picks_BC, inner_BC].mean(axis=1))
