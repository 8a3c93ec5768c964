"""Reader of bandwidth tables: what nccl-tests and rccl-tests print, and the all_reduce_bench.py of BigScience.

Launchers decorate lines (``srun -l``, ``mpirun --tag-output``, time stamps), mix those of several processes, and logs
hold several tables with warnings between their rows. So a row is found anywhere in a line, by its numbers and data
type, and belongs to the last header with the same decoration.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
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
_TYPES: Final = (
    "int8|uint8|int32|uint32|int64|uint64|half|float|double|bfloat16|char|int|fp8_e4m3|fp8_e5m2|f8e4m3|f8e5m2|fp16|bf16"
)
_ROW: Final = re.compile(rf"(?<![\w.])(\d+)\s+(\d+)\s+(?:{_TYPES})\b.*")
_TIME: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]?|\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?Z?|[+-]\d\d:?\d\d\b"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b.{0,24}?\b\d{4}\b"
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
    """A table whose rows are being read."""

    ways: int
    line: int
    said: str
    host_of: dict[int, str]
    is_checked: bool
    rows: list[tuple[float, float, float, float]] = field(default_factory=list)
    wrong_bytes: list[int] = field(default_factory=list)
    redop: str = ""


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a file is the output of one of these programs."""
    try:
        text = _text(Path(path))
    except InputError:
        return False
    return _COLUMNS.search(text) is not None or (
        _BENCH_SIZE.search(text) is not None and _BENCH_TIME.search(text) is not None
    )


def read_tables(path: str | os.PathLike[str]) -> list[Table]:
    """All tables in a file, out-of-place; rows of size 0 are left out. Raises InputError if there is none."""
    path = Path(path)
    text = _text(path)
    opened = list(_split(text, str(path)))
    if not opened:
        bench = _benchmark(text, str(path))
        if bench is None:
            raise InputError(
                f"{path}: no table of nccl-tests; allowed: a header with size, count, type, time and algbw"
            )
        return [bench]
    tables = []
    for i, one in enumerate(opened):
        where = f"{path}, table {i + 1} in line {one.line}" if len(opened) > 1 else str(path)
        kept = np.array(sorted(row for row in one.rows if row[0] > 0), dtype=np.float64).reshape(-1, 4)
        if not len(kept) and one.wrong_bytes:
            raise InputError(f"{where}: all {len(one.wrong_bytes)} rows failed their own check ({_WRONG} > 0)")
        if not len(kept):
            raise InputError(f"{where}: 0 sizes; allowed: at least 1")
        op, members = _operation(one, path.name, kept, where)
        hosts = set(one.host_of.values()) - {""}
        tables.append(Table(op, members, kept[:, 0], kept[:, 1], where, len(hosts), _left_out(one, where)))
    return tables


def _left_out(table: _Open, where: str) -> tuple[str, ...]:
    wrong = len(table.wrong_bytes)
    if not wrong:
        return ()
    sizes = ", ".join(map(str, table.wrong_bytes[:4])) + (", ..." if wrong > 4 else "")
    rows = f"{wrong} row{'s' if wrong > 1 else ''} of {wrong + len(table.rows)}"
    return (f"{where}: {rows} failed their own check ({_WRONG} > 0; bytes {sizes}) and are left out: look at it first",)


def _text(path: Path) -> str:
    content, _ = content_of(path, MAX_BYTES)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from None


def _split(text: str, where: str) -> Iterator[_Open]:
    """Tables in the order of their headers; lines of different decoration belong to different ones."""
    opened: dict[str, _Open] = {}
    host_of: dict[str, dict[int, str]] = defaultdict(dict)
    order: list[_Open] = []
    program = ""
    for number, line in enumerate(text.splitlines(), 1):
        if (named := _PROGRAM.search(line)) is not None:
            program = named[1]
        if (header := _COLUMNS.search(line)) is not None:
            decoration = _decoration(line[: header.start()])
            ways = max(header[0].count("algbw"), 1)
            opened[decoration] = _Open(ways, number, program, host_of.pop(decoration, {}), _WRONG in header[0])
            order.append(opened[decoration])
        elif (ranked := _RANK.search(line)) is not None:
            host_of[_decoration(line[: ranked.start()])][int(ranked[1])] = ranked[2] or ""
        elif opened and (row := _ROW.search(line)) is not None:
            table = opened.get(_decoration(line[: row.start()]))
            if table is not None:
                _add_row(row[0], table, f"{where}, line {number}")
    return iter(order)


def _decoration(before: str) -> str:
    """What a launcher put before a line, without times."""
    return "".join(_TIME.sub("", before).split()).strip("[]()|")


def _add_row(text: str, table: _Open, where: str) -> None:
    """Size in bytes, time in seconds, algorithm and bus bandwidth of a line, whatever columns lie between."""
    words = text.split()
    wanted = table.ways * _RESULTS
    results = words[3:][-wanted:]
    if len(results) < wanted:
        raise InputError(
            f"{where}: {len(words)} columns; allowed: size, count, type ... and {_RESULTS} for each way of running"
        )
    table.redop = words[3] if len(words) > 3 + wanted else ""
    time_us, algbw, busbw = results[:3]
    try:
        row = float(words[0]), float(time_us) * 1e-6, float(algbw), float(busbw)
    except ValueError:
        raise InputError(f"{where}: {text.strip()!r}; allowed: numbers for size, time and bandwidth") from None
    if not (math.isfinite(row[1]) and row[1] > 0.0):
        raise InputError(f"{where}: time {time_us} us; allowed: greater than 0")
    wrong = [word for word in results[_RESULTS - 1 :: _RESULTS] if word.isdecimal() and int(word) > 0]
    if wrong and table.is_checked:
        table.wrong_bytes.append(int(row[0]))
    else:
        table.rows.append(row)


def _operation(table: _Open, name: str, rows: NDArray[np.float64], where: str) -> tuple[Op, int]:
    """Which collective among how many: from program name and rank list, else from bus over algorithm bandwidth.

    That ratio is 2(n-1)/n for an all-reduce and (n-1)/n for the others, as nccl-tests defines it.
    """
    in_name = _PROGRAM.search(name)
    program = table.said or (in_name[1] if in_name is not None else "")
    if program in _NO_LAW:
        raise InputError(f"{where}: {program}, for which there is no law; allowed: {', '.join(_PROGRAMS)}")
    ratio = rows[-1, 3] / rows[-1, 2] if rows[-1, 2] > 0 else math.nan
    whole = 1.0 - 1e-6
    op: Op = "all_reduce" if ratio >= whole and table.redop not in {"none", ""} else "all_gather"
    op = _PROGRAMS.get(program, op)
    passes = 2.0 if op == "all_reduce" else 1.0
    members = len(table.host_of) or (round(passes / (passes - ratio)) if 0.0 < ratio < passes else 0)
    if op == "send":
        members = max(members, 2)
    if members < 2:
        raise InputError(f"{where}: {members} ranks; allowed: at least 2, listed as '# Rank  0 ...' lines")
    return op, members


def _benchmark(text: str, where: str) -> Table | None:
    """The output of all_reduce_bench.py: one size, several times on every rank; a rank's first one warms up."""
    sizes = {int(rank): float(size) for rank, size in _BENCH_SIZE.findall(text)}
    times: dict[int, list[float]] = defaultdict(list)
    rank = -1
    for line in text.splitlines():
        if (found := _BENCH_TIME.search(line)) is not None:
            times[rank].append(float(found[1]))
        elif (ranked := _BENCH_RANK.search(line)) is not None and int(ranked[1]) in sizes:
            rank = int(ranked[1])
    if not sizes or not times:
        return None
    if len(sizes) < 2 or len(set(sizes.values())) > 1:
        named = f"{len(sizes)} ranks, sizes {sorted(set(sizes.values()))[:4]} GB"
        raise InputError(f"{where}: {named}; allowed: at least 2 ranks with one size")
    kept = [time_s for one in times.values() for time_s in one[1:] if time_s > 0.0]
    if not kept:
        raise InputError(f"{where}: no time after the first, which warms up; allowed: at least one")
    size_bytes = np.full(len(kept), next(iter(sizes.values())) * 1e9)
    return Table("all_reduce", len(sizes), size_bytes, np.array(kept), where)
