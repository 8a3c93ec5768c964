"""One rank's decision core: times of an iteration in, the delay before the next one out. No clock, sleep or thread.

Runs the simulator's own estimator, signals and rules as plain Python on one column. So a policy that was tuned on the
simulator acts through the same arithmetic here. Uses ``paceenv.core.timing`` and a ``paceenv.policies.base.Policy``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals, timing
from paceenv.policies.base import Policy

_STANDING = slice(timing.SUM_STEPS, timing.TICK_FIELDS)
"""The fields by which a policy and the stagger rule measure their own effect; fixed while they may not act."""


class RankPacer:
    """Follows one rank through its iterations and decides on the delay before each.

    Args:
        policy: decides threshold and window of the mechanisms once per control interval, on this rank's own view.
        cap_s: the longest delay, seconds, at least 0; no policy and no rule exceeds it.
        has_barrier: whether the job ends its step with a barrier after the payload collective.
        barrier_alone_s: the barrier's duration once all ranks are there, seconds; the time beyond it is waiting.
        interval_iterations: iterations of a control interval, as in training, at least 1; the first interval runs
            without pacing.
        member: this rank's place in its process group, for the stagger rule.
        members: size of that group.
        cap_share: the longest delay as a share of the job's baseline step; the smaller of the two caps counts.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        cap_s: float,
        has_barrier: bool,
        barrier_alone_s: float = 0.0,
        interval_iterations: int = 20,
        member: int = 0,
        members: int = 1,
        cap_share: float = math.inf,
    ) -> None:
        for name, value in (("cap_s", cap_s), ("cap_share", cap_share), ("barrier_alone_s", barrier_alone_s)):
            if not value >= 0.0:
                raise ValueError(f"{name} = {value!r}; allowed: at least 0")
        if interval_iterations < 1:
            raise ValueError(f"interval_iterations = {interval_iterations!r}; allowed: at least 1")
        if not 0 <= member < members:
            raise ValueError(f"member = {member!r}; allowed: from 0 to {members - 1} of {members} members")
        self._member, self._members = member, members
        self._policy, self._cap_s, self._cap_share, self._has_barrier = policy, cap_s, cap_share, has_barrier
        self._barrier_alone_s, self._interval_iterations = barrier_alone_s, interval_iterations
        self._rank, self._tick = timing.new_state()
        self._comm_R, self._wait_R = np.zeros(1, np.float32), np.zeros(1, np.float32)
        self._settings_M2, self._done = pacing.off(), 0
        policy.reset(1)

    def follow(self, policy: Policy) -> None:
        """Follow another policy from the next interval on; until then nothing is delayed."""
        policy.reset(1)
        self._policy, self._settings_M2 = policy, pacing.off()

    @property
    def step_baseline_s(self) -> float:
        """Baseline of the step, seconds; infinite before the first."""
        return float(self._tick[timing.STEP_BASELINE_S])

    @property
    def comm_baseline_s(self) -> float:
        """Baseline of the payload collective, seconds; infinite before the first."""
        return float(self._rank[timing.COMM_BASELINE_S, 0])

    @property
    def slack_low_s(self) -> float:
        """Slack this rank can count on, seconds."""
        return float(timing.slack_low_s(self._rank, 0))

    @property
    def within_slack(self) -> bool:
        """Whether only rules are on that delay within the rank's own slack (slack and the paper's)."""
        window_M = self._settings_M2[:, pacing.WINDOW]
        return not (window_M[pacing.PHASE_SHIFT] > 0.0 or window_M[pacing.STAGGER] > 0.0)

    def view(self) -> NDArray[np.float32]:
        """This rank's view of the current interval: the observation vector ``(O,)``."""
        out = np.empty(signals.SIGNALS, np.float32)
        signals.write_signals(self._rank, 0, self._tick, out)
        return out

    def iteration(
        self,
        comm_s: float,
        barrier_s: float,
        step_s: float,
        *,
        delay_s: float | None = None,
        standing: bool = False,
    ) -> float:
        """Take in one iteration.

        Args:
            comm_s: time from entry to exit of the payload collective, seconds.
            barrier_s: time in the barrier, seconds; ignored in a job without one.
            step_s: time since the end of the last step, seconds.
            delay_s: the rank's real delay at the start of this iteration, seconds; by default the decided one.
            standing: whether pacing was not allowed in this iteration. Then the baselines go on learning, the policy
                and its measurements stand still, and the delay before the interruption is returned again.

        Returns:
            The delay before the next iteration, seconds.
        """
        if delay_s is not None:
            decided_s = self._rank[timing.DELAY_S, 0]
            self._rank[timing.DELAY_S, 0] = delay_s
        if standing:
            stood = self._tick[_STANDING].copy()
            self._observe(comm_s, barrier_s, step_s)
            self._tick[_STANDING] = stood
            if delay_s is not None:
                self._rank[timing.DELAY_S, 0] = decided_s
            return float(self._rank[timing.DELAY_S, 0])
        if self._done and self._done % self._interval_iterations == 0:
            signals.start_interval(self._tick)
        self._observe(comm_s, barrier_s, step_s)
        # an interval's last delay still follows the old settings, as in the simulator: the view comes after it
        cap_s = min(self._cap_s, self._cap_share * self._tick[timing.STEP_BASELINE_S])
        timing.decide(self._rank, self._tick, 0, 1, self._settings_M2, cap_s, self._member, self._members)
        self._done += 1
        if self._done % self._interval_iterations == 0:
            self._settings_M2 = np.asarray(self._policy.act(self.view()[None])[0], np.float64)
        return float(self._rank[timing.DELAY_S, 0])

    def _observe(self, comm_s: float, barrier_s: float, step_s: float) -> None:
        self._comm_R[0], self._wait_R[0] = comm_s, max(barrier_s - self._barrier_alone_s, 0.0)
        timing.observe_step(self._tick, step_s)
        timing.observe_ranks(self._rank, self._tick, self._comm_R, self._wait_R, self._has_barrier)

    @property
    def wait_s(self) -> float:
        """The wait of the iteration taken in last, seconds."""
        return float(self._wait_R[0])
