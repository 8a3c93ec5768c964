"""Protects a job from its policy: limits on every delay, and checks of every decision.

:class:`Guard` cuts a delay to its limits. :class:`GuardedPolicy` calls a policy, checks its answer and the time it
took, and gives it up with one exception that gives the reason. No sleep, no thread; clocks are arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.limits import Limits, refilled
from paceenv.live.log_once import described
from paceenv.policies.base import Policy, fault_of
from paceenv.policies.ranges import RangeWatch

MAX_WINDOW, MAX_THRESHOLD = 1.0, 2.0 * max(pacing.MAX_THRESHOLD)
"""Largest settings of a sane policy, ratios; hand-written policies may go a little beyond the codec's ends."""
QUIET_AFTER_MARK = 5
"""Iterations without delay after a checkpoint or an evaluation."""
SLOW_DECISIONS, FAR_TOO_SLOW = 3, 10.0
"""One late decision may be the machine's fault; three in a row, or one of ten times the limit, are the policy's."""


class Guard:
    """Cuts delays to the limits: cap, share of the step, own slack, budget, quiet times.

    The budget is the bucket of ``paceenv.core.limits``. A clock that steps back fills nothing; one that steps forward
    fills it at most.
    """

    def __init__(self, limits: Limits, cut: dict[str, int] | None = None) -> None:
        self.limits = limits
        self.cut = {} if cut is None else cut
        """How often each limit shortened or forbade a delay; of several, the strictest counts."""
        self._left_s, self._now_s = limits.burst_s, math.nan
        self._quiet_until = limits.quiet_first

    def quiet(self, iteration: int) -> None:
        """A checkpoint or the like was seen in ``iteration``: no delay for ``QUIET_AFTER_MARK`` iterations."""
        self._quiet_until = max(self._quiet_until, iteration + 1 + QUIET_AFTER_MARK)

    def allowed_s(
        self, asked_s: float, *, iteration: int, now_s: float, step_s: float, slack_s: float | None = None
    ) -> float:
        """The allowed delay before ``iteration``, seconds: at most ``asked_s`` and every limit.

        Args:
            step_s: the usual step time, seconds; not-a-number allows no delay.
            slack_s: low quantile of the rank's own slack, seconds; None for mechanisms that do not use slack.
        """
        self._refill(now_s)
        most_s = [("cap", self.limits.cap_s), ("share", self.limits.cap_share * step_s), ("budget", self._left_s)]
        if slack_s is not None:
            most_s.append(("slack", pacing.SLACK_GAIN * slack_s))
        return self._cut(asked_s, iteration, most_s)

    def allowed_hold_s(self, asked_s: float, *, iteration: int, step_s: float) -> float:
        """How long transfers may be held back in ``iteration``, seconds: caps and quiet times, as for a delay.

        No rank stands still, so neither budget nor slack is a limit.
        """
        return self._cut(asked_s, iteration, [("cap", self.limits.cap_s), ("share", self.limits.cap_share * step_s)])

    def _cut(self, asked_s: float, iteration: int, most_s: Sequence[tuple[str, float]]) -> float:
        if not asked_s > 0.0:
            return 0.0
        if iteration < self._quiet_until:
            return self._said("quiet", 0.0)
        strictest, allowed_s = "", asked_s
        for name, limit_s in most_s:
            if not limit_s > 0.0:
                return self._said(name, 0.0)
            if limit_s < allowed_s:
                strictest, allowed_s = name, limit_s
        return self._said(strictest, allowed_s) if strictest else asked_s

    def taken(self, slept_s: float, now_s: float) -> None:
        """A delay of ``slept_s`` ended: take it from the budget.

        The debt is at most one minute's budget: a process that was stopped for an hour in its delay must not pay for
        days.
        """
        self._refill(now_s)
        if slept_s > 0.0:
            self._left_s = max(self._left_s - slept_s, -self.limits.budget_s_per_minute)

    def _refill(self, now_s: float) -> None:
        if math.isfinite(now_s):
            elapsed_s = now_s - self._now_s
            if elapsed_s > 0.0:
                self._left_s = refilled(self._left_s, self.limits.fill * elapsed_s, self.limits.burst_s)
            self._now_s = now_s

    def _said(self, limit: str, allowed_s: float) -> float:
        self.cut[limit] = self.cut.get(limit, 0) + 1
        return allowed_s


class PolicyFault(RuntimeError):
    """A policy raised, returned an invalid answer, or took too long. It is not asked again."""


class OutOfRange(RuntimeError):
    """The job's signals lie outside the range that the policy was calibrated for."""


class GuardedPolicy(Policy):
    """A policy that is checked at every call, and not called again after a fault.

    Raises InputError for a calibrated range of an unknown signal.
    """

    def __init__(self, policy: Policy, *, limit_s: float = 0.02, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch = RangeWatch(policy.calibrated_range)
        self._policy, self._limit_s, self._clock = policy, limit_s, clock
        self.name = str(getattr(policy, "name", type(policy).__name__))
        self.interval_iterations = policy.interval_iterations
        self._slow, self._fault = 0, ""

    def reset(self, rows: int) -> None:
        self._slow = 0
        self._watch.reset(rows)
        try:
            self._policy.reset(rows)
        except (Exception, SystemExit) as error:
            raise self._failed(f"raised {described(error)} when it was reset") from error

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        """The policy's settings, checked; raises :class:`PolicyFault` or :class:`OutOfRange`."""
        if self._fault:
            raise PolicyFault(self._fault)
        if len(lost := np.flatnonzero(self._watch.lost(signals_BO))):
            listed = self._watch.described(signals_BO[lost[0]])
            raise OutOfRange(f"policy {self.name} is not calibrated for this job: {listed}")
        start_s = self._clock()
        try:
            settings = np.array(self._policy.act(signals_BO.copy()))
        except (Exception, SystemExit) as error:  # not KeyboardInterrupt: that is the user's
            raise self._failed(f"raised {described(error)}") from error
        took_s = self._clock() - start_s
        self._slow = self._slow + 1 if took_s > self._limit_s else 0
        if took_s > FAR_TOO_SLOW * self._limit_s or self._slow >= SLOW_DECISIONS:
            raise self._failed(f"took {1e3 * took_s:.0f} ms to decide; allowed: {1e3 * self._limit_s:.0f} ms")
        if fault := fault_of(settings, len(signals_BO), threshold=MAX_THRESHOLD, window=MAX_WINDOW):
            raise self._failed(fault)
        return settings.astype(np.float64)

    def _failed(self, how: str) -> PolicyFault:
        self._fault = f"policy {self.name} {how}"
        return PolicyFault(self._fault)
