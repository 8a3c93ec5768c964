"""Lines of a text log as the program wrote them: without colours, redrawn progress bars and launchers' tags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from paceenv.importers.packed import Unpacked

MAX_LINE: Final = 8192
"""Characters of a line that are looked at; longer ones are configurations or damage."""
_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-9;?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\-_])")
_TAG: Final = re.compile(
    r"[ \t]{0,8}(?:"
    r"(?P<srun>\d{1,6}):[ \t]"  # srun -l
    r"|\[(?:[^\[\],<>\s]{1,96},)?(?P<mpi>\d{1,6})\]<std(?:out|err|diag)>:?[ \t]?"  # mpirun --tag-output
    r"|\[(?:rank[ _]?|default|trainer|worker)(?P<torch>\d{1,6})\]:?[ \t]?"  # torchrun, and torch's own tags
    r")"
)
_DATE: Final = re.compile(
    r"(?:(?P<y>\d{4})[-/](?P<m>\d\d)[-/](?P<d>\d\d)|(?<!\d)(?P<m2>\d\d?)/(?P<d2>\d\d?)(?:/(?P<y2>\d{4}))?"
    r"|\b[IWEF](?P<m3>\d\d?)(?P<d3>\d\d))[ T_,-](?P<clock>\d\d:\d\d:\d\d)"
    r"(?:[.,](?P<part>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
"""Year first; month first with or without a year (mmengine, detectron2); or as glog has it."""
_EPOCH: Final = re.compile(
    r"(?:^\W{0,8}(?:(?:debug|info|warning|error)\W{1,8})?"
    r"|\b(?:(?:wall|unix|epoch)_?)?(?:time(?:_?stamp)?|ts|clock|date|now|at)\W{1,8})"
    r"(1[0-9]{9})(\.\d{1,9}|\d{3})?(?![\d.])",
    re.IGNORECASE,
)
"""Seconds since 1970: first in the line, or behind a word for time; elsewhere such a number counts tokens."""
_MAX_HEAD: Final = 256
"""Characters from the beginning of a line in which a time stamp is looked for."""


class Line(NamedTuple):
    """A line: its text, the rank that a launcher's tag names, or None, and the text with that tag."""

    text: str
    rank: int | None
    tagged: str = ""


class Number(NamedTuple):
    """A field's value in its unit, and the unit of its last digit.

    A time stamp is in seconds since 1970, as if UTC where no zone is given.
    """

    value: float
    digit: float


def read_lines(path: Path) -> Iterator[Line]:
    """All lines of a file, gzipped or not; bytes that are no text are replaced, a cut gzip ends the lines.

    Memory does not grow with the file. A carriage return ends a line, as each redraw of a progress bar is one.

    Raises InputError: the file cannot be read.
    """
    return map(_plain, Unpacked(path).lines(4 * MAX_LINE))


def _plain(raw: bytes) -> Line:
    text = raw[: 4 * MAX_LINE].decode("utf-8", "replace")[:MAX_LINE].lstrip("\ufeff")  # Excel begins a file with it
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    rank, tagged = None, text
    for _ in range(3):  # a launcher may tag what another has tagged
        tag = _TAG.match(text)
        if tag is None:
            break
        rank = int(tag["srun"] or tag["mpi"] or tag["torch"]) if rank is None else rank
        text = text[tag.end() :]
    return Line(text, rank, tagged)


def without_dates(text: str) -> str:
    """A line without its dates, whose numbers are nothing else."""
    return _DATE.sub(" | ", text)


def stamp_in(text: str) -> Number | None:
    """The time stamp at the beginning of a line, if there is one."""
    head = text[:_MAX_HEAD]
    if (match := _DATE.search(head)) is not None:
        parts = ("y", "y2", "1972"), ("m", "m2", ""), ("d", "d2", "")
        year, month, day = (match[a] or match[b] or c for a, b, c in parts)
        clock = map(int, match["clock"].split(":"))
        try:
            zone = datetime.strptime(match["zone"], "%z").tzinfo if match["zone"] else UTC
            at = datetime(int(year), int(month or match["m3"]), int(day or match["d3"]), *clock, tzinfo=zone)  # type: ignore[misc, arg-type]
        except ValueError:
            return None
        fraction = match["part"] or ""
        whole_s = at.timestamp()
    elif (match := _EPOCH.search(head)) is not None:
        fraction = (match[2] or "").lstrip(".")
        whole_s = float(match[1])
    else:
        return None
    clock_s = whole_s + int(fraction or 0) / 10 ** len(fraction)
    return Number(clock_s, 10.0 ** -len(fraction))
