"""The campaign on detection counts rightly: jobs with a known lateness, its limits, and its tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.evidence import detection
from benchmarks.evidence._lateness_jobs import Series
from paceenv.core.lateness.watch import LateSpan


def calm(steps: int = 300, cv: float = 0.02) -> Series:
    own_TR = 1.0 + cv * np.random.default_rng(8).normal(size=(steps, 4))
    return Series("calm", own_TR, own_TR.max(axis=1) + 0.1, ((0, 1, 2, 3),), np.zeros_like(own_TR))


def test_a_slowed_rank_is_named_and_a_name_of_another_one_is_wrong() -> None:
    found = detection.delay("made", calm(), 2, 150, 0.3)
    assert 4 <= found.steps <= 10
    assert found.seconds == pytest.approx(found.steps * 1.45, rel=0.1)
    assert (found.off, found.wrong) == (0.0, 0)
    assert found.amount == pytest.approx(1.0, abs=0.1)
    slowed = calm().slowed(2, slice(150, None), 0.3)
    assert detection.is_true(slowed, LateSpan(2, 150, None, 160, 11, 0.3, 0.0))
    assert not detection.is_true(slowed, LateSpan(1, 150, None, 160, 11, 0.3, 0.0))
    assert detection.healthy("made", [slowed]).true == 1
    assert detection.healthy("made", [calm()]).wrong == 0


def test_a_rank_that_is_never_named_counts_as_never() -> None:
    missed = detection.delay("made", calm(cv=0.2), 2, 150, 0.1)
    assert math.isnan(missed.steps)
    named = detection.delay("made", calm(), 2, 150, 0.5)
    _, _, rows = detection.delay_table([missed, named])
    assert [(row[0], row[4]) for row in rows if row[1] == "made"] == [("10%", "0%"), ("50%", "100%")]
    cells = detection._delay_cells([missed, named])
    assert (cells[0], cells[2], cells[4]) == ("2", "50%", "never")


def test_the_limits_are_those_of_poisson() -> None:
    assert detection.upper(0) == pytest.approx(-math.log(0.05))
    for count in (1, 5):
        mean = detection.upper(count)
        assert sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1)) == pytest.approx(0.05)
        mean = detection.lower(count)
        assert 1.0 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count)) == pytest.approx(0.05)
