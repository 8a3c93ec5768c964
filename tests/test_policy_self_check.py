"""A policy's check of itself: pacing that costs is stopped, pacing that pays is left alone, by every rank alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from paceenv.core import signals
from paceenv.policies.distilled import Distilled, SelfCheck
from paceenv.policies.names import find
from paceenv.policies.policy_file import PolicyFile, load_policy, save_policy
from paceenv.policies.rollout import run, start
from paceenv.policies.rules import passive
from paceenv.sim.cluster import Cluster

INTERVALS = 200


def course(cost: Callable[[int], float], noise: float, rows: int = 1, seed: int = 0) -> NDArray[np.bool_]:
    """Whether the rows may pace, ``(T, rows)``, in a job whose steps are longer by ``cost`` while the first row may."""
    rng, check, before, paces = np.random.default_rng(seed), SelfCheck(), 0.0, False
    check.reset(rows)
    found = np.zeros((INTERVALS, rows), bool)
    for t in range(INTERVALS):
        level = np.log1p(cost(t) if paces else 0.0) + noise * rng.normal()
        found[t] = check.allowed(np.full(rows, level - before if t else 0.0), np.full(rows, noise * 20**0.5))
        before, paces = level, bool(found[t, 0])
    return found


@pytest.mark.parametrize("cost", [0.01, 0.05, 0.3])
def test_pacing_that_costs_is_stopped(cost: float) -> None:
    may_T = course(lambda t: cost, noise=0.002)[:, 0]
    assert may_T[:2].all(), "it begins with the benefit of the doubt"
    assert may_T[:50].mean() < 0.5
    assert may_T[50:].mean() < 0.15


@pytest.mark.parametrize(("gain", "noise"), [(0.05, 0.002), (0.05, 0.02), (0.5, 0.1)])
def test_pacing_that_pays_is_hardly_interrupted(gain: float, noise: float) -> None:
    shares = [course(lambda t: -gain, noise, seed=seed).mean() for seed in range(6)]
    assert np.mean(shares) > 0.97


@pytest.mark.parametrize("noise", [0.001, 0.05])
def test_where_it_changes_nothing_it_may_go_on(noise: float) -> None:
    assert np.mean([course(lambda t: 0.0, noise, seed=seed).mean() for seed in range(6)]) > 0.8


def test_a_job_that_changes_is_tried_again() -> None:
    may_T = course(lambda t: 0.05 if t < 40 else -0.05, noise=0.002)[:, 0]
    assert may_T[10:40].mean() < 0.5
    assert may_T[140:].mean() > 0.95


def test_ranks_that_see_the_same_steps_agree_and_rows_do_not_meet() -> None:
    together, alone = course(lambda t: 0.02, 0.005, rows=5), course(lambda t: 0.02, 0.005)
    np.testing.assert_array_equal(together, np.repeat(alone, 5, axis=1))


def test_what_is_not_a_number_changes_nothing() -> None:
    check = SelfCheck()
    check.reset(2)
    for t in range(60):
        trend_B = np.array([np.nan, 0.0]) if t == 7 else np.zeros(2)
        may_B = check.allowed(trend_B, np.full(2, np.nan if t == 9 else 0.01))
        assert may_B[0] == may_B[1]


def test_a_file_of_several_settings_checks_itself_and_a_constant_does_not(tmp_path: object) -> None:
    _, content = find("learned")
    assert isinstance(content.policy, Distilled)
    assert content.policy.checks_itself
    assert content.policy.with_preference(0.5).checks_itself
    constant = Distilled(
        [(np.zeros((1, signals.SIGNALS), np.float32), np.ones(1, np.float32))],
        [{"slack": (0.0, 0.1)}],
        margin=0.0,
        hysteresis=0.0,
    )
    path = f"{tmp_path}/constant.safetensors"
    save_policy(path, PolicyFile(constant))
    again = load_policy(path).policy
    assert isinstance(again, Distilled)
    assert not again.checks_itself


def test_a_gather_with_a_slow_rank_on_which_the_slack_rule_loses() -> None:
    """Slack is joint: each sender alone could start later, but all at once they queue at the receiver's port.

    The rule sees that by itself, with the policy's check or without.
    """
    cluster = Cluster.model_validate(
        {
            "name": "gather-slow-rank",
            "job": {"nodes": 6, "compute_s": 0.25, "gradient_bytes": 7e5, "collective": "gather"},
            "fabric": {"nic_gbps": 0.25, "nodes_per_leaf": 6, "oversubscription": 1.0},
            "noise": {"jitter_cv": 0.01, "transfer_cv": 0.002, "slow_ranks": 1, "slow_factor": 1.1},
        }
    )
    seeds, changes = np.arange(1_400_000, 1_400_008), {}
    base_E = run(passive(), start(cluster, seeds), 1000).useful_step_E
    for checks in (False, True):
        policy = find("learned")[1].policy
        assert isinstance(policy, Distilled)
        policy.checks_itself = checks
        changes[checks] = float((base_E / run(policy, start(cluster, seeds), 1000).useful_step_E - 1.0).mean())
    assert min(changes.values()) > -0.006
