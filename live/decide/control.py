"""The control of one rank: from a regular iteration to the delay before the next, under the guard.

Holds policy and decision core (``paceenv.live.decide.pacer``), guard, schedule and comparison of blocks, and actuator.
The mode in force is only ever downgraded to observe, with a reason. No hook, no thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

from paceenv.core.limits import Limits
from paceenv.core.probing import Plan
from paceenv.live.decide.actuator import MIN_DELAY_S, Delay, DelayLengths, DeviceActuator, HostActuator
from paceenv.live.decide.canary import ACTIVE_HOLDOUT_EVERY, MIN_GAIN, Verdict, block_plan, shared_seed
from paceenv.live.decide.contest import Comparisons, Contest
from paceenv.live.decide.guard import Guard, GuardedPolicy, OutOfRange, PolicyFault
from paceenv.live.decide.live_policy import NamedPolicy
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.decide.probe import Probe
from paceenv.live.decide.tune_plan import TunePlan
from paceenv.live.decide.tuner import Tuner
from paceenv.live.decide.verdict_time import Forecast, forecast
from paceenv.live.observe.iteration import Iteration, Shape
from paceenv.live.observe.stamps import Clock, Stamps
from paceenv.live.options import Options
from paceenv.policies.rules import passive

PACED = ("canary", "active", "tune")
"""Modes that delay by a policy."""
BARRIER_ALONE_S = 1e-3
"""A barrier is taken to need at most this once all ranks are there, until they have compared theirs; the time beyond
it is waiting, however constant."""
BARRIER_STEPS, BARRIER_EVERY = 16, 32
"""The ranks compare their barriers of so many steps: before the middle of the quiet start, then after 32 iterations
more, 64 more, and so on."""
ACTIVE_MEMORY_PAIRS = 32
"""In mode active the comparison restarts after this many pairs, so that an old gain does not hide a new loss."""
QUIET_STEPS = 200
"""Steps of the quiet start that tell the noise before any pair of blocks is compared."""
SLACK_MEMORY = 32
"""Iterations over which the guard remembers slack: a fading delay may outlive its slack that long."""


class Control:
    """Decides and delays, as far as the mode allows."""

    def __init__(
        self,
        options: Options,
        policy: NamedPolicy,
        log_once: Callable[[str], None],
        clock: Clock,
        *,
        begins_at: int = 0,
        inform: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.begins_at = self.iteration = begins_at
        """``iteration`` is the last one that was taken in while this rank decided."""
        self.quiet_until = begins_at + options.quiet_first
        """The first iteration that may be delayed."""
        self.mode, self.reason = options.mode, ""
        self._options, self._log_once, self._clock = options, log_once, clock
        self.pacer: RankPacer | None = None
        self._shape: Shape | None = None
        self._barrier_alone_s = 0.0  # as the ranks have found together; 0 before
        self._actuator: HostActuator | DeviceActuator | None = None
        self._decided_s, self._ready = 0.0, False
        self._slack: deque[float] = deque(maxlen=SLACK_MEMORY)
        self._quiet_steps_s: deque[float] = deque(maxlen=QUIET_STEPS)
        self._newest_s: deque[float] = deque(maxlen=SLACK_MEMORY)
        self.barrier_mark: int | None = None
        """The iteration before which the ranks compare their barriers, once it is over; None without a barrier."""
        self.barriers_s: dict[int, float] = {}
        """This rank's newest barriers before that iteration, seconds by iteration; replaced as a whole."""
        self._next_mark, self._mark_step = begins_at + options.quiet_first // 2, BARRIER_EVERY
        self._barriers: deque[tuple[int, float]] = deque(maxlen=BARRIER_STEPS)
        self._asked = 0
        self._taken, self._foregone = DelayLengths(), DelayLengths()
        self.held_s = 0.0
        """The longest real hold of a transfer in the iteration taken in next, seconds."""
        self._holds = 0
        self._shadowed, self._shadowed_s = 0, 0.0  # steps that were decided on in mode shadow
        self.guard = Guard(
            Limits(
                cap_s=options.cap_s,
                cap_share=options.cap_share,
                budget_s_per_minute=options.budget_s_per_minute,
                quiet_first=self.quiet_until,
            )
        )
        self.seed = seed = options.seed if options.seed is not None else shared_seed(os.environ)
        """Of the order of blocks and of probes; ranks with another one would pace at other times."""
        self._policies = policy.candidates or (policy,)
        blocks = [block_plan([one.policy], options.block_iterations) for one in self._policies]
        every = 2 if options.mode == "canary" else ACTIVE_HOLDOUT_EVERY
        self._contest = Contest(seed, blocks, first_iteration=self.quiet_until, holdout_every=every)
        self.tune_plan: TunePlan | None = None
        """In mode tune: the words of rank 0 as far as they were heard."""
        self.tuner: Tuner | None = None
        """In mode tune, on rank 0: decides on those words."""
        if options.mode == "tune":
            self.tune_plan = TunePlan(seed, blocks)
        memory = None if options.mode == "canary" else ACTIVE_MEMORY_PAIRS
        names = [one.source for one in self._policies]
        self.comparisons = Comparisons(names, self._contest, min_gain=MIN_GAIN, memory_pairs=memory)
        """Of blocks with and without pacing, in modes canary and active."""
        self._place, self._inform, self._said = (0, 1), inform, False
        self._ticks = 1  # of the last step
        self._heard = dict[int | None, str]()
        self.probe: Probe | None = None
        """In mode probe: draws the delays instead of a policy."""
        if options.mode == "probe":
            plan = Plan(seed, options.probe_s, self.quiet_until)
            self.probe = Probe(plan, cap_s=options.cap_s, cap_share=options.cap_share)

    @property
    def tick_s(self) -> float:
        """Mean time of an iteration in the newest regular steps, seconds; 0 before the first. Any thread may ask."""
        newest = tuple(self._newest_s)
        return sum(newest) / len(newest) if newest else 0.0

    @property
    def decides(self) -> bool:
        """Whether the mode decides on delays; otherwise iterations only teach the baselines."""
        return self.mode != "observe"

    @property
    def verdict(self) -> Verdict | None:
        """The verdict so far, of several candidates the best one's; None in modes without blocks."""
        return self.comparisons.verdict if self._options.mode in ("canary", "active") else None

    def forecast(self) -> Forecast | None:
        """How long until a verdict; None in modes without one, and while the noise is not known."""
        if self._options.mode not in ("canary", "active"):
            return None
        k = self.comparisons.leader
        schedule, comparison, quiet_s = self._contest.schedules[k], self.comparisons.of[k], tuple(self._quiet_steps_s)
        return forecast(schedule, comparison, quiet_s, self._contest, iteration=self.iteration, ticks=self._ticks)

    def begin(self, stamps: Stamps, device: str, rank: int = 0, ranks: int = 1) -> None:
        """Make the actuator, now that the rank and its timeline are known."""
        cap_s, self._place = self._options.cap_s, (rank, ranks)
        if rank == 0 and self.mode in (*PACED, "shadow"):
            self._say_what_is_narrower()
        if self.tune_plan is not None and rank == 0:
            names = [one.source for one in self._policies]
            self.tuner = Tuner(names, self.tune_plan, min_gain=MIN_GAIN)
        if self._options.actuator == "device" and device != "cpu":
            self._actuator = DeviceActuator(stamps, cap_s=cap_s, device=device)
        else:
            self._actuator = HostActuator(stamps, cap_s=cap_s, clock=self._clock, problem=self._log_once)

    def _say_what_is_narrower(self) -> None:
        for one in self._policies:
            narrower = self.guard.limits.narrower(one.limits) if one.limits is not None else []
            if narrower:
                listed = ", ".join(narrower)
                self._inform(f"policy {one.source} was trained with wider limits and may gain less here: {listed}")

    def downgrade(self, reason: str) -> None:
        """Only observe from now on, and log the reason."""
        if self.mode == "observe":
            return
        self.mode, self.reason, self._decided_s = "observe", reason, 0.0
        if self.pacer is not None:
            self.pacer.follow(passive())
        self._log_once(f"observes from now on and delays nothing: {reason}")

    def know_barrier_alone(self, seconds: float) -> None:
        """Take a barrier's time once all ranks are there from what the ranks have found together. From any thread."""
        self._barrier_alone_s = seconds
        if self.pacer is not None:
            self.pacer.barrier_alone_s = seconds

    def stopped(self) -> dict[int | None, str]:
        """Why this rank paces no more: by number of the candidate, and under None for all. Any thread may ask."""
        all_of_them = {None: self.reason} if self.mode != self._options.mode else {}
        return dict(self.comparisons.out) | all_of_them

    def hear(self, number: int | None, why: str) -> None:
        """Another rank paces no more, so that this one must not either; any thread may call it."""
        self._heard[number] = why

    def finish(self) -> None:
        """The job ends: comparisons under way get their last evaluation."""
        self.comparisons.final()

    def observe(self, iteration: Iteration, shape: Shape, member: int, members: int) -> None:
        """Take in a regular iteration and decide on the next delay.

        Args:
            member: this rank's place in the process group of the payload, 0 to ``members - 1``.
        """
        self.iteration, self._ticks = iteration.iteration, iteration.ticks
        if shape is not self._shape:  # what was learned of parts of a step is no baseline of the whole
            self._shape, self.pacer = shape, None
            for learned in (self._slack, self._newest_s, self._quiet_steps_s, self._barriers):
                learned.clear()
        acting = self._acting(self.iteration)
        self._newest_s.append(iteration.step_s / iteration.ticks)
        if shape.has_barrier:
            self._note_barrier(iteration)
        try:
            if self.pacer is None:
                self.pacer = self._make_pacer(shape, member, members)
                if self.probe is not None:
                    rank, ranks = self._place
                    self.probe.join(rank, shape.payload_group, members, ranks)
            self._decided_s = self.pacer.iteration(
                iteration.comm_s,
                iteration.barrier_s,
                iteration.step_s,
                delay_s=iteration.delay_s,
                acting=acting,
            )
            self._ready = True
        except (PolicyFault, OutOfRange) as error:
            self._give_up(acting or 0, str(error))
        if self.mode == "probe" and self.probe is not None and self.pacer is not None:
            self._decided_s = self.probe.bound_s(self.pacer.step_baseline_s)
            too_costly = self.probe.add(iteration.iteration, iteration.step_s)
            if too_costly:
                self.downgrade(too_costly)
        if self.mode in (*PACED, "shadow") and self.pacer is not None:
            self._slack.append(self.pacer.slack_low_s)
        if self.mode == "shadow" and acting is not None:
            self._shadowed += 1
            self._shadowed_s += iteration.step_s
        if self.tuner is not None and self.tune_plan is not None:
            turn = self.tune_plan.turn(iteration.iteration, iteration.ticks)
            self.tuner.add(iteration.iteration, turn, iteration.step_s, iteration.ticks)
        if self.mode in ("canary", "active"):
            self._say_how_long(iteration)
            delay_s = iteration.delay_s + self.held_s  # of either kind: whether pacing did anything on this rank
            hurting = self.comparisons.add(iteration.iteration, iteration.step_s, delay_s, iteration.ticks)
            if hurting is not None:
                self._give_up(hurting, f"rolled back, as pacing {self.comparisons.of[hurting].verdict.text}")

    def _note_barrier(self, iteration: Iteration) -> None:
        if iteration.iteration >= self._next_mark:  # the same iterations on every rank, whatever each has measured
            self.barriers_s, self.barrier_mark = dict(self._barriers), self._next_mark
            while self._next_mark <= iteration.iteration:
                self._next_mark += self._mark_step
                self._mark_step *= 2
        self._barriers.append((iteration.iteration, iteration.barrier_s))

    def _say_how_long(self, iteration: Iteration) -> None:
        """At the end of the quiet start: how long until a verdict, from the noise of its steps."""
        if iteration.iteration < self.quiet_until:
            self._quiet_steps_s.append(iteration.step_s)
        elif not self._said and (found := self.forecast()) is not None:
            self._said = True
            if self._place[0] == 0:
                self._inform(found.text(self.tick_s))

    def skip(self) -> None:
        """An iteration could not be measured, or is irregular: no delay until the next regular one."""
        self._decided_s, self._ready = 0.0, False

    def apply_delay(self, iteration: int) -> Delay | None:
        """Delay this rank before ``iteration``, if policy, mode, schedule and guard agree; None without a delay."""
        while self._heard:
            number, why = self._heard.popitem()
            if number is None:
                self.downgrade(why)
            elif number not in self.comparisons.out:
                self._give_up(number, why)
        acting = self._acting(iteration)
        if acting is None or self.pacer is None:
            return None
        asked_s = self._decided_s
        if self.mode == "probe" and self.probe is not None:
            asked_s *= self.probe.level(iteration)
        elif len(self._policies) > 1:  # the next iteration may be another candidate's
            asked_s = self.pacer.delay_s(acting) if self._ready else 0.0
        if not asked_s > 0.0:
            return None
        self._asked += 1
        if self._actuator is None:
            return None
        now_s = self._clock()
        allowed_s = self.guard.allowed_s(
            asked_s,
            iteration=iteration,
            now_s=now_s,
            step_s=self.pacer.step_baseline_s,
            slack_s=self._slack_s(acting),
        )
        if self.mode == "shadow":
            if allowed_s >= MIN_DELAY_S:  # else the actuator would leave it out
                self._foregone.add(allowed_s)
                self.guard.taken(allowed_s, now_s)
            return None
        if not allowed_s > 0.0:
            return None
        delay = self._actuator.delay(allowed_s)
        if delay is not None:
            self.guard.taken(delay.slept_s, self._clock())
        return delay

    def hold_s(self, iteration: int) -> float:
        """How long transfers that can wait are held back in ``iteration``, as :meth:`apply_delay` decides; seconds."""
        acting = self._acting(iteration)
        if acting is None or self.pacer is None or self.mode == "probe" or not self._ready:
            return 0.0
        asked_s, step_s = self.pacer.hold_s(acting), self.pacer.step_baseline_s
        if not asked_s > 0.0:
            return 0.0
        allowed_s = self.guard.allowed_hold_s(asked_s, iteration=iteration, step_s=step_s)
        self._holds += allowed_s > 0.0
        return allowed_s if self.mode in PACED else 0.0

    def settle(self, delay: Delay | None) -> float:
        """The effective length of a delay that can be read now, seconds."""
        effective_s = self._actuator.settle(delay) if delay is not None and self._actuator is not None else 0.0
        if not effective_s:
            return 0.0
        self._taken.add(effective_s)
        if delay is not None and delay.cycles and effective_s > delay.slept_s:  # the device's clock was slower
            self.guard.taken(effective_s - delay.slept_s, self._clock())
        return effective_s

    def delays(self) -> dict[str, Any]:
        """Requested and taken delays: counts, and seconds."""
        return {
            "asked": self._asked,
            "taken": self._taken.count,
            **self._taken.as_dict(),
            "ineffective": self._actuator.ineffective if self._actuator is not None else 0,
            "cut": dict(self.guard.cut),
            "holds": self._holds,
        }

    def foregone(self) -> dict[str, Any] | None:
        """In mode shadow: the delays that it would have taken within all limits; None in other modes."""
        if self._options.mode != "shadow":
            return None
        share = self._foregone.total_s / self._shadowed_s if self._shadowed_s else None
        return {"count": self._foregone.count, "steps": self._shadowed, "share": share, **self._foregone.as_dict()}

    def _acting(self, iteration: int) -> int | None:
        """Number of the policy to which mode and schedule allow a delay before ``iteration``; None: no delay."""
        if iteration < self.quiet_until:
            return None
        if self.mode in ("shadow", "probe"):
            return 0
        if self.mode == "tune" and self.tune_plan is not None:
            arm = self.tune_plan.turn(iteration).arm
            return None if arm in self.comparisons.out else arm
        if self.mode not in ("canary", "active"):
            return None
        place = self._contest.place(iteration)
        return place.candidate if place.slot.on and place.candidate not in self.comparisons.out else None

    def _give_up(self, number: int, why: str) -> None:
        """A policy cannot be followed any more: the end of one candidate, or of pacing where no other is left."""
        self.comparisons.out[number] = why
        left = self.mode == "tune" or len(self.comparisons.out) < len(self._policies)
        if not left or self.pacer is None:
            self.downgrade(why)
            return
        self.pacer.follow(passive(), number)
        self._log_once(f"candidate {self._policies[number].source} paces this rank no more: {why}")
        if self.tuner is not None:
            self.tuner.give_up(number, why)

    def _slack_s(self, acting: int) -> float | None:
        """The slack that limits a delay; None where it is no limit, as for a probe, which may cost time."""
        if self.mode == "probe" or self.pacer is None or not self.pacer.within_slack(acting):
            return None
        return max(self._slack, default=0.0)

    def _make_pacer(self, shape: Shape, member: int, members: int) -> RankPacer:
        options, decides = self._options, self.decides and self.probe is None
        return RankPacer(
            [
                GuardedPolicy(one.policy, calibrated_range=one.calibrated_range) if decides else passive()
                for one in self._policies
            ],
            cap_s=options.cap_s,
            cap_share=options.cap_share,
            has_barrier=shape.has_barrier,
            barrier_alone_s=self._barrier_alone_s or min(shape.barrier_alone_s, BARRIER_ALONE_S),
            member=member,
            members=members,
        )
