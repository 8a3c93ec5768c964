"""What each mode lets a rank do: who may act in an iteration, what is asked for, and what is learned from a step.

One class a mode; canary and active are ``paceenv.live.decide.experiment``. Control asks the one in force; a downgrade
puts :class:`Mode` itself, which only observes, in its place. No hook, no thread.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

import numpy as np

from paceenv.core import differences
from paceenv.core.differences import Mean
from paceenv.core.probing import HOLD_ITERATIONS, Plan, unit_of
from paceenv.live.decide.actuator import DelayLengths
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
Stop = tuple[int | None, str]
"""The number of a candidate that must pace no more, None for all, and why."""


class Mode:
    """Mode observe; and what the other modes do where they say nothing else."""

    follows = False
    """Whether it follows a policy."""

    def __init__(self) -> None:
        self.out = dict[int, str]()
        """The candidates that pace no more on this rank, and why."""

    def join(self, rank: int, ranks: int, group: int, members: int) -> None:
        """The process group of the payload is known now, and how many members it has."""

    def acting(self, iteration: int) -> int | None:
        """Number of the policy that may act in an iteration after the quiet start; None: no delay."""
        return None

    def asked_s(self, pacer: RankPacer, acting: int, iteration: int) -> float:
        """The delay before an iteration in which that policy acts, seconds."""
        return pacer.delay_s(acting)

    def take_in(self, step: Step, pacer: RankPacer, delay_s: float) -> Stop | None:
        """A regular step, with this rank's delay of either kind; who must stop since then, if anybody."""
        return None

    def give_up(self, number: int, why: str) -> bool:
        """A candidate cannot be followed any more; whether the mode goes on without it."""
        return False

    def final(self) -> None:
        """The job ends."""

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        """Its entries of a snapshot, as plain data."""
        return {}


class Shadow(Mode):
    """Mode shadow: it decides, and nothing is delayed."""

    follows = True

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.foregone = DelayLengths()
        """The delays that it would have taken within all limits."""
        self._begin, self._steps, self._steps_s = begin, 0, 0.0

    def acting(self, iteration: int) -> int | None:
        return 0

    def take_in(self, step: Step, pacer: RankPacer, delay_s: float) -> Stop | None:
        if step.iteration >= self._begin:
            self._steps += 1
            self._steps_s += step.step_s
        return None

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        share = self.foregone.total_s / self._steps_s if self._steps_s else None
        counts = {"count": self.foregone.count, "steps": self._steps, "share": share}
        return {"shadow": counts | self.foregone.as_dict()}


class Probing(Mode):
    """Mode probe: tiny random delays, so that the effect of a delay on the job is measured and not only fitted.

    ``paceenv.core.probing`` draws which rank is delayed when, the same on every rank. Here are the length on this job
    and the cost of all ranks' probes together.
    """

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
                steps_s = np.array(self._steps_s)
                mean_s = float(differences.mean_s(steps_s, differences.most_s(steps_s)))
                self._holds.append((self.plan.rests(HOLD_ITERATIONS * self._hold), mean_s))
                self._since_evaluation += 1
            self._hold, self._steps_s = hold, []
            if self._since_evaluation >= EVALUATION_HOLDS:
                self._since_evaluation, reason = 0, self._evaluate()
        if iteration >= self.plan.first_iteration and 0.0 < step_s < math.inf:
            self._steps_s.append(step_s)
        return reason

    def _evaluate(self) -> str:
        rest, probed = (Mean(mean_s for rests, mean_s in self._holds if rests == which) for which in (True, False))
        if min(rest.count, probed.count) < 2:
            return ""
        share = probed.count / len(self._holds)
        cost = self._cost_share = share * (probed.value / rest.value - 1.0)
        error = share * math.hypot(rest.error, probed.error) / rest.value
        if cost <= max(MAX_COST_SHARE, SURE_ERRORS * error):
            return ""
        return f"probing cost {100.0 * cost:.1f} % of the mean step; allowed: {100.0 * MAX_COST_SHARE:g} %"
