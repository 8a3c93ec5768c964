"""Reader of Flight Recorder dumps of PyTorch (NCCL): one file per rank, a pickle or JSON, gzipped or not.

A dump is a ring of a rank's last collectives and point-to-point operations, finished or not, with its process groups.
The watchdog writes it when a collective times out; it can also be asked for. Dumps are pickles by default; their
content is read as data and never run (``paceenv.importers.plain_pickle``). ``paceenv.diagnosis.hang`` explains a job
that hangs.

Format: versions 1 to 2.10 of torch/csrc/distributed/c10d/FlightRecorder.hpp and FlightRecorderDetail.hpp.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final

from paceenv.core.errors import InputError
from paceenv.core.wording import name_ranks
from paceenv.importers.collective_names import is_number
from paceenv.importers.packed import content_of
from paceenv.importers.plain_pickle import MAX_BYTES, is_pickle, read_plain_pickle

MAX_FRAMES: Final = 12
"""Stack frames kept of an entry, innermost first."""
_MAX_RANK: Final = 1 << 24
_IN_NAME: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (r"rank[_\-]?(\d{1,8})", r"dump[_\-]?(\d{1,8})", r"(\d{1,8})\D*\Z")
)
"""Where a file's name may say which rank it is of, the best first."""
_PEERS: Final = re.compile(r"(send|recv) (\d{1,8})(?:->|<-)(\d{1,8})\Z")


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective or point-to-point operation, as a rank recorded it."""

    record: int  # its number in the rank's order of recording
    group: str  # name of the process group
    op: str  # what PyTorch calls it, such as ``_all_gather_base``, without backend and peers
    collective_seq: int  # number among the group's collectives; equal on all its members
    state: str  # ``scheduled``, ``started`` or ``completed``; without timing a start is never seen
    sizes: str  # shapes of inputs, as text
    items: int  # numbers in the inputs; -1 if unknown
    status_id: int  # number of the group in the rank's ``pg_status``
    frames: tuple[str, ...]  # where the program called it, innermost first; not kept of completed ones
    dtypes: str = ""  # types of inputs, as text
    created_s: float = 0.0  # when the host enqueued it
    p2p_seq: int = 0  # number among the rank's point-to-point operations of the group
    is_p2p: bool = False  # whether it is one of those
    peer: int = -1  # rank within the group that it sends to or receives from; -1 for a collective
    own: int = -1  # the rank's own number within the group, as a point-to-point operation says it; -1 else

    @property
    def is_done(self) -> bool:
        return self.state == "completed"


@dataclass(frozen=True, eq=False)
class Group:
    """A process group as one of its members knows it: name, description, global ranks in the group's order.

    Compared by identity: its ranks may be thousands.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    is_whole: bool = True  # whether these are all of its ranks; of a log's lines they are those that wrote one

    @cached_property
    def text(self) -> str:
        """The group by its description and ranks."""
        said = self.description or (f"process group {self.name}" if self.name else "a group without a name")
        return f"{said} ({name_ranks(self.ranks)}{'' if self.is_whole else ' seen'})"


@dataclass(frozen=True)
class Dump:
    rank: int
    path: Path
    entries: tuple[Entry, ...]  # in the order of recording
    groups: dict[str, Group]  # the rank's process groups by name; empty in dumps of older versions
    status: dict[int, tuple[int, int]]  # last number enqueued and completed by group number; -1 for nothing
    notes: tuple[str, ...] = ()  # what is damaged or contradictory, one line each
    of_watchdog: bool = False  # whether it comes from lines of a log: the last collective of each group only


@dataclass(frozen=True)
class Unit:
    """An operation of a rank: one entry, or several that were coalesced into one."""

    rank: int
    group: Group  # the same object on all its members
    seq: int  # number of the collective in the group, or of the send or receive on this rank
    is_p2p: bool  # whether it is made of sends and receives
    entries: tuple[Entry, ...]  # the first one gives it its place in the rank's order
    peers: tuple[tuple[str, int], ...]  # direction and global rank of each send and receive
    is_done: bool  # whether the rank saw it complete

    @property
    def op(self) -> str:
        """What PyTorch calls it, sends and receives with the other rank."""
        if self.is_p2p:
            said = [f"{way} {'to' if way == 'send' else 'from'} {rank}" for way, rank in self.peers]
            return " + ".join(said[:3]) + (f" + {len(said) - 3} more" if len(said) > 3 else "")
        return " + ".join(list(dict.fromkeys(entry.op for entry in self.entries))[:3])

    @property
    def text(self) -> str:
        """The operation by its name and number."""
        return self.op if self.is_p2p else f"{self.op} {self.seq}"

    @property
    def where(self) -> str:
        """The same with its group."""
        return f"{self.text} of {self.group.text}"

    @property
    def place(self) -> tuple[Group, int, int]:
        """The operation that all its members share; sends and receives are told apart by rank."""
        return self.group, self.seq, self.rank if self.is_p2p else -1


def read_dump(path: str | Path) -> Dump:
    """A rank's dump. Raises InputError if it is none, or nothing says which rank it is of."""
    path = Path(path)
    events, about, damage = _content(path)
    parsed = (_entry(event, keep=i == len(events) - 1) for i, event in enumerate(events))
    entries = sorted((entry for entry in parsed if entry is not None), key=lambda entry: entry.record)
    groups = _groups(about.get("pg_config"))
    if events and not entries:
        raise InputError(f"{path}: {len(events)} entries without a collective; allowed: a dump of the Flight Recorder")
    rank, status = _rank(path, about, entries, groups), _status(about.get("pg_status"))
    return Dump(rank, path, tuple(entries), groups, status, (damage,) * bool(damage))


def _content(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Entries, everything beside them, and a note on damage; of a damaged file those entries that were complete."""
    content, torn = content_of(path, MAX_BYTES)
    was_pickled = is_pickle(content)
    if was_pickled:
        document, damage = read_plain_pickle(content)
    else:
        try:
            document, damage = json.loads(content.decode("utf-8-sig", "replace")), ""
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: damaged JSON: {error}; allowed: a dump of the Flight Recorder") from None
    if not damage:
        entries = document.get("entries") if isinstance(document, dict) else None
        if entries is None and isinstance(document, dict) and document.keys() & {"pg_config", "pg_status"}:
            entries = []  # of a rank that has recorded none
        if not isinstance(entries, list):
            what = "a pickle" if was_pickled else "JSON"
            raise InputError(f'{path}: {what} without a list "entries"; allowed: a dump of the Flight Recorder')
        return [entry for entry in entries if isinstance(entry, dict)], document, ""
    complete = [entry for entry in document if isinstance(entry, dict)]
    about = next(({"pg_config": entry} for entry in complete if _groups(entry)), {})
    entries = [entry for entry in complete if "record_id" in entry]
    if not entries:
        raise InputError(f"{path}: {torn or damage}; allowed: a dump of the Flight Recorder")
    return entries, about, f"{path}: damaged, {torn or damage}; what came before is used"


def _entry(event: dict[str, Any], *, keep: bool) -> Entry | None:
    """An entry, its frames kept if it has not completed or if ``keep``; None if its values are none of an entry."""
    try:
        said, state = event["profiling_name"], event.get("state")
        name = said.partition(":")[2] or said
        peers = _PEERS.match(name)
        group, status_id = event.get("process_group"), int(event.get("pg_id", -1))
        group = group[0] if isinstance(group, list | tuple) else group
        inputs = [prod(shape) for shape in event.get("input_sizes") or ()]
        created_ns = event.get("time_created_ns")
        return Entry(
            record=int(event.get("record_id", 0)),
            group=str(max(status_id, 0) if group is None else group),
            op=peers[1] if peers else name,
            collective_seq=int(event.get("collective_seq_id", event.get("seq_id", ""))),
            p2p_seq=int(event.get("p2p_seq_id", 0)),
            is_p2p=event.get("is_p2p") is True or peers is not None,
            peer=int(peers[3]) if peers else -1,
            own=int(peers[2]) if peers else -1,
            state=state if state in ("started", "completed") else "scheduled",
            created_s=created_ns * 1e-9 if is_number(created_ns) and created_ns > 0 else 0.0,
            sizes=_text(event.get("input_sizes")),
            dtypes=_text(event.get("input_dtypes")),
            items=int(min(sum(inputs), 1 << 60)) if inputs else -1,
            status_id=status_id,
            frames=_frames(event.get("frames")) if keep or state != "completed" else (),
        )
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        return None


def _whole(value: Any) -> int | None:
    """A whole number, also where JSON has it as text."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else None


def _text(value: Any) -> str:
    if not isinstance(value, list | tuple) or len(value) > 64:
        return ""
    text = str([list(part) if isinstance(part, tuple) else part for part in value])
    return text if len(text) < 400 else f"{text[:400]} ..."


def _frames(value: Any) -> tuple[str, ...]:
    frames = (frame for frame in (value[:MAX_FRAMES] if isinstance(value, list) else ()) if isinstance(frame, dict))
    parts = (tuple(str(frame.get(key, "?"))[:200] for key in ("name", "filename", "line")) for frame in frames)
    return tuple(f"{name} at {file}:{line}" for name, file, line in parts)


def _groups(config: Any) -> dict[str, Group]:
    groups = {}
    for name, about in config.items() if isinstance(config, dict) else ():
        if isinstance(about, dict) and (ranks := _ranks(about.get("ranks"))):
            description = about.get("desc")
            known = isinstance(description, str) and description not in {"", "undefined"}
            groups[str(name)] = Group(str(name), str(description) if known else "", ranks)
    return groups


def _ranks(value: Any) -> tuple[int, ...]:
    numbers = re.findall(r"\d{1,8}", value[: 1 << 22]) if isinstance(value, str) else value
    if not isinstance(numbers, list | tuple):
        return ()
    ranks = [_whole(number) for number in numbers]
    return tuple(dict.fromkeys(rank for rank in ranks if rank is not None and 0 <= rank < _MAX_RANK))


def _status(status: Any) -> dict[int, tuple[int, int]]:
    progress = {}
    for key, about in status.items() if isinstance(status, dict) else ():
        number = _whole(key)
        if number is not None and isinstance(about, dict):
            enqueued, completed = (_whole(about.get(f"last_{what}_collective")) for what in ("enqueued", "completed"))
            progress[number] = (-1 if enqueued is None else enqueued, -1 if completed is None else completed)
    return progress


def _rank(path: Path, about: dict[str, Any], entries: list[Entry], groups: dict[str, Group]) -> int:
    """Which rank a dump is of.

    The content says it by a key, by its point-to-point operations, or by groups that have only this rank in common.
    """
    common = set.intersection(*(set(group.ranks) for group in groups.values())) if groups else set()
    said = [_whole(about.get(key)) for key in ("rank", "global_rank")]
    inside = [rank for rank in said if rank is not None and 0 <= rank < _MAX_RANK]
    members = ((entry.own, groups[entry.group].ranks) for entry in entries if entry.group in groups)
    inside += [ranks[own] for own, ranks in members if 0 <= own < len(ranks)]
    inside += common if len(common) == 1 else ()
    if inside:
        return inside[0]
    for rank in (int(match[1]) for pattern in _IN_NAME if (match := pattern.search(path.name)) is not None):
        if not common or rank in common:
            return rank
    raise InputError(
        f"{path}: neither its content nor its name says which rank it is of; allowed: nccl_trace_rank_3, _dump_3"
    )


def units_of(dump: Dump, named: Mapping[str, Group]) -> list[Unit]:
    """A rank's operations in its order, in the groups ``named``.

    Entries of one coalesced operation share their numbers. Only its last entry knows its state; where that one has
    been left out because it completed, the rank went on after the others.
    """
    parts = defaultdict[tuple[str, int, int], list[Entry]](list)
    for entry in dump.entries:
        if entry.group in named:
            parts[entry.group, entry.collective_seq, entry.p2p_seq].append(entry)
    units = []
    for entries in parts.values():
        closing = [entry for entry in entries if entry.op == "coalesced" or entry.op.endswith("_coalesced")][-1:]
        inside = [entry for entry in entries if entry.op != "coalesced"] or entries
        left_out = len(entries) > 1 and not closing and entries[-1].record < dump.entries[-1].record
        group, is_p2p = named[entries[0].group], any(entry.is_p2p for entry in entries)
        peers = tuple((e.op, group.ranks[e.peer]) for e in inside if 0 <= e.peer < len(group.ranks))
        done = left_out or any(entry.is_done for entry in closing or entries)
        seq = entries[0].p2p_seq if is_p2p else entries[0].collective_seq
        kept = sorted(inside, key=lambda e: e.record)
        kept += [e for e in closing if e not in kept and e.state == "started"]
        units.append(Unit(dump.rank, group, seq, is_p2p, tuple(kept), peers, done))
    return sorted(units, key=lambda unit: unit.entries[0].record)
