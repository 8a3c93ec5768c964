"""What a live rank does and measures imperfectly; the referee has late wake-ups, noisy stamps and missing steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from conftest import EVERY_NOISE

from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]
UNEQUAL: dict[str, Any] = {"has_barrier": True, "transfer_alone_s": 0.1, "uplink_work_s": 0.1, "post_work_groups": 1}
UNEQUAL |= {"post_work_s": 0.3, "jitter_cv": 0.003}
"""Two groups share an uplink, and one of them has work after its collective: the other can wait."""


def test_without_pacing_a_late_wake_up_and_a_missing_step_change_no_step(simulator: Make) -> None:
    jobs = UNEQUAL | EVERY_NOISE
    plain = simulator(range(4), ranks=8, groups=2, **jobs)
    other = simulator(range(4), ranks=8, groups=2, **jobs, late_wake_s=0.01, stamp_noise_s=0.001, missing_share=0.1)
    np.testing.assert_array_equal(plain.run(plain.off(), 300), other.run(other.off(), 300))
    assert not np.array_equal(plain.observe(), other.observe())
