"""The control of one rank on made-up step times: what is delayed, when, and what makes it stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_live_steps import Shaped

from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.core.probing import unit_of
from paceenv.live.decide.control import Control, Tally
from paceenv.live.decide.live_policy import NamedPolicy, find_policy
from paceenv.live.decide.modes import Probing
from paceenv.live.observe.stamps import HostStamps
from paceenv.live.observe.step import LEARNING_ITERATIONS, Step
from paceenv.live.options import make_options
from paceenv.policies.base import Policy
from paceenv.policies.learned import Learned

STEP_S = 0.1


class Job:
    """A rank that is early by ``slack_s`` and whose steps last ``step_s(delay_s)``; time stands still otherwise.

    It is the second of a group of two, or at another ``place``, and of ``ranks`` in all.
    """

    place, rank, ranks = (1, 2), 0, 1

    def __init__(
        self, policy: NamedPolicy | Policy | str | None, mode: str, step_s: Callable[[float], float], **options: Any
    ):
        self.now_s, self.said, self._step_s = 0.0, list[str](), step_s
        found = policy if isinstance(policy, NamedPolicy) else find_policy(policy)
        chosen, stamps = make_options({"mode": mode} | options), HostStamps(lambda: self.now_s)
        place = self.rank, self.ranks
        self.control = Control(chosen, found, self.said.append, lambda: self.now_s, stamps, Tally(), place=place)
        actuator: Any = self.control._actuator
        actuator._sleeper = self
        shaped = Shaped({0: self.place})
        self.shape = shaped.shape
        for _ in range(LEARNING_ITERATIONS):
            self.shape.observe(shaped.operations(("all_reduce", 0, 1 << 20, 0.0, 0.01)), STEP_S)
        self.delays_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self, iterations: int, slack_s: float = 0.02) -> None:
        for i in range(len(self.delays_s), len(self.delays_s) + iterations):
            acting = self.control.acting(i)
            delay = None if acting is None else self.control.apply_delay(i, acting)
            delay_s = 0.0 if delay is None else self.control.settle(delay, i)
            self.delays_s.append(delay_s)
            comm_s = 0.01 + max(slack_s - delay_s, 0.0) * (i % 200 > 2)  # the baseline is seen before
            step_s = self._step_s(delay_s)
            iteration = Step(i, 0.0, step_s, 0.0, delay_s, (), comm_s, 0.0, True, "")
            self.control.observe(iteration, self.shape, *self.place)
            self.now_s += step_s - delay_s


def _noisy(effect: float) -> Callable[[float], float]:
    random = np.random.default_rng(3)
    return lambda delay_s: STEP_S * (1.0 + random.normal(0.0, 0.005)) + effect * delay_s


@pytest.mark.parametrize("mode", ["canary", "active"])
def test_pacing_that_hurts_is_rolled_back_and_said(mode: str) -> None:
    job = Job("static:stagger=0/0.4", mode, _noisy(2.0), seed=1)
    job.run(50 + 600 * 6)
    assert job.control.mode == "observe"
    assert "rolled back, as pacing hurts by" in job.control.reason
    assert len([text for text in job.said if "rolled back" in text]) == 1
    assert not any(job.delays_s[-100:])


def test_what_was_learned_of_a_step_is_forgotten_where_it_is_another_one() -> None:
    """A job that changes for good: its steps end with a barrier from now on."""
    job = Job("static:phase_shift=0.05/0.4", "active", lambda delay_s: STEP_S + delay_s)
    job.run(24)
    before, job.shape.has_barrier = job.control.pacer, True
    job.run(1)
    assert job.control.pacer is not before


def test_a_job_unlike_those_the_policy_knows_is_observed() -> None:
    layers = [(np.zeros((2, signals.SIGNALS), np.float32), np.array([-1.0, 1.0], np.float32))]
    policy = Learned(layers, ("slack",), calibrated_range={"comm_share": (0.6, 0.9)})
    job = Job(policy, "active", _noisy(0.0))
    job.run(400)
    assert job.control.mode == "observe"
    assert "comm_share = 0." in job.control.reason
    assert "calibrated: 0.6 to 0.9" in job.control.reason


def test_the_environment_has_the_last_word() -> None:
    for value in ("off", "of"):  # a typing error in an emergency
        assert make_options({"mode": "active"}, {"PACEENV_LIVE": value}).mode == "off"
    assert make_options({"mode": "active"}, {"PACEENV_LIVE": "on"}).mode == "active"
    with pytest.raises(InputError, match="live: unknown option speed; allowed: block_iterations, budget"):
        make_options({"speed": 1})


# Probes: a plan that everybody draws alike


def test_what_moves_together_is_a_group_or_else_a_rank() -> None:
    assert unit_of(5, 3, 2, 8) == ("group 3", 4)
    assert unit_of(5, 0, 8, 8) == ("rank 5", 8)  # one group has all: to delay it would only shift the job
    assert unit_of(5, -1, 1, 8) == ("rank 5", 8)


class OfEight(Job):
    place, rank, ranks = (2, 8), 2, 8


def test_a_rank_without_slack_is_probed_by_the_plan_within_every_limit() -> None:
    job = OfEight(None, "probe", lambda delay_s: 0.1 + delay_s, seed=3, probe_s=0.005)
    job.run(1500, slack_s=0.0)
    delay_s_T, mode = np.array(job.delays_s), job.control.chosen
    assert isinstance(mode, Probing)
    assert not delay_s_T[:50].any()
    assert delay_s_T == pytest.approx([0.005 * mode.plan.level(i, "rank 2", 8) for i in range(1500)], rel=0.02)
    assert (delay_s_T > 0.0).sum() > 50
    assert job.control.mode == "probe", job.said  # nobody asks for a policy
    assert job.said == []
