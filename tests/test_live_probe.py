"""Probes: a plan that everybody draws alike, delays within every limit, and a real job delayed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_live_control import Job as LiveJob

from paceenv.core.probing import unit_of


def test_what_moves_together_is_a_group_or_else_a_rank() -> None:
    assert unit_of(5, 3, 2, 8) == ("group 3", 4)
    assert unit_of(5, 0, 8, 8) == ("rank 5", 8)  # one group has all: to delay it would only shift the job
    assert unit_of(5, -1, 1, 8) == ("rank 5", 8)


class Job(LiveJob):
    """Rank 2 of eight, in one group, whose steps last ``step_s(delay_s)``."""

    place, rank, ranks = (2, 8), 2, 8

    def __init__(self, step_s: Callable[[float], float], **options: Any) -> None:
        super().__init__(None, "probe", step_s, seed=3, **options)

    def probed(self, iterations: int) -> np.ndarray:
        """The delays of all iterations so far."""
        self.run(iterations, slack_s=0.0)
        return np.array(self.delays_s)


def test_a_rank_without_slack_is_probed_by_the_plan_within_every_limit() -> None:
    job = Job(lambda delay_s: 0.1 + delay_s, probe_s=0.005)
    delay_s_T = job.probed(1500)
    mode: Any = job.control.chosen
    bound_s = 0.005
    level_T = np.array([mode.plan.level(i, "rank 2", 8) for i in range(1500)])
    assert not delay_s_T[:50].any()
    assert delay_s_T == pytest.approx(bound_s * level_T, rel=0.02)
    assert (delay_s_T > 0.0).sum() > 50
    assert job.control.mode == "probe", job.said  # nobody asks for a policy
    assert job.said == []
