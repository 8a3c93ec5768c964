"""What each mode lets a rank do: who may act in an iteration, what is asked for, and what is learned from a step.

One class a mode. :class:`paceenv.live.decide.control.Control` asks the one in force; a downgrade puts :class:`Mode`
itself, which only observes, in its place. No hook, no thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paceenv.core.probing import Plan as ProbingPlan
from paceenv.live.decide.actuator import DelayLengths
from paceenv.live.decide.blocks import ACTIVE, CANARY, Plan, block_plan
from paceenv.live.decide.experiment import MEMORY_PAIRS, Experiment
from paceenv.live.decide.live_policy import NamedPolicy
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.decide.probe import Probe
from paceenv.live.decide.verdict_time import time_to_verdict
from paceenv.live.observe.iteration import Iteration
from paceenv.live.options import Options

QUIET_STEPS = 200
"""Steps of the quiet start that tell the noise before any pair of blocks is compared."""
Stop = tuple[int | None, str]
"""The number of a candidate that must pace no more, None for all, and why."""


class Mode:
    """Mode observe; and what the other modes do where they say nothing else."""

    follows = False
    """Whether it follows a policy."""

    def __init__(self) -> None:
        self.out = dict[int, str]()
        """The candidates that pace no more on this rank, and why."""

    def begin(self, rank: int) -> None:
        """The rank is known now."""

    def join(self, rank: int, ranks: int, group: int, members: int) -> None:
        """The process group of the payload is known now, and how many members it has."""

    def acting(self, iteration: int) -> int | None:
        """Number of the policy that may act in an iteration after the quiet start; None: no delay."""
        return None

    def asked_s(self, pacer: RankPacer, acting: int, iteration: int) -> float:
        """The delay before an iteration in which that policy acts, seconds."""
        return pacer.delay_s(acting)

    def take_in(self, iteration: Iteration, pacer: RankPacer, delay_s: float) -> Stop | None:
        """A regular step, with this rank's delay of either kind; who must stop since then, if anybody."""
        return None

    def give_up(self, number: int, why: str) -> bool:
        """A candidate cannot be followed any more; whether the mode goes on without it."""
        return False

    def forget(self) -> None:
        """What was learned of steps so far is of parts of a step."""

    def final(self) -> None:
        """The job ends."""

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        """Its entries of a snapshot, as plain data."""
        return {}


class Probing(Mode):
    """Mode probe: delays are drawn."""

    def __init__(self, options: Options, seed: int, begin: int) -> None:
        super().__init__()
        plan = ProbingPlan(seed, options.probe_s, begin)
        self.probe, self._bound_s = Probe(plan, cap_s=options.cap_s, cap_share=options.cap_share), 0.0

    def join(self, rank: int, ranks: int, group: int, members: int) -> None:
        self.probe.join(rank, group, members, ranks)

    def acting(self, iteration: int) -> int | None:
        return 0

    def asked_s(self, pacer: RankPacer, acting: int, iteration: int) -> float:
        return self._bound_s * self.probe.level(iteration)

    def take_in(self, iteration: Iteration, pacer: RankPacer, delay_s: float) -> Stop | None:
        self._bound_s = self.probe.bound_s(pacer.step_baseline_s)
        too_costly = self.probe.add(iteration.iteration, iteration.step_s)
        return (None, too_costly) if too_costly else None

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        return {"probe": self.probe.snapshot()}


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

    def take_in(self, iteration: Iteration, pacer: RankPacer, delay_s: float) -> Stop | None:
        if iteration.iteration >= self._begin:
            self._steps += 1
            self._steps_s += iteration.step_s
        return None

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        share = self.foregone.total_s / self._steps_s if self._steps_s else None
        found = {"count": self.foregone.count, "steps": self._steps, "share": share}
        return {"shadow": found | self.foregone.as_dict()}


class Switchback(Mode):
    """Modes canary and active: candidates take turns by a plan that all ranks share; what surely hurts, stops."""

    follows = True

    def __init__(self, plan: Plan, names: Sequence[str], inform: Callable[[str], None]) -> None:
        super().__init__()
        self.plan = plan
        memory_pairs = MEMORY_PAIRS if plan.every == ACTIVE else None
        self.experiment = Experiment(names, plan, self.out, memory_pairs=memory_pairs)
        self._inform, self._said, self._ticks = inform, False, 1
        self._quiet_steps_s: deque[float] = deque(maxlen=QUIET_STEPS)

    def acting(self, iteration: int) -> int | None:
        arm = self.plan.turn(iteration).arm
        return None if arm in self.out else arm

    def give_up(self, number: int, why: str) -> bool:
        self.out[number] = why
        return len(self.out) < len(self.plan.blocks)

    def begin(self, rank: int) -> None:
        self._said |= rank > 0

    def take_in(self, iteration: Iteration, pacer: RankPacer, delay_s: float) -> Stop | None:
        self._ticks = iteration.ticks
        if iteration.iteration < self.plan.begin:
            self._quiet_steps_s.append(iteration.step_s)
        elif not self._said:
            steps_s = self._quiet_steps_s or [iteration.step_s]
            if found := self._forecast(sum(steps_s) / len(steps_s) / iteration.ticks):
                self._said = True  # from the noise of the quiet start
                self._inform(found)
        hurting = self.experiment.add(iteration.iteration, iteration.step_s, delay_s, iteration.ticks)
        if hurting is None:
            return None
        return hurting, f"rolled back, as pacing {self.experiment.candidates[hurting].verdict.text}"

    def forget(self) -> None:
        self._quiet_steps_s.clear()

    def final(self) -> None:
        self.experiment.final()

    def _forecast(self, tick_s: float) -> str:
        """How long until a verdict on the leading candidate; "" while the noise is not known. Any thread may ask."""
        k, quiet_s = self.experiment.leader, tuple(self._quiet_steps_s)
        return time_to_verdict(self.plan, self.experiment.candidates[k], k, quiet_s, tick_s, self._ticks)

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        experiment, until = self.experiment, self._forecast(tick_s)
        verdict, leader = experiment.verdict, experiment.candidates[experiment.leader]
        found = verdict.as_dict() | experiment.as_dict()
        if len(experiment.candidates) > 1:
            found["text"] = f"{leader.name}: {verdict.text}"
        return {"canary": found | {"forecast": {"text": until} if until else None}}


def make_mode(
    options: Options, policies: Sequence[NamedPolicy], *, seed: int, begin: int, inform: Callable[[str], None]
) -> Mode:
    """What the options ask for; nothing is delayed before iteration ``begin``."""
    names = [one.source for one in policies]
    blocks = [block_plan(one.policy, options.block_iterations) for one in policies]
    if options.mode == "probe":
        return Probing(options, seed, begin)
    if options.mode == "shadow":
        return Shadow(begin)
    if options.mode in ("canary", "active"):
        plan = Plan(seed, blocks, begin=begin, every=CANARY if options.mode == "canary" else ACTIVE)
        return Switchback(plan, names, inform)
    return Mode()
