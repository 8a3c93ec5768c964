"""Reader of the text that the programs of nccl-tests print: sizes and times of one collective."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.sim.cluster.collectives import Op

_PROGRAMS: Final[dict[str, Op]] = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "broadcast_perf": "broadcast",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send",
}
_COLUMNS: Final = re.compile(r"^#\s+size\s+count\s+type\b.*\btime\b.*\balgbw\b", re.MULTILINE)
_RANK: Final = re.compile(r"^#\s+Rank\s+(\d+)\b", re.MULTILINE)
_RESULTS: Final = 4
"""Columns of one way of running: time, algbw, busbw, #wrong."""
_FEWEST: Final = 4
"""A law of three terms needs one size more than that to have a residual."""


@dataclass(frozen=True)
class Table:
    """One run of a program of nccl-tests: sizes in bytes as it counts them, seconds.

    ``paceenv.sim.cluster.collectives.volume`` counts bytes alike.
    """

    op: Op
    members: int
    size_bytes: NDArray[np.float64]
    time_s: NDArray[np.float64]
    source: str


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a file is the output of a program of nccl-tests."""
    try:
        return _COLUMNS.search(Path(path).read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def read_table(path: str | os.PathLike[str]) -> Table:
    """The out-of-place table in a file of nccl-tests output; rows of size 0 are left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from None
    if _COLUMNS.search(text) is None:
        raise InputError(f"{path}: no table of nccl-tests; allowed: a header with size, count, type, time and algbw")
    rows, redop = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip()[:1].isdigit():
            rows.append(_row(line, f"{path}, line {number}"))
            words = line.split()
            redop = words[3] if len(words) > 3 + 2 * _RESULTS else ""
    kept = np.array(sorted(row for row in rows if row[0] > 0), dtype=np.float64).reshape(-1, 4)
    if len(np.unique(kept[:, 0])) < _FEWEST:
        raise InputError(f"{path}: {len(np.unique(kept[:, 0]))} sizes; allowed: at least {_FEWEST}")
    op, members = _operation(Path(path).name + "\n" + text, redop, kept, str(path))
    return Table(op, members, kept[:, 0], kept[:, 1], str(path))


def _row(line: str, where: str) -> tuple[float, float, float, float]:
    """Size in bytes, time in seconds, algorithm and bus bandwidth of a line, whatever columns lie between."""
    words = line.split()
    results = words[3:][-2 * _RESULTS :]
    if len(results) < 2 * _RESULTS:
        raise InputError(
            f"{where}: {len(words)} columns; allowed: size, count, type ... and 4 out of place, 4 in place"
        )
    time_us, algbw, busbw = results[:3]
    try:
        row = float(words[0]), float(time_us) * 1e-6, float(algbw), float(busbw)
    except ValueError:
        raise InputError(f"{where}: {line.strip()!r}; allowed: numbers for size, time and bandwidth") from None
    if not (math.isfinite(row[1]) and row[1] > 0.0):
        raise InputError(f"{where}: time {time_us} us; allowed: greater than 0")
    return row


def _operation(text: str, redop: str, rows: NDArray[np.float64], where: str) -> tuple[Op, int]:
    """Which collective among how many: from program name and rank list, else from bus over algorithm bandwidth.

    That ratio is 2(n-1)/n for an all-reduce and (n-1)/n for the others, as nccl-tests defines it.
    """
    named = [op for program, op in _PROGRAMS.items() if program in text]
    ranks = {int(rank) for rank in _RANK.findall(text)}
    ratio = rows[-1, 3] / rows[-1, 2] if rows[-1, 2] > 0 else math.nan
    whole = 1.0 - 1e-6
    op: Op = named[0] if named else ("all_reduce" if ratio >= whole and redop not in {"none", ""} else "all_gather")
    passes = 2.0 if op == "all_reduce" else 1.0
    members = len(ranks) or (round(passes / (passes - ratio)) if 0.0 < ratio < passes else 0)
    if op == "send":
        members = max(members, 2)
    if members < 2:
        raise InputError(f"{where}: {members} ranks; allowed: at least 2, listed as '# Rank  0 ...' lines")
    return op, members
