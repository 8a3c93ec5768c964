"""The observation vector (contract 2), and parity: a recording replayed as a live rank would, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import EVERY_NOISE
from hypothesis import given
from hypothesis import strategies as st
from laid_out import laid_out

from paceenv.core import pacing, signals, timing
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import Simulator

Observation = np.ndarray[Any, np.dtype[np.float32]]


def written(rank: np.ndarray[Any, Any], tick: np.ndarray[Any, Any], r: int = 0) -> dict[str, float]:
    out = np.empty(signals.SIGNALS, np.float32)
    signals.write_signals(rank, r, tick, out)
    return dict(zip(signals.NAMES, out.tolist(), strict=True))


def feed(
    rank: np.ndarray[Any, Any], tick: np.ndarray[Any, Any], step_s: float, comm_s: float, wait_s: float, n: int
) -> None:
    for _ in range(n):
        timing.observe_step(tick, step_s)
        timing.observe_ranks(rank, tick, np.array([comm_s]), np.array([wait_s]), True)


def test_steady_job_shows_shares_and_nothing_else() -> None:
    rank, tick = timing.new_state()
    feed(rank, tick, 2.0, 0.5, 0.1, 500)
    seen = written(rank, tick)
    shares = {"comm_share": 0.25, "wait_share": 0.5, "slack_share": 0.5}
    for name in signals.NAMES:
        assert seen[name] == pytest.approx(shares.get(name, 0.0), abs=1e-3), name


def test_inflation_and_trend() -> None:
    rank, tick = timing.new_state()
    signals.start_interval(tick)
    feed(rank, tick, 1.0, 0.2, 0.0, 10)
    signals.start_interval(tick)
    feed(rank, tick, 1.2, 0.4, 0.0, 10)
    seen = written(rank, tick)
    assert seen["step_inflation"] == pytest.approx(signals.squash(math.log(1.2), 0.1))
    assert seen["step_trend"] == pytest.approx(signals.squash(math.log(1.2), 0.05))
    comm_s = 0.4 - 0.2 * (1 - float(timing.SMOOTHING)) ** 10
    assert seen["comm_inflation"] == pytest.approx(signals.squash(math.log(comm_s / 0.2), 0.2), rel=1e-5)
    assert seen["step_cv"] == pytest.approx(0.0, abs=1e-5), "the variation is the interval's own"


def test_a_collective_of_microseconds_is_no_scale() -> None:
    """Senders of a gather hand over in 20 us or in 3 ms of a step of 100: on a null that looked like contention."""
    rank, tick = timing.new_state()
    for comm_s in (2e-5, 3e-3) * 40:
        feed(rank, tick, 0.1, comm_s, 0.04, 1)
    seen = written(rank, tick)
    assert seen["comm_inflation"] == 0.0
    assert seen["comm_change"] < 0.8


@given(
    history=st.lists(
        st.tuples(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(-1e-3, 1e4), st.floats(0, 10)),
        min_size=1,
        max_size=70,
    ),
    barrier=st.booleans(),
)
def test_observations_stay_in_the_box_for_any_history(
    history: list[tuple[float, float, float, float]], barrier: bool
) -> None:
    rank, tick = timing.new_state()
    for i, (step_s, comm_s, wait_s, delay_s) in enumerate(history):
        if i % 20 == 0:
            signals.start_interval(tick)
        rank[timing.DELAY_S] = delay_s
        timing.observe_step(tick, step_s)
        timing.observe_ranks(rank, tick, np.float32([comm_s]), np.float32([wait_s]), barrier)
    seen = written(rank, tick)
    assert all(-1.0 <= value <= 1.0 for value in seen.values()), seen


# Parity: the engine's compiled estimator, rules and signals against the same source interpreted


def replay(
    recordings: list[Recording], plan: list[np.ndarray[Any, Any]], e: int, r: int, sim: Simulator
) -> Observation:
    """Rank ``r`` of job ``e`` as a live rank would see it, one column in plain Python; asserts every delay."""
    rank, tick = timing.new_state()
    job, per_group = sim.batch.jobs[e], sim.batch.ranks // sim.batch.groups
    for recording, settings_ESM2 in zip(recordings, plan, strict=True):
        signals.start_interval(tick)
        own = settings_ESM2[e, min(r, settings_ESM2.shape[1] - 1)]
        for t in range(recording.step_ET.shape[1]):
            assert rank[timing.DELAY_S, 0] == recording.delay_ETR[e, t, r], (t, r)
            step_s = float(recording.step_ET[e, t])
            comm_s = recording.finish_ETG[e, t, r // per_group] - recording.entry_ETR[e, t, r]
            wait_s = step_s - job["barrier_s"] - recording.ready_ETG[e, t, r // per_group]
            timing.observe_step(tick, step_s)
            timing.observe_ranks(rank, tick, np.float32([comm_s]), np.float32([wait_s]), bool(job["has_barrier"]))
            cap_s = min(1.0, float(tick[timing.STEP_BASELINE_S]))
            timing.decide(rank, tick, *laid_out(own, 1), cap_s, r % per_group, per_group)
    out = np.empty(signals.SIGNALS, np.float32)
    signals.write_signals(rank, 0, tick, out)
    return out


UNEQUAL_SLACK: dict[str, Any] = {"ranks": 8, "groups": 4, "uplink_work_s": 0.1, "has_barrier": True, "barrier_s": 1e-4}
UNEQUAL_SLACK |= {"latency_s": 1e-3, "jitter_cv": 0.003, "post_work_share": 0.2, "post_work_mean_iterations": 30.0}
UNEQUAL_SLACK |= {"post_work_episode_s": 0.3, "post_work_spread": 0.5}
TENANT = {"compute_s": 0.8, "uplink_work_s": 0.4, "jitter_cv": 0.01, "ranks": 4}
JOBS: dict[str, dict[str, Any]] = {
    "one group with jitter": {"ranks": 4, "transfer_alone_s": 0.1, "jitter_cv": 0.05},
    "unequal slack": UNEQUAL_SLACK,
    "two jobs": {"ranks": 4, "uplink_work_s": 0.4, "jitter_cv": 0.01, "common_cv": 0.01, "tenants": [TENANT]},
    "every noise": EVERY_NOISE | {"ranks": 6, "transfer_alone_s": 0.05},
}


@pytest.mark.parametrize("common", [True, False], ids=["one setting for all", "a setting per rank"])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_replaying_a_recording_gives_the_same_delays_and_observations(
    simulator: Callable[..., Simulator], job: dict[str, Any], common: bool
) -> None:
    sim = simulator([3, 4], **job)
    rng = np.random.default_rng(0)
    shape = (2, 1 if common else sim.batch.ranks, len(pacing.MECHANISMS), 2)
    # many mechanisms at once, thresholds near zero and some windows off, so that every branch is taken
    plan = [rng.uniform(0, 0.1, shape) * [0.1, 6.0] * (rng.random(shape) < 0.8) for _ in range(4)]
    recordings = [sim.record(settings_ESM2, n) for settings_ESM2, n in zip(plan, (20, 50, 7, 90), strict=True)]
    assert max(r.delay_ETR.max() for r in recordings) > 0.01, "the comparison must not be of zeros"
    every = sim.observe(every_rank=True)
    observer = sim.observe()
    for e in range(2):
        replayed = [replay(recordings, plan, e, r, sim) for r in range(sim.batch.ranks)]
        np.testing.assert_allclose(every[e], replayed, rtol=0, atol=1e-6)
        assert any(np.array_equal(observer[e], view) for view in every[e]), "the observer is one of the ranks"


@pytest.mark.parametrize("name", signals.NAMES)
def test_unsquash_is_the_way_back(name: str) -> None:
    scale = signals.SCALES[signals.NAMES.index(name)]
    values = [-0.5, -0.01, 0.0, 0.003, 0.2, 0.9]
    entries = [signals.squash(value, scale) if scale else value for value in values]
    assert signals.unsquash(name, entries) == pytest.approx(values, rel=1e-9)
    assert np.isfinite(signals.unsquash(name, [-1.0, 1.0])).all()
