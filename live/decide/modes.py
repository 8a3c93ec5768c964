"""What each mode lets a rank do: who may act in an iteration, what is asked for, and what is learned from a step.

One class a mode; canary and active are ``paceenv.live.decide.experiment``. Control asks the one in force; a downgrade
puts :class:`Mode` itself, which only observes, in its place. No hook, no thread.
"""

from __future__ import annotations

import math
from typing import Any, Final

from paceenv.core.probing import Plan, unit_of
from paceenv.live.decide.actuator import DelayLengths
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.observe.step import Step
from paceenv.live.options import Options

MOST_SHARE: Final = 0.1
"""Of the step: the longest probe. A delay that helps may be longer, one that only shows something may not."""
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

    def as_dict(self) -> dict[str, Any]:
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

    def as_dict(self) -> dict[str, Any]:
        share = self.foregone.total_s / self._steps_s if self._steps_s else None
        counts = {"count": self.foregone.count, "steps": self._steps, "share": share}
        return {"shadow": counts | self.foregone.as_dict()}


class Probing(Mode):
    """Mode probe: ``paceenv.core.probing`` draws which rank is delayed when; here is the length on this job."""

    def __init__(self, options: Options, seed: int, begin: int) -> None:
        super().__init__()
        self.plan = Plan(seed, begin)
        self._most_s = min(options.probe_s, options.cap_s)
        self._most_share = min(options.cap_share, MOST_SHARE)
        self._unit, self._units = "", 1
        self._bound_s = 0.0

    def join(self, rank: int, ranks: int, group: int, members: int) -> None:
        self._unit, self._units = unit_of(rank, group, members, ranks)

    def acting(self, iteration: int) -> int | None:
        return 0

    def asked_s(self, pacer: RankPacer, acting: int, iteration: int) -> float:
        usual_s = pacer.step_baseline_s
        self._bound_s = min(self._most_s, self._most_share * usual_s) if 0.0 < usual_s < math.inf else 0.0
        return self._bound_s * self.plan.level(iteration, self._unit, self._units) if self._unit else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"probe": {"unit": self._unit, "bound_s": self._bound_s}}
