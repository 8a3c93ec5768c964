"""One rank's decision core: times of an iteration in, the delay before the next one out. No clock, sleep or thread.

Runs the simulator's own estimator, signals and rules as plain Python on one column. So a policy that was tuned on the
simulator acts through the same arithmetic here. Uses ``paceenv.core.timing``, ``paceenv.core.standing`` and
``paceenv.policies.base.Policy``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals, standing, timing
from paceenv.core.limits import capped_s
from paceenv.policies.base import Policy


class _Course:
    """One policy's unbroken course: its settings, its iterations, and the estimator as it was when it last acted."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.interval_iterations = policy, policy.interval_iterations
        self.done = 0
        self.follow(pacing.off())
        self.left: standing.Left | None = None
        policy.reset(1)

    def follow(self, settings_M2: NDArray[np.float64]) -> None:
        """Follow these settings until the next decision."""
        self.settings_M2R = [[[threshold], [window]] for threshold, window in settings_M2.tolist()]
        self.on_M = [window > 0.0 for window in settings_M2[:, pacing.WINDOW].tolist()]


class RankPacer:
    """Follows one rank through its iterations and decides on the delay before each.

    Several policies may take turns. Each sees only the iterations in which it acts, as one unbroken history
    (``paceenv.core.standing``); the baselines learn from all iterations.

    Args:
        policy: decides threshold and window of the mechanisms once per control interval, on this rank's own view; or
            several policies. A policy's first interval runs without pacing.
        cap_s: the longest delay, seconds, at least 0; no policy and no rule exceeds it.
        cap_share: the longest delay as a share of the job's baseline step; the smaller of the two caps counts.
    """

    def __init__(
        self,
        policy: Policy | Sequence[Policy],
        *,
        cap_s: float,
        has_barrier: bool,
        barrier_alone_s: float = 0.0,
        member: int = 0,
        members: int = 1,
        cap_share: float = math.inf,
    ) -> None:
        policies = [policy] if isinstance(policy, Policy) else policy
        self._member, self._members = member, members
        self._cap_s, self._cap_share, self._has_barrier = cap_s, cap_share, has_barrier
        self.barrier_alone_s = barrier_alone_s
        """May be set while the job runs, once it is known better."""
        rank, tick_K = timing.new_state()
        self._rank, self._tick = _lists(rank), tick_K.tolist()
        self._courses = [_Course(one) for one in policies]
        self._acting: int | None = None

    @property
    def step_baseline_s(self) -> float:
        """Baseline of the step, seconds; infinite before the first."""
        return float(self._tick[timing.STEP_BASELINE_S])

    @property
    def slack_low_s(self) -> float:
        """Slack this rank can count on, seconds."""
        return float(timing.slack_low_s(self._rank, 0))

    def within_slack(self, which: int = 0) -> bool:
        """Whether only rules are on that delay within the rank's own slack (slack and the paper's).

        Rule ``defer`` delays no rank, so slack is no limit for :meth:`hold_s`.
        """
        on_M = self._courses[which].on_M
        return not (on_M[pacing.PHASE_SHIFT] or on_M[pacing.STAGGER])

    def delay_s(self, which: int = 0) -> float:
        """The delay before the next iteration if that policy acts in it, seconds."""
        return self._decided(which, timing.DELAY_S)

    def hold_s(self, which: int = 0) -> float:
        """How long a transfer that can wait is held back in the next iteration if that policy acts in it, seconds."""
        return self._decided(which, timing.DEFER_S)

    def _decided(self, which: int, slot: int) -> float:
        left = self._courses[which].left
        return float((self._rank if which == self._acting or left is None else left.rank)[slot][0])

    def view(self) -> NDArray[np.float32]:
        """This rank's view of the current interval: the observation vector ``(O,)``."""
        out = np.empty(signals.SIGNALS, np.float32)
        signals.write_signals(np.array(self._rank), 0, self._tick, out)
        return out

    def iteration(
        self, comm_s: float, barrier_s: float, step_s: float, *, delay_s: float | None = None, acting: int | None = 0
    ) -> float:
        """Take in one iteration.

        Args:
            delay_s: the rank's real delay at the start of this iteration, seconds; by default the decided one.
            acting: number of the policy that was allowed to act in this iteration; None: pacing was not allowed. Then
                only the baselines learn for good, and the policies stand still.

        Returns:
            The delay before the next iteration, seconds, if the same policy acts in it (the first, where none acts).
        """
        if acting != self._acting:
            self._hand_over(acting)
        if delay_s is not None or acting is None:
            self._rank[timing.DELAY_S][0] = np.float32(delay_s or 0.0)
        course = self._courses[acting] if acting is not None else None
        if course is not None and course.done and course.done % course.interval_iterations == 0:
            signals.start_interval(self._tick)
        comm_R, wait_R = [np.float32(comm_s)], [np.float32(max(barrier_s - self.barrier_alone_s, 0.0))]
        timing.observe_step(self._tick, step_s)
        timing.observe_ranks(self._rank, self._tick, comm_R, wait_R, self._has_barrier)
        if course is None:
            return self.delay_s()
        # an interval's last delay still follows the old settings, as in the simulator: the view comes after it
        cap_s = capped_s(self._cap_s, self._cap_share, self._tick[timing.STEP_BASELINE_S])
        timing.decide(self._rank, self._tick, course.settings_M2R, course.on_M, cap_s, self._member, self._members)
        course.done += 1
        if course.done % course.interval_iterations == 0:
            course.follow(course.policy.act(self.view()[None])[0])
        return float(self._rank[timing.DELAY_S][0])

    def _hand_over(self, acting: int | None) -> None:
        """Before an iteration in which another policy acts, or none."""
        rank, tick_K = np.array(self._rank), np.array(self._tick)
        if self._acting is not None:
            self._courses[self._acting].left = standing.leave(rank, tick_K)
        elif self._courses[0].left is None:  # the first time that any policy acts
            first = standing.begin(rank, tick_K)
            for course in self._courses:
                course.left = first
        if acting is not None and (left := self._courses[acting].left) is not None:
            standing.resume(rank, tick_K, left)
            self._rank, self._tick = _lists(rank), tick_K.tolist()
        self._acting = acting


def _lists(rank: NDArray[np.float32]) -> list[list[np.float32]]:
    return [list(row) for row in rank]
