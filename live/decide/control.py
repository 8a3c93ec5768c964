"""The control of one rank: from a regular iteration to the delay before the next, under the guard.

Holds policy and decision core (``paceenv.live.decide.pacer``), guard, actuator and what the mode allows
(``paceenv.live.decide.modes``). The mode in force is only ever downgraded to observe, with a reason.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceenv.core.limits import Limits
from paceenv.live.decide.actuator import MIN_DELAY_S, DelayLengths, DeviceActuator, HostActuator
from paceenv.live.decide.blocks import ACTIVE, CANARY, Plan, block_plan, shared_seed
from paceenv.live.decide.experiment import Experiment
from paceenv.live.decide.guard import Guard, GuardedPolicy, OutOfRange, PolicyFault
from paceenv.live.decide.live_policy import NamedPolicy
from paceenv.live.decide.modes import Mode, Probing, Shadow
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.observe.log import Delay
from paceenv.live.observe.stamps import Clock, Stamps
from paceenv.live.observe.step import Shape, Step
from paceenv.live.options import PACED, Options
from paceenv.policies.rules import passive

BARRIER_ALONE_S = 1e-3
"""A barrier is taken to need at most this once all ranks are there, until they have compared theirs; the time beyond
it is waiting, however constant."""
BARRIER_STEPS, BARRIER_EVERY = 16, 32
"""The ranks compare their barriers of so many steps: before the middle of the quiet start, then after 32 iterations
more, 64 more, and so on."""
SLACK_MEMORY = 32
"""Iterations over which the guard remembers slack: a fading delay may outlive its slack that long."""


class Barriers:
    """This rank's barriers, kept until the ranks compare them."""

    def __init__(self, begin: int) -> None:
        self.mark: int | None = None
        """The iteration before which the ranks compare their barriers, once it is over; None without a barrier."""
        self.compared_s: dict[int, float] = {}
        """The newest barriers before that iteration, seconds by iteration; replaced as a whole."""
        self.alone_s = 0.0
        """A barrier's time once all ranks are there, as the ranks have found together; 0 before."""
        self._next_mark, self._mark_step = begin, BARRIER_EVERY
        self._newest: deque[tuple[int, float]] = deque(maxlen=BARRIER_STEPS)

    def add(self, step: Step) -> None:
        if step.iteration >= self._next_mark:  # the same iterations on every rank, whatever each has measured
            self.compared_s, self.mark = dict(self._newest), self._next_mark
            while self._next_mark <= step.iteration:
                self._next_mark += self._mark_step
                self._mark_step *= 2
        self._newest.append((step.iteration, step.barrier_s))


@dataclass
class Tally:
    """What all modes of an agent have delayed, and how often limits cut it."""

    asked: int = 0
    holds: int = 0
    taken: DelayLengths = field(default_factory=DelayLengths)
    cut: dict[str, int] = field(default_factory=dict)


class Control:
    """Decides and delays, as far as the mode allows. ``place``: the rank, and how many there are."""

    def __init__(
        self,
        options: Options,
        policy: NamedPolicy,
        log_once: Callable[..., None],
        clock: Clock,
        stamps: Stamps,
        tally: Tally,
        *,
        device: str = "cpu",
        place: tuple[int, int] = (0, 1),
        begins_at: int = 0,
    ) -> None:
        self.begins_at = self.iteration = begins_at
        """The first iteration of this mode, and the last one that was taken in while this rank decided."""
        self.quiet_until = begins_at + options.quiet_first
        """The first iteration that may be delayed."""
        self.mode, self.reason = options.mode, ""
        self.decides = self.mode not in ("off", "observe")
        """Whether the mode decides on delays; otherwise iterations only teach the baselines."""
        self._options, self._log_once, self._clock = options, log_once, clock
        self._policies, self._place = policy.candidates or (policy,), place
        self.seed = options.seed if options.seed is not None else shared_seed(os.environ)
        """Of the order of blocks and of probes; ranks with another one would pace at other times."""
        self.chosen = _make_mode(options, self._policies, seed=self.seed, begin=self.quiet_until)
        """What the asked mode does, and has found; ``mode`` may be observe meanwhile."""
        self._in_force = self.chosen if self.decides else Mode()
        self._actuator = HostActuator(stamps, cap_s=options.cap_s, clock=clock)
        if device != "cpu":
            self._actuator = DeviceActuator(stamps, cap_s=options.cap_s, device=device)
        self.pacer: RankPacer | None = None
        self.barriers = Barriers(begins_at + options.quiet_first // 2)
        self._of = -1, False  # the payload's group, and whether a barrier ends the step
        self._ready = False
        self._slack: deque[float] = deque(maxlen=SLACK_MEMORY)
        # what shadow would do counts only as long as it is in force
        self._tally = replace(tally, cut=dict(tally.cut)) if self.mode == "shadow" else tally
        self._taken = DelayLengths()  # in this mode
        self.held_s = 0.0
        """The longest real hold of a transfer in the iteration taken in next, seconds."""
        limits = Limits(options.cap_s, options.cap_share, options.budget_s_per_minute, self.quiet_until)
        self.guard = Guard(limits, self._tally.cut)

    def downgrade(self, reason: str) -> None:
        """Only observe from now on, and log the reason."""
        if not self.decides:
            return
        self.mode, self.decides, self.reason, self._in_force = "observe", False, reason, Mode()
        self._log_once(f"observes from now on and delays nothing: {reason}")

    def know_barrier_alone(self, seconds: float) -> None:
        """Take a barrier's time once all ranks are there from what the ranks have found together. From any thread."""
        self.barriers.alone_s = seconds
        if self.pacer is not None:
            self.pacer.barrier_alone_s = seconds

    def stopped(self) -> dict[int | None, str]:
        """Why this rank paces no more: by number of the candidate, and under None for all. Any thread may ask."""
        all_of_them = {None: self.reason} if self.mode != self._options.mode else {}
        return dict(self.chosen.out) | all_of_them

    def hear(self, number: int | None, why: str) -> None:
        """Another rank paces no more, so that this one must not either."""
        if number is None or number not in self.chosen.out:
            self._give_up(number, why)

    def observe(self, step: Step, shape: Shape, member: int, members: int) -> None:
        """Take in a regular iteration; ``member`` is this rank's place in the process group of the payload."""
        self.iteration = step.iteration
        if self._of != (of := (shape.payload_group, shape.has_barrier)):  # learned anew: the step is another one
            self._of, self.pacer = of, None
            self._slack.clear()
        acting = self.acting(self.iteration)
        if shape.has_barrier:
            self.barriers.add(step)
        try:
            if self.pacer is None:
                self.pacer = self._make_pacer(shape, member, members)
                self.chosen.join(*self._place, shape.payload_group, members)
            self.pacer.iteration(step.comm_s, step.barrier_s, step.step_s, delay_s=step.delay_s, acting=acting)
            self._ready = True
        except (PolicyFault, OutOfRange) as error:
            self._give_up(acting or 0, str(error))
        if self.pacer is None:
            return
        if self._in_force.follows:
            self._slack.append(self.pacer.slack_low_s)
        delay_s = step.delay_s + self.held_s  # of either kind: whether pacing did anything on this rank
        if (stop := self._in_force.take_in(step, self.pacer, delay_s)) is not None:
            self._give_up(*stop)

    def skip(self) -> None:
        """An iteration could not be measured, or is irregular: no delay until the next regular one."""
        self._ready = False

    def acting(self, iteration: int) -> int | None:
        """Number of the policy to which mode and plan allow a delay before ``iteration``; None: no delay."""
        return None if iteration < self.quiet_until else self._in_force.acting(iteration)

    def apply_delay(self, iteration: int, acting: int) -> Delay | None:
        """Delay this rank before ``iteration``, in which that policy acts, if it asks and the guard agrees."""
        pacer, mode = self.pacer, self._in_force
        if pacer is None or not self._ready:
            return None
        asked_s = mode.asked_s(pacer, acting, iteration)
        if not asked_s > 0.0:
            return None
        self._tally.asked += 1
        slack_s, now_s = None, self._clock()
        if mode.follows and pacer.within_slack(acting):  # a probe may cost time
            slack_s = max(self._slack, default=0.0)
        step_s = pacer.step_baseline_s
        allowed_s = self.guard.allowed_s(asked_s, iteration=iteration, now_s=now_s, step_s=step_s, slack_s=slack_s)
        if isinstance(mode, Shadow):
            if allowed_s >= MIN_DELAY_S:  # else the actuator would leave it out
                mode.foregone.add(allowed_s)
                self.guard.taken(allowed_s, now_s)
            return None
        if not allowed_s > 0.0:
            return None
        delay = self._actuator.delay(allowed_s)
        if delay is not None:
            self.guard.taken(delay.slept_s, self._clock())
        return delay

    def hold_s(self, iteration: int, acting: int) -> float:
        """How long transfers that can wait are held back in ``iteration``, as :meth:`apply_delay` decides; seconds."""
        if self.pacer is None or not self._in_force.follows or not self._ready:
            return 0.0
        asked_s, step_s = self.pacer.hold_s(acting), self.pacer.step_baseline_s
        if not asked_s > 0.0:
            return 0.0
        allowed_s = self.guard.allowed_hold_s(asked_s, iteration=iteration, step_s=step_s)
        self._tally.holds += allowed_s > 0.0
        return 0.0 if isinstance(self._in_force, Shadow) else allowed_s

    def settle(self, delay: Delay, iteration: int) -> float:
        """The effective length of a delay at the start of an iteration, seconds; it can be read now."""
        effective_s = self._actuator.settle(delay)
        if not effective_s:
            return 0.0
        self._tally.taken.add(effective_s)
        if iteration >= self.begins_at:  # else it was asked for in the mode before
            self._taken.add(effective_s)
        if delay.cycles and effective_s > delay.slept_s:  # the device's clock was slower
            self.guard.taken(effective_s - delay.slept_s, self._clock())
        return effective_s

    def delays(self) -> dict[str, Any]:
        return {
            "asked": self._tally.asked,
            "taken": self._tally.taken.count,
            **self._tally.taken.as_dict(),
            "mean_s": self._taken.as_dict()["mean_s"],
            "cut": dict(self.guard.cut),
            "holds": self._tally.holds,
        }

    def snapshot(self) -> dict[str, Any]:
        """What the mode has found, as plain data; None for what belongs to other modes."""
        return dict.fromkeys(("shadow", "canary", "probe")) | self.chosen.as_dict()

    def _give_up(self, number: int | None, why: str) -> None:
        """A policy cannot be followed any more: the end of one candidate, or of pacing where no other is left."""
        if number is None or not self._in_force.give_up(number, why) or self.pacer is None:
            self.downgrade(why)
            return
        self._log_once(f"candidate {self._policies[number].source} paces this rank no more: {why}")

    def _make_pacer(self, shape: Shape, member: int, members: int) -> RankPacer:
        options, follows = self._options, self._in_force.follows
        return RankPacer(
            [GuardedPolicy(one.policy) if follows else passive() for one in self._policies],
            cap_s=options.cap_s,
            cap_share=options.cap_share,
            has_barrier=shape.has_barrier,
            barrier_alone_s=self.barriers.alone_s or min(shape.barrier_alone_s, BARRIER_ALONE_S),
            member=member,
            members=members,
        )


def _make_mode(options: Options, policies: Sequence[NamedPolicy], *, seed: int, begin: int) -> Mode:
    """What the options ask for; nothing is delayed before iteration ``begin``."""
    blocks = [block_plan(one.policy, options.block_iterations) for one in policies]
    if options.mode == "probe":
        return Probing(options, seed, begin)
    if options.mode == "shadow":
        return Shadow(begin)
    if options.mode in PACED:
        plan = Plan(seed, blocks, begin=begin, every=CANARY if options.mode == "canary" else ACTIVE)
        return Experiment([one.source for one in policies], plan)
    return Mode()
