"""What text says of a job that hangs or died: PyTorch's watchdog, ``NCCL RAS``, launchers that report an exit code.

The watchdog's lines are a dump of the Flight Recorder with less in it: of each rank the last collective that it
enqueued and completed, the one that timed out, and where its program stood; so they become such dumps.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceenv.importers.flight_recorder import MAX_FRAMES, Dump, Entry, Group, ranks_text
from paceenv.importers.log_text.log_lines import read_lines
from paceenv.importers.nccl_info import MARK, say_network

_RANK: Final = re.compile(r"\b[Rr]ank (\d{1,7})\]")
_GROUP: Final = re.compile(r"\[PG (?:ID )?(\w{1,20})(?: PG GUID (\w{0,40})(?:\(([^)]{0,60})\))?)? Rank \d")
_WORK: Final = re.compile(
    r"WorkNCCL\(SeqNum=(\d{1,15}), OpType=(\w{1,40})(?:, NumelIn=(\d{1,15}), NumelOut=(\d{1,15}))?"
)
_LAST: Final = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d{1,15}), last completed (?:NCCL )?work: (-?\d{1,15})", re.IGNORECASE
)
_RAN_MS: Final = re.compile(r"ran for (\d{1,12}) milliseconds")
_FRAME: Final = re.compile(r'^\s*File "([^"]{1,300})", line (\d{1,7}), in (\S{1,100})')
_EXIT: Final = re.compile(
    r"(?:exit ?code[^\w-]{0,3}|[Ee]xited with exit code|exited on signal|exit status|[Ss]ignal) ?(-?\d{1,3})\b"
)
_LOCAL_RANK: Final = re.compile(r"(?:local_rank|task)s?[: ]{1,2}(\d{1,7})")
_DIED: Final = ("exitcode", "exit code", "on signal", "SIGABRT", "SIGKILL", "SIGSEGV", "core dumped", "Signal ")
_ENDED: Final = re.compile(r"\bexit ?code\W{0,3}0\b")
_MISSING: Final = re.compile(r"Process \d+ on node (\S+) managing GPUs? ([\d, ]+)")
_MISSING_RANKS: Final = re.compile(r"The missing ranks?: ([\d, \-]+)")
_COUNTS: Final = re.compile(r"(\d+) ranks? ha(?:s|ve) launched up to operation (\d+)")
_OF_RANK: Final = re.compile(r"Rank (\d+) -- GPU (\d+) managed by process \d+ on node (\S+)")
_RAS: Final = "Job summary"
MAX_RANKS: Final = 65_536
MAX_RAS: Final = 20_000
"""Lines."""


@dataclass
class _Rank:
    """What the lines of one rank and group say; -1 for unknown."""

    seq: int = -1
    op: str = ""
    items: tuple[int, int] = (-1, -1)
    enqueued: int = -1
    completed: int = -1
    ran_ms: float = 0.0


class HangText:
    """Collects what the text files of one job say of a hang or a death."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[str, str], dict[int, _Rank]] = {}
        self.frames: dict[int, list[str]] = {}
        self.exits: dict[str, None] = {}
        self._ras: list[str] = []
        self._info: list[str] = []
        self._path = Path()

    def read(self, path: Path) -> bool:
        """Look at all lines of a file; whether they say anything."""
        before, in_ras = (len(self.ranks), len(self.exits), len(self._ras), len(self._info)), False
        for line in read_lines(path):
            text = line.text
            if "ProcessGroupNCCL" in text or "Watchdog caught" in text:
                _watchdog(text, line.rank, self)
            elif "File" in text and (frame := _FRAME.match(text)) is not None:
                frames = self.frames.setdefault(-1 if line.rank is None else line.rank, [])
                frames.insert(0, f"{frame[3]} at {frame[1]}:{frame[2]}")
                del frames[MAX_FRAMES:]
            elif any(word in text for word in _DIED) and not _ENDED.search(text):
                _death(text, line.rank, self)
            elif MARK in text and len(self._info) < MAX_RAS:
                self._info.append(text)
            in_ras = in_ras or text.startswith(_RAS)
            if in_ras and len(self._ras) < MAX_RAS:
                self._ras.append(text)
        found = (len(self.ranks), len(self.exits), len(self._ras), len(self._info)) != before
        self._path = path if found else self._path
        return found

    @property
    def dumps(self) -> tuple[Dump, ...]:
        """The watchdog's lines."""
        return _dumps(self._path, self)

    @property
    def network(self) -> str:
        """What the lines of NCCL say that the job uses, "" if nothing."""
        return say_network(self._info)

    @property
    def said(self) -> tuple[str, ...]:
        """Sentences on what else is known."""
        return (*_ras(self._ras), *_deaths(self.exits))


def _watchdog(text: str, tag: int | None, found: HangText) -> None:
    ranked = _RANK.search(text)
    rank = int(ranked[1]) if ranked is not None else tag
    work, last = _WORK.search(text), _LAST.search(text)
    if rank is None or rank >= MAX_RANKS or (work is None and last is None):
        return
    named = _GROUP.search(text)
    group = (named[1], named[3] or named[2] or "") if named is not None else ("", "")
    of_rank = found.ranks.setdefault(group, {}).setdefault(rank, _Rank())
    if work is not None:
        of_rank.seq, of_rank.op = int(work[1]), work[2].strip("_").lower()
        of_rank.items = int(work[3] or -1), int(work[4] or -1)
        ran = _RAN_MS.search(text)
        of_rank.ran_ms = float(ran[1]) if ran is not None else 0.0
    if last is not None:
        of_rank.enqueued, of_rank.completed = int(last[1]), int(last[2])


def _death(text: str, rank: int | None, found: HangText) -> None:
    code, local = _EXIT.search(text), _LOCAL_RANK.search(text)
    named = re.search(r"\bSIG(?!TERM|INT|CHLD)[A-Z]{2,7}\b", text)
    if named is not None:
        how = named[0]
    elif code is not None and code[1] != "0":
        how = _code(int(code[1]))
    elif "core dumped" in text:
        how = "a signal (core dumped)"
    else:
        return
    who = f"rank {rank}" if rank is not None else f"local rank {local[1]}" if local is not None else "a process"
    if len(found.exits) < 64:
        found.exits.setdefault(f"{who} ended with {how}")


def _code(code: int) -> str:
    number = -code if code < 0 else code - 128 if code > 128 else 0
    names = {one.value: one.name for one in signal.Signals}
    return f"exit code {code}" + (f" ({names[number]})" if number in names else "")


def _deaths(exits: Iterable[str]) -> tuple[str, ...]:
    said = list(exits)
    coded = [one for one in said if "exit code" in one]
    shown = coded or said
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return (f"the job died: {', '.join(shown[:3])}{more}",) if shown else ()


def _ras(lines: list[str]) -> tuple[str, ...]:
    """What NCCL's RAS says: processes that do not answer, and ranks that launched fewer operations than others."""
    text, said = "\n".join(lines), list[str]()
    missing = _MISSING_RANKS.findall(text)
    nodes = [f"node {node}, GPU {gpu.strip()}" for node, gpu in _MISSING.findall(text)]
    if missing or nodes:
        ranks = sorted({int(rank) for part in missing for rank in _expand(part)})
        where = f" ({'; '.join(nodes[:4])})" if nodes else ""
        many = len(ranks or nodes) > 1
        who = f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}" if ranks else f"{len(nodes)} process"
        said.append(
            f"{who}{where} {'do' if many else 'does'} not answer, and {'have' if many else 'has'} died or stand still"
        )
    for part in re.split(r"\n\s*#", text):
        counts = sorted((int(op), int(count)) for count, op in _COUNTS.findall(part))
        if len(counts) > 1:
            behind = [f"rank {rank} (node {node}, GPU {gpu})" for rank, gpu, node in _OF_RANK.findall(part)]
            who = ", ".join(behind[:4]) + (f" and {len(behind) - 4} more" if len(behind) > 4 else "")
            (least, few), (most, _) = counts[0], counts[-1]
            said.append(f"{who or f'{few} ranks'} launched no collective after {least}, the others are in {most}")
    return tuple(dict.fromkeys(said))


def _expand(text: str) -> Iterable[int]:
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            yield from range(int(first), min(int(last) if last.isdecimal() else int(first), int(first) + MAX_RANKS) + 1)


def _dumps(path: Path, found: HangText) -> tuple[Dump, ...]:
    """The watchdog's lines as dumps, one of each rank, groups of those ranks that are named.

    A line that names no group is of the rank's only one.
    """
    by_group = dict(found.ranks)
    unnamed = by_group.pop(("", ""), {}) if len(by_group) > 1 else {}
    for rank, one in unnamed.items():
        for of_group in by_group.values():
            if (known := of_group.get(rank)) is not None and known.seq < 0 <= one.seq:
                known.seq, known.op, known.items, known.ran_ms = one.seq, one.op, one.items, one.ran_ms
                break
        else:
            next(iter(by_group.values())).setdefault(rank, one)
    entries: dict[int, list[Entry]] = {}
    groups: dict[int, dict[str, Group]] = {}
    status: dict[int, dict[int, tuple[int, int]]] = {}
    for number, ((name, said), of_group) in enumerate(by_group.items()):
        ranks = sorted(of_group)
        if (len(by_group) == 1 or name == "0" or "default" in said) and len(ranks) > ranks[-1] // 2:
            ranks = list(range(ranks[-1] + 1))  # what is said of no line is a rank, too
        group = Group(name or "0", said if said != name else "", tuple(ranks))
        for rank, one in of_group.items():
            groups.setdefault(rank, {})[group.name] = group
            frames = tuple(found.frames.get(rank, ()))
            completed = one.completed if one.completed >= 0 else max(one.seq - 1, 0)
            if one.seq >= 0:
                entry = _entry(len(entries.get(rank, ())), group.name, one, one.seq, "started", number, frames)
            else:
                entry = _entry(len(entries.get(rank, ())), group.name, one, completed, "completed", number, frames)
            entries.setdefault(rank, []).append(entry)
            # An older version has no count of its own: the one that timed out was the last.
            status.setdefault(rank, {})[number] = (max(one.enqueued, one.seq), completed)
    return tuple(
        Dump(rank, path, tuple(of_rank), groups[rank], status[rank], of_watchdog=True)
        for rank, of_rank in sorted(entries.items())
    )


def _entry(record: int, group: str, one: _Rank, seq: int, state: str, number: int, frames: tuple[str, ...]) -> Entry:
    return Entry(
        record=record, group=group, op=one.op or "collective", collective_seq=seq, p2p_seq=0, is_p2p=False, peer=-1,
        own=-1, state=state, created_s=0.0, started_s=None, completed_s=None, duration_ms=None,
        sizes=f"[[{one.items[0]}]]" if one.items[0] >= 0 else "", dtypes="", bytes=0, items=one.items,
        status_id=number, frames=frames,
    )  # fmt: skip
