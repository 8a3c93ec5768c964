"""A job that stands still, from the Flight Recorder dumps of its ranks: who waits for whom, and where that ends.

A collective is known by its group and number. Its members with a dump have entered it or not; a member that finished it
proves that all entered it, if it is of a kind that needs all. A send or receive is matched with the other side's.

A rank waits in its first operation that nobody has finished: for members that have not entered it, or else for members
that entered it and are busy with something earlier. A chain ends at a rank that waits for nobody (it stopped), at one
without a dump, at an operation that all have entered (a device is stuck in it), or in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from paceenv.core.lateness.watch import COMMON_END
from paceenv.importers.collective_names import op_name
from paceenv.importers.flight_recorder import Dump, Group, Unit, units_of

RootKind = Literal["stopped", "no dump", "stuck", "circle"]
_ORDER: Final[tuple[RootKind, ...]] = ("stopped", "no dump", "stuck", "circle")
_NOBODY: Final = (-1, -1)


@dataclass(frozen=True)
class Wait:
    unit: Unit
    absent: tuple[int, ...]  # ranks that have not entered it, or, without a dump, are not known to have
    busy: tuple[int, ...]  # if all have entered, those that are still in an earlier operation


@dataclass(frozen=True)
class Root:
    kind: RootKind
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]  # all ranks whose chains lead there, those of the root left out


class Standstill:
    """All dumps of one incident.

    ``silent`` are ranks that are members of a group and left no dump, ``units`` each rank's operations in its order,
    ``entered`` the last collective of each group that each rank is known to have entered; likewise ``finished``.
    """

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self.dumps = {dump.rank: dump for dump in dumps}
        known: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._named = {d.rank: {n: known.setdefault((n, g.ranks), g) for n, g in d.groups.items()} for d in dumps}
        self.units = {dump.rank: units_of(dump, self._named[dump.rank]) for dump in dumps}
        self.groups = known.values()
        self.silent = tuple(sorted(set[int]().union(*(group.ranks for group in self.groups)) - set(self.dumps)))
        self.with_p2p = {unit.group for units in self.units.values() for unit in units if unit.is_p2p}
        self.entered: dict[Group, dict[int, int]] = defaultdict(dict)
        self.finished: dict[Group, dict[int, int]] = defaultdict(dict)
        self._collect()

    def _collect(self) -> None:
        for rank, units in self.units.items():
            opened = set()
            for unit in units:
                if not unit.is_p2p:
                    _raise(self.entered[unit.group], rank, unit.seq)
                    if unit.is_done:
                        _raise(self.finished[unit.group], rank, unit.seq)
                    elif unit.group not in opened:  # a group's collectives end in their order
                        opened.add(unit.group)
                        _raise(self.finished[unit.group], rank, unit.seq - 1)
        for rank, dump in self.dumps.items():
            for number, name in {e.status_id: e.group for e in dump.entries if e.group in dump.groups}.items():
                entered, finished = dump.status.get(number, _NOBODY)
                if (group := self._named[rank][name]) not in self.with_p2p:  # there a status counts these, too
                    _raise(self.entered[group], rank, entered)
                    _raise(self.finished[group], rank, finished)

    @cached_property
    def _proven(self) -> dict[Group, tuple[tuple[int, int], tuple[int, int]]]:
        """By group: the last collective that a member's end proves that all entered, and which member; the two best."""
        kinds = {
            (u.group, u.seq): op_name(u.entries[0].op) for units in self.units.values() for u in units if not u.is_p2p
        }
        proven = {}
        for group, ends in self.finished.items():
            proofs = [(s if kinds.get((group, s), "all_reduce") in COMMON_END else s - 1, r) for r, s in ends.items()]
            best, second = sorted([*proofs, _NOBODY, _NOBODY], reverse=True)[:2]
            proven[group] = best, second
        return proven

    def _ended_elsewhere(self, unit: Unit) -> bool:
        """Whether another member finished this collective, which proves that this rank had entered it, too."""
        best, second = self._proven.get(unit.group, (_NOBODY, _NOBODY))
        return not unit.is_p2p and unit.seq <= (best if best[1] != unit.rank else second)[0]

    @cached_property
    def blind(self) -> dict[int, int]:
        """By rank: collectives that peers finished and that it never saw end; ranks without any are left out."""
        unseen = {r: sum(not u.is_done and self._ended_elsewhere(u) for u in units) for r, units in self.units.items()}
        return {rank: count for rank, count in unseen.items() if count}

    @cached_property
    def pending(self) -> dict[int, tuple[Unit, ...]]:
        """Each rank's operations that nobody is known to have finished.

        Of a blind rank, sends and receives before something that peers finished do not count either.
        """
        pending = {}
        for rank, units in self.units.items():
            unseen = [unit for unit in units if not unit.is_done]
            last = max((unit.entries[0].record for unit in unseen if self._ended_elsewhere(unit)), default=-1)
            left = (unit for unit in unseen if not self._ended_elsewhere(unit))
            pending[rank] = tuple(unit for unit in left if not (unit.is_p2p and unit.entries[0].record < last))
        return pending

    @cached_property
    def _posted(self) -> set[tuple[int, Group, str, int]]:
        """Sends and receives that ranks have pending: rank, group, direction and other rank."""
        units = (unit for units in self.pending.values() for unit in units)
        return {(unit.rank, unit.group, way, other) for unit in units for way, other in unit.peers}

    def not_entered(self, unit: Unit) -> tuple[int, ...]:
        """Ranks that are not known to have entered what a rank waits in; those without a dump included."""
        if unit.is_p2p:
            posted = self._posted
            return tuple(sorted({r for way, r in unit.peers if (r, unit.group, _ANSWER[way], unit.rank) not in posted}))
        entered = self.entered[unit.group]
        return tuple(rank for rank in unit.group.ranks if entered.get(rank, -1) < unit.seq)

    @cached_property
    def waits(self) -> dict[int, Wait]:
        """What each rank waits in and for; ranks that wait for nothing are left out."""
        fronts = {rank: units[0] for rank, units in self.pending.items() if units}
        shared: dict[tuple[Group, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        waits = {}
        for rank, unit in fronts.items():
            if unit.place not in shared:
                absent = self.not_entered(unit)
                shared[unit.place] = absent, () if absent else _busy(unit, fronts)
            waits[rank] = Wait(unit, *shared[unit.place])
        return waits

    @cached_property
    def roots(self) -> tuple[Root, ...]:
        """Where all chains of waiting end, those first that most ranks wait for."""
        towards = {rank: wait.absent or wait.busy for rank, wait in self.waits.items()}
        waited_for = sorted({rank for ranks in towards.values() for rank in ranks})
        ends: list[tuple[RootKind, tuple[int, ...]]] = []
        ends += [("stopped", (rank,)) for rank in waited_for if rank in self.dumps and rank not in self.waits]
        ends += [("no dump", (rank,)) for rank in waited_for if rank not in self.dumps]
        together: dict[tuple[Group, int, int], list[int]] = defaultdict(list)
        for rank, wait in self.waits.items():
            if not towards[rank]:
                pair = wait.unit.group, -1, min((rank, *(peer for _, peer in wait.unit.peers)))
                together[pair if wait.unit.is_p2p else wait.unit.place].append(rank)
        ends += [("stuck", tuple(sorted(ranks))) for ranks in together.values()]
        behind: dict[int, set[int]] = defaultdict(set)
        for rank, others in towards.items():
            for other in others:
                behind[other].add(rank)
        left = set(self.waits) - _all_behind(tuple(rank for _, ranks in ends for rank in ranks), behind)
        while left and (inside := {rank for rank in left if behind[rank] & left}) != left:
            left = inside
        ends += [("circle", tuple(sorted(left)))] if left else []
        roots = [Root(kind, ranks, tuple(sorted(_all_behind(ranks, behind) - set(ranks)))) for kind, ranks in ends]
        return tuple(sorted(roots, key=lambda root: (-len(root.waiting), _ORDER.index(root.kind), root.ranks)))


_ANSWER: Final = {"send": "recv", "recv": "send"}


def _raise(where: dict[int, int], rank: int, seq: int) -> None:
    where[rank] = max(where.get(rank, -1), seq)


def _busy(unit: Unit, fronts: dict[int, Unit]) -> tuple[int, ...]:
    """Ranks that entered an operation but are in an earlier one."""
    if not unit.is_p2p:
        return tuple(sorted(r for r in unit.group.ranks if r in fronts and fronts[r].place != unit.place))

    def answers(front: Unit, way: str) -> bool:
        return front.group is unit.group and (_ANSWER[way], unit.rank) in front.peers

    return tuple(sorted({r for way, r in unit.peers if r in fronts and not answers(fronts[r], way)}))


def _all_behind(ranks: tuple[int, ...], behind: dict[int, set[int]]) -> set[int]:
    """All ranks whose chains lead to these, with these."""
    seen, left = set(ranks), list(ranks)
    while left:
        new = behind.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen
