"""The ranks' snapshots side by side: blocks of the same iterations, and who waits in which collective of which group.

All members leave an all_reduce, a barrier, an all_gather, a reduce_scatter and an all_to_all together. So the
difference of two members' blocked times in it is the difference of their arrivals, without any clock.

Times are seconds per step; not-a-number is unknown. Suffixes: R ranks (in the order of the snapshots), K blocks of the
same iterations on every rank, E entries (one rank in one operation of one group).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.live.record.snapshot import Snapshot, entry, number, text

FLOOR_S = 0.5e-3
"""A shorter wait is not told apart from none, seconds."""
WHOLE_SHARE = 0.9
"""A rank's block with a smaller share of the steps that another rank has in it is left out."""
MAX_BLOCKS = 128
"""More blocks than any agent keeps; a snapshot with more is not from one."""
MAX_OPERATIONS = 64
"""A snapshot with more collectives is not from an agent."""
MAX_RANKS = 1_000_000
_RANKS = re.compile(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")
Key = tuple[Any, ...]
Times = NDArray[np.float64]


class Grid(NamedTuple):
    """Blocks that all ranks can be brought to: their length in iterations, from iteration 0 on, and how many."""

    iterations: int
    length: int

    def span(self, first: int, last: int) -> tuple[int, int]:
        """First and last iteration of the blocks ``first`` to ``last``."""
        return first * self.iterations, (last + 1) * self.iterations - 1


class Blocks(NamedTuple):
    """R ranks over the same K blocks."""

    grid: Grid
    own_s_RK: Times
    step_s_RK: Times
    steps_K: Times
    """Steps of a block that a rank has measured, the most; at least 1."""


def find_grid(snapshots: Sequence[Snapshot]) -> Grid | None:
    """The grid of the ranks' blocks: as long as the longest of them; None if there are none."""
    grids = [grid for grid in map(_own_grid, snapshots) if grid is not None]
    if not grids:
        return None
    size = max(grid.iterations for grid in grids)
    return Grid(size, max(-(-grid.length * grid.iterations // size) for grid in grids))


def _own_grid(snapshot: Snapshot) -> Grid | None:
    """The blocks of one rank; None where there are none, or they are no agent's."""
    blocks = entry(snapshot, "own", "blocks")
    size, own = number(blocks, "iterations"), entry(blocks, "own_s")
    if size is None or not isinstance(own, list):
        return None
    power = size == int(size) and 1 <= size <= 1 << 30 and int(size) & (int(size) - 1) == 0
    return Grid(int(size), len(own)) if power and 0 < len(own) <= MAX_BLOCKS else None


def on_grid(grid: Grid, snapshot: Snapshot, values: Any, *, total: bool = False) -> Times:
    """A rank's values by block, on ``grid``: of the shorter blocks in one the mean over their steps, or the total."""
    value_K = np.full(grid.length, math.nan)
    theirs, own, steps = _own_grid(snapshot), _floats(values), _floats(entry(snapshot, "own", "blocks", "steps"))
    if theirs is None or own is None or not 0 < len(own) <= MAX_BLOCKS:
        return value_K
    weights = np.ones(len(own)) if total or steps is None or len(steps) != len(own) else steps
    block = np.arange(len(own)) // (grid.iterations // theirs.iterations)
    known = (block < grid.length) & ~np.isnan(own) & (weights > 0.0)
    block, own, weights = block[known], own[known], weights[known]
    sums, counts = (np.bincount(block, summed, grid.length) for summed in (own * weights, weights))
    value_K[counts > 0.0] = (sums if total else sums / np.maximum(counts, 1.0))[counts > 0.0]
    return value_K


def _floats(values: Any) -> Times | None:
    """A list of numbers, unknown where one is not finite; None for anything else."""
    try:
        floats = np.array(values, dtype=np.float64) if isinstance(values, list) else None
    except (TypeError, ValueError, OverflowError):
        return None
    if floats is None or floats.ndim != 1:
        return None
    return np.where(np.isfinite(floats), floats, math.nan)


def side_by_side(snapshots: Sequence[Snapshot], grid: Grid) -> Blocks:
    """The ranks' own times and steps on one grid."""

    def table(name: str, *, total: bool = False) -> Times:
        return np.array([on_grid(grid, s, entry(s, "own", "blocks", name), total=total) for s in snapshots])

    own_s_RK, step_s_RK, steps_RK = table("own_s"), table("step_s"), table("steps", total=True)
    most_K = np.max(steps_RK, axis=0, initial=0.0, where=~np.isnan(steps_RK))
    # the last block of a rank that was heard earlier holds fewer of the steps
    own_s_RK[steps_RK < WHOLE_SHARE * most_K] = math.nan
    return Blocks(grid, own_s_RK, step_s_RK, np.maximum(most_K, 1.0))


@dataclass
class Group:
    """A process group: the ranks it has, and the places of those with a snapshot."""

    ranks: tuple[int, ...]
    places: list[int] = field(default_factory=list)
    unseen_per_step: float = 0.0


class Operation(NamedTuple):
    """One kind of operation in one group, with its entries: places of ranks and their blocked times."""

    op: str
    group: Group
    places: NDArray[np.int64]
    blocked_s_EK: Times


class Wait(NamedTuple):
    """How long the members of a group wait in one operation for those that arrive last, seconds per step."""

    op: str
    group: Group
    places: NDArray[np.int64]
    wait_s_E: Times


@dataclass
class Traffic:
    """All groups and operations of a job, as far as the snapshots show them."""

    groups: list[Group]
    operations: list[Operation]
    ungrouped_s_R: Times
    """Blocked time in operations whose group has no number, or no ranks that its agent knows."""


def read_traffic(snapshots: Sequence[Snapshot], grid: Grid | None) -> Traffic:
    """The groups and operations of the ranks' snapshots; ill-typed entries count as missing."""
    groups: dict[Key, Group] = {}
    rows: dict[tuple[Key, str], dict[int, Times]] = {}
    ungrouped_s_R = np.zeros(len(snapshots))
    grid = grid or Grid(1, 1)
    for place, snapshot in enumerate(snapshots):
        keys = _read_groups(snapshot, place, groups)
        for item in _items(snapshot, "unseen"):
            if (key := keys.get(number(item, "group"))) is not None:
                groups[key].unseen_per_step = max(groups[key].unseen_per_step, number(item, "per_step") or 0.0)
        for item in _items(snapshot, "collectives"):
            blocked_s = number(item, "blocked_s")
            if blocked_s is None:
                continue
            op, key = text(item, "op"), keys.get(number(item, "group"))
            if key is None:
                ungrouped_s_R[place] += blocked_s
            else:
                blocked_s_K = on_grid(grid, snapshot, item.get("blocks_s"))
                blocked_s_K = np.where(np.isnan(blocked_s_K), blocked_s, blocked_s_K)
                of_rank = rows.setdefault((key, op), {})
                of_rank[place] = of_rank.get(place, 0.0) + blocked_s_K
    operations = [
        Operation(op, groups[key], np.array(list(of_rank)), np.array(list(of_rank.values())))
        for (key, op), of_rank in rows.items()
    ]
    return Traffic(list(groups.values()), operations, ungrouped_s_R)


def _items(snapshot: Snapshot, name: str) -> list[dict[str, Any]]:
    items = entry(snapshot, name)
    return [item for item in items[:MAX_OPERATIONS] if isinstance(item, dict)] if isinstance(items, list) else []


def _read_groups(snapshot: Snapshot, place: int, groups: dict[Key, Group]) -> dict[float | None, Key]:
    """The keys of this rank's groups by their numbers. The same number may name disjoint groups on different ranks."""
    keys: dict[float | None, Key] = {}
    listed = entry(snapshot, "groups")
    for label, described in listed.items() if isinstance(listed, dict) else ():
        members = _members(text(described, "ranks"))
        if members is not None and str(label).isdecimal():
            key = (int(label), text(described, "name"), members)
            groups.setdefault(key, Group(members)).places.append(place)
            keys[float(label)] = key
    return keys


@functools.lru_cache(4096)
def _members(ranks: str) -> tuple[int, ...] | None:
    """The ranks in a list such as ``0-3,8``; None for anything else. A file may say whatever it likes."""
    if not _RANKS.fullmatch(ranks):
        return None
    spans = [range(int(edge[0]), int(edge[-1]) + 1) for edge in (part.split("-") for part in ranks.split(","))]
    return tuple(itertools.chain(*spans)) if 0 < sum(map(len, spans)) <= MAX_RANKS else None


def connected_sets(ranks: int, traffic: Traffic) -> list[list[int]]:
    """Places of ranks that groups connect in which anything happens, seen or not, in ascending order.

    A rank that none connects is a set of its own.
    """
    of = {place: {place} for place in range(ranks)}
    used = [operation.group for operation in traffic.operations]
    for group in [*used, *(group for group in traffic.groups if group.unseen_per_step > 0.0)]:
        parts = {id(of[place]): of[place] for place in group.places}
        if len(parts) > 1:
            joined = set().union(*parts.values())
            of |= dict.fromkeys(joined, joined)
    return [sorted(together) for together in {id(one): one for one in of.values()}.values()]


def measure_wait(operation: Operation, among_R: NDArray[np.bool_], blocks: Sequence[int]) -> Wait:
    """How long each member among those ranks waits in ``operation`` for the last one, over the given blocks."""
    kept = among_R[operation.places]
    chosen = operation.blocked_s_EK[kept][:, blocks]
    blocked_s_E = np.median(chosen, axis=1) if chosen.shape[1] else np.full(len(chosen), math.nan)
    waits = blocked_s_E - blocked_s_E.min()
    return Wait(operation.op, operation.group, operation.places[kept], waits)


def medians(table_RK: Times) -> Times:
    """The median of what is known in each row, ``(R,)``; unknown where nothing is."""
    median_R = np.full(len(table_RK), math.nan)
    known = ~np.isnan(table_RK).all(axis=1)
    median_R[known] = np.nanmedian(table_RK[known], axis=1)
    return median_R
