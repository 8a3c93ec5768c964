"""Who waits for whom in a job that stands still, and where the chains of waiting end.

A rank waits in its first operation that nobody has finished: for members that have not entered it, or else for members
that entered it and are busy with something earlier. A chain ends at a rank that waits for nobody (it stopped), at one
without a dump, at an operation that all have entered (a device is stuck in it), or in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from paceenv.diagnosis.observed.standstill import Standstill, Unit
from paceenv.importers.flight_recorder import Group

RootKind = Literal["stopped", "no dump", "stuck", "circle"]
ORDER: Final[tuple[RootKind, ...]] = ("stopped", "no dump", "stuck", "circle")
Place = tuple[Group, int, int]
"""An operation: group, number, and for sends and receives the rank, -1 for a collective."""


@dataclass(frozen=True)
class Wait:
    """What a rank waits in and for.

    Attributes:
        unit: the operation.
        absent: ranks that have not entered it, or, without a dump, are not known to have.
        busy: if all have entered, those that are still in an earlier operation.
    """

    unit: Unit
    absent: tuple[int, ...]
    busy: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks waited for."""
        return self.absent or self.busy

    @property
    def place(self) -> Place:
        """The operation."""
        return place_of(self.unit)


@dataclass(frozen=True)
class Root:
    """Where chains of waiting end.

    Attributes:
        kind: how.
        ranks: the ranks there.
        waiting: all ranks whose chains lead there, those of the root left out.
    """

    kind: RootKind
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


def place_of(unit: Unit) -> Place:
    """The operation that a rank's unit belongs to; sends and receives are told apart by rank."""
    return unit.group, unit.seq, unit.rank if unit.is_p2p else -1


def find_waits(job: Standstill) -> dict[int, Wait]:
    """What each rank waits in and for; ranks that wait for nothing are left out."""
    fronts = {rank: units[0] for rank, units in job.pending.items() if units}
    places = {rank: place_of(unit) for rank, unit in fronts.items()}
    shared: dict[Place, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    found = {}
    for rank, unit in fronts.items():
        if places[rank] not in shared:
            absent = job.not_entered(unit)
            busy = () if absent else tuple(sorted(_busy(unit, fronts, places)))
            shared[places[rank]] = absent, busy
        found[rank] = Wait(unit, *shared[places[rank]])
    return found


def _busy(unit: Unit, fronts: dict[int, Unit], places: dict[int, Place]) -> Iterable[int]:
    """Ranks that entered an operation but are in an earlier one."""
    if not unit.is_p2p:
        return (rank for rank in unit.group.ranks if rank in fronts and places[rank] != place_of(unit))
    return {other for way, other in unit.peers if other in fronts and not _answers(fronts[other], unit, way)}


def _answers(front: Unit, unit: Unit, way: str) -> bool:
    """Whether a rank is in the other side of a send or receive."""
    return front.group is unit.group and ("recv" if way == "send" else "send", unit.rank) in front.peers


def find_roots(job: Standstill, waits: dict[int, Wait]) -> tuple[Root, ...]:
    """Where all chains end, those first that most ranks wait for.

    Args:
        job: all ranks' dumps.
        waits: by rank, what it waits in and for whom.
    """
    towards = {rank: wait.ranks for rank, wait in waits.items()}
    waited_for = {rank for ranks in towards.values() for rank in ranks}
    ends: list[tuple[RootKind, tuple[int, ...]]] = []
    stopped = sorted(rank for rank in waited_for if rank in job.dumps and rank not in waits)
    ends += [("stopped", (rank,)) for rank in stopped]
    ends += [("no dump", (rank,)) for rank in sorted(waited_for - set(job.dumps))]
    together: dict[Place, list[int]] = defaultdict(list)
    for rank, wait in waits.items():
        if not wait.ranks:
            pair = (
                (wait.unit.group, -1, min((rank, *(p for _, p in wait.unit.peers)))) if wait.unit.is_p2p else wait.place
            )
            together[pair].append(rank)
    ends += [("stuck", tuple(sorted(ranks))) for ranks in together.values()]
    ends += [("circle", tuple(circle)) for circle in _circles(towards)]
    reach = _reverse(towards)
    roots = []
    for kind, ranks in ends:
        waiting = tuple(sorted(_behind(ranks, reach) - set(ranks)))
        roots.append(Root(kind, ranks, waiting))
    return tuple(sorted(roots, key=lambda root: (-len(root.waiting), ORDER.index(root.kind), root.ranks)))


def _circles(towards: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Ranks that wait for each other and for nobody else; a collective's members are joined through the collective."""
    nodes: dict[object, int] = {}
    edges = set()
    for rank, others in towards.items():
        if others:
            mine, hub = nodes.setdefault(rank, len(nodes)), nodes.setdefault(others, len(nodes))
            edges.add((mine, hub))
            edges |= {(hub, nodes.setdefault(other, len(nodes))) for other in others}
    if not edges:
        return []
    tails, heads = np.array(sorted(edges)).T
    graph = coo_array((np.ones(len(tails), np.int8), (tails, heads)), shape=(len(nodes), len(nodes)))
    _, part_N = connected_components(graph, directed=True, connection="strong")
    leaves = set(part_N[tails[part_N[tails] != part_N[heads]]].tolist())
    parts: dict[int, list[int]] = defaultdict(list)
    for node, k in nodes.items():
        if isinstance(node, int) and part_N[k] not in leaves:
            parts[int(part_N[k])].append(node)
    return [sorted(ranks) for ranks in parts.values() if len(ranks) > 1]


def _reverse(towards: dict[int, tuple[int, ...]]) -> dict[int, set[int]]:
    """Which ranks wait for each rank directly."""
    found: dict[int, set[int]] = defaultdict(set)
    for rank, others in towards.items():
        for other in others:
            found[other].add(rank)
    return found


def _behind(ranks: Iterable[int], reach: dict[int, set[int]]) -> set[int]:
    """All ranks whose chains lead to these."""
    seen, waiting = set(ranks), list(ranks)
    while waiting:
        for rank in reach.get(waiting.pop(), ()):
            if rank not in seen:
                seen.add(rank)
                waiting.append(rank)
    return seen
