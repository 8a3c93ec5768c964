"""Times of several ranks side by side, block of iterations by block: who takes longer, by how much, and since when.

Suffixes: R ranks, K blocks of the same iterations on every rank. Times are seconds per step; not-a-number is unknown.
A paired difference has a far smaller error than that of two means: what slows all ranks in a block cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.student_t import student_t_quantile
from paceenv.live.record.snapshot import Snapshot, entry, number

Times = NDArray[np.float64]

FLOOR_S, FLOOR_SHARE = 0.5e-3, 0.01
"""A shorter difference is never called late: seconds, share of the step."""
FALSE_ALARMS = 0.001
"""Chance that noise alone exceeds the margin in any of a set's ranks."""
BLOCK_SPREADS = 6.0
"""Robust standard deviations of a block's differences beyond which a rank is late in that block."""
STRETCHES = 8
"""Noise that lasts for several blocks shows in the means of this many stretches."""
WHOLE_SHARE = 0.9
"""A rank's block with a smaller share of the steps that another rank has in it is left out."""
MIN_BLOCKS = 2
MAX_BLOCKS = 128
"""More blocks than any agent keeps; a snapshot with more is not from one."""

CHRONIC, SINCE, SOMETIMES, ONCE = "chronic", "since", "now and then", "once"


class Blocks(NamedTuple):
    """R ranks over the same K blocks; block ``k`` is the iterations from ``first + k * iterations`` on."""

    iterations: int
    first: int
    own_s_RK: Times
    step_s_RK: Times

    def span(self, first: int, last: int) -> tuple[int, int]:
        """First and last iteration of the blocks ``first`` to ``last``."""
        return self.first + first * self.iterations, self.first + (last + 1) * self.iterations - 1


class Grid(NamedTuple):
    """The blocks that all ranks can be brought to: their length in iterations, the first one's number, how many."""

    iterations: int
    first: int
    length: int


class Lateness(NamedTuple):
    """How much longer each rank's own work takes than that of the median of the others, seconds per step.

    ``margin_s_R`` is the smallest difference that is not noise, ``block_margin_s`` the same for a single block.
    """

    late_s_RK: Times
    late_s_R: Times
    margin_s_R: Times
    block_margin_s: float


class Pattern(NamedTuple):
    """When a rank is late: its kind, the amount then, and in which blocks."""

    kind: str
    late_s: float
    blocks: list[int]


def find_grid(snapshots: Sequence[Snapshot]) -> Grid | None:
    """The grid of the ranks' blocks: as long as the longest of them; None if there are none."""
    spans = []
    for snapshot in snapshots:
        size, first = number(snapshot, "own", "blocks", "iterations"), number(snapshot, "own", "blocks", "first")
        own = entry(snapshot, "own", "blocks", "own_s")
        if size is not None and first is not None and isinstance(own, list) and _valid(size, first, len(own)):
            spans.append((int(size), int(first) * int(size), (int(first) + len(own)) * int(size)))
    if not spans:
        return None
    size = max(span[0] for span in spans)
    low, high = min(span[1] for span in spans) // size, max(-(-span[2] // size) for span in spans)
    return Grid(size, low, min(high - low, MAX_BLOCKS))


def _valid(size: float, first: float, length: int) -> bool:
    power = size == int(size) and 1 <= size <= 1 << 30 and int(size) & (int(size) - 1) == 0
    return power and 0 <= first < 1 << 40 and 0 < length <= MAX_BLOCKS


def on_grid(grid: Grid, snapshot: Snapshot, values: Any) -> Times:
    """A rank's values by block, on ``grid``; a longer block is the mean of its shorter ones, if all are known."""
    found = np.full(grid.length, math.nan)
    size, first = number(snapshot, "own", "blocks", "iterations"), number(snapshot, "own", "blocks", "first")
    if size is None or first is None or not isinstance(values, list) or not _valid(size, first, len(values)):
        return found
    try:
        own = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return found
    if own.ndim != 1:
        return found
    own[~np.isfinite(own)] = math.nan
    factor, place = grid.iterations // int(size), np.arange(len(own)) + int(first)
    block = place // factor - grid.first
    inside = (block >= 0) & (block < grid.length)
    known = inside & ~np.isnan(own)
    sums = np.bincount(block[known], own[known], grid.length)
    counts = np.bincount(block[known], minlength=grid.length)
    whole = counts == factor
    found[whole] = sums[whole] / factor
    return found


def side_by_side(snapshots: Sequence[Snapshot], grid: Grid) -> Blocks:
    """The ranks' own times and steps on one grid."""

    def table(name: str) -> Times:
        return np.array([on_grid(grid, s, entry(s, "own", "blocks", name)) for s in snapshots])

    own_s_RK, step_s_RK, steps_RK = table("own_s"), table("step_s"), table("steps")
    if not np.isnan(steps_RK).all():  # the last block of a rank that was heard earlier holds fewer of the steps
        most_K = np.max(steps_RK, axis=0, initial=0.0, where=~np.isnan(steps_RK))
        own_s_RK[steps_RK < WHOLE_SHARE * most_K] = math.nan
    return Blocks(grid.iterations, grid.first * grid.iterations, own_s_RK, step_s_RK)


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


def compare(own_s_RK: Times, step_s: float) -> Lateness:
    """Each rank's own time against the median of the others, in every block that most of the ranks have.

    Args:
        own_s_RK: own times, seconds per step, of at least two ranks.
        step_s: mean step time, seconds.
    """
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
        late_s_K: how much longer its own work took than the others' median, by block.
        margin_s: smallest difference of all blocks together that is not noise.
        block_margin_s: the same for a single block.
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
    kind = ONCE if places[-1] - places[0] == len(places) - 1 and len(places) <= max(1, len(known) // 10) else SOMETIMES
    return Pattern(kind, float(np.median(values[late])), places)


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
