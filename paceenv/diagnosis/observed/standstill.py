"""The state of a job that stands still, from the Flight Recorder dumps of its ranks: who has entered and finished what.

A collective is known by its group and number. Its members with a dump have entered it or not; a member that finished it
proves that all entered it, if it is of a kind that needs all. A send or receive is matched with the other side's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from paceenv.importers.flight_recorder import Dump, Entry, Group
from paceenv.importers.profiler.collective_names import op_name

NEEDS_ALL: Final = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
"""Collectives that no member finishes before all have entered."""


@dataclass(frozen=True)
class Unit:
    """An operation of a rank: one entry, or several that were coalesced into one.

    Attributes:
        rank: the rank.
        group: the group, the same object on all its members.
        seq: number of the collective in the group, or of the send or receive on this rank.
        is_p2p: whether it is made of sends and receives.
        entries: its entries.
        peers: direction and global rank of each send and receive.
        is_done: whether the rank saw it complete.
    """

    rank: int
    group: Group
    seq: int
    is_p2p: bool
    entries: tuple[Entry, ...]
    peers: tuple[tuple[str, int], ...]
    is_done: bool

    @property
    def record(self) -> int:
        """Its place in the rank's order."""
        return self.entries[0].record

    @property
    def op(self) -> str:
        """What PyTorch calls it, sends and receives with the other rank."""
        if self.is_p2p:
            said = [f"{way} {'to' if way == 'send' else 'from'} {rank}" for way, rank in self.peers]
            return " + ".join(said[:3]) + (f" + {len(said) - 3} more" if len(said) > 3 else "")
        ops = dict.fromkeys(entry.op for entry in self.entries)
        return " + ".join(list(ops)[:3])

    @property
    def kind(self) -> str:
        """The operation's kind, as traces call it."""
        return op_name(self.entries[0].op)

    @property
    def created_s(self) -> float:
        """When the host enqueued it."""
        return self.entries[0].created_s

    @property
    def is_started(self) -> bool:
        """Whether the rank's device was seen to have begun it."""
        return any(entry.state != "scheduled" for entry in self.entries)


class Standstill:
    """All dumps of one incident.

    Attributes:
        dumps: by rank.
        silent: ranks that are members of a group and left no dump.
        units: each rank's operations in its order.
        entered: the last collective of each group that each rank is known to have entered.
        finished: likewise finished.
    """

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self.dumps = {dump.rank: dump for dump in dumps}
        self._seen_in: dict[str, set[int]] = defaultdict(set)
        self._own: dict[tuple[str, int], int] = {}
        for dump in dumps:
            for entry in dump.entries:
                self._seen_in[entry.group].add(dump.rank)
                if entry.own >= 0:
                    self._own[entry.group, entry.own] = dump.rank
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._named = {
            dump.rank: {
                name: self._groups.setdefault((group.name, group.ranks), group) for name, group in dump.groups.items()
            }
            for dump in dumps
        }
        self.units = {dump.rank: _units(dump, self) for dump in dumps}
        members = set[int]().union(*(group.ranks for group in self.groups))
        self.silent = tuple(sorted(members - set(self.dumps)))
        self.entered: dict[Group, dict[int, int]] = defaultdict(dict)
        self.finished: dict[Group, dict[int, int]] = defaultdict(dict)
        self._collect()

    @property
    def groups(self) -> Collection[Group]:
        """All groups, each once."""
        return self._groups.values()

    def group_of(self, rank: int, name: str) -> Group:
        """The group that a rank calls by this name; of unknown members those that have it in their dumps.

        Args:
            rank: global rank of a caller.
            name: of the group, as the rank's dump has it.
        """
        named = self._named[rank]
        if name not in named:
            ranks = tuple(sorted(self._seen_in[name]))
            named[name] = self._groups.setdefault((name, ranks), Group(name, "", ranks, is_guess=True))
        return named[name]

    def member(self, group: Group, index: int) -> int:
        """The global rank of a member; -1 if that is not known.

        Args:
            group: the process group.
            index: place of the member in it.
        """
        if group.is_guess:
            return self._own.get((group.name, index), -1)
        return group.ranks[index] if index < len(group.ranks) else -1

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
        by_order = all(_agrees(dump) for dump in self.dumps.values())
        for dump in self.dumps.values():
            for name, (entered, finished) in _named_status(dump, by_order=by_order).items():
                group = self.group_of(dump.rank, name)
                if group not in self.with_p2p:  # there its numbers are those of sends and receives, too
                    _raise(self.entered[group], dump.rank, entered)
                    _raise(self.finished[group], dump.rank, finished)

    @cached_property
    def with_p2p(self) -> frozenset[Group]:
        """Groups that have sends and receives, so that their members' numbers may differ."""
        return frozenset(unit.group for units in self.units.values() for unit in units if unit.is_p2p)

    @cached_property
    def _proven(self) -> dict[Group, tuple[tuple[int, int], tuple[int, int]]]:
        """By group: the last collective that a member's end proves that all entered, and which member; the two best."""
        kinds = {
            (unit.group, unit.seq): unit.kind for units in self.units.values() for unit in units if not unit.is_p2p
        }
        found = {}
        for group, ends in self.finished.items():
            proofs = [(s if kinds.get((group, s), "all_reduce") in NEEDS_ALL else s - 1, r) for r, s in ends.items()]
            best = sorted(proofs, reverse=True)[:2]
            found[group] = best[0], best[1] if len(best) > 1 else (-1, -1)
        return found

    def ended_elsewhere(self, unit: Unit) -> bool:
        """Whether another member finished this collective, which proves that this rank had entered it, too."""
        best, second = self._proven.get(unit.group, ((-1, -1), (-1, -1)))
        return not unit.is_p2p and unit.seq <= (best if best[1] != unit.rank else second)[0]

    @cached_property
    def blind(self) -> dict[int, int]:
        """By rank: collectives that peers finished and that it never saw end; ranks without any are left out."""
        counts = {
            rank: sum(not unit.is_done and self.ended_elsewhere(unit) for unit in units)
            for rank, units in self.units.items()
        }
        return {rank: count for rank, count in counts.items() if count}

    @cached_property
    def pending(self) -> dict[int, tuple[Unit, ...]]:
        """Each rank's operations that nobody is known to have finished.

        Of a blind rank, sends and receives before something that peers finished do not count either.
        """
        found = {}
        for rank, units in self.units.items():
            ended = [unit.record for unit in units if not unit.is_done and self.ended_elsewhere(unit)]
            last = max(ended, default=-1)
            found[rank] = tuple(
                unit
                for unit in units
                if not unit.is_done and not self.ended_elsewhere(unit) and not (unit.is_p2p and unit.record < last)
            )
        return found

    @cached_property
    def _posted(self) -> Counter[tuple[int, Group, str, int]]:
        """How many sends and receives each rank has pending, by rank, group, direction and other rank."""
        return Counter(
            (unit.rank, unit.group, way, other)
            for units in self.pending.values()
            for unit in units
            for way, other in unit.peers
        )

    def unmatched(self, unit: Unit) -> tuple[int, ...]:
        """Ranks that have not posted the other side of a rank's sends and receives; those without a dump included."""
        before: Counter[tuple[str, int]] = Counter()
        for earlier in self.pending[unit.rank]:
            if earlier.record >= unit.record:
                break
            before.update(earlier.peers if earlier.group == unit.group else ())
        missing = []
        for way, other in unit.peers:
            before[way, other] += 1
            answer = "recv" if way == "send" else "send"
            if self._posted[other, unit.group, answer, unit.rank] < before[way, other]:
                missing.append(other)
        return tuple(sorted(set(missing)))

    def not_entered(self, unit: Unit) -> tuple[int, ...]:
        """Members that are not known to have entered what a rank waits in; those without a dump included."""
        if unit.is_p2p:
            return self.unmatched(unit)
        entered = self.entered[unit.group]
        return tuple(rank for rank in unit.group.ranks if entered.get(rank, -1) < unit.seq)

    def has_entered(self, rank: int, unit: Unit) -> bool:
        """Whether a member is known to have entered what another one waits in.

        Args:
            rank: global rank of the member.
            unit: the collective or message that another rank waits in.
        """
        if unit.is_p2p:
            return rank not in (other for _, other in unit.peers) or rank not in self.unmatched(unit)
        return self.entered[unit.group].get(rank, -1) >= unit.seq


def _units(dump: Dump, job: Standstill) -> list[Unit]:
    """A rank's operations in its order.

    Entries of one coalesced operation share their numbers. Only its last entry knows its state; where that one has been
    left out because it completed, the rank went on after the others.
    """
    parts: dict[tuple[str, int, int], list[Entry]] = defaultdict(list)
    for entry in dump.entries:
        parts[entry.group, entry.collective_seq, entry.p2p_seq].append(entry)
    last = dump.entries[-1].record if dump.entries else -1
    found = []
    for entries in parts.values():
        closing = [entry for entry in entries if entry.op == "coalesced" or entry.op.endswith("_coalesced")]
        inside = [entry for entry in entries if entry.op != "coalesced"] or entries
        left_out = len(entries) > 1 and not closing and entries[-1].record < last
        group, is_p2p = job.group_of(dump.rank, entries[0].group), any(entry.is_p2p for entry in entries)
        peers = tuple((e.op, other) for e in inside if e.peer >= 0 and (other := job.member(group, e.peer)) >= 0)
        state = closing[-1:] or entries
        done = left_out or any(entry.is_done for entry in state)
        seq = entries[0].p2p_seq if is_p2p else entries[0].collective_seq
        kept = tuple(sorted(inside, key=lambda e: e.record))
        if closing and closing[-1] not in kept and closing[-1].state == "started":
            kept = (*kept, closing[-1])
        found.append(Unit(dump.rank, group, seq, is_p2p, kept, peers, done))
    return sorted(found, key=lambda unit: unit.record)


def _agrees(dump: Dump) -> bool:
    """Whether numbers of groups in a rank's status have the order of the groups' names, as far as entries show."""
    by_order = _by_order(dump)
    return all(
        by_order.get(entry.status_id, entry.group) == entry.group for entry in dump.entries if entry.status_id >= 0
    )


def _by_order(dump: Dump) -> dict[int, str]:
    """Names of groups by their number in the status, if both count groups in the order of their creation."""
    names = sorted(dump.groups, key=lambda name: (len(name), name))
    if len(names) != len(dump.status) or not all(name.isdecimal() for name in names):
        return {}
    return dict(zip(sorted(dump.status), names, strict=True))


def _named_status(dump: Dump, *, by_order: bool) -> dict[str, tuple[int, int]]:
    """Last entered and last finished collective by the group's name, where that is known."""
    names = _by_order(dump) if by_order else {}
    names |= {entry.status_id: entry.group for entry in dump.entries if entry.status_id >= 0}
    return {names[number]: status for number, status in dump.status.items() if number in names}


def _raise(where: dict[int, int], rank: int, seq: int) -> None:
    where[rank] = max(where.get(rank, -1), seq)


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as ranges: ``0-3, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans)
