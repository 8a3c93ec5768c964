"""The answer on a job that hangs or died: which ranks it waits for in the end, and what each other rank waits for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from paceenv.core.wording import format_list, name_ranks
from paceenv.diagnosis.standstill import Root, Standstill, Wait
from paceenv.importers.collective_names import op_name
from paceenv.importers.flight_recorder import Dump, Group, Unit
from paceenv.importers.inputs import split_recordings

NOTHING_HANGS: Final = "nothing hangs: every operation that a dump shows has completed"
UNDETERMINED: Final = "cannot be determined"
OLDER_S: Final = 120.0
"""A dump whose newest entry is older than the others' by more may be of another run."""
_FRAMES: Final = 3
"""Stack frames printed."""
_LIBRARY: Final = ("/torch/", "torch/distributed", "site-packages/torch", "<frozen")
_SAME_INPUT: Final = frozenset(("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"))
"""Collectives in which every member gives as much as the others."""
WAITS: Final = ("ranks", "wait in", "of the group", "for", "in the end for")
LAST_SEEN: Final = ("rank", "last recorded", "called from", "behind", "did not enter")
"""Columns of the two tables."""
NEXT: Final = (
    "Next: on the hosts of the ranks named here, py-spy dump --pid PID shows where a process stands that still runs; "
    "the logs of host and GPU (dmesg) show what failed"
)


class Mismatch(NamedTuple):
    """One collective that its members entered differently, which can never match."""

    group: Group
    seq: int
    what: str  # "operation", "type" or "size"
    text: str  # what was entered and by which ranks, most ranks first


class Hang:
    """What the dumps of one incident show; of several dumps of a rank the latest counts."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        latest = {dump.rank: dump for dump in sorted(dumps, key=_newest_s)}
        self.of_watchdog, files = all(dump.of_watchdog for dump in dumps), {dump.path for dump in dumps}
        self.name = str(dumps[0].path if self.of_watchdog and len(files) == 1 else dumps[0].path.parent)
        self.replaced = len(dumps) - len(latest)
        self.job = Standstill([latest[rank] for rank in sorted(latest)])
        self.waits, self.roots, self.mismatches = self.job.waits, self.job.roots, _mismatches(self.job)
        self.hangs = bool(self.waits)
        self.apart = _apart(self.job) if self.of_watchdog else ""
        self.stopped = tuple(sorted(rank for root in self._roots("stopped") for rank in root.ranks))
        self.blind = tuple(sorted(self.job.blind))
        """Ranks that never saw the end of collectives which their peers finished."""

    def _roots(self, *kinds: str) -> list[Root]:
        return [root for root in self.roots if root.kind in kinds]

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that something is wrong with, as far as dumps show it: stopped, or blind where few are."""
        return tuple(sorted({*self.stopped, *(() if self._are_dumps_older() else self.blind)}))

    def _are_dumps_older(self) -> bool:
        """Whether so many ranks saw no ends that their dumps are rather of an earlier moment."""
        return len(self.blind) > max(2, len(self.job.dumps) // 4)

    def last_seen(self) -> list[tuple[str, ...]]:
        """Rows of what the ranks were last seen doing that stopped, are stuck or saw no ends."""
        stuck = {rank for root in self._roots("stuck", "circle") for rank in root.ranks}
        shown = {*self.stopped, *self.blind, *(stuck if len(stuck) < 9 else ())}
        rows = map(self._last_seen, sorted(shown & set(self.job.dumps)))
        return [row for row in rows if not self.of_watchdog or (row[4], row[2]) != ("-", "not recorded")]

    def _last_seen(self, rank: int) -> tuple[str, ...]:
        dump, ahead = self.job.dumps[rank], self._first_without(rank)
        did, behind, following = "nothing unfinished", 0, "-"
        if ahead is not None:
            entered, finished = self.job.entered[ahead.group], self.job.finished[ahead.group].get(rank, -1)
            behind = 0 if ahead.is_p2p else max(entered.values()) - entered.get(rank, ahead.seq - 1)
            following = f"{ahead.text} of {ahead.group.text}"
            did += f"; {finished} was its last collective there" if finished >= 0 else ""
        frames: tuple[str, ...] = ()
        if dump.entries:
            last = dump.entries[-1]
            at = time.strftime(", at %H:%M:%S UTC", time.gmtime(last.created_s)) if last.created_s > 0.0 else ""
            group = dump.groups[last.group].text if last.group in dump.groups else ""
            did = f"{last.op} {last.p2p_seq if last.is_p2p else last.collective_seq} of {group}, {last.state}{at}"
            own = tuple(frame for frame in last.frames if not any(part in frame for part in _LIBRARY))
            frames = (own or last.frames)[:_FRAMES]
        if blind := self.job.blind.get(rank, 0):
            did += f"; {blind} ends never seen"
        ahead_by = f"{behind} collectives" if behind else "-"
        return str(rank), did, "; ".join(frames) or "not recorded", ahead_by, following

    def _first_without(self, rank: int) -> Unit | None:
        """The first operation that others entered and this rank did not; a collective where there is one."""
        pending = (unit for units in self.job.pending.values() for unit in units if rank in unit.group.ranks)
        of_others = (unit for unit in pending if unit.rank != rank and (rank in self.stopped or not unit.is_p2p))
        missed = [unit for unit in of_others if rank in self.job.not_entered(unit)]
        return min(missed, key=lambda unit: (unit.is_p2p, unit.entries[0].created_s), default=None)

    @cached_property
    def verdict(self) -> str:
        silence = f"; {name_ranks(self.job.silent)} left no dump" if self.job.silent else ""
        if not any(self.job.units.values()):
            return f"{UNDETERMINED}: the {len(self.job.dumps)} dumps have no entries of known groups{silence}"
        if not self.hangs:
            return f"{NOTHING_HANGS}{silence}"
        if self.apart:
            return self.apart
        said = [mismatch.text for mismatch in self.mismatches]
        said += [text for text in (self._stopped_text(), self._blind_text(), self._no_dump_text()) if text]
        held = self._roots("stuck", "circle")
        said += [self._circle_text(root) if root.kind == "circle" else self._stuck_text(root) for root in held]
        if len(self.suspects) > len(self.stopped) > 0:
            said.insert(0, f"{len(self.suspects)} suspects, {name_ranks(self.suspects)}")
        said = said or [f"{UNDETERMINED}: operations are unfinished, and nobody is absent from them"]
        text = "; ".join([*said, *self._doubts()])
        if self.of_watchdog:
            text = text.replace("left no dump", "left no line of the watchdog").replace("its dump is", "its log is")
        return text

    def _doubts(self) -> list[str]:
        """Why the dumps may not be of the same moment."""
        doubts = []
        if self.replaced:
            doubts.append(f"{self.replaced} older {_plural(self.replaced, 'dump')} of the same ranks left out")
        newest = {rank: _newest_s(dump) for rank, dump in self.job.dumps.items() if dump.entries}
        usual_s = median(newest.values()) if newest else 0.0
        old = [rank for rank, at_s in newest.items() if usual_s - at_s > OLDER_S]
        if old:
            age_s = usual_s - max(newest[rank] for rank in old)
            doubts.append(
                f"the newest entry of {name_ranks(old)} is {age_s:.0f} s older than the others': stopped long before, "
                "or dumps of another run"
            )
        worlds = {group.ranks for group in self.job.groups if group.name == "0"}
        if len(worlds) > 1:
            sizes = ", ".join(str(size) for size in sorted({len(ranks) for ranks in worlds}))
            doubts.append(f"the dumps disagree on the ranks of group 0 (sizes {sizes}): they are of different runs")
        return doubts

    def _stopped_text(self) -> str:
        if not self.stopped:
            return ""
        waiting = {rank for root in self._roots("stopped") for rank in root.waiting} - set(self.stopped)
        one = len(self.stopped) == 1
        alone, whom = ("it waits", "it") if one else ("they wait", "them")
        text = f"{name_ranks(self.stopped)} stopped: {alone} for nobody, and {_count(waiting)} for {whom} in the end"
        firsts = {rank: self._first_without(rank) for rank in self.stopped[:4]}
        places = list(dict.fromkeys(unit.where for unit in firsts.values() if unit is not None))
        if len(places) > 1:
            places = [f"{unit.where} without rank {rank}" for rank, unit in firsts.items() if unit is not None]
        return text + (f", first in {' and '.join(places)}" if places else "")

    def _blind_text(self) -> str:
        if not self.blind:
            return ""
        most = max(self.job.blind.values())
        counted = f"{'' if len(self.blind) == 1 else 'up to '}{most} {_plural(most, 'collective')}"
        text = f"{name_ranks(self.blind)} never saw the end of {counted} that others finished"
        if self._are_dumps_older():
            return f"{text}: their dumps are probably older than the others'"
        text += ": a device or link may have failed there, or the dump is older than the others'"
        also = [rank for rank in self.blind if rank not in self.stopped]
        if not also or not self.stopped:
            return text
        whom = "it" if len(also) == 1 else "them"
        return f"{text}; {name_ranks(also)} did enter what others entered, so nobody waits for {whom} yet"

    def _no_dump_text(self) -> str:
        roots = self._roots("no dump")
        if not roots:
            return f"{name_ranks(self.job.silent)} left no dump" if self.job.silent else ""
        ranks = tuple(rank for root in roots for rank in root.ranks)
        named = f"{name_ranks(ranks)} left no dump"
        if self.stopped:
            return f"{named}: whether they stopped or waited {UNDETERMINED}"
        whom, why = "it", "it died, or could not write, or its dump is not here"
        if len(ranks) > 1:
            why = f"they died, or could not write, or their dumps are not here; which of them wait {UNDETERMINED}"
            whom = "them"
        return f"{named}, and {_count({r for root in roots for r in root.waiting})} for {whom} in the end: {why}"

    def _stuck_text(self, root: Root) -> str:
        unit = self.waits[root.ranks[0]].unit
        if self.of_watchdog and not self.mismatches:
            who = f"{name_ranks(root.ranks)} {'waits' if len(root.ranks) == 1 else 'wait'}"
            return (
                f"{who} in {unit.where}, which nobody is seen to finish; a rank of it without a line in this log may "
                "not have entered it"
            )
        if any(m.group is unit.group and m.seq == unit.seq for m in self.mismatches):
            return f"{unit.where} cannot end for that reason, and {_count(root.waiting)} behind it"
        entered = f"all have entered {unit.where}, and"
        if late := self._not_begun(root):
            begun = name_ranks(set(root.ranks) - set(late))
            return f"{entered} the devices of {begun} have begun it: {name_ranks(late)} did not get there"
        if blind := [rank for rank in root.ranks if rank in self.job.blind]:
            return f"{entered} {name_ranks(blind)} cannot see it end: a device or link may have failed there"
        return (
            f"{entered} nobody has finished it: a device, the network, or an operation in flight "
            f"when the dumps were written; which rank is stuck {UNDETERMINED} without TORCH_NCCL_ENABLE_TIMING=1"
        )

    def _circle_text(self, root: Root) -> str:
        waits = [self.waits[rank] for rank in root.ranks[:4]]
        parts = [f"rank {w.unit.rank} in {w.unit.where} for {format_list(w.absent or w.busy)}" for w in waits]
        text = f"{name_ranks(root.ranks)} wait for each other ({'; '.join(parts)}): "
        if late := self._not_begun(root):
            return f"{text}the devices of the others are in it, and that of {name_ranks(late)} has not begun it"
        return (
            f"{text}they entered operations in different orders, or one is stuck on its device, or stopped with an "
            f"operation posted ahead; which one {UNDETERMINED}"
        )

    def _not_begun(self, root: Root) -> tuple[int, ...]:
        """Ranks of a root whose devices were not seen to begin what they wait in, if those of others were."""
        entries = {rank: self.waits[rank].unit.entries for rank in root.ranks}
        late = tuple(rank for rank in root.ranks if all(entry.state == "scheduled" for entry in entries[rank]))
        return late if len(late) < len(root.ranks) else ()

    def ends(self) -> dict[int, tuple[int, ...]]:
        """For each waiting rank the ranks that its chain ends at."""
        ends_of: dict[int, set[int]] = {rank: set() for rank in self.waits}
        for root in self.roots:
            for rank in root.waiting:
                ends_of.setdefault(rank, set()).update(root.ranks)
        return {rank: tuple(sorted(ends)) for rank, ends in ends_of.items()}

    def waiting_rows(self) -> list[tuple[str, ...]]:
        """Ranks, operation, group, whom they wait for, and in the end; what is alike in one row."""
        alike: dict[tuple[str, str, tuple[int, ...]], list[Wait]] = defaultdict(list)
        ends = self.ends()
        for rank, wait in sorted(self.waits.items()):
            unit = wait.unit
            op = unit.entries[0].op if unit.is_p2p else unit.text
            alike[op, unit.group.description or unit.group.text, ends[rank]].append(wait)
        rows: list[tuple[str, ...]] = []
        for (op, where, last), waits in alike.items():
            groups = {wait.unit.group for wait in waits}
            where = groups.pop().text if len(groups) == 1 else f"{where}, {len(groups)} groups"
            absent, busy = {r for wait in waits for r in wait.absent}, {r for wait in waits for r in wait.busy}
            both = ((absent, "absent"), (busy, "busy before it"))
            whom = ", ".join(f"{format_list(those)} ({how})" for those, how in both if those) or "all are in it"
            rows.append((format_list(wait.unit.rank for wait in waits), op, where, whom, format_list(last) or "-"))
        return rows

    def to_json(self) -> dict[str, Any]:
        ends = self.ends()
        return {
            "folder": self.name,
            "ranks": len(self.job.dumps) + len(self.job.silent),
            "dumps": len(self.job.dumps),
            "hangs": self.hangs,
            "verdict": self.verdict,
            "suspects": self.suspects,
            "stopped": self.stopped,
            "never_saw_ends": self.job.blind,
            "without_dump": self.job.silent,
            "mismatches": [mismatch.text for mismatch in self.mismatches],
            "waits": [
                {"rank": rank, "wait_in": wait.unit.text, "group": wait.unit.group.text}
                | {"absent": wait.absent, "busy": wait.busy, "in_the_end_for": ends[rank]}
                for rank, wait in sorted(self.waits.items())
            ],
            "last_seen": [dict(zip(LAST_SEEN, row, strict=True)) for row in self.last_seen()],
        }


def find_hangs(dumps: Sequence[Dump]) -> tuple[Hang, ...]:
    """One answer for each incident; dumps of the same rank in different folders belong to different ones."""
    parts = split_recordings([(Path(dump.path), dump.rank) for dump in dumps])
    return tuple(Hang([dumps[i] for i in part]) for part in parts if part)


def _mismatches(job: Standstill) -> tuple[Mismatch, ...]:
    """The first unfinished collective of each group, where its members entered different ones.

    Groups whose sends and receives are coalesced are left out: their collectives' numbers may differ between ranks.
    """
    drifting = {unit.group for units in job.units.values() for unit in units if unit.is_p2p and len(unit.entries) > 1}
    first: dict[Group, dict[int, Unit]] = defaultdict(dict)
    for rank, units in job.pending.items():
        for unit in units:
            if not unit.is_p2p and unit.group not in drifting:
                first[unit.group].setdefault(rank, unit)
    mismatches = []
    for group, units_R in first.items():
        seq = min(unit.seq for unit in units_R.values())
        what, said = _compare({rank: unit for rank, unit in units_R.items() if unit.seq == seq})
        if what:
            variants = {name: [rank for rank in said if said[rank] == name] for name in said.values()}
            most_first = sorted(variants.items(), key=lambda variant: -len(variant[1]))
            listed = "; ".join(f"{name} on {name_ranks(ranks)}" for name, ranks in most_first)
            text = f"collective {seq} of {group.text} does not match in {what}: {listed}"
            mismatches.append(Mismatch(group, seq, what, text))
    return tuple(mismatches)


def _apart(job: Standstill) -> str:
    """That ranks time out in collectives of one group of which some finished what others are in; "" if none do.

    All that the watchdog says is the number: the programs called a different number of collectives, or other ones.
    """
    first = {rank: units[0] for rank, units in job.units.items() if units}
    stuck = {rank: unit for rank, unit in first.items() if not (unit.is_done or unit.is_p2p)}
    for group in {unit.group: None for unit in stuck.values()}:
        in_it: dict[tuple[int, str], list[int]] = defaultdict(list)
        for rank, unit in stuck.items():
            if unit.group is group:
                items = unit.entries[0].items
                of = f" ({items} element{'' if items == 1 else 's'})" if items >= 0 else ""
                in_it[unit.seq, f"{unit.op.upper()} {unit.seq}{of}"].append(rank)
        seqs = [seq for seq, _ in in_it]
        behind = [rank for rank in stuck if rank in job.blind]
        if len(set(seqs)) > 1 and behind:
            said = "; ".join(f"{name_ranks(ranks)} in {name}" for (_, name), ranks in sorted(in_it.items()))
            may = "" if group.name else "; this log names no groups, so they may be of different ones"
            return f"the ranks are in different collectives of {group.text}: {said}{may}"
    return ""


def _compare(units: dict[int, Unit]) -> tuple[str, dict[int, str]]:
    """In what the members' entries of one collective differ, "" if in nothing, and what each of them entered."""
    kinds = {op_name(unit.entries[0].op) for unit in units.values()}
    if len(kinds) > 1:
        return "operation", {rank: unit.op for rank, unit in units.items()}
    are_whole = all(len(unit.entries) == 1 for unit in units.values())  # not the parts of a coalesced one
    if kinds <= _SAME_INPUT and are_whole:
        entries = {rank: unit.entries[0] for rank, unit in units.items()}
        shown = {rank: f"{units[rank].op} of {entry.sizes} {entry.dtypes}" for rank, entry in entries.items()}
        if len({entry.dtypes for entry in entries.values()}) > 1:
            return "type", shown
        sizes = {rank: entry.items for rank, entry in entries.items() if entry.items >= 0}
        if len(set(sizes.values())) > 1:
            return "size", {rank: shown[rank] for rank in sizes}
    return "", {}


def _newest_s(dump: Dump) -> float:
    """When a rank enqueued its last operation; -1 if its dump has none."""
    return max((entry.created_s for entry in dump.entries), default=-1.0)


def _count(ranks: Collection[int]) -> str:
    n = len(ranks)
    return f"{n} other {_plural(n, 'rank')} {'waits' if n == 1 else 'wait'}"


def _plural(n: int, word: str) -> str:
    return word if n == 1 else f"{word}s"
