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
