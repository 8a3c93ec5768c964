"""Buffers that overflow, and when senders leave a gather: closed forms; the referee has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from traced_jobs import SOCKET_RUNS_DIR, needs_socket_runs

from paceenv.calibration.job_stamps import read_job
from paceenv.core import pacing
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.trace import read_trace
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.layout import ALL_TO_ALL, GATHER
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]


# Buffers that overflow


SHALLOW, DEEP = 32768 / 14480, 262144 / 14480
PORT: dict[str, Any] = {"ranks": 8, "incast_kind": GATHER, "incast_flow_s": 0.05, "incast_fit": DEEP}


def test_a_shallow_buffer_times_out_as_often_as_its_overflow_says(simulator: Make) -> None:
    sim = simulator(range(200), **PORT | {"incast_fit": SHALLOW, "incast_timeout_s": 0.2})
    step = sim.run(sim.off(), 50)
    overflow = np.maximum(1.0 - SHALLOW / np.arange(1, 8), 0.0)
    expected = 1.0 - np.prod(1.0 - overflow**3)
    waited = step > 1.36
    assert waited.mean() == pytest.approx(expected, abs=4.5 * np.sqrt(0.25 / step.size))
    assert step[waited] == pytest.approx(1.55, abs=1e-9)
    assert step[~waited] == pytest.approx(1.35, abs=1e-9)


# When senders leave a gather


def shares(entry_TR: np.ndarray[Any, Any], exit_TR: np.ndarray[Any, Any], step_T: np.ndarray[Any, Any]) -> list[float]:
    """Share of a step in the gather: the receiver's and the senders' mean, and the senders' median."""
    inside_TR = (exit_TR - entry_TR) / step_T[:, None]
    mean_R = (exit_TR - entry_TR).mean(axis=0) / step_T.mean()
    return [float(mean_R[0]), float(mean_R[1:].mean()), float(np.median(inside_TR[:, 1:]))]


@needs_socket_runs
def test_a_recorded_gather_spends_its_steps_where_the_simulated_one_does() -> None:
    trace = read_trace(SOCKET_RUNS_DIR / "incast-shallow-learned.parquet")
    stamps = read_job(read_matrix(trace))
    unpaced = stamps.part(stamps.unpaced_T)
    gather = trace.isin("op", "gather")
    rank, iteration, end_s = (trace.column(name)[gather] for name in ("rank", "iteration", "end_s"))
    out_TR = np.full((iteration.max() + 1, rank.max() + 1), np.nan)
    out_TR[iteration, rank] = end_s
    exit_TR = out_TR[unpaced.iteration_T] - unpaced.begin_T[:, None]
    start_TR = np.maximum(unpaced.entry_TR, unpaced.entry_TR[:, :1])
    assert (exit_TR >= start_TR).all(), "no message moves before both ends are there"
    late = unpaced.iteration_T >= 400  # when send buffers have grown
    recorded = shares(unpaced.entry_TR[late], exit_TR[late], unpaced.step_T[late])
    simulator = start(load_cluster("incast-shallow"), np.arange(8))
    recording = simulator.record(simulator.off(), 400)
    entry_TR, left_TR = (a.reshape(-1, 8) for a in (recording.entry_ETR, recording.exit_ETR))
    assert recorded == pytest.approx(shares(entry_TR, left_TR, recording.step_ET.ravel()), abs=0.05)


@pytest.mark.parametrize(
    ("job", "low", "high"),
    [
        pytest.param({"incast_fit": SHALLOW}, 0.0, 0.65, id="pays over a shallow buffer"),
        pytest.param({"incast_fit": DEEP}, 1.0, 1.002, id="over a deep one only few trials cost"),
        # a late rank still receives from all others at once, so a stagger only delays
        pytest.param({"incast_fit": SHALLOW, "incast_kind": ALL_TO_ALL}, 1.0, 1.02, id="gives up in an all-to-all"),
    ],
)
def test_a_stagger(simulator: Make, job: dict[str, Any], low: float, high: float) -> None:
    """Mean step with the stagger rule over that without, on the same noise."""
    job = PORT | {"incast_flow_s": 0.07, "incast_timeout_s": 2.8, "jitter_cv": 0.03} | job
    passive, paced = (simulator(range(16), **job) for _ in range(2))
    settings = pacing.settings({"stagger": (0.25, 0.42)})[None, None].repeat(16, axis=0)
    assert low <= paced.run(settings, 1000).mean() / passive.run(passive.off(), 1000).mean() < high
