"""The benchmark of calibration in small: intervals hold the truth."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evidence.recovery import ASKED, Case, coverage, recover, rows

COUNTS = {"jitter": 8, "imbalance": 6, "slow rank": 10, "fail-slow": 6, "shared uplink": 1}
COUNTS |= {"post-collective episodes": 2}
CHANCE = 0.02
"""How far the share of so few may be off for no reason."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [recover(mechanism, seed) for mechanism, count in COUNTS.items() for seed in range(count)]


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say(cases: list[Case]) -> None:
    found = [one for case in cases for one in case.parameters]
    low, high = ASKED[0] - CHANCE, ASKED[1] + CHANCE
    assert low <= coverage(found) <= high
    # an interval half as wide, or twice, would not pass
    z = np.array([abs(one.z) for one in found if one.is_identified])
    assert np.mean(z < 0.5 * 1.645) < low
    assert np.mean(z < 2.0 * 1.645) > high


@pytest.mark.slow
@pytest.mark.parametrize("key", ["job.compute_s", "noise.slow_factor", "noise.persistent_cv"])
def test_few_workers_are_part_of_the_error(key: str, cases: list[Case]) -> None:
    """Errors over steps alone held the truth in a third of the cases, or less."""
    found = [one for case in cases for one in case.parameters if one.key == key]
    assert len(found) >= 8
    assert coverage(found) >= 0.7


@pytest.mark.slow
def test_what_is_there_is_seen_and_hardly_anything_else(cases: list[Case]) -> None:
    # where fail-slow episodes begin and end, jitter may be taken for imbalance of little skewness
    assert sum(len(set(case.seen) - set(case.there)) for case in cases) <= 1
    assert sum(len(case.seen) for case in cases) >= 0.9 * sum(len(case.there) for case in cases)


@pytest.mark.slow
def test_a_fitted_cluster_takes_as_long_as_the_job(cases: list[Case]) -> None:
    assert np.median([abs(case.mean_error) for case in cases]) < 0.01
    assert rows(cases)[-1][0] == "all"
