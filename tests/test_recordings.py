"""Recordings as traces: what a simulated iteration looks like to who reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceenv.core import pacing
from paceenv.core.trace import read_trace
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]


def traced(sim: Simulator, path: Path, iterations: int = 40, settings: Any = None) -> dict[str, Any]:
    """Columns of the trace of a run, as arrays."""
    with RecordingWriter(path, sim, "job") as writer:
        for _ in range(2):  # two recordings, so that time goes on from one to the next
            writer.add(sim.record(sim.off() if settings is None else settings, iterations // 2))
    table = read_trace(path).table
    return {name: np.asarray(table[name].to_pylist()) for name in table.column_names}


def of(rows: dict[str, Any], op: str) -> dict[str, Any]:
    return {name: column[rows["op"] == op] for name, column in rows.items()}


def test_operations_of_a_rank_follow_one_another_without_gaps(simulator: Make, tmp_path: Path) -> None:
    job = {"ranks": 8, "groups": 4, "uplink_work_s": 0.1, "has_barrier": True, "barrier_s": 0.01, "jitter_cv": 0.05}
    sim = simulator(**job, post_work_groups=1, post_work_s=0.3, checkpoint_iterations=7, checkpoint_s=0.5)
    settings = pacing.settings({"slack": (0.0, 0.3)})[None, None]
    rows = traced(sim, tmp_path / "trace.parquet", settings=settings)
    assert set(rows["op"]) == {"pace", "compute", "all_reduce", "optimizer", "barrier", "checkpoint"}
    for rank in range(8):
        mine = {name: column[rows["rank"] == rank] for name, column in rows.items()}
        order = np.lexsort((mine["seq"], mine["iteration"]))
        np.testing.assert_allclose(mine["start_s"][order][1:], mine["end_s"][order][:-1], atol=1e-9)


@pytest.mark.parametrize(("checkpoint_s", "failure_per_s"), [(0.5, 0.02), (8.0, 0.005)])
def test_checkpoints_and_restarts_are_operations(
    simulator: Make, tmp_path: Path, checkpoint_s: float, failure_per_s: float
) -> None:
    """Also where a checkpoint takes longer than a restart."""
    rules = {"checkpoint_iterations": 10, "checkpoint_s": checkpoint_s, "failure_per_s": failure_per_s}
    sim = simulator(ranks=2, restart_s=5.0, **rules)
    rows = traced(sim, tmp_path / "trace.parquet", 200)
    restarts, checkpoints = of(rows, "restart"), of(rows, "checkpoint")
    assert len(restarts["rank"]) == 2 * sim.outcome().failures[0] > 0
    assert np.all(restarts["end_s"] - restarts["start_s"] > 4.99)
    assert checkpoints["end_s"] - checkpoints["start_s"] == pytest.approx(checkpoint_s)
    assert np.all((checkpoints["iteration"] + 1) % 10 == 0)
    assert len(checkpoints["iteration"]) == 40


def test_ranks_that_run_ahead_compute_before_the_collective_is_through(simulator: Make, tmp_path: Path) -> None:
    sim = simulator(ranks=4, jitter_cv=0.2, transfer_alone_s=0.3, staleness=2)
    plain = simulator(ranks=4, jitter_cv=0.2, transfer_alone_s=0.3)
    rows, calm = traced(sim, tmp_path / "a.parquet"), traced(plain, tmp_path / "b.parquet")
    compute, reduce = of(rows, "compute"), of(rows, "all_reduce")
    lengths = compute["end_s"] - compute["start_s"]
    np.testing.assert_allclose(lengths, of(calm, "compute")["end_s"] - of(calm, "compute")["start_s"], rtol=1e-5)
    before = np.array([reduce["end_s"][reduce["iteration"] == t - 1].max() for t in range(1, 40)])
    started = np.array([compute["start_s"][compute["iteration"] == t].min() for t in range(1, 40)])
    assert (started < before - 0.1).any()
