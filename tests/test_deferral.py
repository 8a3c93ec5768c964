"""Holding back transfers that can wait: when ranks do it, from the common step time alone."""

from __future__ import annotations

import numpy as np
import pytest
from laid_out import laid_out

from paceenv.core import pacing, switchback, timing


def holds(held_s: float, free_s: float, iterations: int, threshold: float = 0.02) -> list[float]:
    """What one rank holds in each iteration of a job whose steps last so long with and without holding."""
    rank, tick = timing.new_state()
    settings, comm, wait = (
        pacing.settings({"defer": (threshold, 0.1)}),
        np.zeros(1, np.float32),
        np.zeros(1, np.float32),
    )
    found = []
    for _ in range(iterations):
        hold_s = float(rank[timing.DEFER_S, 0])
        found.append(hold_s)
        timing.observe_step(tick, held_s if hold_s > 0.0 else free_s)
        timing.observe_ranks(rank, tick, comm, wait, True)
        timing.decide(rank, tick, *laid_out(settings, 1), 10.0)
    return found


def test_a_hold_that_shortens_steps_goes_on_and_is_looked_at_again_and_again() -> None:
    found = np.array(holds(0.8, 1.0, 2000)) > 0.0
    assert found[500:].mean() > 0.97
    assert not found[500:].all(), "the steps without it stay known"


@pytest.mark.parametrize("held_s", [1.0, 1.05, 2.0])
def test_a_hold_that_does_not_shorten_steps_is_tried_in_one_of_forty_iterations(held_s: float) -> None:
    found = np.array(holds(held_s, 1.0, 4000)) > 0.0
    assert found[1000:].mean() < 0.025


def test_a_hold_that_clearly_hurts_ends_at_once() -> None:
    found = np.array(holds(1.05, 1.0, 500)) > 0.0
    assert found.sum() == 2 * (switchback.HURT_ITERATIONS), "two trials, each as short as can be"
    neutral = np.array(holds(1.01, 1.0, 500)) > 0.0
    assert neutral.sum() >= 3 * switchback.DEFER_TRIAL


def test_a_gain_below_the_threshold_is_not_taken() -> None:
    gained = 1.0 / 0.97 - 1.0
    assert np.mean(np.array(holds(0.97, 1.0, 1000, threshold=gained - 0.01)) > 0.0) > 0.9
    assert np.mean(np.array(holds(0.97, 1.0, 1000, threshold=gained + 0.01)) > 0.0) < 0.4


def test_a_trial_waits_for_settings_that_ask_for_it() -> None:
    """Steps of before, in which nothing was held, are no hold that helped, however lucky they were."""
    rank, tick = timing.new_state()
    comm, wait, rng = np.zeros(1, np.float32), np.zeros(1, np.float32), np.random.default_rng(1)
    for setting in [pacing.off()] * 300 + [pacing.settings({"defer": (0.02, 0.1)})] * 40:
        held = rank[timing.DEFER_S, 0] > 0.0
        timing.observe_step(tick, (0.8 if held else 1.0) * (1.0 + 0.01 * rng.normal()))
        timing.observe_ranks(rank, tick, comm, wait, True)
        timing.decide(rank, tick, *laid_out(setting, 1), 10.0)
    assert rank[timing.DEFER_S, 0] > 0.0
    assert switchback.defer_gain(tick) == pytest.approx(0.25, abs=0.03)


def test_threshold_zero_holds_always_and_window_zero_never() -> None:
    assert all(holds(2.0, 1.0, 200, threshold=0.0)[2:])
    rank, tick = timing.new_state()
    rank[timing.DEFER_S] = 1.0
    timing.observe_step(tick, 1.0)
    timing.decide(rank, tick, *laid_out(pacing.off(), 1), 10.0)
    assert not rank[timing.DEFER_S].any()


def test_the_hold_is_the_window_within_the_cap_and_no_delay_of_the_rank() -> None:
    rank, tick = timing.new_state()
    timing.observe_step(tick, 1.0)
    timing.decide(rank, tick, *laid_out(pacing.settings({"defer": (0.0, 0.25)}), 1), 10.0)
    assert rank[timing.DEFER_S, 0] == pytest.approx(0.25)
    assert rank[timing.DELAY_S, 0] == 0.0
    timing.decide(rank, tick, *laid_out(pacing.settings({"defer": (0.0, 0.25)}), 1), 0.1)
    assert 0.0999 < rank[timing.DEFER_S, 0] <= 0.1


def test_a_setting_that_is_off_for_all_ends_the_holds_of_all() -> None:
    rank, tick = timing.new_state(3)
    each = np.stack([pacing.off(), *[pacing.settings({"defer": (0.0, 0.25)})] * 2])
    timing.observe_step(tick, 1.0)
    timing.decide(rank, tick, *laid_out(each, 3), 10.0)
    assert rank[timing.DEFER_S] == pytest.approx([0.0, 0.25, 0.25])
    timing.decide(rank, tick, *laid_out(pacing.off(), 3), 10.0)
    assert not rank[timing.DEFER_S].any()
