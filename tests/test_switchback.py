"""The slack rule judges itself: it pauses on all ranks, stops where it costs, and is hardly interrupted elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from laid_out import laid_out
from numpy.typing import NDArray

from paceenv.core import pacing, switchback, timing
from paceenv.policies.names import rule
from paceenv.policies.rollout import run
from paceenv.policies.rules import passive
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start

SLACK = pacing.settings({"slack": (0.0, 0.2)})


def delays_s(
    cost: Callable[[int], float], noise: float = 0.01, iterations: int = 1000, seed: int = 0
) -> NDArray[np.float64]:
    """Delays of a rank that always has slack, in a job whose steps are longer by ``cost`` while it delays."""
    rng, (rank, tick) = np.random.default_rng(seed), timing.new_state()
    found = np.zeros(iterations)
    for t in range(iterations):
        found[t] = rank[timing.DELAY_S, 0]
        step_s = 1.0 + noise * rng.normal() + (cost(t) if found[t] > 0.0 else 0.0)
        timing.observe_step(tick, step_s)
        wait_R = np.array([0.3 - found[t]], np.float32)
        timing.observe_ranks(rank, tick, np.array([0.1], np.float32), wait_R, True)
        timing.decide(rank, tick, *laid_out(SLACK, 1), 10.0)
    return found


@pytest.mark.parametrize(("cost", "noise"), [(0.02, 0.001), (0.05, 0.01), (0.3, 0.01), (0.3, 0.05)])
def test_slack_whose_use_lengthens_the_step_is_left_alone(cost: float, noise: float) -> None:
    shares = [np.mean(delays_s(lambda t: cost, noise, seed=seed) > 0.0) for seed in range(3)]
    assert np.mean(shares) < 0.15


@pytest.mark.parametrize("gain", [0.05, 0.3])
def test_slack_whose_use_pays_is_hardly_interrupted(gain: float) -> None:
    shares = [np.mean(delays_s(lambda t: -gain, seed=seed) > 0.0) for seed in range(3)]
    assert np.mean(shares) > 0.96


def test_a_delay_is_the_same_after_a_pause() -> None:
    delay_T = delays_s(lambda t: -0.1, noise=0.0)
    (paused,) = np.nonzero((delay_T[60:] == 0.0) & (delay_T[59:-1] > 0.0))
    for t in 60 + paused:
        assert not delay_T[t : t + switchback.SLACK_PAUSE].any()
        assert delay_T[t + switchback.SLACK_PAUSE] == pytest.approx(delay_T[t - 1], rel=0.05)
    assert len(paused) > 0


def test_a_job_that_changes_is_tried_again() -> None:
    delay_T = delays_s(lambda t: 0.1 if t < 200 else -0.1, iterations=1500)
    assert np.mean(delay_T[:200] > 0.0) < 0.3
    assert np.mean(delay_T[-300:] > 0.0) > 0.9


def test_ranks_with_the_same_settings_pause_together_whatever_their_slack() -> None:
    rng, (late, early) = np.random.default_rng(2), (timing.new_state(), timing.new_state())
    for _ in range(400):
        step_s = 1.0 + 0.05 * rng.normal()
        for (rank, tick), wait_s in ((late, 0.0), (early, 0.3)):
            timing.observe_step(tick, step_s)
            timing.observe_ranks(rank, tick, np.array([0.1], np.float32), np.array([wait_s], np.float32), True)
            timing.decide(rank, tick, *laid_out(SLACK, 1), 10.0)
        np.testing.assert_array_equal(late[1], early[1])


def test_delays_too_short_to_be_slept_are_left_out() -> None:
    rank, tick = timing.new_state()
    timing.observe_step(tick, 1.0)
    for asked, acts in ((0.5 * timing.MIN_DELAY_SHARE, False), (2.0 * timing.MIN_DELAY_SHARE, True)):
        settings_M2 = pacing.settings({"stagger": (0.0, asked)})
        timing.decide(rank, tick, *laid_out(settings_M2, 1), 10.0, 1, 2)
        assert (rank[timing.DELAY_S, 0] > 0.0) == acts


def change(policy: str, cluster: str, *changes: str) -> float:
    """By how much a policy lengthens the mean step, a share."""
    job, seeds = load_cluster(cluster).changed(changes), np.arange(4)
    made = rule(policy)
    assert made is not None
    paced, free = (run(p, start(job, seeds), 600).useful_step_E for p in (made, passive()))
    return float((paced / free).mean() - 1.0)


def test_mean_slack_is_the_papers_rule_without_its_losses() -> None:
    paper, ours = (change(f"static:{name}=0/0.3", "null-jitter") for name in ("paper", "mean_slack"))
    assert paper > 0.05
    assert ours < 0.15 * paper


def test_mean_slack_keeps_what_the_papers_rule_gains() -> None:
    paper, ours = (change(f"static:{name}=0.01/0.3", "unequal-slack") for name in ("paper", "mean_slack"))
    assert paper < -0.05
    assert ours < 0.75 * paper
