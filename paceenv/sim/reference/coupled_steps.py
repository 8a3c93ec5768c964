"""One job, step by step: what a step leaves behind for the next, and what the ranks decide from it.

A rank begins a step when the one before is over, plus its pacing delay: that is all that pacing can do. At the end of
a step every rank takes in what it measured itself and sets its next delay, by the estimator and the rules of
``paceenv.core``, which a live rank runs, too.

A rank that waits spins and draws power; that warms its node and slows its compute. A failure takes the job back to its
last checkpoint and lets it start cold. Where ranks may run ahead (bounded staleness), one begins its next step at once
unless it is as many steps ahead of the last complete collective as it may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import limits as delay_limits
from paceenv.core import signals, standing, timing
from paceenv.core.limits import Limits
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.engine.draws import OBSERVER, uniform
from paceenv.sim.reference.chance import Chance, TenantChance
from paceenv.sim.reference.flows import Links, Tenant
from paceenv.sim.reference.one_collective import one_collective
from paceenv.sim.reference.ranks import Laid, Step


class Job:
    """One episode of a job; ``key`` is its key (:func:`paceenv.sim.engine.simulator.episode_keys`)."""

    def __init__(self, cluster: Cluster, key: np.uint64, limits: Limits) -> None:
        self.batch, self._limits, self._key = derive(cluster, np.array([key])), limits, key
        ranks, groups = self.batch.ranks, self.batch.groups
        self._job: Any = self.batch.jobs[0]
        self._group_R = [r // (ranks // groups) for r in range(ranks)]
        has_tenants = bool(cluster.tenants)
        if cluster.has_program:
            plan, use = cluster.plan(), use_of(cluster.fabric, cluster.job, has_tenants=has_tenants)
        else:
            plan, use = one_collective(self._job, ranks, groups)
        self.laid = Laid(plan, use, has_tenants=has_tenants)
        self.chance = Chance(self._job, float(self.batch.skewness_E[0]), self._key, ranks, groups)
        records = enumerate(self.batch.tenants_EK[0])
        self.tenants = [Tenant(one, TenantChance(one, self._key, k)) for k, one in records if one["weight"] > 0.0]
        self._links = Links(self.tenants)
        self._rank, self._tick = timing.new_state(ranks)
        self._t, self._time_s, self._energy_j = 0, 0.0, 0.0
        self._early_R, self._steps_s = [0.0] * ranks, [0.0] * max(int(self._job["staleness"]), 1)
        self._heat_N = [0.0] * (ranks // int(self._job["ranks_per_node"]))
        self._kept = self._saved = self._failures = self._warm_at = 0
        self._hazard_left = self.chance.until_failure(0)

    def begin_pacing(self) -> None:
        """The quiet start is over: ranks forget all but their baselines."""
        self._tick = standing.when_pacing_begins(self._tick)

    def steps(self, settings_SM2: NDArray[np.float64], iterations: int) -> list[tuple[Any, ...]]:
        """Run steps; returns the fields of a recording for each."""
        signals.start_interval(self._tick)
        return [self._iterate(settings_SM2) for _ in range(iterations)]

    def views(self) -> tuple[NDArray[np.float32], int]:
        """What every rank observed of the last steps ``(R, O)``, and the rank whose view counts."""
        out_RO = np.empty((self.batch.ranks, signals.SIGNALS), np.float32)
        for r in range(self.batch.ranks):
            signals.write_signals(self._rank, r, self._tick, out_RO[r])
        return out_RO, int(uniform(self._key, OBSERVER, 0) * self.batch.ranks)

    def totals(self) -> tuple[float | list[float], ...]:
        """What the episode came to so far: the fields of an outcome."""
        useful = self._kept if self._can_stop else self._t
        by_place = {one.chance.place: float(one.cycles) for one in self.tenants}
        cycles = [by_place.get(k, math.nan) for k in range(self.batch.tenants_EK.shape[1])]
        return self._time_s, self._energy_j, self._failures, float(self._t - useful), float(useful), cycles

    # one step

    @property
    def _can_stop(self) -> bool:
        return bool(self._job["checkpoint_iterations"] > 0 or self._job["failure_per_s"] > 0.0)

    def _iterate(self, settings_SM2: NDArray[np.float64]) -> tuple[Any, ...]:
        """One step; returns what a recording keeps of it."""
        job, t, ranks = self._job, self._t, range(self.batch.ranks)
        compute_R, stall_R = self.chance.compute_s(t)
        if not job["has_program"]:  # a stall is a part of the one compute phase, not in front of it
            compute_R, stall_R = [sum(both) for both in zip(compute_R, stall_R, strict=True)], [0.0] * len(ranks)
        compute_R = [compute_R[r] * self._slower(r) for r in ranks]
        delay_R = [self._real_delay_s(r) for r in ranks]
        start_R, hold_R = list(self._early_R), [float(one) for one in self._rank[timing.DEFER_S]]
        begin_R = [start_R[r] + delay_R[r] + stall_R[r] for r in ranks]
        step = Step(self.laid, self._links, self.chance, job, t, begin_R, compute_R, hold_R)
        step.run()

        entry_R = [step.at_R[r] - step.waited_R[r] for r in ranks]
        finish_G, exit_R = self._leave(step)
        post_G = self.chance.post_work_s(t)
        ready_G = [finish_s + post_s for finish_s, post_s in zip(finish_G, post_G, strict=True)]
        end_s = max(ready_G)
        step_s = end_s + float(job["barrier_s"])
        ready_R = [exit_R[r] + post_G[self._group_R[r]] for r in ranks]
        comm_R = [step.paid_R[r] - (step.at_R[r] - exit_R[r]) for r in ranks]
        if job["staleness"] > 0:
            comm_R = self._run_ahead(entry_R, step_s)
        self._spend(step.computed_R, delay_R, step_s)
        extra_s = self._interrupt(step_s) if self._can_stop else 0.0
        self._time_s += step_s + extra_s
        self._decide(settings_SM2, comm_R, [end_s - ready_s for ready_s in ready_R], step_s + extra_s)
        self._rewind(step_s + extra_s)
        self._t += 1
        by_instruction = [at_s for of_rank in step.end_RI for at_s in of_rank]
        kept = (by_instruction, step.begin_O, step.through_O) if job["has_program"] else ([], [], [])
        return step_s + extra_s, start_R, entry_R, delay_R, exit_R, finish_G, ready_G, *kept

    def _leave(self, step: Step) -> tuple[list[float], list[float]]:
        """When the collective of each group is over, and when each rank leaves it; seconds."""
        ranks, finish_G = range(self.batch.ranks), [0.0] * self.batch.groups
        if self._job["has_program"]:  # all that a rank waits for is one collective at the end of its step
            finish_G = [max(step.at_R)] * self.batch.groups
            return finish_G, list(step.at_R)
        for one in self.laid.operations:
            g = self._group_R[one.members[0]]
            finish_G[g] = max(finish_G[g], step.through_O[one.number])
        return finish_G, [min(step.at_R[r], finish_G[self._group_R[r]]) for r in ranks]

    def _rewind(self, step_s: float) -> None:
        if not self.tenants:  # what nobody else uses is free once the step is over
            self._links.now_s = min(self._links.now_s, step_s)
        self._links.rewind(step_s)

    def _run_ahead(self, entry_R: Sequence[float], step_s: float) -> list[float]:
        """When each rank begins its next step, before the end of this one; returns how long each was blocked."""
        self._steps_s[self._t % len(self._steps_s)] = step_s
        free_R = [min(entry_s - step_s, 0.0) for entry_s in entry_R]
        self._early_R = [max(free_s, -sum(self._steps_s)) for free_s in free_R]
        return [early_s - free_s for early_s, free_s in zip(self._early_R, free_R, strict=True)]

    # what the ranks decide

    def _real_delay_s(self, r: int) -> float:
        """How long a rank is delayed: it wakes up late, and it does not delay itself after a step that it missed."""
        asked_s = float(self._rank[timing.DELAY_S, r])
        if self.chance.is_missing(self._t - 1, r):
            asked_s = 0.0
        elif asked_s > 0.0 and self._job["late_wake_s"] > 0.0:
            asked_s += self.chance.late_wake_s(self._t, r)
        self._rank[timing.DELAY_S, r] = asked_s
        return float(self._rank[timing.DELAY_S, r])

    def _decide(
        self, settings_SM2: NDArray[np.float64], comm_R: Sequence[float], wait_R: Sequence[float], step_s: float
    ) -> None:
        """Every rank takes in its own timing of the step and sets its next delay."""
        ranks, allowed = self.batch.ranks, self._limits
        seen_2R = np.array([comm_R, wait_R], np.float32)
        if self._job["stamp_noise_s"] > 0.0:
            errors_R2 = [self.chance.stamp_error_s(self._t, r) for r in range(ranks)]
            seen_2R = np.maximum(seen_2R + np.array(errors_R2).T, 0.0).astype(np.float32)
        missing = [r for r in range(ranks) if self.chance.is_missing(self._t, r)]
        aside = self._rank[:, missing]
        timing.observe_step(self._tick, step_s)
        timing.observe_ranks(self._rank, self._tick, seen_2R[0], seen_2R[1], bool(self._job["has_barrier"]))
        cap_s = delay_limits.capped_s(allowed.cap_s, allowed.cap_share, self._tick[timing.STEP_BASELINE_S])
        each = len(settings_SM2) > 1
        for low, settings_M2 in enumerate(settings_SM2):
            high = low + 1 if each else ranks
            timing.decide(self._rank, self._tick, low, high, settings_M2, cap_s, 0, ranks // self.batch.groups)
        budget_R, delay_R = self._rank[timing.BUDGET_S], self._rank[timing.DELAY_S]
        timing.spend(budget_R, delay_R, ranks, step_s, allowed.burst_s, allowed.fill)
        self._rank[:, missing] = aside

    # what couples steps: power and heat, checkpoints and failures

    def _node(self, n: int) -> slice:
        per_node = int(self._job["ranks_per_node"])
        return slice(n * per_node, (n + 1) * per_node)

    def _slower(self, r: int) -> float:
        """How much longer a rank computes on a warm node, and after a restart."""
        heat = self._heat_N[r // int(self._job["ranks_per_node"])]
        cold = float(self._job["warmup_factor"]) if self._t < self._warm_at else 1.0
        return cold * (1.0 + float(self._job["heat_slowdown"]) * heat)

    def _joules(self, computed_s: float, delayed_s: float, whole_s: float) -> float:
        """What ranks spend in some rank-seconds: whoever neither computes nor is delayed spins."""
        job, spun_s = self._job, whole_s - computed_s - delayed_s
        return float(job["compute_w"] * computed_s + job["wait_w"] * spun_s + job["delay_w"] * delayed_s)

    def _spend(self, computed_R: Sequence[float], delay_R: Sequence[float], step_s: float) -> None:
        """Add the energy of a step, and warm each node towards its mean power relative to computing."""
        job = self._job
        if job["compute_w"] == 0.0:
            return
        for n, heat in enumerate(self._heat_N):
            computed_s, delayed_s = sum(computed_R[self._node(n)]), sum(delay_R[self._node(n)])
            whole_s = float(job["ranks_per_node"]) * step_s
            joules = self._joules(computed_s, delayed_s, whole_s)
            self._energy_j += joules
            power = joules / (float(job["compute_w"]) * whole_s)
            self._heat_N[n] = heat + (power - heat) / float(job["heat_iterations"])

    def _interrupt(self, step_s: float) -> float:
        """Checkpoint and fail where it is time to; returns the seconds that this adds to the step.

        The hazard adds up over seconds of running, and faster on hot nodes; the job fails where it exceeds a draw.
        """
        job, extra_s = self._job, 0.0
        self._kept += 1
        if job["checkpoint_iterations"] > 0 and (self._t + 1) % job["checkpoint_iterations"] == 0:
            extra_s, self._saved = float(job["checkpoint_s"]), self._kept
        heat = sum(self._heat_N) / len(self._heat_N)
        self._hazard_left -= job["failure_per_s"] * (1.0 + job["failure_heat"] * heat) * (step_s + extra_s)
        if self._hazard_left <= 0.0:
            self._failures += 1
            self._hazard_left += self.chance.until_failure(self._failures)
            self._kept, self._warm_at = self._saved, self._t + 1 + int(job["warmup_iterations"])
            self._heat_N = [0.0] * len(self._heat_N)
            extra_s += float(job["restart_s"])
        self._energy_j += extra_s * self.batch.ranks * float(job["delay_w"])
        return extra_s
