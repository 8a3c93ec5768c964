"""A job, step by step: what a step leaves behind for the next, and what the ranks decide from it.

A rank begins a step when the one before is over, plus its pacing delay: that is all that pacing can do. At the end of
a step every rank takes in what it measured itself and sets its next delay, by the estimator and the rules of
``paceenv.core``, which a live rank runs, too.

A rank that waits spins and draws power; that warms its node and slows its compute. A failure takes the job back to its
last checkpoint and lets it start cold. Where ranks may run ahead (bounded staleness), one begins its next step at once
unless it is as many steps ahead of the last complete collective as it may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import limits as delay_limits
from paceenv.core import pacing, signals, timing
from paceenv.core.limits import LIMITS
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.footprint import UPLINK, Use
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, Wait, lay
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.engine import draws
from paceenv.sim.engine.draws import uniform
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import Outcome, episode_keys
from paceenv.sim.reference.chance import Chance
from paceenv.sim.reference.flows import Links, Tenant
from paceenv.sim.reference.ranks import TAIL, Rank, Step

Array = NDArray[np.float64]
NO_WORK = 1e-12
"""Share of the uplink below which a collective meets nobody."""
WRAPS = np.errstate(over="ignore")
"""The hashes want integers that wrap."""


def one_collective(job: Any, ranks: int, groups: int) -> tuple[StepPlan, Callable[[Start, Sequence[int]], Use]]:
    """A job of which only one collective a step was measured, as a program, and what it takes of the uplink.

    With overlap the collective may start when all have their first gradients, ``overlap_share`` of the compute before
    its end. The last gradients are reduced after it, however early the first ones went.
    """
    overlap, work_s, any_bytes = float(job["overlap_share"]), float(job["uplink_work_s"]), math.inf
    first, last = Start("gradients", "all_reduce", any_bytes), Start(TAIL, "all_reduce", any_bytes)
    role: list[Instruction] = [Compute(1.0), first, Wait("gradients", 0)]
    if overlap > 0.0:
        role = [Compute(1.0 - overlap), first, Compute(overlap), last, Wait(TAIL, 0), Wait("gradients", 0)]
    parts = np.arange(ranks).reshape(groups, -1).tolist()
    meets = work_s > NO_WORK * job["transfer_alone_s"]
    alone_s = max(float(job["transfer_alone_s"]), work_s if meets else 0.0)
    share_U = np.array([work_s / alone_s] if meets else [])
    taken = Use(alone_s, float(job["latency_s"]), np.full(len(share_U), UPLINK), share_U)
    tail = Use(0.0, float(job["tail_s"]), taken.link_U[:0], share_U[:0])
    plan = StepPlan([0] * ranks, [role], {"gradients": parts, TAIL: parts})
    return plan, lambda start, members: tail if start is last else taken


class Reference:
    """One episode of a job in simulation, as the engine's ``Simulator`` of one environment."""

    @WRAPS
    def __init__(self, cluster: Cluster, seed: int) -> None:
        key, has_tenants = episode_keys([seed])[0], bool(cluster.tenants)
        self.batch = derive(cluster, np.array([key]))
        self._job: Any = self.batch.jobs[0]
        ranks, groups = self.batch.ranks, self.batch.groups
        self._group_R = np.arange(ranks) // (ranks // groups)
        if cluster.has_program:
            plan, use = cluster.plan(), use_of(cluster.fabric, cluster.job, has_tenants=has_tenants)
        else:
            plan, use = one_collective(self._job, ranks, groups)
        self._laid, self._links = lay(plan, use, has_tenants=has_tenants), Links()
        self._chance = Chance(self._job, float(self.batch.skewness_E[0]), key, ranks, groups)
        tenants = enumerate(self.batch.tenants_EK[0])
        self._tenants = {k: Tenant(one, key, k, self._links) for k, one in tenants if one["weight"] > 0.0}
        self._rank, self._tick = timing.new_state(ranks)
        self._missed_R = np.zeros(ranks, np.bool_)
        self._t, self._time_s, self._energy_j = 0, 0.0, 0.0
        self._early_R, self._steps_s = np.zeros(ranks), [0.0] * max(int(self._job["staleness"]), 1)
        self._heat_N = np.zeros(ranks // int(self._job["ranks_per_node"]))
        self._kept = self._saved = self._failures = self._warm_at = 0
        self._hazard_left = self._hazard()
        self._can_stop = bool(self._job["checkpoint_iterations"] > 0 or self._job["failure_per_s"] > 0.0)

    def run(self, settings_ESM2: Array, iterations: int) -> Array:
        """Step times ``(1, T)``, seconds."""
        return self.record(settings_ESM2, iterations).step_ET

    @WRAPS
    def record(self, settings_ESM2: Array, iterations: int) -> Recording:
        """As :meth:`run`, with every stamp."""
        signals.start_interval(self._tick)
        steps = [self._step(settings_ESM2[0]) for _ in range(iterations)]
        return Recording(*(np.array([field], np.float64) for field in zip(*steps, strict=True)))

    def observe(self) -> NDArray[np.float32]:
        """What every rank observed of the last run, ``(1, R, O)``."""
        out_RO = np.empty((self.batch.ranks, signals.SIGNALS), np.float32)
        for r in range(self.batch.ranks):
            signals.write_signals(self._rank, r, self._tick, out_RO[r])
        return out_RO[None]

    def outcome(self) -> Outcome:
        """What the episode came to so far."""
        useful = float(self._kept if self._can_stop else self._t)
        cycles_K = np.full(self.batch.tenants_EK.shape[1], np.nan)
        for k, tenant in self._tenants.items():
            cycles_K[k] = tenant.cycles
        totals = self._time_s, self._energy_j, self._failures, self._t - useful, useful, cycles_K
        return Outcome(*(np.array([total]) for total in totals))

    def _step(self, settings_SM2: Array) -> tuple[Any, ...]:
        """One step; returns what a recording keeps of it."""
        job, t, start_R = self._job, self._t, self._early_R
        compute_R, stall_R = self._chance.compute_R(t)
        if not job["has_program"]:  # a stall is a part of the one compute phase, not in front of it
            compute_R, stall_R = compute_R + stall_R, np.zeros_like(stall_R)
        compute_R = compute_R * self._slower_R()
        delay_R = self._real_delay_R()
        begin_R, hold_R = start_R + delay_R + stall_R, self._rank[timing.DEFER_S].astype(np.float64)
        ranks = [Rank(*one.tolist()) for one in np.array([begin_R, compute_R, hold_R]).T]
        step = Step(self._laid, self._links, self._chance, t, ranks)
        stamps = [(rank.at_s, rank.waited_s, rank.paid_s, rank.computed_s) for rank in ranks]
        at_R, waited_R, paid_R, computed_R = np.array(stamps).T
        finish_G, exit_R = self._leave(step, at_R)
        ready_G = finish_G + self._chance.post_work_G(t)
        step_s = float(ready_G.max() + job["barrier_s"])
        wait_R = ready_G.max() - (exit_R + (ready_G - finish_G)[self._group_R])
        comm_R = paid_R - (at_R - exit_R)
        if job["staleness"] > 0:
            comm_R = self._run_ahead(at_R - waited_R, step_s)
        self._spend(computed_R, delay_R, step_s)
        whole_s = step_s + (self._interrupt(step_s) if self._can_stop else 0.0)
        self._time_s += whole_s
        self._decide(settings_SM2, np.array([comm_R, wait_R], np.float32), whole_s)
        self._links.rewind(whole_s, is_shared=bool(self._tenants))
        self._t += 1
        kept: tuple[list[float], ...] = ([], [], [])
        if job["has_program"]:
            ends = [end_s for rank in ranks for end_s in rank.end_I]
            kept = ends, [one.begin_s for one in step.transfers], [one.through_s for one in step.transfers]
        return whole_s, start_R, at_R - waited_R, delay_R, exit_R, finish_G, ready_G, *kept

    def _leave(self, step: Step, at_R: Array) -> tuple[Array, Array]:
        """When the collective of each group is over, and when each rank leaves it; seconds."""
        finish_G = np.zeros(self.batch.groups)
        if self._job["has_program"]:  # all that a rank waits for is one collective at the end of its step
            return finish_G + at_R.max(), at_R
        for transfer in step.transfers:
            g = self._group_R[transfer.one.members[0]]
            finish_G[g] = max(finish_G[g], transfer.through_s)
        return finish_G, np.minimum(at_R, finish_G[self._group_R])

    def _run_ahead(self, entry_R: Array, step_s: float) -> Array:
        """When each rank begins its next step, before the end of this one; returns how long each was blocked."""
        self._steps_s[self._t % len(self._steps_s)] = step_s
        free_R = np.minimum(entry_R - step_s, 0.0)
        self._early_R = np.maximum(free_R, -sum(self._steps_s))
        return self._early_R - free_R

    # what the ranks decide

    def _real_delay_R(self) -> Array:
        """How long ranks are delayed: they wake up late, and do not delay themselves after a step that they missed."""
        delay_R, u_R = self._rank[timing.DELAY_S], self._chance.uniform_R(draws.LATE_WAKE, self._t)
        delay_R -= np.where(delay_R > 0.0, self._job["late_wake_s"] * np.log(u_R + 2.0**-33), 0.0)
        delay_R[self._missed_R] = 0.0
        return np.asarray(delay_R, np.float64)

    def _decide(self, settings_SM2: Array, seen_2R: NDArray[np.float32], step_s: float) -> None:
        """Every rank takes in its own timing of the step, collective and barrier, and sets its next delay.

        Its stamps are noisy. It cannot measure some steps; but at first an agent learns the shape of a step, and misses
        none.
        """
        ranks, job, chance, t = self.batch.ranks, self._job, self._chance, self._t
        if job["stamp_noise_s"] > 0.0:
            error_2R = job["stamp_noise_s"] * np.array([chance.normal_R(draws.STAMPS, 2 * t + k) for k in (0, 1)])
            seen_2R = np.maximum(seen_2R + error_2R, 0.0).astype(np.float32)
        is_missed_R = chance.uniform_R(draws.MISSING, t) < job["missing_share"]
        self._missed_R = is_missed_R & (t >= timing.BLOCK_ITERATIONS)
        aside = self._rank[:, self._missed_R]
        timing.observe_step(self._tick, step_s)
        timing.observe_ranks(self._rank, self._tick, seen_2R[0], seen_2R[1], bool(job["has_barrier"]))
        cap_s = delay_limits.capped_s(LIMITS.cap_s, LIMITS.cap_share, self._tick[timing.STEP_BASELINE_S])
        settings_M2R, on_M = pacing.laid_out(settings_SM2, ranks)
        timing.decide(self._rank, self._tick, settings_M2R, on_M, cap_s, 0, ranks // self.batch.groups)
        budget_R, delay_R = self._rank[timing.BUDGET_S], self._rank[timing.DELAY_S]
        timing.spend(budget_R, delay_R, ranks, step_s, LIMITS.burst_s, LIMITS.fill)
        self._rank[:, self._missed_R] = aside

    # what couples steps: power and heat, checkpoints and failures

    def _slower_R(self) -> Array:
        """How much longer ranks compute on warm nodes, and after a restart."""
        heat_R = np.repeat(self._heat_N, int(self._job["ranks_per_node"]))
        cold = float(self._job["warmup_factor"]) if self._t < self._warm_at else 1.0
        return np.asarray(cold * (1.0 + float(self._job["heat_slowdown"]) * heat_R))

    def _spend(self, computed_R: Array, delay_R: Array, step_s: float) -> None:
        """Add the energy of a step, and warm each node towards its mean power relative to computing.

        A rank that neither computes nor is delayed spins.
        """
        job, nodes, whole_s = self._job, len(self._heat_N), float(self._job["ranks_per_node"]) * step_s
        if job["compute_w"] == 0.0:
            return
        computed_N, delayed_N = (one_R.reshape(nodes, -1).sum(axis=1) for one_R in (computed_R, delay_R))
        spun_N = whole_s - computed_N - delayed_N
        joules_N = job["compute_w"] * computed_N + job["wait_w"] * spun_N + job["delay_w"] * delayed_N
        self._energy_j += float(joules_N.sum())
        self._heat_N += (joules_N / (job["compute_w"] * whole_s) - self._heat_N) / job["heat_iterations"]

    def _hazard(self) -> float:
        """The hazard that the job lives through until its next failure: exponential with mean 1."""
        return -math.log(uniform(self._chance.key, draws.FAILURE, self._failures))

    def _interrupt(self, step_s: float) -> float:
        """Checkpoint and fail where it is time to; returns the seconds that this adds to the step.

        The hazard adds up over seconds of running, and faster on hot nodes; the job fails where it exceeds a draw.
        """
        job, extra_s = self._job, 0.0
        self._kept += 1
        if job["checkpoint_iterations"] > 0 and (self._t + 1) % job["checkpoint_iterations"] == 0:
            extra_s, self._saved = float(job["checkpoint_s"]), self._kept
        heat = self._heat_N.mean()
        self._hazard_left -= job["failure_per_s"] * (1.0 + job["failure_heat"] * heat) * (step_s + extra_s)
        if self._hazard_left <= 0.0:
            self._failures += 1
            self._hazard_left += self._hazard()
            self._kept, self._warm_at = self._saved, self._t + 1 + int(job["warmup_iterations"])
            self._heat_N[:] = 0.0
            extra_s += float(job["restart_s"])
        self._energy_j += extra_s * self.batch.ranks * float(job["delay_w"])
        return extra_s
