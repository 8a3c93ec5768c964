"""A job, step by step: what a step leaves behind for the next, and what the ranks decide from it.

A rank begins a step when the one before is over, plus its pacing delay: that is all that pacing can do. At the end of
a step every rank takes in what it measured itself and sets its next delay. Where ranks may run ahead (bounded
staleness), one begins its next step at once unless it is as many steps ahead of the last complete collective as it may
be.

What concerns a rank, a node or a group by itself is told once, by functions of the engine that run here as they are:

- ``noise``: a rank computes in step t, besides stalls,

      compute_s * factor[rank] * (1 + common[t]) * max(0, 1 + jitter[t, rank] + imbalance[t, rank] + drift[t, rank])

  and longer while it is in a fail-slow episode. Every draw is a hash of the episode's key, what it is for, step and
  rank; none depends on time or on pacing. Some groups have work after their collective.
- ``measuring``: a rank wakes up late and measures with errors; estimator and rules are those of a live rank.
- ``coupling``: a rank that waits spins and draws power, which warms its node and slows its compute. A failure takes the
  job back to its last checkpoint and lets it start cold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals, timing
from paceenv.sim.cluster.derive import start
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.footprint import Use
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, Wait, lay
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.engine import coupling, layout, measuring, noise
from paceenv.sim.engine.fluid import NO_WORK
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.program_layout import UPLINK
from paceenv.sim.engine.simulator import Outcome
from paceenv.sim.reference.flows import Links, tenant_life
from paceenv.sim.reference.ranks import TAIL, Rank, Step

Array = NDArray[np.float64]
WRAPS = np.errstate(over="ignore")
"""The hashes want integers that wrap."""


def one_collective(job: Any, ranks: int, groups: int) -> tuple[StepPlan, Callable[[Start, Sequence[int]], Use]]:
    """A job of which only one collective a step was measured, as a program, and what it takes of the uplink.

    With overlap the collective may start when all have their first gradients, ``overlap_share`` of the compute before
    its end. The last gradients are reduced after it, however early the first ones went.
    """
    overlap, work_s, any_bytes = float(job["overlap_share"]), float(job["uplink_work_s"]), math.inf
    first, last = Start("gradients", "all_reduce", any_bytes), Start(TAIL, "all_reduce", any_bytes)
    role: list[Instruction] = [Compute(1.0), first, Wait(1)]
    if overlap > 0.0:
        role = [Compute(1.0 - overlap), first, Compute(overlap), last, Wait(3), Wait(1)]
    parts = np.arange(ranks).reshape(groups, -1).tolist()
    meets = work_s > NO_WORK * job["transfer_alone_s"]
    alone_s = max(float(job["transfer_alone_s"]), work_s if meets else 0.0)
    share_U = np.array([work_s / alone_s] if meets else [])
    taken = Use(alone_s, float(job["latency_s"]), np.full(len(share_U), UPLINK), share_U)
    tail = Use(0.0, float(job["tail_s"]), taken.link_U[:0], share_U[:0])
    plan = StepPlan([0] * ranks, [role], {"gradients": parts, TAIL: parts})
    return plan, lambda start, members: tail if start is last else taken


class Reference:
    """One episode of a job in simulation, as the engine's ``Simulator`` of one environment, whose state it keeps."""

    @WRAPS
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._simulator, has_tenants = start(cluster, [seed]), bool(cluster.tenants)
        self._view, self.batch = self._simulator.view(0), self._simulator.batch
        ranks, groups = self.batch.ranks, self.batch.groups
        self._per_group, self._room = ranks // groups, layout.scratch(ranks, groups)
        if self.batch.program is not None:
            plan, use = cluster.plan(), use_of(cluster.fabric, cluster.job, has_tenants=has_tenants)
        else:
            plan, use = one_collective(self._view.job, ranks, groups)
        self._laid, self._links = lay(plan, use, has_tenants=has_tenants), Links()
        tenants = np.flatnonzero(self._view.tenants["weight"] > 0.0).tolist()
        self._is_shared = bool(tenants)
        for k in tenants:
            self._links.go_on(tenant_life(self._view, k, self._links))
        self._early_R, self._steps_s = np.zeros(ranks), [0.0] * max(int(self._view.job["staleness"]), 1)

    def run(self, settings_ESM2: Array, iterations: int) -> Array:
        """Step times ``(1, T)``, seconds."""
        return self.record(settings_ESM2, iterations).step_ET

    @WRAPS
    def record(self, settings_ESM2: Array, iterations: int) -> Recording:
        """As :meth:`run`, with every stamp."""
        signals.start_interval(self._view.tick)
        pacing.by_rank(settings_ESM2[0], self._room.settings_M2R, self._room.on_M)
        steps = [self._step() for _ in range(iterations)]
        return Recording(*(np.array([field], np.float64) for field in zip(*steps, strict=True)))

    def observe(self) -> NDArray[np.float32]:
        """What every rank observed of the last run, ``(1, R, O)``."""
        return self._simulator.observe(every_rank=True)

    def outcome(self) -> Outcome:
        """What the episode came to so far."""
        return self._simulator.outcome()

    def _step(self) -> tuple[Any, ...]:
        """One step; returns what a recording keeps of it."""
        job, clock, room, start_R = self._view.job, self._view.clock, self._room, self._early_R
        t, key, state = int(clock["iteration"]), clock["key"], self._view.rank
        has_program = self.batch.program is not None
        noise.draw_compute(self._view, room, has_program)
        coupling.slow_down(self._view, room)
        delay_R = state[timing.DELAY_S, : self.batch.ranks]
        measuring.delay_imperfectly(job, key, t, delay_R)
        measuring.keep_missing(job, key, t, state, room.aside_FR)
        delay_R = delay_R.astype(np.float64)
        # a stall is at the start of a program, and a part of the one compute phase of other jobs
        begin_R = start_R + delay_R + (room.spare_R if has_program else 0.0)
        hold_R = state[timing.DEFER_S, : self.batch.ranks]
        ranks = [Rank(*one.tolist()) for one in np.array([begin_R, room.compute_R, hold_R]).T]
        step = Step(self._laid, self._links, self._view, ranks, is_measured=not has_program)
        stamps = [(rank.at_s, rank.waited_s, rank.paid_s, rank.computed_s) for rank in ranks]
        at_R, waited_R, paid_R, computed_R = np.array(stamps).T
        finish_G, exit_R = self._leave(step, at_R)
        noise.start_post_work(self._view)
        group = self._view.group
        ready_G = finish_G + group[layout.FIXED_POST_WORK_S]
        ready_G += np.where(group[layout.POST_WORK_UNTIL] > t, group[layout.POST_WORK_NOW_S], 0.0)
        step_s = float(ready_G.max() + job["barrier_s"])
        room.wait_R[:] = ready_G.max() - (exit_R + np.repeat(ready_G - finish_G, self._per_group))
        room.comm_R[:] = paid_R - (at_R - exit_R)
        if job["staleness"] > 0:
            room.comm_R[:] = self._run_ahead(at_R - waited_R, step_s)
        extra_s = self._couple(computed_R, step_s)
        measuring.take_in(self._view, room, self._simulator.tables.limits, step_s, extra_s, self._per_group)
        measuring.keep_missing(job, key, t, room.aside_FR, state)
        self._links.rewind(step_s + extra_s, is_shared=self._is_shared)
        clock["time_s"] += step_s + extra_s
        clock["iteration"] += 1
        kept: tuple[list[float], ...] = ([], [], [])
        if has_program:
            ends = [end_s for rank in ranks for end_s in rank.end_I]
            kept = ends, [one.begin_s for one in step.transfers], [one.through_s for one in step.transfers]
        return step_s + extra_s, start_R, at_R - waited_R, delay_R, exit_R, finish_G, ready_G, *kept

    def _leave(self, step: Step, at_R: Array) -> tuple[Array, Array]:
        """When the collective of each group is over, and when each rank leaves it; seconds."""
        finish_G = np.zeros(self.batch.groups)
        if self.batch.program is not None:  # all that a rank waits for is one collective at the end of its step
            return finish_G + at_R.max(), at_R
        for transfer in step.transfers:
            g = transfer.one.members[0] // self._per_group
            finish_G[g] = max(finish_G[g], transfer.through_s)
        return finish_G, np.minimum(at_R, np.repeat(finish_G, self._per_group))

    def _run_ahead(self, entry_R: Array, step_s: float) -> Array:
        """When each rank begins its next step, before the end of this one; returns how long each was blocked."""
        self._steps_s = [*self._steps_s[1:], step_s]
        free_R = np.minimum(entry_R - step_s, 0.0)
        self._early_R = np.maximum(free_R, -sum(self._steps_s))
        return self._early_R - free_R

    def _couple(self, computed_R: Array, step_s: float) -> float:
        """Spend energy, warm up, checkpoint and fail; returns the seconds that this adds to the step."""
        job = self._view.job
        if job["compute_w"] > 0.0:
            coupling.note_computed(self._view, computed_R)
            coupling.spend(self._view, float(computed_R.sum()), step_s)
        can_stop = job["checkpoint_iterations"] > 0 or job["failure_per_s"] > 0.0
        return coupling.interrupt(self._view, step_s) if can_stop else 0.0
