"""Probes of one rank: tiny random delays, so that the effect of a delay on the job is measured and not only fitted.

``paceenv.core.probing`` draws which rank is delayed when, the same on every rank. This module sets the length on this
job and watches the cost. The delays pass guard and actuator like all others (``paceenv.live.decide.control``).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median, variance
from typing import Any, Final

from paceenv.core.differences import CLIP_MEDIANS
from paceenv.core.probing import HOLD_ITERATIONS, Plan, unit_of
from paceenv.live.decide.modes import Mode, Stop
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.observe.step import Step
from paceenv.live.options import Options

EVALUATION_HOLDS, KEPT_HOLDS = 60, 600
"""The cost of probing is evaluated after every EVALUATION_HOLDS holds, over the last KEPT_HOLDS."""
MOST_SHARE: Final = 0.1
"""Of the step: the longest probe. A delay that helps may be longer, one that only shows something may not."""
MAX_COST_SHARE: Final = 0.02
"""Probing ends when it makes the mean step longer by more than this ..."""
SURE_ERRORS: Final = 3.0
"""... and by more than this many standard errors: there are many evaluations, and noise must not end it."""


class Probing(Mode):
    """Mode probe: this rank's probes, and the cost of all ranks' probes together."""

    def __init__(self, options: Options, seed: int, begin: int) -> None:
        super().__init__()
        self.plan = Plan(seed, options.probe_s, begin)
        self._most_s = min(options.probe_s, options.cap_s)
        self._most_share = min(options.cap_share, MOST_SHARE)
        self._unit, self._units = "", 1
        self._bound_s = 0.0
        self._hold, self._steps_s = -1, list[float]()
        self._holds = deque[tuple[bool, float]](maxlen=KEPT_HOLDS)
        self._since_evaluation = 0
        self._cost_share: float | None = None

    def join(self, rank: int, ranks: int, group: int, members: int) -> None:
        self._unit, self._units = unit_of(rank, group, members, ranks)

    def acting(self, iteration: int) -> int | None:
        return 0

    def asked_s(self, pacer: RankPacer, acting: int, iteration: int) -> float:
        return self._bound_s * self.plan.level(iteration, self._unit, self._units) if self._unit else 0.0

    def take_in(self, step: Step, pacer: RankPacer, delay_s: float) -> Stop | None:
        step_s, usual_s = step.step_s, pacer.step_baseline_s
        self._bound_s = min(self._most_s, self._most_share * usual_s) if 0.0 < usual_s < math.inf else 0.0
        too_costly = self._add(step.iteration, step_s)
        return (None, too_costly) if too_costly else None

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        return {"probe": {"unit": self._unit, "bound_s": self._bound_s, "cost_share": self._cost_share}}

    def _add(self, iteration: int, step_s: float) -> str:
        """Take in a regular iteration and its step time, seconds; returns the reason to end probing, or ""."""
        hold, reason = iteration // HOLD_ITERATIONS, ""
        if hold != self._hold:
            if self._steps_s:
                self._holds.append((self.plan.rests(HOLD_ITERATIONS * self._hold), _clipped_mean(self._steps_s)))
                self._since_evaluation += 1
            self._hold, self._steps_s = hold, []
            if self._since_evaluation >= EVALUATION_HOLDS:
                self._since_evaluation, reason = 0, self._evaluate()
        if iteration >= self.plan.first_iteration and 0.0 < step_s < math.inf:
            self._steps_s.append(step_s)
        return reason

    def _evaluate(self) -> str:
        rest, probed = ([mean_s for rests, mean_s in self._holds if rests == which] for which in (True, False))
        if min(len(rest), len(probed)) < 2:
            return ""
        share, rest_s = len(probed) / len(self._holds), fmean(rest)
        cost = share * (fmean(probed) / rest_s - 1.0)
        error = share * math.sqrt(variance(rest) / len(rest) + variance(probed) / len(probed)) / rest_s
        self._cost_share = cost
        if cost <= max(MAX_COST_SHARE, SURE_ERRORS * error):
            return ""
        return f"probing cost {100.0 * cost:.1f} % of the mean step; allowed: {100.0 * MAX_COST_SHARE:g} %"


def _clipped_mean(steps_s: list[float]) -> float:
    """The mean of a hold's steps; a stall counts as at most a few medians."""
    most_s = CLIP_MEDIANS * median(steps_s)
    return fmean(min(step_s, most_s) for step_s in steps_s)
