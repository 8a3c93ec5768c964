"""Traces for tests: a plain job whose every number is known, and where the published production traces are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceenv.core.trace import Trace, TraceMetadata
from paceenv.diagnosis.clocks import matrix_on_one_clock
from paceenv.diagnosis.operation_matrix import OperationMatrix
from paceenv.importers.inputs import read_inputs

STRAGGLER_DIR = Path(
    os.environ.get("PACEENV_STRAGGLER_DIR")
    or Path(__file__).resolve().parents[3] / "shared" / "data" / "bytedance-straggler"
)
needs_traces = pytest.mark.skipif(
    not STRAGGLER_DIR.is_dir(), reason="set PACEENV_STRAGGLER_DIR to the published traces"
)

JEAN_ZAY_DIR = Path(os.environ.get("PACEENV_JEAN_ZAY_DIR") or STRAGGLER_DIR.with_name("jean-zay"))
needs_jean_zay = pytest.mark.skipif(
    not JEAN_ZAY_DIR.is_dir(), reason="set PACEENV_JEAN_ZAY_DIR to logs of Megatron-LM on 4, 8 and 16 nodes"
)

SOCKET_RUNS_DIR = Path(
    os.environ.get("PACEENV_SOCKET_RUNS_DIR") or Path(__file__).resolve().parents[3] / "shared" / "data" / "socket-runs"
)
needs_socket_runs = pytest.mark.skipif(
    not SOCKET_RUNS_DIR.is_dir(), reason="set PACEENV_SOCKET_RUNS_DIR to recordings of jobs of the testbed"
)

H100_DIR = Path(
    os.environ.get("PACEENV_H100_DIR")
    or Path(__file__).resolve().parents[3] / "shared" / "data" / "modded-nanogpt-8xh100"
)
needs_h100 = pytest.mark.skipif(not H100_DIR.is_dir(), reason="set PACEENV_H100_DIR to the profiles of eight H100")

H200_DIR = Path(os.environ.get("PACEENV_H200_DIR") or H100_DIR.with_name("h200-two-ranks"))
needs_h200 = pytest.mark.skipif(
    not H200_DIR.is_dir(), reason="set PACEENV_H200_DIR to profiles of two ranks on an H200"
)


def job_of(compute_TR: Any, transfer_s: Any = 0.5, name: str = "plain", **changed: Any) -> Trace:
    """Ranks compute as long as given and reduce together, ``(T, 1)`` or always as long.

    ``changed`` are columns, computes before reductions.
    """
    compute_TR = np.asarray(compute_TR, np.float64)
    end_T1 = np.cumsum(compute_TR.max(axis=1, keepdims=True) + transfer_s, axis=0)
    begin_TR = np.concatenate([[[0.0]], end_T1[:-1]]) + 0.0 * compute_TR
    arrive_TR, end_TR = begin_TR + compute_TR, end_T1 + 0.0 * compute_TR
    step_TR, rank_TR = np.indices(compute_TR.shape)
    columns = {
        "job": name,
        "rank": np.concatenate([rank_TR.ravel()] * 2),
        "iteration": np.concatenate([step_TR.ravel()] * 2),
        "seq": np.repeat([0, 1], compute_TR.size),
        "op": np.repeat(["compute", "all_reduce"], compute_TR.size),
        "group": np.repeat([-1, 0], compute_TR.size),
        "start_s": np.concatenate([begin_TR.ravel(), arrive_TR.ravel()]),
        "end_s": np.concatenate([arrive_TR.ravel(), end_TR.ravel()]),
    }
    ranks = tuple({"rank": r} for r in range(compute_TR.shape[1]))
    return Trace.from_columns(columns | changed, TraceMetadata({"name": name}, ranks, "test"))


def trace_of_rows(rows: list[tuple[Any, ...]]) -> Trace:
    """A trace of rank, iteration, seq, op, group, begin and end in each row."""
    keys = ("rank", "iteration", "seq", "op", "group", "start_s", "end_s")
    columns = {key: list(values) for key, values in zip(keys, zip(*rows, strict=True), strict=True)}
    return Trace.from_columns({"job": "plain", **columns}, TraceMetadata({"name": "plain"}, (), "test"))


def matrix_in(path: Path) -> OperationMatrix:
    """The matrix of the one job in a file, on one clock."""
    return matrix_on_one_clock(read_inputs([path]).require_trace())[0]


def awaited(trace: Trace, op: str = "all_reduce") -> Trace:
    """A simulated trace as the live recorder writes it: transfers in the background begin where a rank waits for them.

    Ranks wait at the end of their step, after all other work.

    Args:
        trace: in which rows of such transfers begin where they were handed over.
        op: the transfers in the background.
    """
    columns = {name: trace.column(name).copy() for name in trace.table.column_names}
    mine = columns["op"] == op
    others = ~mine & (columns["op"] != "barrier")
    ready: dict[tuple[Any, Any], float] = {}
    for rank, iteration, end_s in zip(*(columns[n][others] for n in ("rank", "iteration", "end_s")), strict=True):
        ready[rank, iteration] = max(ready.get((rank, iteration), 0.0), end_s)
    waits = np.array([ready[key] for key in zip(columns["rank"][mine], columns["iteration"][mine], strict=True)])
    columns["start_s"][mine], columns["end_s"][mine] = waits, np.maximum(columns["end_s"][mine], waits)
    columns["seq"][mine] += 100
    return Trace.from_columns(columns, trace.metadata)
