"""What each mode lets a rank do: who may act in an iteration, what is asked for, and what is learned from a step.

One class a mode. :class:`paceenv.live.decide.control.Control` asks the one in force; a downgrade puts :class:`Mode`
itself, which only observes, in its place. No hook, no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceenv.live.decide.actuator import DelayLengths
from paceenv.live.decide.blocks import ACTIVE, Plan
from paceenv.live.decide.experiment import MEMORY_PAIRS, Experiment, time_to_verdict
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.observe.step import Step

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
        found = {"count": self.foregone.count, "steps": self._steps, "share": share}
        return {"shadow": found | self.foregone.as_dict()}


class Switchback(Mode):
    """Modes canary and active: candidates take turns by a plan that all ranks share; what surely hurts, stops."""

    follows = True

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        super().__init__()
        self.plan = plan
        memory_pairs = MEMORY_PAIRS if plan.every == ACTIVE else None
        self.experiment = Experiment(names, plan, self.out, memory_pairs=memory_pairs)

    def acting(self, iteration: int) -> int | None:
        arm = self.plan.turn(iteration).arm
        return None if arm in self.out else arm

    def give_up(self, number: int, why: str) -> bool:
        self.out[number] = why
        return len(self.out) < len(self.plan.blocks)

    def take_in(self, step: Step, pacer: RankPacer, delay_s: float) -> Stop | None:
        hurting = self.experiment.add(step.iteration, step.step_s, delay_s, step.ticks)
        if hurting is None:
            return None
        return hurting, f"rolled back, as pacing {self.experiment.candidates[hurting].verdict.text}"

    def final(self) -> None:
        self.experiment.final()

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        experiment, leader = self.experiment, self.experiment.leading
        found = leader.verdict.as_dict() | experiment.as_dict()
        if len(experiment.candidates) > 1:
            found["text"] = f"{leader.name}: {leader.verdict.text}"
        until = time_to_verdict(self.plan, leader, tick_s)
        return {"canary": found | {"forecast": {"text": until} if until else None}}
