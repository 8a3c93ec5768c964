"""The ranks' snapshots side by side: blocks of the same iterations, and who waits in which collective of which group.

All members leave an all_reduce, a barrier, an all_gather, a reduce_scatter and an all_to_all together. So the
difference of two members' blocked times in it is the difference of their arrivals, without any clock.

Times are seconds per step; not-a-number is unknown. Suffixes: R ranks (in the order of the snapshots), K blocks of the
same iterations on every rank, E entries (one rank in one operation of one group).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.lateness.watch import LateRank
from paceenv.core.wording import name_ranks, read_list
from paceenv.live.record.snapshot import Snapshot, entry, number, text

FLOOR_S = 0.5e-3
"""A shorter wait is not told apart from none, seconds."""
WHOLE_SHARE = 0.9
"""A rank's block with a smaller share of the steps that another rank has in it is left out."""
MAX_BLOCKS = 128
"""More blocks than any agent keeps; a snapshot with more is not from one."""
MAX_OPERATIONS = 64
"""A snapshot with more collectives is not from an agent."""
Key = tuple[Any, ...]
Times = NDArray[np.float64]


@dataclass
class Group:
    """A process group: the ranks it has, the places of those with a snapshot, and what each of them has started."""

    ranks: tuple[int, ...]
    places: list[int] = field(default_factory=list)
    started: list[float | None] = field(default_factory=list)
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


class Job:
    """What all sets of ranks are judged from. Ill-typed entries count as missing."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        by_rank = {s["rank"]: s for s in snapshots if type(s.get("rank")) is int and s["rank"] >= 0}
        self.ranks = sorted(by_rank)
        self.snapshots = [by_rank[rank] for rank in self.ranks]
        newest = max(self.snapshots, key=lambda s: number(s, "unix_time_s") or 0.0)
        self.world_size = int(number(newest, "world_size") or len(self.ranks))
        self.missing = sorted(set(range(min(self.world_size, 1 << 20))) - set(self.ranks))
        own = [_own_blocks(snapshot) for snapshot in self.snapshots]
        self.block_iterations = max(size for size, _ in own)
        """Of a block: as long as the longest of any rank."""
        self.blocks = max(-(-size * blocks // self.block_iterations) for size, blocks in own)
        """K; 0 where no rank has measured any."""
        self.own_s_RK, self.step_s_RK = self._table("own_s"), self._table("step_s")
        steps_RK = self._table("steps", total=True)
        most_K = np.max(steps_RK, axis=0, initial=0.0, where=~np.isnan(steps_RK))
        # the last block of a rank that was heard earlier holds fewer of the steps
        self.own_s_RK[steps_RK < WHOLE_SHARE * most_K] = math.nan
        self.steps_K = np.maximum(most_K, 1.0)
        """Steps of a block that a rank has measured, the most; at least 1."""
        self.groups = list[Group]()
        self.operations = list[Operation]()
        self.ungrouped_s_R = np.zeros(len(self.ranks))
        """Blocked time in operations whose group has no number, or no ranks that its agent knows."""
        self._read_traffic()

    def names(self, places: Sequence[int]) -> str:
        """The ranks at these places in words."""
        return name_ranks([self.ranks[place] for place in places])

    def held_up(self, old: Collection[int] = ()) -> tuple[list[int], list[int]]:
        """Places of the ranks that have not started a collective that others wait in, and of those others.

        By what groups count; none where that cannot tell, as on a GPU, where a host runs ahead of its device. Ranks
        that are behind because they wait themselves are left out. ``old`` ranks may have gone on since their snapshots:
        they are behind only in a group in which no other rank is.
        """
        used = {id(operation.group) for operation in self.operations}
        counts = [{p: n for p, n in zip(g.places, g.started, strict=True) if n is not None} for g in self.groups]
        if (
            self.missing
            or any(text(s, "locality", "device") != "cpu" for s in self.snapshots)
            or len({number(s, "iterations") == 0.0 for s in self.snapshots}) > 1  # they count from different places
            or any(len(of) < len(g.ranks) for g, of in zip(self.groups, counts, strict=True) if of or id(g) in used)
        ):
            return [], []
        sure = [{p: n for p, n in of.items() if n == max(of.values()) or self.ranks[p] not in old} for of in counts]
        at_last = [{p: float(n == max(of.values())) for p, n in of.items()} for of in counts]
        counts = [one if len({*one.values()}) > 1 else last for one, last in zip(sure, at_last, strict=True)]
        behind = [{place for place, n in of.items() if n == min(of.values())} for of in counts]
        ahead = [set(of) - least for of, least in zip(counts, behind, strict=True)]
        first = set[int]().union(*(least for least, most in zip(behind, ahead, strict=True) if most)).difference(*ahead)
        waiting = (most for least, most in zip(behind, ahead, strict=True) if least & first)
        return sorted(first), sorted(set[int]().union(*waiting))

    def numbers(self, places: Sequence[int], *path: str) -> Times:
        """A number of the snapshots at these places; 0 where it is unknown."""
        return np.array([number(self.snapshots[place], *path) or 0.0 for place in places])

    def span(self, late: LateRank, of: int = -1) -> tuple[int, int]:
        """First iteration of a lateness (of its last span, or of span ``of``), and its last iteration."""
        last = late.spans[-1].last
        after = self.blocks if last is None else last + 1
        return late.spans[of].first * self.block_iterations, after * self.block_iterations - 1

    def _table(self, name: str, *, total: bool = False) -> Times:
        return np.array([self._by_block(s, entry(s, "own", "blocks", name), total=total) for s in self.snapshots])

    def _by_block(self, snapshot: Snapshot, values: Any, *, total: bool = False) -> Times:
        """A rank's values by block: of its own shorter ones in one the mean over their steps, or the total."""
        value_K = np.full(self.blocks, math.nan)
        (size, blocks), own = _own_blocks(snapshot), _floats(values)
        steps = _floats(entry(snapshot, "own", "blocks", "steps"))
        if not blocks or own is None or not 0 < len(own) <= MAX_BLOCKS:
            return value_K
        weights = np.ones(len(own)) if total or steps is None or len(steps) != len(own) else steps
        block = np.arange(len(own)) // (self.block_iterations // size)
        known = (block < self.blocks) & ~np.isnan(own) & (weights > 0.0)
        block, own, weights = block[known], own[known], weights[known]
        sums, counts = (np.bincount(block, summed, self.blocks) for summed in (own * weights, weights))
        value_K[counts > 0.0] = (sums if total else sums / np.maximum(counts, 1.0))[counts > 0.0]
        return value_K

    def _read_traffic(self) -> None:
        groups: dict[Key, Group] = {}
        rows: dict[tuple[Key, str], dict[int, Times]] = {}
        for place, snapshot in enumerate(self.snapshots):
            keys = _read_groups(snapshot, place, groups)
            for item in _items(snapshot, "unseen"):
                if (key := keys.get(number(item, "group"))) is not None:
                    groups[key].unseen_per_step = max(groups[key].unseen_per_step, number(item, "per_step") or 0.0)
            for item in _items(snapshot, "collectives"):
                blocked_s = number(item, "blocked_s")
                if blocked_s is None:
                    continue
                key = keys.get(number(item, "group"))
                if key is None:
                    self.ungrouped_s_R[place] += blocked_s
                else:
                    blocked_s_K = self._by_block(snapshot, item.get("blocks_s"))
                    of_rank = rows.setdefault((key, text(item, "op")), {})
                    blocked_s_K = np.where(np.isnan(blocked_s_K), blocked_s, blocked_s_K)
                    of_rank[place] = of_rank.get(place, 0.0) + blocked_s_K
        self.groups = list(groups.values())
        self.operations = [
            Operation(op, groups[key], np.array(list(of_rank)), np.array(list(of_rank.values())))
            for (key, op), of_rank in rows.items()
        ]

    def connected(self) -> list[list[int]]:
        """Places of ranks that groups connect in which anything happens, seen or not, in ascending order.

        A rank that none connects is a set of its own.
        """
        of = {place: {place} for place in range(len(self.ranks))}
        used = [operation.group for operation in self.operations]
        for group in [*used, *(group for group in self.groups if group.unseen_per_step > 0.0)]:
            parts = {id(of[place]): of[place] for place in group.places}
            if len(parts) > 1:
                joined = set().union(*parts.values())
                of |= dict.fromkeys(joined, joined)
        return [sorted(together) for together in {id(one): one for one in of.values()}.values()]


def _own_blocks(snapshot: Snapshot) -> tuple[int, int]:
    """The iterations of a rank's blocks, and how many it has; none where they are no agent's."""
    size, own = number(snapshot, "own", "blocks", "iterations"), entry(snapshot, "own", "blocks", "own_s")
    if size is None or not isinstance(own, list):
        return 1, 0
    power = size == int(size) and 1 <= size <= 1 << 30 and int(size) & (int(size) - 1) == 0
    return (int(size), len(own)) if power and 0 < len(own) <= MAX_BLOCKS else (1, 0)


def _floats(values: Any) -> Times | None:
    """A list of numbers, unknown where one is not finite; None for anything else."""
    try:
        floats = np.array(values, dtype=np.float64) if isinstance(values, list) else None
    except (TypeError, ValueError, OverflowError):
        return None
    if floats is None or floats.ndim != 1:
        return None
    return np.where(np.isfinite(floats), floats, math.nan)


def _items(snapshot: Snapshot, name: str) -> list[dict[str, Any]]:
    items = entry(snapshot, name)
    return [item for item in items[:MAX_OPERATIONS] if isinstance(item, dict)] if isinstance(items, list) else []


def _read_groups(snapshot: Snapshot, place: int, groups: dict[Key, Group]) -> dict[float | None, Key]:
    """The keys of this rank's groups by their numbers. The same number may name disjoint groups on different ranks."""
    keys: dict[float | None, Key] = {}
    listed = entry(snapshot, "groups")
    for label, described in listed.items() if isinstance(listed, dict) else ():
        members = read_list(text(described, "ranks"))
        if members and str(label).isdecimal():
            key = (int(label), text(described, "name"), members)
            group = groups.setdefault(key, Group(members))
            group.places.append(place)
            group.started.append(number(described, "started"))
            keys[float(label)] = key
    return keys


def medians(table_RK: Times) -> Times:
    """The median of what is known in each row, ``(R,)``; unknown where nothing is."""
    median_R = np.full(len(table_RK), math.nan)
    known = ~np.isnan(table_RK).all(axis=1)
    median_R[known] = np.nanmedian(table_RK[known], axis=1)
    return median_R
