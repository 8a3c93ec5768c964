"""The time law of a link from a table of ``nccl-tests``: latency + size / bandwidth + sqrt(size), with standard errors.

Reads the text that ``all_reduce_perf`` and its sisters print and fits :class:`paceenv.sim.cluster.collectives.Law` to
it by non-negative least squares on relative errors, so that 8 bytes count as much as 8 GB.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from paceenv.core.errors import InputError
from paceenv.sim.cluster.collectives import BYTES_PER_GBIT, Law, Op, volume

_PROGRAMS: dict[str, Op] = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "broadcast_perf": "broadcast",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send",
}
_COLUMNS = re.compile(r"^#\s+size\s+count\s+type\b.*\btime\b.*\balgbw\b", re.MULTILINE)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b", re.MULTILINE)
_RESULTS = 4
"""Columns of one way of running: time, algbw, busbw, #wrong."""
_FEWEST = 4
"""A law of three terms needs one size more than that to have a residual."""


@dataclass(frozen=True)
class Table:
    """One run of a program of nccl-tests: sizes in bytes as it counts them (:func:`volume` counts alike), seconds."""

    op: Op
    members: int
    size_bytes: NDArray[np.float64]
    time_s: NDArray[np.float64]
    source: str


@dataclass(frozen=True)
class BandwidthFit:
    """A fitted law, its standard errors, and how far off it is with and without the square root."""

    table: Table
    law: Law
    hop_se: float
    bandwidth_se: float
    sqrt_se: float
    residual: NDArray[np.float64]
    """(law - measured) / measured, for each size."""
    plain_residual: NDArray[np.float64]
    """The same of the best law without the square root."""

    @property
    def misfit(self) -> float:
        """Root mean square of the relative residuals."""
        return float(np.sqrt(np.mean(self.residual**2)))

    @property
    def plain_misfit(self) -> float:
        """The same without the square root."""
        return float(np.sqrt(np.mean(self.plain_residual**2)))

    def to_config(self, inside: bool) -> dict[str, Any]:
        """The law as the ``fabric`` keys of a cluster: of the links inside a node, or of its NICs."""
        gbps, latency_us = self.law.bandwidth_Bps / BYTES_PER_GBIT, self.law.hop_s * 1e6
        prefix, rate = ("intra_node_", "intra_node_gbps") if inside else ("", "nic_gbps")
        return {
            rate: float(f"{gbps:.5g}"),
            f"{prefix}latency_us": float(f"{latency_us:.4g}"),
            f"{prefix}sqrt_us_per_sqrt_mb": float(f"{self.law.sqrt_s * 1e9:.4g}"),
        }


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


def fit_bandwidth(table: Table) -> BandwidthFit:
    """The law of a table, as a ring's volumes explain it."""
    found = volume(table.op, "ring", table.members, table.size_bytes)
    columns = np.stack([np.full_like(table.time_s, found.rounds), found.sent_bytes, np.sqrt(found.sent_bytes)], axis=1)
    relative = columns / table.time_s[:, None]
    plain, _ = _nnls(relative[:, :2])
    values, errors = _nnls(relative)
    if values[1] <= 0.0:
        raise InputError(f"{table.source}: time does not grow with size; allowed: sizes large enough to fill the link")
    return BandwidthFit(
        table,
        Law(float(values[0]), float(1.0 / values[1]), float(values[2])),
        float(errors[0]),
        float(errors[1] / values[1] ** 2),
        float(errors[2]),
        relative @ values - 1.0,
        relative[:, :2] @ plain - 1.0,
    )


def _nnls(relative: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Non-negative coefficients that bring every row to 1, and their standard errors (not a number at the bound)."""
    scale = np.linalg.norm(relative, axis=0)
    values, norm = nnls(relative / scale, np.ones(len(relative)))
    free = values > 0.0
    used = (relative / scale)[:, free]
    variance = norm**2 / max(len(relative) - free.sum(), 1)
    errors = np.full(len(values), math.nan)
    errors[free] = np.sqrt(variance * np.diag(np.linalg.inv(used.T @ used)))
    return values / scale, errors / scale
