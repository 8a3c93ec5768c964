"""Traces for tests: a plain job whose every number is known, and where the published production traces are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceenv.core import timing
from paceenv.core.trace import Trace, TraceMetadata, read_trace
from paceenv.diagnosis.answer import Answer, find_answer
from paceenv.diagnosis.clocks import matrix_on_one_clock
from paceenv.diagnosis.operation_matrix import OperationMatrix
from paceenv.importers.inputs import Inputs, read_inputs
from paceenv.importers.merge_ranks import Merged
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.recording import RecordingWriter

DATA = Path(os.environ.get("PACEENV_DATA_DIR") or Path(__file__).resolve().parents[3] / "shared" / "data")
"""What others recorded."""


def _found(folder: str) -> tuple[Path, pytest.MarkDecorator]:
    """A folder of it, and the mark of tests that need it."""
    reason = f"set PACEENV_DATA_DIR to a folder with {folder}"
    return DATA / folder, pytest.mark.skipif(not (DATA / folder).is_dir(), reason=reason)


STRAGGLER_DIR, needs_traces = _found("bytedance-straggler")
JEAN_ZAY_DIR, needs_jean_zay = _found("jean-zay")
SOCKET_RUNS_DIR, needs_socket_runs = _found("socket-runs")
H100_DIR, needs_h100 = _found("modded-nanogpt-8xh100")
H200_DIR, needs_h200 = _found("h200-two-ranks")
HANGS_DIR, needs_hangs = _found("nvrx-flight-recorder")
SMALL_CASES_DIR, needs_small_cases = _found("small-cases")


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


def phases_of(*phases: tuple[Any, str, Any, Any]) -> Trace:
    """Ranks work and then meet, phase by phase; a step begins when all have ended the one before.

    A phase is seconds of work ``(T, R)`` (None for no work), the operation in which ranks meet, the group of each or of
    all, and the seconds that it takes once all of a group are there, ``(T, R)`` or one for all.
    """
    steps, ranks = np.shape(phases[0][0])
    now_R, rows = np.zeros(ranks), list[tuple[Any, ...]]()
    for t in range(steps):
        now_R = np.full(ranks, now_R.max())
        for k, (work_TR, op, group, lasts) in enumerate(phases):
            there_R = now_R if work_TR is None else now_R + work_TR[t]
            group_R = np.broadcast_to(group, ranks)
            end_R = np.array([there_R[group_R == g].max() for g in group_R]) + np.broadcast_to(lasts, (steps, ranks))[t]
            for r in range(ranks):
                rows += [(r, t, 2 * k, "compute", -1, now_R[r], there_R[r])] if work_TR is not None else []
                rows.append((r, t, 2 * k + 1, op, int(group_R[r]), there_R[r], end_R[r]))
            now_R = end_R
    keys = ("rank", "iteration", "seq", "op", "group", "start_s", "end_s")
    columns = {key: list(values) for key, values in zip(keys, zip(*rows, strict=True), strict=True)}
    return Trace.from_columns({"job": "plain", **columns}, TraceMetadata({"name": "plain"}, (), "test"))


def changed(trace: Trace, **columns: Any) -> Trace:
    """The trace with other values in some columns."""
    return Trace.from_columns({name: trace.column(name) for name in trace.table.column_names} | columns, trace.metadata)


def paced(cluster: Cluster, seed: int, delay_TR: Any) -> Trace:
    """The trace of a simulated job whose ranks hold back as given, seconds."""
    simulator = start(cluster, [seed])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        with RecordingWriter(path, simulator, "paced") as writer:
            for delay_R in delay_TR:
                simulator.state.rank_EFR[0, timing.DELAY_S, : len(delay_R)] = delay_R
                writer.add(simulator.record(simulator.off(), 1))
        return read_trace(path)


def answer_of(merged: Merged) -> Answer:
    """What is said of profiles that were merged."""
    return find_answer(Inputs(merged.trace, activity=merged.activity))


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
    return changed(trace, **columns)
