"""What the slowest of many does to a step: closed forms, and the engine against them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from paceenv.sim.engine.simulator import Simulator
from paceenv.validation.closed_forms import any_slow, expected_maximum, exponential_rate

Make = Callable[..., Simulator]


@pytest.mark.parametrize("ranks", [1, 2, 8, 512, 100_000])
def test_expected_maximum_of_exponentials_is_a_harmonic_number(ranks: int) -> None:
    exact = exponential_rate(ranks)
    assert expected_maximum(stats.expon.sf, ranks, 0.0, 60.0) == pytest.approx(exact, rel=1e-6)
    assert exact == pytest.approx(math.log(ranks) + 0.5772156649 + 0.5 / ranks, abs=0.09 / ranks**2)


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi))])
def test_expected_maximum_of_normals(ranks: int, expected: float) -> None:
    assert expected_maximum(stats.norm.sf, ranks, -12.0, 12.0) == pytest.approx(expected, abs=1e-9)


def test_expected_maximum_of_uniforms() -> None:
    assert expected_maximum(lambda x: 1.0 - x, 9, 0.0, 1.0) == pytest.approx(0.9, rel=1e-9)


@pytest.mark.parametrize(("probability", "ranks"), [(0.0, 9), (1e-3, 512), (0.2, 7), (1.0, 3), (1e-12, 10**6)])
def test_probability_that_any_is_slow(probability: float, ranks: int) -> None:
    none = math.exp(ranks * math.log1p(-probability)) if probability < 1.0 else 0.0
    assert any_slow(probability, ranks) == pytest.approx(1.0 - none, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_the_engine_amplifies_exponentials_as_the_closed_form_says(simulator: Make, ranks: int) -> None:
    sim = simulator(range(64), ranks=ranks, imbalance_cv=1.0, skewness=2.0)
    step = sim.run(sim.off(), 2000)
    error = step.mean(axis=1).std() / 8
    assert step.mean() == pytest.approx(exponential_rate(ranks), abs=4.5 * error + 2e-3)


def test_the_engine_stalls_as_often_as_any_rank_does(simulator: Make) -> None:
    sim = simulator(range(32), ranks=64, stall_rate=0.005, stall_mean_s=1.0)
    stalled = (sim.run(sim.off(), 2000) > 1.0).mean()
    assert stalled == pytest.approx(any_slow(0.005, 64), abs=4.5 * np.sqrt(0.25 / 64000))
