"""Brings the blocks of iterations in several ranks' snapshots side by side, for ``paceenv.core.lateness``.

Suffixes: R ranks, K blocks of the same iterations on every rank. Times are seconds per step; not-a-number is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceenv.core.lateness.peers import Times
from paceenv.live.record.snapshot import Snapshot, entry, number

WHOLE_SHARE = 0.9
"""A rank's block with a smaller share of the steps that another rank has in it is left out."""
MAX_BLOCKS = 128
"""More blocks than any agent keeps; a snapshot with more is not from one."""


class Blocks(NamedTuple):
    """R ranks over the same K blocks; block ``k`` is the iterations from ``first + k * iterations`` on."""

    iterations: int
    first: int
    own_s_RK: Times
    step_s_RK: Times

    def span(self, first: int, last: int) -> tuple[int, int]:
        """First and last iteration of the blocks ``first`` to ``last``.

        Args:
            first: number of the first block.
            last: number of the last block, which is included.
        """
        return self.first + first * self.iterations, self.first + (last + 1) * self.iterations - 1


class Grid(NamedTuple):
    """The blocks that all ranks can be brought to: their length in iterations, the first one's number, how many."""

    iterations: int
    first: int
    length: int


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
    """A rank's values by block, on ``grid``; a longer block is the mean of its shorter ones, if all are known.

    Args:
        grid: the blocks that all ranks are compared on.
        snapshot: of the rank; it says how long its blocks are.
        values: one value a block, as the snapshot has them.
    """
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
    """The ranks' own times and steps on one grid.

    Args:
        snapshots: the ranks' last statuses.
        grid: the blocks that all ranks are compared on.
    """

    def table(name: str) -> Times:
        return np.array([on_grid(grid, s, entry(s, "own", "blocks", name)) for s in snapshots])

    own_s_RK, step_s_RK, steps_RK = table("own_s"), table("step_s"), table("steps")
    if not np.isnan(steps_RK).all():  # the last block of a rank that was heard earlier holds fewer of the steps
        most_K = np.max(steps_RK, axis=0, initial=0.0, where=~np.isnan(steps_RK))
        own_s_RK[steps_RK < WHOLE_SHARE * most_K] = math.nan
    return Blocks(grid.iterations, grid.first * grid.iterations, own_s_RK, step_s_RK)
