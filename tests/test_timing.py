"""The timing estimator: baselines, recent lows, means, slack and the delays they lead to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from laid_out import laid_out
from numpy.typing import NDArray

from paceenv.core import pacing, slots, switchback, timing

Floats = NDArray[np.floating]


def feed(
    rank: Floats,
    tick: Floats,
    comm_s: Floats | float,
    wait_s: Floats | float = 0.0,
    step_s: float = 1.0,
    barrier: bool = True,
) -> None:
    """One iteration of every column."""
    ranks = rank.shape[1]
    timing.observe_step(tick, step_s)
    comm_R, wait_R = np.full(ranks, comm_s, dtype=np.float32), np.full(ranks, wait_s, dtype=np.float32)
    timing.observe_ranks(rank, tick, comm_R, wait_R, barrier)


@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_baselines_remember_the_uncontended_time_for_many_blocks(blocks: int) -> None:
    rank, tick = timing.new_state()
    for _ in range(timing.BLOCK_ITERATIONS):
        feed(rank, tick, 1.0, step_s=3.0)
    for _ in range(blocks * timing.BLOCK_ITERATIONS):
        feed(rank, tick, 2.0, step_s=5.0)
    left = (1.0 - float(timing.BASELINE_RISE)) ** blocks
    assert rank[slots.COMM_BASELINE_S, 0] == pytest.approx(2.0 - left)
    assert tick[timing.STEP_BASELINE_S] == pytest.approx(5.0 - 2.0 * left)
    before_s = tick[timing.STEP_BASELINE_S]
    for _ in range(2):
        feed(rank, tick, 0.5, step_s=2.5)
        assert tick[timing.STEP_BASELINE_S] == before_s, "two lucky iterations are noise"
    feed(rank, tick, 0.5, step_s=2.5)
    assert rank[slots.COMM_BASELINE_S, 0] == 0.5, "three in a block count at once"
    assert tick[timing.STEP_BASELINE_S] == 2.5


def test_a_baseline_is_the_third_smallest_of_its_first_block_and_starts_at_once() -> None:
    rank, tick = timing.new_state()
    values = np.random.default_rng(3).uniform(1.0, 2.0, timing.BLOCK_ITERATIONS)
    for n, value in enumerate(values, 1):
        feed(rank, tick, value, step_s=value)
        expected = np.sort(values[:n])[min(n, 3) - 1]
        assert rank[slots.COMM_BASELINE_S, 0] == pytest.approx(expected, rel=1e-6)
        assert tick[timing.STEP_BASELINE_S] == expected


def test_recent_low_falls_at_once_forgets_within_its_windows_and_keeps_its_margin() -> None:
    rank, tick = timing.new_state()
    for _ in range(3):
        feed(rank, tick, 4.0)
    for _ in range(200):
        feed(rank, tick, 7.0)
    assert timing.comm_low_s(rank, 0) == pytest.approx(7.0), "the 4 has passed, though the baseline still remembers it"
    assert rank[slots.COMM_BASELINE_S, 0] < 7.0
    feed(rank, tick, 6.5)
    assert rank[slots.COMM_CHANGE_S, 0] == pytest.approx(timing.SMOOTHING * 0.5)
    assert timing.comm_low_s(rank, 0) == pytest.approx(6.5 - timing.CHANGE_MARGIN * timing.SMOOTHING * 0.5)
    for _ in range(3):
        feed(rank, tick, 4.0)
    assert timing.comm_low_s(rank, 0) == rank[slots.COMM_BASELINE_S, 0] == 4.0, "never below the baseline"
    lows = []
    for _ in range(200):
        feed(rank, tick, 7.0)
        lows.append(timing.comm_low_s(rank, 0))
    assert lows[-1] == pytest.approx(7.0)
    assert np.diff(lows).min() >= 0.0


def test_slack_is_wait_plus_own_delay() -> None:
    rank, tick = timing.new_state(2)
    rank[timing.DELAY_S] = 0.0, 0.25
    for _ in range(400):
        feed(rank, tick, 1.0, np.array([0.5, 0.25]))
    assert timing.slack_low_s(rank, 0) == pytest.approx(0.5)
    assert timing.slack_low_s(rank, 1) == pytest.approx(0.5), "a delay does not use up the slack it takes"


def test_without_a_barrier_wait_is_what_the_collective_takes_over_its_baseline() -> None:
    rank, tick = timing.new_state()
    for _ in range(3):
        feed(rank, tick, 0.5, 99.0, barrier=False)
    assert rank[slots.SLACK_S, 0] == 0.0
    feed(rank, tick, 0.75, 99.0, barrier=False)
    assert rank[slots.SLACK_S, 0] == 0.25
    feed(rank, tick, 0.5, 99.0, barrier=False)
    assert rank[slots.SLACK_S, 0] == 0.0
    feed(rank, tick, 0.25, 99.0, barrier=False)
    assert rank[slots.SLACK_S, 0] == -0.25, "luckier than usual, and not yet the baseline"


def early_rank() -> tuple[Floats, Floats]:
    """Three ranks that have waited 0.2 s for long, in a contended collective after an uncontended start."""
    rank, tick = timing.new_state(3)
    for _ in range(3):
        feed(rank, tick, 0.5, 0.2)
    for i in range(200):
        feed(rank, tick, 0.75, 0.2 + 1e-3 * (i % 2))
    return rank, tick


def test_decide_takes_the_largest_demand_not_the_sum() -> None:
    asked = []
    everything = pacing.off()
    for mechanism in pacing.MECHANISMS:
        rank, tick = early_rank()
        one = pacing.settings({mechanism: (0.0, 0.6)})
        everything += one
        timing.decide(rank, tick, *laid_out(one, 3), 10.0)
        asked.append(rank[timing.DELAY_S].copy())
    rank, tick = early_rank()
    timing.decide(rank, tick, *laid_out(everything, 3), 10.0)
    np.testing.assert_array_equal(rank[timing.DELAY_S], np.max(asked, axis=0))
    assert asked[pacing.SLACK].all()
    assert asked[pacing.PHASE_SHIFT].all()


# Stagger: hold, probe, back off


def staggered(step_s: Callable[[int, bool], float], iterations: int) -> tuple[Floats, Floats, Floats]:
    """The tick after steps that last as told by their number and whether ranks hold places; the steps, and the delay
    that the last of four members took before each."""
    (rank, tick), steps, delays = timing.new_state(), [], []
    for t in range(iterations):
        delays.append(float(rank[timing.DELAY_S, 0]))
        steps.append(step_s(t, delays[-1] > 0.0))
        feed(rank, tick, 0.1, step_s=steps[-1])
        timing.decide(rank, tick, *laid_out(pacing.settings({"stagger": (0.1, 0.3)}), 1), 10.0, 3, 4)
    return tick, np.array(steps), np.array(delays)


def collapsing(good_at_first: int) -> Callable[[int, bool], float]:
    """Steps of a job that take half as long with a stagger."""
    return lambda t, holds: 1.0 if t < good_at_first else 1.2 if holds else 2.5


def test_ranks_take_their_places_while_a_job_collapses() -> None:
    tick, _, delays = staggered(lambda t, _: 1.0 if t < 13 else 2.5, 17)
    assert delays[-1] == pytest.approx(0.3 * tick[timing.STEP_BASELINE_S])
    rank, _ = timing.new_state(4)
    timing.decide(rank, tick, *laid_out(pacing.settings({"stagger": (0.1, 0.3)}), 4), 10.0, 0, 4)
    np.testing.assert_allclose(rank[timing.DELAY_S], delays[-1] * np.arange(4) / 3, rtol=1e-6)
    timing.decide(rank, tick, *laid_out(pacing.settings({"stagger": (2.0, 0.3)}), 4), 10.0, 0, 4)
    assert not rank[timing.DELAY_S].any(), "the inflation is below this threshold"


def test_a_stagger_that_helps_is_held_ever_longer() -> None:
    held = staggered(collapsing(4), 3000)[2] > 0.0
    assert np.mean(held[-1000:]) > 0.98
    assert not held[-1000:].all(), "it probes"


def test_a_job_that_collapses_in_every_step_tries_places() -> None:
    """None of its steps stands out, so its baseline is a collapsed step, until a trial."""
    _, steps, delays = staggered(collapsing(0), 1000)
    assert not delays[: switchback.STAGGER_FIRST_TRIAL].any()
    assert np.mean(delays[-500:] > 0.0) > 0.95
    assert np.mean(steps[-500:]) < 1.3


def test_slow_steps_by_chance_do_not_make_a_stagger_look_good() -> None:
    """A hold follows slow steps, and after slow steps by chance the next ones are faster of themselves."""
    rng, held = np.random.default_rng(0), []
    rank, tick = timing.new_state(2)
    for _ in range(3000):
        held.append(bool(tick[slots.STAGGER_LEFT] > 0.0))
        feed(rank, tick, 0.1, step_s=float(rng.gamma(6.0, 1.0 / 6.0)) + 0.15 * held[-1])
    assert np.mean(held) < 0.08, np.mean(held)
