"""Rules that judge themselves: slack pauses on all ranks and stops where it costs; transfers are held where it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def iterate(rank: Any, tick: Any, settings: Any, step_s: float, comm_s: float = 0.0, wait_s: float = 0.0) -> None:
    """One iteration of a rank that meets the others in a barrier, and what it decides then."""
    timing.observe_step(tick, step_s)
    timing.observe_ranks(rank, tick, np.full(1, comm_s, np.float32), np.full(1, wait_s, np.float32), True)
    timing.decide(rank, tick, *laid_out(settings, 1), 10.0)


def delays_s(
    cost: Callable[[int], float], noise: float = 0.01, iterations: int = 1000, seed: int = 0
) -> NDArray[np.float64]:
    """Delays of a rank that always has slack, in a job whose steps are longer by ``cost`` while it delays."""
    rng, (rank, tick) = np.random.default_rng(seed), timing.new_state()
    found = np.zeros(iterations)
    for t in range(iterations):
        found[t] = rank[timing.DELAY_S, 0]
        step_s = 1.0 + noise * rng.normal() + (cost(t) if found[t] > 0.0 else 0.0)
        iterate(rank, tick, SLACK, step_s, 0.1, 0.3 - found[t])
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
            iterate(rank, tick, SLACK, step_s, 0.1, wait_s)
        np.testing.assert_array_equal(late[1], early[1])


def test_delays_too_short_to_be_slept_are_left_out() -> None:
    rank, tick = timing.new_state()
    timing.observe_step(tick, 1.0)
    for asked, acts in ((0.5 * timing.MIN_DELAY_SHARE, False), (2.0 * timing.MIN_DELAY_SHARE, True)):
        settings_M2 = pacing.settings({"stagger": (0.0, asked)})
        timing.decide(rank, tick, *laid_out(settings_M2, 1), 10.0, 1, 2)
        assert (rank[timing.DELAY_S, 0] > 0.0) == acts


def change(policy: str, cluster: str) -> float:
    """By how much a policy lengthens the mean step, a share."""
    made = rule(policy)
    assert made is not None
    paced, free = (run(p, start(load_cluster(cluster), np.arange(4)), 600).useful_step_E for p in (made, passive()))
    return float((paced / free).mean() - 1.0)


def test_mean_slack_is_the_papers_rule_without_its_losses_and_keeps_what_it_gains() -> None:
    paper, ours = (change(f"static:{name}=0/0.3", "null-jitter") for name in ("paper", "mean_slack"))
    assert paper > 0.05
    assert ours < 0.15 * paper
    paper, ours = (change(f"static:{name}=0.01/0.3", "unequal-slack") for name in ("paper", "mean_slack"))
    assert paper < -0.05
    assert ours < 0.75 * paper


# Holding back transfers that can wait: when ranks do it, from the common step time alone


def holds(held_s: float, free_s: float, iterations: int, threshold: float = 0.02) -> NDArray[np.bool_]:
    """Whether one rank holds in each iteration of a job whose steps last so long with and without holding."""
    (rank, tick), found = timing.new_state(), []
    for _ in range(iterations):
        found.append(bool(rank[timing.DEFER_S, 0] > 0.0))
        iterate(rank, tick, pacing.settings({"defer": (threshold, 0.1)}), held_s if found[-1] else free_s)
    return np.array(found)


def test_a_hold_that_shortens_steps_goes_on_and_is_looked_at_again_and_again() -> None:
    found = holds(0.8, 1.0, 2000)
    assert found[500:].mean() > 0.97
    assert not found[500:].all(), "the steps without it stay known"


@pytest.mark.parametrize("held_s", [1.0, 1.05, 2.0])
def test_a_hold_that_does_not_shorten_steps_is_tried_in_one_of_forty_iterations(held_s: float) -> None:
    assert holds(held_s, 1.0, 4000)[1000:].mean() < 0.025


def test_a_hold_that_clearly_hurts_ends_at_once() -> None:
    assert holds(1.05, 1.0, 500).sum() == 2 * switchback.HURT_ITERATIONS, "two trials, each as short as can be"
    assert holds(1.01, 1.0, 500).sum() >= 3 * switchback.DEFER_TRIAL


def test_a_gain_below_the_threshold_is_not_taken() -> None:
    gained = 1.0 / 0.97 - 1.0
    assert holds(0.97, 1.0, 1000, threshold=gained - 0.01).mean() > 0.9
    assert holds(0.97, 1.0, 1000, threshold=gained + 0.01).mean() < 0.4


def test_a_trial_waits_for_settings_that_ask_for_it() -> None:
    """Steps of before, in which nothing was held, are no hold that helped, however lucky they were."""
    (rank, tick), rng = timing.new_state(), np.random.default_rng(1)
    for settings in [pacing.off()] * 300 + [pacing.settings({"defer": (0.02, 0.1)})] * 40:
        held = rank[timing.DEFER_S, 0] > 0.0
        iterate(rank, tick, settings, (0.8 if held else 1.0) * (1.0 + 0.01 * rng.normal()))
    assert rank[timing.DEFER_S, 0] > 0.0
    assert switchback.defer_gain(tick) == pytest.approx(0.25, abs=0.03)


def test_threshold_zero_holds_the_window_within_the_cap_and_window_zero_never_and_no_rank_is_delayed() -> None:
    assert holds(2.0, 1.0, 200, threshold=0.0)[2:].all()
    (rank, tick), defer = timing.new_state(3), pacing.settings({"defer": (0.0, 0.25)})
    timing.observe_step(tick, 1.0)
    timing.decide(rank, tick, *laid_out(np.stack([pacing.off(), defer, defer]), 3), 10.0)
    assert rank[timing.DEFER_S] == pytest.approx([0.0, 0.25, 0.25])
    timing.decide(rank, tick, *laid_out(pacing.off(), 3), 10.0)
    assert not rank[timing.DEFER_S].any(), "off for all ends the holds of all"
    timing.decide(rank, tick, *laid_out(defer, 3), 0.1)
    assert ((rank[timing.DEFER_S] > 0.0999) & (rank[timing.DEFER_S] <= 0.1)).all()
    assert not rank[timing.DELAY_S].any()
