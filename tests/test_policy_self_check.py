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
    shares = [course(lambda t: -gain, noise, seed=seed).mean() for seed in range(4)]
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
