"""Judges blocks of iterations of all ranks together: who takes longer, by how much, and in which blocks.

For data that comes as a table of means, such as the snapshots of a live job. Steps that come one by one are for
:mod:`paceenv.core.lateness.watch`. A paired difference has a far smaller error than that of two means: what slows all
ranks in a block cancels.

Suffixes: R ranks, K blocks of the same iterations on every rank. Times are seconds per step; not-a-number is unknown.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.lateness.medians import Times, others_median, row_medians
from paceenv.core.lateness.patterns import CHRONIC, SINCE, Pattern, kind_of_past
from paceenv.core.student_t import student_t_quantile

FLOOR_S, FLOOR_SHARE = 0.5e-3, 0.01
"""A shorter difference is never called late: seconds, share of the step."""
FALSE_ALARMS = 0.001
"""Chance that noise alone exceeds the margin in any of a set's ranks."""
BLOCK_SPREADS = 6.0
"""Robust standard deviations of a block's differences beyond which a rank is late in that block."""
STRETCHES = 8
"""Noise that lasts for several blocks shows in the means of this many stretches."""
MIN_BLOCKS = 2


class Lateness(NamedTuple):
    """How much longer each rank's own work takes than that of the median of the others, seconds per step.

    ``margin_s_R`` is the smallest difference that is not noise, ``block_margin_s`` the same for a single block.
    """

    late_s_RK: Times
    late_s_R: Times
    margin_s_R: Times
    block_margin_s: float


def compare(own_s_RK: Times, step_s: float) -> Lateness:
    """Each rank's own time against the median of the others, in every block that most of the ranks have."""
    known_K = (~np.isnan(own_s_RK)).sum(axis=0)
    own_s_RK = np.where(known_K >= 0.75 * max(known_K.max(initial=0), 2), own_s_RK, math.nan)
    late_s_RK = own_s_RK - others_median(own_s_RK)
    late_s_R = row_medians(late_s_RK)
    floor_s = max(FLOOR_S, FLOOR_SHARE * step_s)
    away_RK = late_s_RK - late_s_R[:, None]
    spread_s = 1.4826 * float(np.nanmedian(np.abs(away_RK))) if not np.isnan(away_RK).all() else math.inf
    blocks_R = (~np.isnan(late_s_RK)).sum(axis=1)
    error_s_R = np.maximum(_errors(away_RK, 1), _errors(away_RK, max(late_s_RK.shape[1] // STRETCHES, 1)))
    known = np.isfinite(error_s_R)
    if not known.any():
        margin_s_R = np.full(len(own_s_RK), math.inf)
    else:
        usual_s = float(np.median(error_s_R[known]))
        blocks = int(np.median(blocks_R[known]))
        degrees = max((blocks - 1) * (len(own_s_RK) - 1) // (1 if len(own_s_RK) < 3 else 2), 1)
        times = 1.25 * _quantile(FALSE_ALARMS / len(own_s_RK), degrees)  # of a median, not of a mean
        margin_s_R = np.where(known, np.maximum(floor_s, times * np.maximum(error_s_R, usual_s)), math.inf)
    return Lateness(late_s_RK, late_s_R, margin_s_R, max(floor_s, BLOCK_SPREADS * spread_s))


@lru_cache(maxsize=256)
def _quantile(tail: float, degrees: int) -> float:
    return student_t_quantile(tail, float(degrees))


def _errors(away_RK: Times, together: int) -> Times:
    """Standard errors of the rows' means from the spread of means of ``together`` blocks; a few blocks far off count
    as far as six robust standard deviations."""
    size = np.abs(away_RK)
    limit = 6.0 * 1.4826 * row_medians(size)[:, None]
    many = away_RK.shape[1] >= STRETCHES
    clipped = np.clip(away_RK, -limit, limit) if many else away_RK
    whole = clipped.shape[1] // together * together
    cut = clipped[:, :whole].reshape(len(clipped), -1, together)
    counts = (~np.isnan(cut)).sum(axis=2)
    means = np.where(counts > 0, np.nansum(cut, axis=2) / np.maximum(counts, 1), math.nan)
    number_R = (~np.isnan(means)).sum(axis=1)
    centre = np.nansum(means, axis=1) / np.maximum(number_R, 1)
    squares = np.nansum((means - centre[:, None]) ** 2, axis=1)
    enough = number_R >= MIN_BLOCKS
    return np.where(enough, np.sqrt(squares / np.maximum(number_R - 1, 1) / np.maximum(number_R, 1)), math.inf)


def find_pattern(late_s_K: Times, margin_s: float, block_margin_s: float) -> Pattern | None:
    """When a rank is late, from its differences by block; None for a rank that is not.

    Args:
        margin_s: smallest difference of all blocks together that is not noise.
    """
    known = np.flatnonzero(~np.isnan(late_s_K))
    if len(known) < MIN_BLOCKS:
        return None
    values = late_s_K[known]
    late = values > block_margin_s
    begun = _begin(values, late, max(margin_s, block_margin_s))
    if begun:
        return Pattern(SINCE, float(np.median(values[begun:])), known[begun:].tolist())
    middle_s = float(np.median(values))
    if middle_s > margin_s and float(np.mean(values > 0.25 * middle_s)) >= 0.7:
        return Pattern(CHRONIC, middle_s, known.tolist())
    if not late.any():
        return None
    places = known[late].tolist()
    return Pattern(kind_of_past(_spans(places), len(known)), float(np.median(values[late])), places)


def _spans(places: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers: first and last of each."""
    cuts = (np.flatnonzero(np.diff(places) > 1) + 1).tolist()
    return [(places[a], places[b - 1]) for a, b in zip([0, *cuts], [*cuts, len(places)], strict=True)]


def _begin(values: Times, late: NDArray[np.bool_], margin_s: float) -> int:
    """The place from which on a rank is late in nearly every block, and before in nearly none; 0 if there is none."""
    if len(values) < 4:
        return 0
    before, after = np.cumsum(late)[:-1], np.cumsum(late[::-1])[::-1][1:]
    cuts = np.arange(1, len(values))
    fits = (before <= 0.1 * cuts) & (after >= 0.9 * (len(values) - cuts)) & (len(values) - cuts >= 3) & (cuts >= 2)
    for cut in cuts[fits & late[1:]]:
        old_s, new_s = float(np.median(values[:cut])), float(np.median(values[cut:]))
        if new_s > margin_s and abs(old_s) < 0.25 * new_s:
            return int(cut)
    return 0
