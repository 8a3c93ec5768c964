"""What text says of a job that hangs or died: PyTorch's watchdog, ``NCCL RAS``, launchers that report an exit code.

The watchdog's lines are a dump of the Flight Recorder with less in it: of each rank the last collective that it
enqueued and completed, the one that timed out, and where its program stood; so they become such dumps.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceenv.core.wording import IN_VAIN, name_ranks, read_list
from paceenv.importers.flight_recorder import MAX_FRAMES, Dump, Entry, Group
from paceenv.importers.log_text.log_lines import read_lines
from paceenv.importers.nccl_info import MARK

_RANK: Final = re.compile(r"\[rank(\d{1,7})\]")
_RANK_IN_GROUP: Final = re.compile(r"\bRank (\d{1,7})\]")
"""The rank in the group, which is the job's where nothing else names it."""
_GROUP: Final = re.compile(r"\[PG (?:ID )?(\w{1,20})(?: PG GUID (\w{0,40}))?(?: ?\(([^)]{0,60})\))? Rank \d")
_STUCK: Final = re.compile(r"watchdog got stuck for (\d{1,9}) seconds|Heartbeat monitor timed out")
_WORK: Final = re.compile(r"WorkNCCL\(SeqNum=(\d{1,15}), OpType=(\w{1,40})(?:, NumelIn=(\d{1,15}))?")
_AT: Final = re.compile(r"by watchdog at work(?: sequence id)?: (\d{1,15})")
_LAST: Final = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d{1,15}), last completed (?:NCCL )?work: (-?\d{1,15})", re.IGNORECASE
)
_FRAME: Final = re.compile(r'^\s*File "([^"]{1,300})", line (\d{1,7}), in (\S{1,100})')
_CODE: Final = re.compile(
    r"(?:exit(?:ed|s)?(?: with)?[ _-]?(?:code|status)|\breturn[ _-]?code)[^\w-]{0,6}(-?\d{1,3})\b", re.IGNORECASE
)
_SIGNAL: Final = re.compile(r"(?:on|by|[Cc]aught) signal (\d{1,2})\b(?!\.)|\b(SIG(?:ABRT|KILL|SEGV|BUS|FPE|ILL))\b")
_OTHER_END: Final = re.compile(r"core dumped|oom[_-]kill|Out Of Memory|CUDA out of memory|Segmentation fault|Bus error")
_RAISED: Final = re.compile(r"[\w.]{0,100}(?:Error|Exception|Interrupt)(?:: .{1,200}|$)")
_BEHIND: Final = re.compile(r"(ranks? [\d, -]{1,80}) (?:raised nothing, and|ha(?:d|s|ve) not started the collective)")
"""What the agent of a live job says of ranks that others wait for."""
_GOES_ON: Final = ": steps go on"
_WHO: Final = re.compile(r"(?<![a-z])((?:local[_ ])?rank|task|process rank)s?\W{1,5}(\d{1,7})\b", re.IGNORECASE)
_WHO_ABOVE: Final = re.compile(r"^\W{0,12}rank\W{1,12}(\d{1,7})\b")
_ABOVE: Final = 6
"""Lines below one that names a rank, as launchers print a block for each."""
_MISSING: Final = re.compile(r"Process \d+ on node (\S+) managing GPUs? ([\d, ]+)")
_MISSING_RANKS: Final = re.compile(r"The missing ranks?: ([\d, \-]+)")
_COUNTS: Final = re.compile(r"(\d+) ranks? ha(?:s|ve) launched up to operation (\d+)")
_COUNTED: Final = re.compile(r"different (\w+) operation counts")
_OF_RANK: Final = re.compile(r"Rank (\d+) -- GPU (\d+) managed by process \d+ on node (\S+)")
_STATUS: Final = re.compile(r"^\s*\d+(?:\s+[\d-]+){5}\s+([A-Z]+\s+[A-Z,]+)\s*$")
_RAS: Final = "Job summary"
_FIRST: Final = "Root Cause"
"""What torchrun prints above the process that failed first."""
MAX_RANKS: Final = 65_536
MAX_LINES: Final = 20_000


@dataclass
class _Rank:
    """What the lines of one rank and group say; -1 for unknown."""

    seq: int = -1
    op: str = ""
    items: int = -1
    enqueued: int = -1
    completed: int = -1

    def was_behind(self, seq: int) -> bool:
        """Whether it had not enqueued this when it first spoke of itself: a time-out there is of a later moment."""
        return 0 <= self.enqueued < seq


class HangText:
    """Collects what the text files of one job say of a hang or a death; ``info`` are lines on what NCCL uses."""

    def __init__(self) -> None:
        self.info: list[str] = []
        self._ranks: dict[tuple[str, str, str], dict[int, _Rank]] = defaultdict(lambda: defaultdict(_Rank))
        self._stuck: dict[int, None] = {}
        self._first = ""
        self._frames: dict[int, list[str]] = defaultdict(list)
        self._exits: dict[str, str] = {}
        self._raised: dict[str, str] = {}
        self._behind, self._stands = "the rank that raised nothing", ""
        self._ras: list[str] = []
        self._path = Path()

    def read(self, path: Path) -> bool:
        """Look at all lines of a file; whether they say anything."""
        before, in_ras, above, is_first = self._said(), False, (-_ABOVE, ""), False
        for number, line in enumerate(read_lines(path)):
            text = line.text
            if "ProcessGroupNCCL" in text or "Watchdog caught" in text:
                self._watchdog(line.tagged, line.rank)
            elif "File" in text and (frame := _FRAME.match(text)) is not None:
                frames = self._frames[-1 if line.rank is None else line.rank]
                frames.insert(0, f"{frame[3]} at {frame[1]}:{frame[2]}")
                del frames[MAX_FRAMES:]
            elif (behind := _BEHIND.search(text)) is not None:
                self._behind, self._stands = behind[1], text.partition("]: ")[2] or self._stands
            elif _GOES_ON in text:
                self._stands = ""
            elif (named := _WHO_ABOVE.match(text)) is not None and "xit" not in text:
                above = number, f"rank {named[1]}"
                self._first = above[1] if is_first else self._first
            elif MARK in text:
                self.info += [text] * (len(self.info) < MAX_LINES)
            else:
                self._death(text, line.rank, above[1] if number - above[0] < _ABOVE else "")
            in_ras, is_first = in_ras or text.startswith(_RAS), is_first or text.startswith(_FIRST)
            self._ras += [text] * (in_ras and len(self._ras) < MAX_LINES)
        says_anything = self._said() != before
        self._path = path if says_anything else self._path
        return says_anything

    def _said(self) -> tuple[int, ...]:
        return len(self._ranks), len(self._exits), len(self._ras), len(self.info), len(self._stuck), len(self._stands)

    def _watchdog(self, text: str, tag: int | None) -> None:
        ranked, work, at, last = (
            _RANK.search(text) or _RANK_IN_GROUP.search(text), *(form.search(text) for form in (_WORK, _AT, _LAST))
        )  # fmt: skip
        rank = int(ranked[1]) if ranked is not None else tag
        if rank is None or rank >= MAX_RANKS:
            return
        if _STUCK.search(text) is not None:
            self._stuck[rank] = None
        if not (work or at or last):
            return
        named = _GROUP.search(text)
        one = self._ranks[(named[1], named[2] or "", named[3] or "") if named is not None else ("", "", "")][rank]
        seq = int((work or at or (0, 0))[1])
        if one.was_behind(seq):
            return
        if work is not None and not 0 <= one.seq < seq:  # of several that timed out it waits in the first
            one.seq, one.op = seq, work[2].strip("_").lower()
            one.items = int(work[3] or -1)
        elif at is not None and one.seq < 0:
            one.seq = seq
        if last is not None and one.enqueued < 0:
            one.enqueued, one.completed = int(last[1]), int(last[2])

    def _death(self, text: str, rank: int | None, above: str) -> None:
        """An exit code or a signal, and whose it is: by a tag, in the same line, or in a line above."""
        if rank is not None and (raised := _RAISED.match(text)) is not None:
            self._raised[f"rank {rank}"] = raised[0]
        code, caught, other = _CODE.search(text), _SIGNAL.search(text), _OTHER_END.search(text)
        if not (code or caught or other):
            return
        named = _WHO.search(text)
        who = f"{named[1].lower().replace('_', ' ').replace('process ', '')} {named[2]}" if named is not None else above
        who = f"rank {rank}" if rank is not None and not who.startswith("rank") else who or "a process"
        if code is not None:
            number = int(code[1])
        else:
            number = 0 if caught is None else -int(caught[1] or signal.Signals.__members__.get(caught[2], 0))
        if number not in {0, -signal.SIGTERM} and len(self._exits) < MAX_LINES:  # launchers stop the others themselves
            caught_by = -number if number < 0 else number - 128
            name = f" ({signal.Signals(caught_by).name})" if caught_by in {*signal.Signals} else ""
            self._exits[who] = f"exit code {number}{name}"
        elif other is not None and not (code or caught):
            self._exits.setdefault(who, other[0])

    @property
    def said(self) -> tuple[str, ...]:
        """Sentences on what is known besides the watchdog's lines."""
        exits = dict(self._exits)
        if len(exits) > 1:
            exits.pop("a process", None)  # launchers say it again of all
        by_code: dict[str, list[str]] = defaultdict(list)
        for who, how in exits.items():
            by_code[how].append(who)
        ends = []
        for how, ended in by_code.items():
            ranks = [int(who.removeprefix("rank ")) for who in ended if who.startswith("rank ")]
            named = [name_ranks(ranks)] * bool(ranks) + [who for who in ended if not who.startswith("rank ")]
            ends.append(f"{', '.join(named[:4])}{' and more' * (len(named) > 4)} ended with {how}")
        first = f"{self._first} first; " if self._first in self._exits and len(by_code) > 1 else ""
        known = [who for who in exits if who.startswith("rank ")]
        one = self._first or (known[0] if len(known) == 1 else "")
        raised = f"; {one} raised {self._raised[one]}" if one in self._raised else ""
        raised += f", so it waited in vain: look at {self._behind}" * any(words in raised for words in IN_VAIN)
        died = (f"the job died: {first}{'; '.join(ends[:4])}{raised}",) if ends else ()
        stuck = (
            f"the watchdog of {name_ranks(self._stuck)} got stuck: a call of CUDA or NCCL, or Python's lock (GIL), "
            "does not return on the host; no collective is named, and which rank it began with cannot be told",
        ) * (bool(self._stuck) and not any(self._ranks.values()))
        stands = (f"the job stood still when its log ended: {self._stands}",) * bool(self._stands and not died)
        return (*_ras(self._ras), *stuck, *died, *stands)

    @property
    def dumps(self) -> tuple[Dump, ...]:
        """The watchdog's lines as dumps, one of each rank, groups of those ranks that are named.

        A line that names no group is of the rank's only one.
        """
        by_group = {name: dict(ranks) for name, ranks in self._ranks.items()}
        unnamed = by_group.pop(("", "", ""), {}) if len(by_group) > 1 else {}
        for rank, one in unnamed.items():
            named = [of_group[rank] for of_group in by_group.values() if rank in of_group]
            of_rank = [other for other in named if not (other.op or other.was_behind(one.seq))]
            known = next((other for other in of_rank if other.seq == one.seq), of_rank[0] if of_rank else None)
            if known is not None:
                known.seq, known.op, known.items = one.seq, one.op, one.items
            elif not any(other.was_behind(one.seq) for other in named):
                next(iter(by_group.values())).setdefault(rank, one)
        entries: dict[int, list[Entry]] = defaultdict(list)
        groups: dict[int, dict[str, Group]] = defaultdict(dict)
        status: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        for number, ((own, name, said), of_group) in enumerate(by_group.items()):
            ranks = sorted(of_group)
            is_whole = (len(by_group) == 1 or "0" in {own, name} or "default" in said) and len(ranks) > ranks[-1] // 2
            if is_whole:
                ranks = list(range(ranks[-1] + 1))  # what is said of no line is a rank, too
            alike = sum(other == said for _, _, other in by_group) > 1
            group = Group(name or own, f"{said} {name}" if said and alike else said, tuple(ranks), is_whole)
            ops = {one.seq: one.op for one in of_group.values() if one.op}
            for rank, one in of_group.items():
                groups[rank][group.name] = group
                completed = one.completed if one.completed >= 0 else max(one.seq - 1, 0)
                entries[rank].append(
                    Entry(
                        record=len(entries[rank]), group=group.name, op=one.op or ops.get(one.seq, "collective"),
                        collective_seq=one.seq if one.seq >= 0 else completed, items=one.items, status_id=number,
                        state="started" if one.seq >= 0 else "completed", frames=tuple(self._frames.get(rank, ())),
                        sizes=f"[[{one.items}]]" if one.items >= 0 else "",
                    )
                )  # fmt: skip
                # An older version has no count of its own: the one that timed out was the last.
                status[rank][number] = (max(one.enqueued, one.seq), completed)
        return tuple(
            Dump(rank, self._path, tuple(of_rank), groups[rank], status[rank], of_watchdog=True)
            for rank, of_rank in sorted(entries.items())
        )


def _ras(lines: Iterable[str]) -> tuple[str, ...]:
    """What NCCL's RAS says: processes that do not answer, and ranks that launched fewer operations than others."""
    missing, places, said, states = set[int](), dict[str, None](), list[str](), dict[str, None]()
    op, counts = "collective", list[tuple[int, int, list[str]]]()
    for text in [*lines, "#"]:
        if text.lstrip().startswith("#") or "======" in text:  # of another communicator
            said += [_behind(op, counts)] if len({at for at, _, _ in counts}) > 1 else []
            counts = []
        elif (counted := _COUNTED.search(text)) is not None:
            op = counted[1]
        elif (count := _COUNTS.search(text)) is not None:
            counts.append((int(count[2]), int(count[1]), []))
        elif (status := _STATUS.match(text)) is not None:
            states.setdefault(" ".join(status[1].split()))
        elif (process := _MISSING.search(text)) is not None:
            places.setdefault(f"node {process[1]}, GPU {process[2].strip()}")
        elif (rank := _OF_RANK.search(text)) is not None:
            if counts:
                counts[-1][2].append(rank[1])  # ranks stand below their count, where they are few
            else:
                missing.add(int(rank[1]))
        elif (ranks := _MISSING_RANKS.search(text)) is not None:
            missing |= set(read_list(ranks[1].replace(" ", "").rstrip(",-")))
    missing = {rank for rank in missing if rank < MAX_RANKS}
    if missing or places:
        many = max(len(missing), len(places)) > 1
        who = name_ranks(missing) if missing else "processes" if many else "a process"
        where = f" ({'; '.join(list(places)[:4])})" if places else ""
        silent = "do not answer: they have" if many else "does not answer: it has"
        said.insert(0, f"{who}{where} {silent} died or hangs")
    if states and not said:
        said = [f"NCCL RAS says {', '.join(states)}, and names no rank"]
        if [*states] == ["RUNNING OK"]:
            said = ["NCCL RAS: all ranks answer, with equal counts of operations: what hangs does not show there"]
    return tuple(dict.fromkeys(said))


def _behind(op: str, counts: list[tuple[int, int, list[str]]]) -> str:
    """Which ranks launched fewer operations; those that RAS lists may be the ones ahead."""
    last = max(at for at, _, _ in counts)
    behind, ahead = ([one for one in counts if (one[0] < last) == is_behind] for is_behind in (True, False))
    late, early = ([int(rank) for _, _, listed in part for rank in listed] for part in (behind, ahead))
    who = name_ranks(late) if late else f"{sum(count for _, count, _ in behind)} ranks"
    others = f"{name_ranks(early) if early else 'the others'} {'is' if len(early) == 1 else 'are'}"
    return f"{who} launched no {op} after {min(at for at, _, _ in behind)}, {others} in {last}"
