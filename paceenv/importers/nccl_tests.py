"""Reader of bandwidth tables: what nccl-tests and rccl-tests print, and the all_reduce_bench.py of BigScience.

Launchers decorate lines (``srun -l``, ``mpirun --tag-output``, time stamps), and logs hold several tables with warnings
between their rows. So a row is found anywhere in a line, by its numbers and data type, and belongs to the last header.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.importers.packed import content_of
from paceenv.sim.cluster.collectives import Op

MAX_BYTES: Final = 1 << 28
"""Of a file, unpacked; a few times as much is held while it is read."""
_PROGRAMS: Final[dict[str, Op]] = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "broadcast_perf": "broadcast",
    "reduce_perf": "broadcast",  # a ring passes as much the other way
    "alltoall_perf": "all_to_all",
    "alltoallv_perf": "all_to_all",
    "sendrecv_perf": "send",
}
_NO_LAW: Final = ("gather_perf", "scatter_perf", "hypercube_perf")
_PROGRAM: Final = re.compile(rf"(?<![a-z_])({'|'.join([*_PROGRAMS, *_NO_LAW])})\b")
_COLUMNS: Final = re.compile(r"#\s+size\s+count\s+type\b.*\btime\b.*\balgbw\b.*")
_RANK: Final = re.compile(r"#\s+Rank\s+(\d+)\b(?:.*?\bon\s+(\S+)\s+device\b)?")
_ROW: Final = re.compile(
    r"(?<![\w.])(\d+)\s+(\d+)\s+(?:u?int\d{0,2}|half|float|double|char|b?fp?\d\w{0,8}|bfloat16)\b.*"
)
_WRONG: Final = "#wrong"
"""The column with the number of wrong elements of a row; versions before 2.13 have the largest error there."""
_RESULTS: Final = 4
"""Columns of one way of running: time, algbw, busbw, #wrong."""
_BENCH_SIZE: Final = re.compile(r"\b(\d+) data size: ([\d.]+) GB")
_BENCH_RANK: Final = re.compile(r"(?:^|[\s:>\]])(\d+):\s*$")
_BENCH_TIME: Final = re.compile(r"\bduration: ([\d.]+) sec")


@dataclass(frozen=True)
class Table:
    """One run of a program: sizes in bytes as nccl-tests counts them, seconds; a size may stand several times.

    ``paceenv.sim.cluster.collectives.volume`` counts bytes alike. ``nodes`` is how many hosts the header lists, 0 if it
    lists none; ``notes`` say what was left out.
    """

    op: Op
    members: int
    size_bytes: NDArray[np.float64]
    time_s: NDArray[np.float64]
    source: str
    nodes: int = 0
    notes: tuple[str, ...] = ()


@dataclass
class _Open:
    """A table whose rows are being read: size, time, algorithm and bus bandwidth."""

    ways: int
    line: int
    program: str
    host_of: dict[int, str]
    is_checked: bool
    rows: list[tuple[float, float, float, float]] = field(default_factory=list)
    wrong_bytes: list[int] = field(default_factory=list)
    redop: str = ""

    def add(self, text: str, where: str) -> None:
        """A line with a row, whatever columns lie between."""
        words, wanted = text.split(), self.ways * _RESULTS
        results = words[3:][-wanted:]
        self.redop = words[3] if len(words) > 3 + wanted else ""
        try:
            size, time_us, algbw, busbw = (float(word) for word in (words[0], *results[:3]))
        except ValueError:
            time_us = math.nan
        if len(results) < wanted or not 0.0 < time_us < math.inf:
            raise InputError(f"{where}: {text.strip()!r}; allowed: size, count, type ... time > 0, algbw, busbw, wrong")
        wrong = any(word.isdecimal() and int(word) > 0 for word in results[_RESULTS - 1 :: _RESULTS])
        if wrong and self.is_checked:
            self.wrong_bytes.append(int(size))
        elif size > 0:
            self.rows.append((size, time_us * 1e-6, algbw, busbw))

    def table(self, name: str, where: str) -> Table:
        """The whole of it; ``name`` of the file may tell the program."""
        wrong, rows = self.wrong_bytes, np.array(sorted(self.rows), np.float64).reshape(-1, 4)
        if not self.rows:
            failed = f"all {len(wrong)} rows failed their own check ({_WRONG} > 0)"
            raise InputError(f"{where}: {failed if wrong else '0 sizes; allowed: at least 1'}")
        op, members = self._operation(name, rows[-1], where)
        note = ""
        if wrong:
            sizes = ", ".join(map(str, wrong[:4])) + (", ..." if len(wrong) > 4 else "")
            count = f"{len(wrong)} row{'s' if len(wrong) > 1 else ''} of {len(wrong) + len(rows)}"
            failed = f"failed their own check ({_WRONG} > 0; bytes {sizes})"
            note = f"{where}: {count} {failed} and are left out: look at it first"
        hosts = set(self.host_of.values()) - {""}
        return Table(op, members, rows[:, 0], rows[:, 1], where, len(hosts), (note,) * bool(note))

    def _operation(self, name: str, last: NDArray[np.float64], where: str) -> tuple[Op, int]:
        """Which collective among how many: from program name and rank list, else from bus over algorithm bandwidth.

        That ratio is 2(n-1)/n for an all-reduce and (n-1)/n for the others, as nccl-tests defines it.
        """
        in_name = _PROGRAM.search(name)
        program = self.program or (in_name[1] if in_name is not None else "")
        if program in _NO_LAW:
            raise InputError(f"{where}: {program}, for which there is no law; allowed: {', '.join(_PROGRAMS)}")
        ratio = last[3] / last[2] if last[2] > 0 else math.nan
        op: Op = "all_reduce" if ratio >= 1.0 - 1e-6 and self.redop not in {"none", ""} else "all_gather"
        op = _PROGRAMS.get(program, op)
        passes = 2.0 if op == "all_reduce" else 1.0
        members = len(self.host_of) or (round(passes / (passes - ratio)) if 0.0 < ratio < passes else 0)
        members = max(members, 2) if op == "send" else members
        if members < 2:
            raise InputError(f"{where}: {members} ranks; allowed: at least 2, listed as '# Rank  0 ...' lines")
        return op, members


def read_tables(path: str | os.PathLike[str]) -> list[Table]:
    """All tables in a file, out-of-place, none if it is not the output of these programs; rows of size 0 are left out.

    Raises InputError if a table is damaged, or of a program for which there is no law.
    """
    path = Path(path)
    try:
        text = content_of(path, MAX_BYTES)[0].decode("utf-8")
    except (InputError, UnicodeDecodeError):
        return []
    if not (_COLUMNS.search(text) or (_BENCH_SIZE.search(text) and _BENCH_TIME.search(text))):
        return []
    opened = _split(text, str(path))
    where = [f"{path}, table {i + 1} in line {one.line}" for i, one in enumerate(opened)] if len(opened) > 1 else [path]
    tables = [one.table(path.name, str(at)) for one, at in zip(opened, where, strict=False)]
    return tables or [_benchmark(text, str(path))]


def _split(text: str, where: str) -> list[_Open]:
    """Tables in the order of their headers."""
    tables, host_of, program = list[_Open](), dict[int, str](), ""
    for number, line in enumerate(text.splitlines(), 1):
        if (named := _PROGRAM.search(line)) is not None:
            program = named[1]
        if (header := _COLUMNS.search(line)) is not None:
            ways = max(header[0].count("algbw"), 1)
            tables.append(_Open(ways, number, program, host_of, _WRONG in header[0]))
            host_of = {}
        elif (ranked := _RANK.search(line)) is not None:
            host_of[int(ranked[1])] = ranked[2] or ""
        elif tables and (row := _ROW.search(line)) is not None:
            tables[-1].add(row[0], f"{where}, line {number}")
    return tables


def _benchmark(text: str, where: str) -> Table:
    """The output of all_reduce_bench.py: one size, several times on every rank; a rank's first one warms up."""
    sizes = {int(rank): float(size) for rank, size in _BENCH_SIZE.findall(text)}
    times: dict[int, list[float]] = defaultdict(list)
    rank = -1
    for line in text.splitlines():
        if (timed := _BENCH_TIME.search(line)) is not None:
            times[rank].append(float(timed[1]))
        elif (ranked := _BENCH_RANK.search(line)) is not None and int(ranked[1]) in sizes:
            rank = int(ranked[1])
    kept = [time_s for one in times.values() for time_s in one[1:] if time_s > 0.0]
    if len(sizes) < 2 or len(set(sizes.values())) > 1 or not kept:
        named = f"{len(sizes)} ranks, sizes {sorted(set(sizes.values()))[:4]} GB, {len(kept)} times after the first"
        raise InputError(f"{where}: {named}; allowed: at least 2 ranks with one size, and a time after that of warm-up")
    return Table("all_reduce", len(sizes), np.full(len(kept), next(iter(sizes.values())) * 1e9), np.array(kept), where)
