"""Differences between ranks: each rank against the median of the others, so that what slows all of them cancels.

Suffixes: R ranks, K blocks or steps of all ranks. Not-a-number is unknown.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def row_medians(table_RK: Times) -> Times:
    """The median of each row, of what is known in it."""
    ordered, counts = np.sort(table_RK, axis=1), (~np.isnan(table_RK)).sum(axis=1)
    rows = np.arange(len(ordered))
    low, high = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, ordered.shape[1] - 1)
    return np.where(counts > 0, 0.5 * (ordered[rows, low] + ordered[rows, high]), math.nan)


def others_median(table_RK: Times) -> Times:
    """For every entry the median of the other ranks in its column; unknown where no other rank is known."""
    order = np.argsort(table_RK, axis=0, kind="stable")
    ordered = np.take_along_axis(table_RK, order, axis=0)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(len(order))[:, None] + np.zeros_like(order), axis=0)
    others = (~np.isnan(table_RK)).sum(axis=0)[None, :] - 1
    last = len(ordered) - 1

    def without(index: NDArray[np.int64]) -> Times:
        shifted = np.clip(index + (index >= place), 0, last)
        return np.take_along_axis(ordered, shifted, axis=0)

    low, high = np.maximum(others - 1, 0) // 2, np.maximum(others, 0) // 2
    rows = np.zeros_like(place)
    middle = 0.5 * (without(rows + low) + without(rows + high))
    return np.where((others < 1) | np.isnan(table_RK), math.nan, middle)


def lateness_of(own_s_R: Times) -> Times:
    """How much longer each rank's work took than the median of the others' in one step, seconds ``(R,)``.

    The same as ``own_s_R`` minus :func:`others_median` of a single column, in a tenth of the time.
    """
    known = int(np.count_nonzero(~np.isnan(own_s_R)))
    if known < 2:
        return np.full(len(own_s_R), math.nan)
    ordered, half = np.sort(own_s_R), known // 2
    low, middle = float(ordered[half - 1]), float(ordered[half])
    if known % 2 == 0:
        others = np.where(own_s_R <= low, middle, low)
    else:
        high = float(ordered[min(half + 1, known - 1)])
        below, above = 0.5 * (middle + high), 0.5 * (low + middle)
        others = np.where(own_s_R < middle, below, np.where(own_s_R > middle, above, 0.5 * (low + high)))
    return np.asarray(own_s_R - others)
