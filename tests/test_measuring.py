"""What a live rank does and measures imperfectly, in both engines: late wake-ups, noise of stamps, missing steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import EVERY_NOISE

from paceenv.core import pacing, timing
from paceenv.sim.engine.measuring import FIRST_MISSING, is_missing
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]
UNEQUAL: dict[str, Any] = {"has_barrier": True, "transfer_alone_s": 0.1, "uplink_work_s": 0.1, "post_work_groups": 1}
UNEQUAL |= {"post_work_s": 0.3, "jitter_cv": 0.003}
"""Two groups share an uplink, and one of them has work after its collective: the other can wait."""
SLACK_M2 = pacing.one_mechanism("slack", 0.0, 0.3)


def test_without_pacing_a_late_wake_up_and_a_missing_step_change_no_step(simulator: Make) -> None:
    jobs = UNEQUAL | EVERY_NOISE
    plain = simulator(range(4), ranks=8, groups=2, **jobs)
    other = simulator(range(4), ranks=8, groups=2, **jobs, late_wake_s=0.01, stamp_noise_s=0.001, missing_share=0.1)
    np.testing.assert_array_equal(plain.run(plain.off(), 300), other.run(other.off(), 300))
    assert not np.array_equal(plain.observe(), other.observe())


def test_a_delay_lasts_longer_by_an_exponential_time_and_the_rank_measures_the_real_one(simulator: Make) -> None:
    exact = simulator(range(16), ranks=8, groups=2, **UNEQUAL)
    late = simulator(range(16), ranks=8, groups=2, **UNEQUAL, late_wake_s=0.004)
    for sim in (exact, late):  # the first decision of both is on the same history
        sim.run(np.tile(pacing.off(), (16, 1, 1, 1)), 100)
    settings = np.tile(SLACK_M2, (16, 1, 1, 1))
    exact.run(settings, 1)
    late.run(settings, 1)
    asked_ER = late.state.rank_EFR[:, timing.DELAY_S, :8].astype(float)
    np.testing.assert_array_equal(asked_ER, exact.state.rank_EFR[:, timing.DELAY_S, :8])
    record = late.record(settings, 1)
    real_ER = record.delay_ETR[:, 0]
    paced = asked_ER > 0.0
    assert 40 <= paced.sum() <= 64
    np.testing.assert_array_equal(real_ER[~paced], 0.0)
    over = (real_ER - asked_ER)[paced]
    assert over.min() > 0.0
    assert over.mean() == pytest.approx(0.004, rel=0.35)
    # the slack of an early group is its wait plus the real delay
    ready_ER = np.repeat(record.ready_ETG[:, 0], 4, axis=1)
    wait_ER = record.step_ET[:, :1] - ready_ER
    slack_ER = late.state.rank_EFR[:, timing.SLACK_S, :8]
    np.testing.assert_allclose(slack_ER, wait_ER + real_ER, atol=1e-6)


def test_noise_of_stamps_is_in_what_a_rank_measures_and_in_no_step(simulator: Make) -> None:
    job = {"has_barrier": True, "transfer_alone_s": 0.1}
    sim = simulator(range(8), ranks=4, **job, stamp_noise_s=1e-3)
    record = sim.record(sim.off(), 1)
    np.testing.assert_allclose(record.step_ET, 1.1)
    seen = []
    for _ in range(200):
        sim.run(sim.off(), 1)
        seen.append(sim.state.rank_EFR[:, [timing.COMM_S, timing.SLACK_S], :4].copy())
    comm, wait = np.moveaxis(np.array(seen), 2, 0)
    assert comm.mean() == pytest.approx(0.1, abs=1e-4)
    assert comm.std() == pytest.approx(1e-3, rel=0.05)
    assert wait.min() == 0.0, "no measured duration is negative"
    assert wait.mean() == pytest.approx(1e-3 / np.sqrt(2.0 * np.pi), rel=0.1)
    assert abs(np.corrcoef(comm.ravel(), wait.ravel())[0, 1]) < 0.05


def test_a_rank_learns_nothing_of_a_missing_step_and_does_not_delay_the_next(simulator: Make) -> None:
    sim = simulator(range(4), ranks=8, groups=2, **UNEQUAL, missing_share=0.1)
    settings = np.tile(SLACK_M2, (4, 1, 1, 1))
    job, found = sim.batch.jobs, 0
    sim.run(settings, FIRST_MISSING)
    missed = np.zeros((4, 8), bool)
    for t in range(FIRST_MISSING, 160):
        before = sim.state.rank_EFR[:, :, :8].copy()
        record = sim.record(settings, 1)
        after = sim.state.rank_EFR[:, :, :8]
        assert (record.delay_ETR[:, 0][missed] == 0.0).all()
        with np.errstate(over="ignore"):
            missed = np.array(
                [[is_missing(job[e], sim.state.clocks["key"][e], t, r) for r in range(8)] for e in range(4)]
            )
        others = [field for field in range(timing.RANK_FIELDS) if field != timing.DELAY_S]
        for e, r in zip(*np.nonzero(missed), strict=True):
            np.testing.assert_array_equal(before[e, others, r], after[e, others, r])
        for e, r in zip(*np.nonzero(~missed), strict=True):
            assert (before[e, others, r] != after[e, others, r]).any()
        found += missed.sum()
    assert found / (4 * 8 * (160 - FIRST_MISSING)) == pytest.approx(0.1, abs=0.02)
