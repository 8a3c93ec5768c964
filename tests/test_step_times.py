"""Statistics of step times alone, on series whose truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import signal

from paceenv.core.errors import InputError
from paceenv.diagnosis.step_times.step_diagnosis import StepDiagnosis, diagnose_steps
from paceenv.importers.log_text.conversion import StepLog

Array = NDArray[np.float64]
NORMAL_P1 = 2.3263
"""Standard deviations that the first percentile of a normal lies below its mean."""


def log_of(step_s: Array, *, every: int = 1, averaged: int = 1, **changes: Any) -> StepLog:
    n = len(step_s)
    steps = np.arange(1, n + 1) * every
    return StepLog("a.log", "test", steps, step_s, np.full(n, averaged), np.zeros(n, np.int64), **changes)


def diagnosed(step_s: Array, **options: Any) -> StepDiagnosis:
    return diagnose_steps(log_of(step_s, **options))


def kinds(found: StepDiagnosis) -> set[str]:
    return {one.kind for one in (*found.findings, *found.minor)}


def ar1(random: np.random.Generator, n: int, memory: float, cv: float) -> Array:
    noise = random.normal(size=n + 300) * np.sqrt(1.0 - memory**2)
    return 1.0 + cv * np.asarray(signal.lfilter([1.0], [1.0, -memory], noise)[300:])


def test_the_ceiling_of_normal_steps_is_known() -> None:
    found = diagnosed(1.0 + 0.02 * np.random.default_rng(1).normal(size=5000))
    assert found.ceiling is not None
    truth = 1.0 / (1.0 - 0.02 * NORMAL_P1) - 1.0
    assert found.ceiling.low <= truth <= found.ceiling.high
    assert found.ceiling.value == pytest.approx(truth, rel=0.08)
    assert found.cv == pytest.approx(0.02, rel=0.05)
    assert found.from_outliers == 0.0
    assert (kinds(found), len(found.ordinary.levels)) == (set(), 1)


def test_averaging_hides_what_single_steps_vary() -> None:
    single = 1.0 + 0.02 * np.random.default_rng(2).normal(size=(600, 32))
    found = diagnosed(single.mean(axis=1), every=32, averaged=32)
    assert "each value averages 32 steps, which hides how single steps vary" in found.verdict


@pytest.mark.parametrize(("every", "period"), [(1, 100), (10, 500), (1, 37)])
def test_outliers_and_their_period(every: int, period: int) -> None:
    n = 2000  # for two of them the last value is an outlier
    step_s = 1.0 + 0.01 * np.random.default_rng(5).normal(size=n)
    at = np.arange(1, n + 1) * every % period == 0
    step_s[at] += 1.5
    found = diagnosed(step_s, every=every)
    np.testing.assert_array_equal(found.ordinary.outlier_V, at)
    assert [one.period for one in (*found.findings, *found.minor) if one.kind == "long steps"] == [period]
    assert found.ceiling is not None
    assert found.from_outliers == pytest.approx(1.5 * at.mean(), rel=0.1)


def test_changes_of_level_and_when() -> None:
    step_s = 1.0 + 0.02 * np.random.default_rng(8).normal(size=2000)
    step_s[800:1500] *= 1.1
    found = diagnosed(step_s)
    assert [r.start for r in found.ordinary.levels] == [0, pytest.approx(800, abs=5), pytest.approx(1500, abs=5)]
    assert [r.level_s for r in found.ordinary.levels] == [pytest.approx(x, rel=0.01) for x in (1.0, 1.1, 1.0)]


def test_drift_is_no_change_of_level() -> None:
    step_s = (1.0 + 0.02 * np.random.default_rng(9).normal(size=2000)) * np.linspace(1.0, 1.05, 2000)
    found = diagnosed(step_s)
    assert len(found.ordinary.levels) == 1
    assert found.drift is not None
    assert abs(found.drift.change - 0.05) <= 2.0 * found.drift.half_width


def test_false_alarms_are_rare() -> None:
    random = np.random.default_rng(11)
    found = [
        diagnosed(ar1(random, int(random.choice([40, 300, 1500])), float(random.choice([0.0, 0.5, 0.9])), 0.02))
        for _ in range(20)
    ]
    assert sum(len(one.ordinary.levels) > 1 for one in found) <= 3
    assert sum(one.drift is not None for one in found) <= 3
    assert sum("alternation" in kinds(one) for one in found) <= 2
    assert not any(
        finding.period for one in found for finding in (*one.findings, *one.minor) if finding.kind == "long steps"
    )


def test_warm_up_and_restarts_are_recognised() -> None:
    random = np.random.default_rng(12)
    parts = [np.concatenate([[9.0, 4.0, 1.5], 1.0 + 0.01 * random.normal(size=200)]) for _ in range(2)]
    log = log_of(np.concatenate(parts))
    runs = np.repeat([0, 1], 203)
    found = diagnose_steps(StepLog(log.name, log.source, log.step_V, log.step_s_V, log.steps_V, runs))
    assert np.flatnonzero(found.ordinary.warm_up_V).tolist() == [0, 1, 2, 203, 204, 205]
    assert found.runs == 2
    assert found.mean_s == pytest.approx(1.0, abs=0.01)


def test_a_first_value_of_part_of_a_step_is_not_the_fastest_one() -> None:
    step_s = 1.0 + 0.01 * np.random.default_rng(15).normal(size=20)
    step_s[0] = 0.2
    found = diagnosed(step_s)
    assert np.flatnonzero(found.ordinary.warm_up_V).tolist() == [0]
    assert found.ceiling is not None
    assert found.ceiling.high < 0.05


def test_few_values_are_no_verdict() -> None:
    few = 1.0 + 0.02 * np.random.default_rng(13).normal(size=6)
    assert "too few" in diagnosed(few).verdict
    with pytest.raises(InputError, match="allowed: at least 4"):
        diagnosed(np.ones(3))
    some = 1.0 + 0.012 * np.random.default_rng(14).normal(size=18)
    assert "cannot be determined from 18 values" in diagnosed(some).verdict
