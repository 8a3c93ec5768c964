"""Traces for tests: a plain job whose every number is known, and where the published production traces are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceenv.cli import application
from paceenv.core import timing
from paceenv.core.operation_matrix import OperationMatrix
from paceenv.core.trace import Trace, TraceMetadata, read_trace
from paceenv.importers.clocks import matrix_on_one_clock
from paceenv.importers.inputs import read_inputs
from paceenv.policies.rollout import run
from paceenv.policies.select import select_policy
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
    return trace_of(rows)


def trace_of(rows: Iterable[tuple[Any, ...]], job: str = "plain") -> Trace:
    """Rows of a rank, iteration, number, operation, group, start and end, and bytes where there are any."""
    keys = ("rank", "iteration", "seq", "op", "group", "start_s", "end_s", "bytes")
    columns = {key: list(values) for key, values in zip(keys, zip(*rows, strict=True), strict=False)}
    return Trace.from_columns({"job": job, **columns}, TraceMetadata({"name": job}, (), "test"))


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


def mean_step_s(cluster: Cluster, policy: str = "passive", first: int = 0, seeds: int = 4, steps: int = 200) -> float:
    """What a rollout of its own says."""
    simulator = start(cluster, first + np.arange(seeds))
    return float(run(select_policy(policy, cluster), simulator, steps).step_ET.mean())


def json_of(*words: Any) -> Any:
    """What a command says with ``--json``."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert application.run([*map(str, words), "--json", "-"]) == 0
    return json.loads(printed.getvalue())


def matrix_in(path: Path) -> OperationMatrix:
    """The matrix of the one job in a file, on one clock."""
    return matrix_on_one_clock(read_inputs([path]).require_trace())[0]
