"""Probes of one rank: tiny delays by chance, so that what a delay does to the job is measured and not only fitted.

Who is delayed when is ``paceenv.probing``'s plan, the same on every rank; here is how long that is on this job, and a
watch on what it costs. The delays go the way of all others, through guard and actuator (``live.control``).
"""

from __future__ import annotations

import math
from typing import Any

from live.canary import CLIP_MEDIANS
from paceenv.probing import HOLD_ITERATIONS, Plan, unit_of

STEP_SHARE = 0.05
"""The longest probe as a share of the step: where every delay is paid in full, probing then costs about 1 % of it."""
STRETCH_ITERATIONS = 60 * HOLD_ITERATIONS
"""What probing costs is looked at after so many iterations, again and again, each stretch for itself."""
MOST_COST_SHARE = 0.02
"""Probing ends when a stretch with it is longer by more than this than its iterations at rest say."""


class Probe:
    """What this rank's probes are, and what all probes together cost.

    Parameters
    ----------
    plan : the same on every rank
    cap_s, cap_share : what no delay exceeds: seconds, share of the step
    """

    def __init__(self, plan: Plan, *, cap_s: float, cap_share: float) -> None:
        self.plan = plan
        self._most_s, self._most_share = min(plan.probe_s, cap_s), min(STEP_SHARE, cap_share)
        self._unit, self._units = "", 1
        self._step_s = 0.0
        self._stretch = 0
        self._steps_s: dict[bool, list[float]] = {True: [], False: []}
        self.cost_share: float | None = None
        """By how much of the step the last stretch was longer because of the probes; None before the first."""

    def join(self, rank: int, group: int, members: int, ranks: int) -> None:
        """Tell which unit this rank belongs to; before, it is not delayed."""
        self._unit, self._units = unit_of(rank, group, members, ranks)

    def bound_s(self, step_s: float) -> float:
        """The longest probe where a step usually takes ``step_s``, seconds; 0 while that is not known."""
        self._step_s = step_s if math.isfinite(step_s) else 0.0
        return min(self._most_s, self._most_share * self._step_s)

    def level(self, iteration: int) -> float:
        """The share of the bound by which this rank is to be delayed before ``iteration``."""
        return self.plan.level(iteration, self._unit, self._units) if self._unit else 0.0

    def add(self, iteration: int, step_s: float) -> str:
        """Take in a regular iteration; returns why probing should end, or nothing."""
        stretch, reason = iteration // STRETCH_ITERATIONS, ""
        if stretch != self._stretch:
            reason = self._judged()
            self._stretch, self._steps_s = stretch, {True: [], False: []}
        if iteration >= self.plan.first_iteration and 0.0 < step_s < math.inf:
            self._steps_s[self.plan.rests(iteration)].append(step_s)
        return reason

    def snapshot(self) -> dict[str, Any]:
        """What can be told: unit, longest probe and cost of the last stretch."""
        return {"unit": self._unit, "bound_s": self.bound_s(self._step_s), "cost_share": self.cost_share}

    def _judged(self) -> str:
        rest, probed = self._steps_s[True], self._steps_s[False]
        if 4 * min(len(rest), len(probed)) < STRETCH_ITERATIONS // 2:
            return ""
        together = sorted(rest + probed)
        clip_s = CLIP_MEDIANS * together[len(together) // 2]
        rest_s, mean_s = (sum(min(s, clip_s) for s in steps) / len(steps) for steps in (rest, together))
        self.cost_share = mean_s / rest_s - 1.0
        if self.cost_share <= MOST_COST_SHARE:
            return ""
        return (
            f"probing cost {100.0 * self.cost_share:.1f} % of the step over {len(together)} iterations; "
            f"allowed: {100.0 * MOST_COST_SHARE:g} %"
        )
