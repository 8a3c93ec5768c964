"""What a run is judged by, and distances of distributions, on series whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core.metrics import correlation_length, mean_interval, reward, step_statistics

positive = st.floats(1e-3, 1e3)


def test_step_statistics_of_known_steps() -> None:
    stats = step_statistics(np.arange(1.0, 101.0).reshape(4, 25))
    assert stats["mean"] == 50.5
    assert stats["sd"] == pytest.approx(math.sqrt((100**2 - 1) / 12))
    assert stats["cv"] == pytest.approx(stats["sd"] / 50.5)
    assert (stats["p50"], stats["p95"], stats["p99"]) == pytest.approx((50.5, 95.05, 99.01))


@given(mean=positive, cv=st.floats(0, 1), slower=st.floats(1.001, 10), reference=positive, weight=st.floats(0, 5))
def test_reward_falls_when_everyone_is_merely_slowed_down(
    mean: float, cv: float, slower: float, reference: float, weight: float
) -> None:
    sd, late = cv * mean, slower * mean
    before = reward(mean, sd, reference, weight)
    assert reward(late, sd, reference, weight) < before, "a constant on every step: CV falls"
    assert sd / late <= sd / mean
    assert reward(late, slower * sd, reference, weight) < before, "a factor on every step: CV stays"


@pytest.mark.parametrize("units", [2, 4, 24])
def test_intervals_of_a_mean_hold_the_truth_at_their_level(units: int) -> None:
    rng = np.random.default_rng(5)
    covered = [3.0 in mean_interval(rng.normal(3.0, 1.0, units)) for _ in range(500)]
    assert 0.92 <= np.mean(covered) <= 0.98
    assert not mean_interval(np.array([2.0])).is_bounded


def test_values_like_their_neighbours_are_fewer_values() -> None:
    random = np.random.default_rng(3)
    independent, runs = random.normal(1.0, 0.1, 3200), np.repeat(random.normal(1.0, 0.1, 200), 16)
    one, other = (len(values) / correlation_length(values) for values in (independent, runs))
    assert one == pytest.approx(3200, rel=0.2)
    assert other == pytest.approx(200, rel=0.4)
