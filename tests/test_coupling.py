"""What couples steps: heat, checkpoints, failures; each with its null."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceenv.core import pacing
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies.rollout import useful_step_s
from paceenv.sim.cluster import load_cluster
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]
POWER: dict[str, Any] = {"compute_w": 400.0, "wait_w": 300.0, "delay_w": 100.0}


# Heat

HOT: dict[str, Any] = POWER | {"ranks_per_node": 4, "heat_slowdown": 0.2, "heat_iterations": 20.0}


def heat_gain(simulator: Make, **changes: Any) -> float:
    """Mean step with slack pacing over that without, in a job whose spinning ranks share a node with the critical."""
    job = HOT | {"ranks": 8, "groups": 2, "has_barrier": True, "post_work_groups": 1, "post_work_s": 1.0} | changes
    passive, paced = (simulator(range(4), **job) for _ in range(2))
    slack = pacing.settings({"slack": (0.01, 0.5)})[None, None].repeat(4, axis=0)
    return float(paced.run(slack, 600).mean() / passive.run(passive.off(), 600).mean())


def test_delaying_spinning_ranks_cools_the_rank_they_wait_for_and_no_other(simulator: Make) -> None:
    # one node for all, so that the early group's waiting warms the late one
    assert heat_gain(simulator, ranks_per_node=8) < 0.995
    assert heat_gain(simulator, ranks_per_node=8, wait_w=100.0) == pytest.approx(1.0, abs=1e-6)
    assert heat_gain(simulator, ranks_per_node=8, heat_slowdown=0.0) == 1.0
    assert heat_gain(simulator, ranks_per_node=4) == pytest.approx(1.0, abs=1e-6), "on other nodes"


# Checkpoints, failures, restarts


def test_throughput_does_not_count_what_failures_undid(simulator: Make) -> None:
    """Young's first-order law: checkpoints every n steps lose (n - 1) / 2 steps to each failure."""
    sim = simulator(range(200), checkpoint_iterations=20, failure_per_s=0.002)
    step_ET = sim.run(sim.off(), 2000)
    useful = useful_step_s(step_ET, sim.outcome())
    assert step_ET.mean() == pytest.approx(1.0)
    assert useful.mean() == pytest.approx(1.0 / (1.0 - 0.002 * 9.5), abs=0.002)


def test_a_hot_job_fails_more_often_and_starts_cold(simulator: Make) -> None:
    """A node that only computes has heat 1 after its first step, and so 1.5 times the rate of a cold one."""
    rules = {"failure_per_s": 0.02, "failure_heat": 0.5, "warmup_iterations": 3, "warmup_factor": 1.3, "restart_s": 9.0}
    sim = simulator(range(200), compute_w=400.0, heat_iterations=1.0, **rules)
    step_ET = sim.run(sim.off(), 1000)
    assert sim.outcome().failures.sum() / (step_ET % 9.0).sum() == pytest.approx(0.02 * 1.5, rel=0.05)
    failed = np.flatnonzero(step_ET[0] > 9.0)
    first = failed[0] if failed[0] < 996 else failed[1]
    np.testing.assert_allclose(step_ET[0, first + 1 : first + 5] % 9.0, [1.3, 1.3, 1.3, 1.0])


def test_the_reward_takes_off_what_a_failure_undoes() -> None:
    """Over an episode the throughput terms, weighted by time, are the iterations that count."""
    rules = ["reliability.mtbf_iterations=6000", "reliability.checkpoint_iterations=50", "reliability.restart_s=5"]
    env = PacingVectorEnv(4, load_cluster("null-jitter").changed(rules), episode_intervals=50)
    env.reset(seed=1)
    first, counted = env._batch.simulators[0].outcome().useful_iterations, np.zeros(4)
    for _ in range(40):
        *_, info = env.step(np.full((4, env.single_action_space.shape[0]), -1.0))
        counted += 20 * info["step_mean_s"] * info["throughput_ratio"] / info["reference_step_s"]
    outcome = env._batch.simulators[0].outcome()
    assert outcome.failures.sum() > 0
    assert outcome.rerun_iterations.sum() > 0
    np.testing.assert_allclose(counted, outcome.useful_iterations - first, atol=1e-6)
