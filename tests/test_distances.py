"""Distances of distributions, on series whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceenv.calibration.distances import Distance
from paceenv.core import metrics


def test_the_distance_is_scipys() -> None:
    random = np.random.default_rng(1)
    for n, m in ((5, 7), (200, 50), (1000, 1000)):
        a, b = random.normal(size=n), np.round(random.normal(0.3, 1.2, size=m), 1)
        assert metrics.ks_distance(a, b) == pytest.approx(stats.ks_2samp(a, b).statistic)
    assert metrics.ks_distance(np.ones(3), np.ones(4)) == 0.0
    assert metrics.ks_distance(np.zeros(3), np.ones(4)) == 1.0


def test_chance_is_exceeded_in_a_twentieth_of_cases() -> None:
    random = np.random.default_rng(2)
    above = [
        metrics.ks_distance(random.normal(size=40), random.normal(size=60)) > metrics.ks_chance(40, 60)
        for _ in range(600)
    ]
    assert 0.01 < np.mean(above) < 0.09
    assert metrics.ks_chance(22) == pytest.approx(0.29, abs=0.005)


def test_values_like_their_neighbours_are_fewer_values() -> None:
    random = np.random.default_rng(3)
    independent, runs = random.normal(1.0, 0.1, 3200), np.repeat(random.normal(1.0, 0.1, 200), 16)
    one, other = (Distance.between("x", values, [independent]) for values in (independent, runs))
    assert one.chance == pytest.approx(metrics.ks_chance(3200), rel=0.1)
    assert other.chance == pytest.approx(metrics.ks_chance(200), rel=0.2)
