"""The control of one rank: from a regular iteration to the delay before the next, under the guard.

Holds what may delay: policy and decision core (``paceenv.live.decide.pacer``), guard, schedule and comparison of
blocks, actuator. The mode in force only ever goes down, to observing, and says why. No hook, no thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

from paceenv.core.probing import Plan
from paceenv.live.decide.actuator import Actuator, Delay, DeviceActuator, HostActuator
from paceenv.live.decide.canary import ACTIVE_HOLDOUT_EVERY, PairedComparison, Schedule, Verdict, shared_seed
from paceenv.live.decide.guard import Guard, GuardedPolicy, Limits, OutOfRange, PolicyFault
from paceenv.live.decide.live_policy import NamedPolicy
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.decide.probe import Probe
from paceenv.live.observe.iteration import Iteration, Shape
from paceenv.live.observe.stamps import Clock, Stamps
from paceenv.live.options import Options
from paceenv.policies.rules import passive

BARRIER_ALONE_S = 1e-3
"""A barrier takes at most this when everybody is there; what a rank sees beyond it is waiting, however constant."""
ACTIVE_MEMORY_PAIRS = 32
"""In mode active the comparison starts anew after so many pairs, so that a good past does not hide harm for long."""
SLACK_MEMORY = 32
"""Iterations over which the guard remembers slack: a rule that lets a delay fade may outlive its slack that long."""


class Control:
    """Decides and delays, as far as the mode allows.

    Parameters
    ----------
    options : settings, the same on every rank
    policy : what decides in modes shadow, canary and active
    say : how to tell, once, that the mode changed
    clock : monotonic seconds of the host
    """

    def __init__(self, options: Options, policy: NamedPolicy, say: Callable[[str], None], clock: Clock) -> None:
        self.mode, self.reason = options.mode, ""
        self._options, self._policy, self._log_once, self._clock = options, policy, say, clock
        self.pacer: RankPacer | None = None
        self._actuator: Actuator | None = None
        self._decided_s = 0.0
        self._slack: deque[float] = deque(maxlen=SLACK_MEMORY)
        self._asked = self._taken = 0
        self._delays_s = self._longest_s = 0.0
        self.guard = Guard(
            Limits(
                cap_s=options.cap_s,
                cap_share=options.cap_share,
                budget_s_per_minute=options.budget_s_per_minute,
                quiet_first=options.quiet_first,
            )
        )
        seed = options.seed if options.seed is not None else shared_seed(os.environ)
        self._schedule = Schedule(
            seed,
            block_iterations=options.block_iterations,
            first_iteration=options.quiet_first,
            holdout_every=2 if options.mode == "canary" else ACTIVE_HOLDOUT_EVERY,
        )
        memory = None if options.mode == "canary" else ACTIVE_MEMORY_PAIRS
        self._comparison = PairedComparison(self._schedule, min_gain=options.min_gain, memory_pairs=memory)
        self._place = (0, 1)
        self.probe: Probe | None = None
        """In mode probe: what delays instead of a policy."""
        if options.mode == "probe":
            plan = Plan(seed, options.probe_s, options.quiet_first)
            self.probe = Probe(plan, cap_s=options.cap_s, cap_share=options.cap_share)

    @property
    def decides(self) -> bool:
        """Whether anything is decided; else iterations only teach the baselines."""
        return self.mode != "observe"

    @property
    def decided_s(self) -> float:
        """What is asked for before the next iteration, seconds, whether it may be taken or not; of probes the bound."""
        return self._decided_s

    @property
    def verdict(self) -> Verdict | None:
        """What the blocks with and without pacing say so far; None in modes without blocks."""
        return self._comparison.verdict if self._options.mode in ("canary", "active") else None

    def begin(self, stamps: Stamps, device: str, rank: int = 0, ranks: int = 1) -> None:
        """The rank, of how many, and its timeline are known: an actuator can be had."""
        cap_s, self._place = self._options.cap_s, (rank, ranks)
        if self._options.actuator == "device" and device != "cpu":
            self._actuator = DeviceActuator(stamps, cap_s=cap_s)
        else:
            self._actuator = HostActuator(stamps, cap_s=cap_s, clock=self._clock, problem=self._log_once)

    def downgrade(self, reason: str) -> None:
        """Go on observing only, and say why."""
        if self.mode == "observe":
            return
        self.mode, self.reason, self._decided_s = "observe", reason, 0.0
        if self.pacer is not None:
            self.pacer.follow(passive())
        self._log_once(f"observes from now on and delays nothing: {reason}")

    def finish(self) -> None:
        """The job ends: a comparison under way gets its last look."""
        self._comparison.final()

    def observe(self, iteration: Iteration, shape: Shape, member: int, members: int) -> None:
        """Take in a regular iteration; ``member`` of ``members`` is this rank's place in its process group."""
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
                standing=not self._may_pace(iteration.iteration),
            )
        except (PolicyFault, OutOfRange) as error:
            self.downgrade(str(error))
        if self.mode == "probe" and self.probe is not None and self.pacer is not None:
            self._decided_s = self.probe.bound_s(self.pacer.step_baseline_s)
            too_costly = self.probe.add(iteration.iteration, iteration.step_s)
            if too_costly:
                self.downgrade(too_costly)
        if self.mode in ("canary", "active") and self.pacer is not None:
            self._slack.append(self.pacer.slack_low_s)
            evaluated = self._comparison.add(iteration.iteration, iteration.step_s, iteration.delay_s)
            if evaluated and self._comparison.verdict.kind == "hurts":
                self.downgrade(f"rolled back, as pacing {self._comparison.verdict.text}")

    def skip(self) -> None:
        """An iteration could not be measured, or is unlike the others: nothing is delayed until one is again."""
        self._decided_s = 0.0

    def apply_delay(self, iteration: int) -> Delay | None:
        """Take the delay before ``iteration``, if there is to be one."""
        asked_s = self._decided_s
        if self.mode == "probe" and self.probe is not None:
            asked_s *= self.probe.level(iteration)
        if not asked_s > 0.0 or self.pacer is None or not self._may_pace(iteration):
            return None
        self._asked += 1
        if self.mode == "shadow" or self._actuator is None:
            return None
        allowed_s = self.guard.allowed_s(
            asked_s,
            iteration=iteration,
            now_s=self._clock(),
            step_s=self.pacer.step_baseline_s,
            slack_s=self._slack_s(),
        )
        if not allowed_s > 0.0:
            return None
        delay = self._actuator.delay(allowed_s)
        if delay is not None:
            self.guard.taken(delay.slept_s, self._clock())
        return delay

    def settle(self, delay: Delay | None) -> float:
        """By how much a delay that is readable now held the rank back, seconds."""
        effective_s = self._actuator.settle(delay) if delay is not None and self._actuator is not None else 0.0
        if not effective_s:
            return 0.0
        self._taken += 1
        self._delays_s += effective_s
        self._longest_s = max(self._longest_s, effective_s)
        return effective_s

    def delays(self) -> dict[str, Any]:
        """What came of the decisions: counts, and seconds."""
        return {
            "asked": self._asked,
            "taken": self._taken,
            "mean_s": self._delays_s / self._taken if self._taken else None,
            "max_s": self._longest_s,
            "total_s": self._delays_s,
            "ineffective": self._actuator.ineffective if self._actuator is not None else 0,
            "cut": dict(self.guard.cut),
        }

    def _may_pace(self, iteration: int) -> bool:
        """Whether a delay may be taken before ``iteration``, as far as mode and schedule say."""
        if self.mode in ("shadow", "probe"):
            return iteration >= self._options.quiet_first
        return self.mode in ("canary", "active") and self._schedule.slot(iteration).on

    def _slack_s(self) -> float | None:
        """The slack within which a delay is to stay; None where that is no limit, as for a probe, which may cost."""
        if self.mode == "probe" or self.pacer is None or not self.pacer.within_slack:
            return None
        return max(self._slack, default=0.0)

    def _make_pacer(self, shape: Shape, member: int, members: int) -> RankPacer:
        options, policy = self._options, self._policy
        return RankPacer(
            GuardedPolicy(policy.policy, calibrated_range=policy.calibrated_range)
            if self.decides and self.probe is None
            else passive(),
            cap_s=options.cap_s,
            cap_share=options.cap_share,
            has_barrier=shape.has_barrier,
            barrier_alone_s=min(shape.barrier_alone_s, BARRIER_ALONE_S),
            interval_iterations=options.interval_iterations,
            member=member,
            members=members,
        )
