"""The answer on a job that hangs or died: which ranks it waits for in the end, and what each other rank waits for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final

from paceenv.diagnosis.observed.mismatches import Mismatch, find_mismatches
from paceenv.diagnosis.observed.standstill import Standstill, Unit, ranks_text
from paceenv.diagnosis.observed.waits import Place, Root, Wait, find_roots, find_waits
from paceenv.importers.flight_recorder import Dump, Entry, Group
from paceenv.importers.inputs import split_recordings

NOTHING_HANGS: Final = "nothing hangs: every operation that a dump shows has completed"
UNDETERMINED: Final = "cannot be determined"
OLDER_S: Final = 120.0
"""A dump whose newest entry is older than the others' by more may be of another run."""
_FRAMES: Final = 3
"""Stack frames printed."""
_LIBRARY: Final = ("/torch/", "torch/distributed", "site-packages/torch", "<frozen")


@dataclass(frozen=True)
class LastSeen:
    """What a rank was last seen doing.

    Attributes:
        rank: the rank.
        last: its last entry; None if its dump has none.
        last_group: the group of that entry, described.
        blind: collectives that its peers finished and it never saw end.
        behind: collectives of ``next_group`` that others entered and it did not.
        next_op: what it should have entered next, as others did; "" if nothing shows that.
        next_group: the group of that one, described.
        finished: last collective that it finished in that group; -1 if unknown.
    """

    rank: int
    last: Entry | None
    last_group: str
    blind: int
    behind: int
    next_op: str
    next_group: str
    finished: int

    @property
    def frames(self) -> tuple[str, ...]:
        """Where the program made its last call, library code left out where anything else is left."""
        frames = () if self.last is None else self.last.frames
        own = tuple(frame for frame in frames if not any(part in frame for part in _LIBRARY))
        return (own or frames)[:_FRAMES]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        last = self.last
        return {
            "rank": self.rank,
            "last": None if last is None else {
                "op": last.op, "group": self.last_group, "state": last.state, "created_s": last.created_s,
                "collective_seq": last.collective_seq, "p2p_seq": last.p2p_seq, "frames": list(last.frames),
            },
            "ends_never_seen": self.blind,
            "behind": self.behind,
            "last_finished": self.finished if self.finished >= 0 else None,
            "next": {"op": self.next_op, "group": self.next_group} if self.next_op else None,
        }  # fmt: skip


class Hang:
    """What the dumps of one incident show.

    Attributes:
        name: the folder that the dumps lie in.
        job: the state that they show.
        waits: what each rank waits in and for.
        roots: where all chains of waiting end.
        mismatches: collectives entered differently.
        replaced: dumps left out, because a later one of the same rank lies beside them.
    """

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self.name = str(dumps[0].path.parent)
        latest: dict[int, Dump] = {}
        for dump in sorted(dumps, key=_newest_s):
            latest[dump.rank] = dump
        self._texts: dict[Group, str] = {}
        self.replaced = len(dumps) - len(latest)
        self.job = Standstill([latest[rank] for rank in sorted(latest)])
        self.waits: dict[int, Wait] = find_waits(self.job)
        self.roots: tuple[Root, ...] = find_roots(self.job, self.waits)
        self.mismatches: tuple[Mismatch, ...] = find_mismatches(self.job)

    @property
    def is_empty(self) -> bool:
        """Whether the dumps have no entries at all."""
        return not any(dump.entries for dump in self.job.dumps.values())

    @property
    def hangs(self) -> bool:
        """Whether anything is unfinished."""
        return bool(self.waits)

    @cached_property
    def stopped(self) -> tuple[int, ...]:
        """Ranks that stopped by themselves, with a dump that shows it."""
        return tuple(sorted(rank for root in self.roots if root.kind == "stopped" for rank in root.ranks))

    @cached_property
    def blind(self) -> tuple[int, ...]:
        """Ranks that never saw the end of collectives which their peers finished."""
        return tuple(sorted(self.job.blind))

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that something is wrong with, as far as dumps show it: stopped, or blind where few are."""
        return tuple(sorted({*self.stopped, *(() if self._are_dumps_older() else self.blind)}))

    def _are_dumps_older(self) -> bool:
        """Whether so many ranks saw no ends that their dumps are rather of an earlier moment."""
        return len(self.blind) > max(2, len(self.job.dumps) // 4)

    @cached_property
    def last_seen(self) -> tuple[LastSeen, ...]:
        """What the ranks were last seen doing that stopped, are stuck or saw no ends."""
        stuck = {rank for root in self.roots if root.kind in {"stuck", "circle"} for rank in root.ranks}
        shown = {*self.stopped, *self.blind, *(stuck if len(stuck) < 9 else ())}
        return tuple(self._last_seen(rank) for rank in sorted(shown & set(self.job.dumps)))

    def group_text(self, group: Group) -> str:
        """A group by its description and ranks."""
        if group not in self._texts:
            self._texts[group] = self._group_text(group)
        return self._texts[group]

    def _group_text(self, group: Group) -> str:
        said = group.description or f"process group {group.name or '?'}"
        ranks = f"ranks {ranks_text(group.ranks)}"
        return f"{said} ({ranks if len(ranks) < 60 else f'{len(group.ranks)} ranks'})"

    def unit_text(self, unit: Unit) -> str:
        """An operation by its name and number."""
        return unit.op if unit.is_p2p else f"{unit.op} {unit.seq}"

    def _last_seen(self, rank: int) -> LastSeen:
        dump, ahead = self.job.dumps[rank], self.first_without(rank)
        last = dump.entries[-1] if dump.entries else None
        group = "" if last is None else self.group_text(self.job.group_of(rank, last.group))
        blind = self.job.blind.get(rank, 0)
        if ahead is None:
            return LastSeen(rank, last, group, blind, 0, "", "", -1)
        entered, finished = self.job.entered[ahead.group], self.job.finished[ahead.group]
        behind = 0 if ahead.is_p2p else max(entered.values()) - entered.get(rank, ahead.seq - 1)
        where = self.unit_text(ahead), self.group_text(ahead.group)
        return LastSeen(rank, last, group, blind, behind, *where, finished.get(rank, -1))

    def first_without(self, rank: int) -> Unit | None:
        """The first operation that others entered and this rank did not; a collective where there is one."""
        mine = {group for group in self.job.groups if rank in group.ranks}
        found = [
            unit
            for units in self.job.pending.values()
            for unit in units
            if rank != unit.rank
            and unit.group in mine
            and (rank in self.stopped or not unit.is_p2p)
            and not self.job.has_entered(rank, unit)
        ]
        return min(found, key=lambda unit: (unit.is_p2p, unit.created_s), default=None)

    @cached_property
    def verdict(self) -> str:
        """The answer in a few sentences."""
        if self.is_empty:
            return f"{UNDETERMINED}: the {len(self.job.dumps)} dumps have no entries{self._silence()}"
        if not self.hangs:
            return f"{NOTHING_HANGS}{self._silence()}"
        said = [mismatch.text(self.group_text(mismatch.group)) for mismatch in self.mismatches]
        said += [text for text in (self._stopped_text(), self._blind_text(), self._no_dump_text()) if text]
        for root in self.roots:
            if root.kind == "stuck":
                said.append(self._stuck_text(root))
            elif root.kind == "circle":
                said.append(self._circle_text(root))
        if len(self.suspects) > len(self.stopped) > 0:
            said.insert(0, f"{len(self.suspects)} suspects, {_ranks(self.suspects)}")
        said = said or [f"{UNDETERMINED}: operations are unfinished, and nobody is absent from them"]
        return "; ".join([*said, *self._doubts()])

    def _doubts(self) -> list[str]:
        """Why the dumps may not be of the same moment."""
        doubts = [f"{self.replaced} older {_plural(self.replaced, 'dump')} of the same ranks left out"] * bool(
            self.replaced
        )
        newest = {rank: _newest_s(dump) for rank, dump in self.job.dumps.items() if dump.entries}
        usual_s = median(newest.values()) if newest else 0.0
        old = [rank for rank, at_s in newest.items() if usual_s - at_s > OLDER_S]
        if old:
            age_s = usual_s - max(newest[rank] for rank in old)
            doubts.append(
                f"the newest entry of {_ranks(old)} is {age_s:.0f} s older than the others': stopped long before, or "
                "dumps of another run"
            )
        worlds = {group.ranks for group in self.job.groups if group.name == "0"}
        if len(worlds) > 1:
            sizes = ", ".join(str(size) for size in sorted({len(ranks) for ranks in worlds}))
            doubts.append(f"the dumps disagree on the ranks of group 0 (sizes {sizes}): they are of different runs")
        return doubts

    def _stopped_text(self) -> str:
        if not self.stopped:
            return ""
        roots = [root for root in self.roots if root.kind == "stopped"]
        waiting = {rank for root in roots for rank in root.waiting} - set(self.stopped)
        one = len(self.stopped) == 1
        alone, whom = ("it waits", "it") if one else ("they wait", "them")
        text = f"{_ranks(self.stopped)} stopped: {alone} for nobody, and {_count(waiting)} for {whom} in the end"
        firsts = {rank: self.first_without(rank) for rank in self.stopped[:4]}
        places = [
            f"{self.unit_text(unit)} of {self.group_text(unit.group)}" + ("" if one else f" without rank {rank}")
            for rank, unit in firsts.items()
            if unit is not None
        ]
        return text + (f", first in {' and '.join(places)}" if places else "")

    def _blind_text(self) -> str:
        if not self.blind:
            return ""
        named = f"{_ranks(self.blind)} never saw the end of"
        most = max(self.job.blind.values())
        counted = f"{'' if len(self.blind) == 1 else 'up to '}{most} {_plural(most, 'collective')}"
        text = f"{named} {counted} that others finished"
        if self._are_dumps_older():
            return f"{text}: their dumps are probably older than the others'"
        text += ": a device or link failed there, or the dump is older than the others'"
        also = [rank for rank in self.blind if rank not in self.stopped]
        if not also or not self.stopped:
            return text
        whom = "it" if len(also) == 1 else "them"
        return f"{text}; {_ranks(also)} did enter what others entered, so nobody waits for {whom} yet"

    def _no_dump_text(self) -> str:
        roots = [root for root in self.roots if root.kind == "no dump"]
        if not roots:
            return self._silence().removeprefix("; ")
        ranks = tuple(rank for root in roots for rank in root.ranks)
        waiting = {rank for root in roots for rank in root.waiting}
        named = f"{_ranks(ranks)} left no dump"
        if self.stopped:
            return f"{named}: whether they stopped or waited {UNDETERMINED}"
        if len(ranks) == 1:
            why = "it died, or could not write, or its dump is not here"
            return f"{named}, and {_count(waiting)} for it in the end: {why}"
        why = f"they died, or could not write, or their dumps are not here; which of them wait {UNDETERMINED}"
        return f"{named}, and {_count(waiting)} for them in the end: {why}"

    def _silence(self) -> str:
        silent = self.job.silent
        return f"; {_ranks(silent)} left no dump" if silent else ""

    def _stuck_text(self, root: Root) -> str:
        unit = self.waits[root.ranks[0]].unit
        where = f"{self.unit_text(unit)} of {self.group_text(unit.group)}"
        if any(m.group is unit.group and m.seq == unit.seq for m in self.mismatches):
            return f"{where} cannot end for that reason, and {_count(root.waiting)} behind it"
        if unit.group.is_guess:
            return f"{where} is unfinished, and no dump says who belongs to it: who is absent {UNDETERMINED}"
        late = self._not_begun(root)
        if late:
            begun = _ranks(set(root.ranks) - set(late))
            return (
                f"all have entered {where}, and the devices of {begun} have begun it: {_ranks(late)} did not get there"
            )
        blind = [rank for rank in root.ranks if rank in self.job.blind]
        if blind:
            return f"all have entered {where}, and {_ranks(blind)} cannot see it end: a device or link failed there"
        return (
            f"all have entered {where}, and nobody has finished it: a device, the network, or an operation in flight "
            f"when the dumps were written; which rank is stuck {UNDETERMINED} without TORCH_NCCL_ENABLE_TIMING=1"
        )

    def _circle_text(self, root: Root) -> str:
        parts = []
        for rank in root.ranks[:4]:
            wait = self.waits[rank]
            where = f"{self.unit_text(wait.unit)} of {self.group_text(wait.unit.group)}"
            parts.append(f"rank {rank} in {where} for {ranks_text(wait.ranks)}")
        text = f"ranks {ranks_text(root.ranks)} wait for each other ({'; '.join(parts)}): "
        late = self._not_begun(root)
        if late:
            return f"{text}the devices of the others are in it, and that of {_ranks(late)} has not begun it"
        return (
            f"{text}they entered operations in different orders, or one is stuck on its device, or stopped with an "
            f"operation posted ahead; which one {UNDETERMINED}"
        )

    def _not_begun(self, root: Root) -> tuple[int, ...]:
        """Ranks of a root whose devices were not seen to begin what they wait in, if those of others were."""
        late = tuple(rank for rank in root.ranks if not self.waits[rank].unit.is_started)
        return late if len(late) < len(root.ranks) else ()

    def ends(self) -> dict[int, tuple[int, ...]]:
        """For each waiting rank the ranks that its chain ends at."""
        found: dict[int, list[int]] = {rank: [] for rank in self.waits}
        for root in self.roots:
            for rank in root.waiting:
                found.setdefault(rank, []).extend(root.ranks)
        return {rank: tuple(sorted(set(ranks))) for rank, ranks in found.items()}

    def waiting_rows(self) -> list[tuple[str, str, str, str, str]]:
        """Waiting ranks, operation, group, whom they wait for, and in the end; what is alike in one row."""
        alike: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
        ends = self.ends()
        for rank, wait in sorted(self.waits.items()):
            unit = wait.unit
            op = unit.entries[0].op if unit.is_p2p else self.unit_text(unit)
            where = unit.group.description or self.group_text(unit.group)
            alike.setdefault((op, where, ends[rank]), []).append(rank)
        rows = []
        for (op, where, last), ranks in alike.items():
            keys = {self.waits[rank].unit.group for rank in ranks}
            where = self.group_text(next(iter(keys))) if len(keys) == 1 else f"{where}, {len(keys)} groups"
            absent = ranks_text(other for rank in ranks for other in self.waits[rank].absent)
            busy = ranks_text(other for rank in ranks for other in self.waits[rank].busy)
            whom = [f"{absent} (absent)"] * bool(absent) + [f"{busy} (busy before it)"] * bool(busy)
            rows.append((ranks_text(ranks), op, where, ", ".join(whom) or "all are in it", ranks_text(last) or "-"))
        return rows

    def _together(self) -> list[tuple[Wait, list[int]]]:
        """What ranks wait in, and which ranks."""
        found: dict[Place, tuple[Wait, list[int]]] = {}
        for rank, wait in sorted(self.waits.items()):
            found.setdefault(wait.place, (wait, []))[1].append(rank)
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``paceenv diagnose --json`` prints it."""
        ends = self.ends()
        return {
            "folder": self.name,
            "ranks": len(self.job.dumps) + len(self.job.silent),
            "dumps": len(self.job.dumps),
            "hangs": self.hangs,
            "verdict": self.verdict,
            "suspects": list(self.suspects),
            "stopped": list(self.stopped),
            "never_saw_ends": {str(rank): count for rank, count in self.job.blind.items()},
            "without_dump": list(self.job.silent),
            "roots": [
                {
                    "kind": root.kind, "ranks": list(root.ranks), "waiting": list(root.waiting),
                    "not_begun": list(self._not_begun(root)) if root.kind in {"stuck", "circle"} else [],
                }
                for root in self.roots
            ],
            "mismatches": [mismatch.to_json() for mismatch in self.mismatches],
            "last_seen": [one.to_json() for one in self.last_seen],
            "waits": [
                {
                    "ranks": ranks, "op": wait.unit.op, "is_p2p": wait.unit.is_p2p, "seq": wait.unit.seq,
                    "group": wait.unit.group.name, "description": wait.unit.group.description,
                    "group_ranks": list(wait.unit.group.ranks), "absent": list(wait.absent), "busy": list(wait.busy),
                    "in_the_end_for": list(ends[ranks[0]]),
                }
                for wait, ranks in self._together()
            ],
        }  # fmt: skip


def find_hangs(dumps: Sequence[Dump]) -> tuple[Hang, ...]:
    """One answer for each incident; dumps of the same rank in different folders belong to different ones."""
    parts = split_recordings([(Path(dump.path), dump.rank) for dump in dumps])
    return tuple(Hang([dumps[i] for i in part]) for part in parts if part)


def _newest_s(dump: Dump) -> float:
    """When a rank enqueued its last operation; -1 if its dump has none."""
    return max((entry.created_s for entry in dump.entries), default=-1.0)


def _count(ranks: Collection[int]) -> str:
    n = len(ranks)
    return f"{n} other {_plural(n, 'rank')} {'waits' if n == 1 else 'wait'}"


def _ranks(ranks: Collection[int]) -> str:
    return f"{_plural(len(ranks), 'rank')} {ranks_text(ranks)}"


def _plural(n: int, word: str) -> str:
    return word if n == 1 else f"{word}s"
