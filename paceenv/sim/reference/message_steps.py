"""One job on a network of messages, step by step, with the fast engine's interface for one environment or several
seeds.

It reads the cluster config itself: ranks, links and messages are built here, not derived from closed forms. On purpose
it shares with the fast engine the draws of noise and of what ranks measure, so that both see the same, and the
estimator and pacing rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.core.limits import LIMITS, Limits
from paceenv.sim.cluster.derive import drawn
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine import draws, layout, noise
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import JobBatch, Outcome, episode_keys
from paceenv.sim.reference.flows import Collective, TenantJob, Wiring
from paceenv.sim.reference.network import Network
from paceenv.sim.reference.paced_job import PacedJob
from paceenv.sim.reference.program_steps import ProgramReference, program_messages
from paceenv.sim.reference.setup import Links, Setup

MAX_WORK = 5 * 10**9
"""Messages times ranks that a run may take: every event looks at all that is under way, about 0.5 us for each."""


class _Step:
    """One iteration on its way: what is drawn for it, and its stamps as they come, absolute seconds."""

    def __init__(self, compute_R: NDArray[np.float64], post_work_G: NDArray[np.float64]) -> None:
        ranks, groups = len(compute_R), len(post_work_G)
        self.compute_R, self.post_work_G = compute_R, post_work_G
        self.delay_R, self.entry_R = np.full(ranks, math.nan), np.full(ranks, math.nan)
        self.exit_R = np.full(ranks, math.nan)
        self.finish_G, self.ready_G = np.full(groups, math.nan), np.full(groups, math.nan)
        self.collectives: list[Collective] = []
        self.groups_to_come = groups


class Reference(PacedJob):
    """A job in simulation, message by message."""

    def __init__(self, cluster: Cluster, seed: int, setup: Setup | None = None, limits: Limits = LIMITS) -> None:
        keys_E = episode_keys([seed])
        self.setup = Setup.of(drawn(cluster, keys_E[0])) if setup is None else setup
        super().__init__(cluster, keys_E, limits)
        self._has_barrier, self._barrier_s = self.setup.has_barrier, self.setup.barrier_s
        self.links, schedule = Links(self.setup, seed), self.setup.schedule()
        self._wirings = [Wiring.of(self.links, schedule, g * self.setup.members) for g in range(self.setup.groups)]
        self.ideal_step_s = self._ideal_step_s()
        self.batch.jobs["ideal_step_s"] = self.ideal_step_s
        self._can_lose = self.setup.collective != "all_reduce" and self.setup.incast_fit < math.inf
        self._on_their_way = 0
        self._tenants = [
            TenantJob(self.network, self.links.upper, keys_E[0], k, tenant, self.ideal_step_s, self._we_transfer)
            for k, tenant in enumerate(self.setup.tenants)
            if tenant.comm_share > 0.0
        ]
        self._steps: list[_Step] = []
        self._next_R, self._is_busy_R = [0] * self.setup.ranks, [False] * self.setup.ranks
        for r in range(self.setup.ranks):
            self._start(r)

    def _recording(self, first: int, end_T1: NDArray[np.float64]) -> Recording:
        steps, begin_T1 = self._steps[first : first + len(end_T1) - 1], end_T1[:-1, None]
        return Recording(
            np.diff(end_T1)[None],
            (np.array([s.entry_R - s.compute_R - s.delay_R for s in steps]) - begin_T1)[None],
            (np.array([s.entry_R for s in steps]) - begin_T1)[None],
            np.array([s.delay_R for s in steps])[None],
            (np.array([s.exit_R for s in steps]) - begin_T1)[None],
            (np.array([s.finish_G for s in steps]) - begin_T1)[None],
            (np.array([s.ready_G for s in steps]) - begin_T1)[None],
            *(np.empty((1, len(steps), 0)) for _ in range(3)),
        )

    # a step

    def _step(self, t: int) -> _Step:
        """Iteration ``t``; drawn when its first rank gets there."""
        if t == len(self._steps):
            with np.errstate(over="ignore"):  # the hashes want integers that wrap
                step = _Step(self._draw_compute()[0], self._draw_post_work())
            self._view.clock["iteration"] += 1
            for g, wiring in enumerate(self._wirings):
                loss = partial(self._timeout_s, t) if self._can_lose else None
                kept = self.setup.send_buffer_bytes
                end = partial(self._finish, t, g)
                step.collectives.append(
                    Collective(self.network, wiring, end, loss, kept, on_begin=self._transfer_begins)
                )
            self._steps.append(step)
        return self._steps[t]

    def _start(self, r: int) -> None:
        """Rank ``r`` starts its next iteration, if it is through with the last one and not too far ahead."""
        t, setup = self._next_R[r], self.setup
        if self._is_busy_R[r] or len(self._end_T) < t - setup.staleness:
            return
        self._next_R[r], self._is_busy_R[r] = t + 1, True
        step = self._step(t)
        step.delay_R[r] = self._real_delay_s(t, r)
        compute_s = float(step.compute_R[r])
        released_s = self.network.now_s + float(step.delay_R[r])
        step.entry_R[r] = released_s + compute_s
        self.network.at(released_s + (1.0 - setup.overlap_share) * compute_s, partial(self._enter, t, r))
        self.network.at(step.entry_R[r], partial(self._complete, t, r))

    def _enter(self, t: int, r: int) -> None:
        """Rank ``r`` has its first gradients; collectives of one rank follow one another in order."""
        g, member = divmod(r, self.setup.members)
        enter = partial(self._steps[t].collectives[g].enter, member)
        if self.setup.staleness > 0 and len(self._end_T) < t:
            self._steps[t - 1].collectives[g].when_through(member, enter)
        else:
            enter()

    def _complete(self, t: int, r: int) -> None:
        """Rank ``r`` has its last gradients, and goes on at once if it may run ahead."""
        g, member = divmod(r, self.setup.members)
        self._steps[t].collectives[g].complete(member)
        self._is_busy_R[r] = False
        self._start(r)

    def _we_transfer(self) -> bool:
        return self._on_their_way > 0

    def _transfer_begins(self) -> None:
        if not self._we_transfer():
            for tenant in self._tenants:
                tenant.is_met()
        self._on_their_way += 1

    def _finish(self, t: int, g: int) -> None:
        """Group ``g``'s collective is over: work after it begins."""
        self._on_their_way -= 1
        step = self._steps[t]
        step.finish_G[g] = self.network.now_s
        step.exit_R[g * self.setup.members : (g + 1) * self.setup.members] = self.network.now_s
        if self.setup.collective == "gather":  # its senders do not wait for each other
            for member, sent_s in step.collectives[g].sent_s.items():
                step.exit_R[g * self.setup.members + member] = min(sent_s, self.network.now_s)
        step.ready_G[g] = step.finish_G[g] + step.post_work_G[g]
        self.network.at(step.ready_G[g], partial(self._ready, t))

    def _ready(self, t: int) -> None:
        step = self._steps[t]
        step.groups_to_come -= 1
        if step.groups_to_come == 0:
            end_s = float(step.ready_G.max()) + self.setup.barrier_s
            self.network.at(end_s, partial(self._end, t, end_s))

    def _end(self, t: int, end_s: float) -> None:
        """The step is over for all: every rank takes in its timing, decides, and goes on."""
        step, begin_s = self._steps[t], self._end_T[-1] if self._end_T else 0.0
        self._end_T.append(end_s)
        step.collectives.clear()  # all their messages are through
        self._spend(float(step.compute_R.sum()), float(step.delay_R.sum()), end_s - begin_s)
        comm_R = (step.exit_R - step.entry_R).astype(np.float32)
        ready_R = step.exit_R + np.repeat(step.ready_G - step.finish_G, self.setup.members)
        wait_R = (end_s - self.setup.barrier_s - ready_R).astype(np.float32)
        self._decide(t, end_s - begin_s, comm_R, wait_R)
        for r in range(self.setup.ranks):
            self._start(r)

    # draws, the fast engine's own

    def _draw_post_work(self) -> NDArray[np.float64]:
        view = self._view
        if view.job["post_work_share"] > 0.0:
            noise.start_post_work(view)
        in_episode_G = view.group[layout.POST_WORK_UNTIL] > view.clock["iteration"]
        episode_G = np.where(in_episode_G, view.group[layout.POST_WORK_NOW_S], 0.0)
        return np.asarray(view.group[layout.FIXED_POST_WORK_S] + episode_G)

    def _timeout_s(self, t: int, sender: int, receiver: int, nth: int) -> float:
        """Timeout of a message that starts as the ``nth`` on its receiver's port: lost segments at its window's end."""
        overflow = max(1.0 - self.setup.incast_fit / nth, 0.0)
        with np.errstate(over="ignore"):
            key = draws.key_of(self._view.clock["key"], draws.INCAST, t)
            is_lost = draws.uniform(key, receiver, sender) < overflow**3
        return self.setup.timeout_s if is_lost else 0.0

    def _ideal_step_s(self) -> float:
        """A step in which no rank is late and one group has the network to itself.

        Ranks that may run ahead hide their collective behind the computing of as many steps as they may be ahead, as
        long as neither that nor the collectives themselves, one after the other, take longer.
        """
        setup = self.setup
        step_s = self._alone_s(setup.compute_s) + setup.barrier_s
        if setup.staleness == 0:
            return step_s
        return max(setup.compute_s, self._alone_s(0.0), step_s / (setup.staleness + 1))

    def _alone_s(self, compute_s: float) -> float:
        """When one group's collective alone is over, after computing that starts at 0."""
        setup, network = self.setup, Network()
        ends: list[float] = []
        collective = Collective(network, self._wirings[0], lambda: ends.append(network.now_s))
        for member in range(setup.members):
            network.at((1.0 - setup.overlap_share) * compute_s, partial(collective.enter, member))
            network.at(compute_s, partial(collective.complete, member))
        network.run_until(lambda: bool(ends))
        return ends[0]


def reference_of(cluster: Cluster, seed: int, limits: Limits = LIMITS) -> PacedJob:
    """A job in simulation, message by message, whatever its step is: one collective or a program."""
    if not cluster.is_measured:
        return ProgramReference(cluster, seed, limits)
    return Reference(cluster, seed, limits=limits)


def run(cluster: Cluster, seed: int, iterations: int, settings_M2: NDArray[np.float64] | None = None) -> Recording:
    """Every stamp of one job under static pacing."""
    reference = reference_of(cluster, seed)
    return reference.record(reference.off() if settings_M2 is None else settings_M2[None, None], iterations)


def check_size(cluster: Cluster, iterations: int, seeds: int) -> None:
    """Refuse a run that would take hours.

    Raises:
        InputError: with the allowed size.
    """
    messages = program_messages(cluster) if not cluster.is_measured else Setup.of(cluster).messages
    if messages * cluster.ranks * iterations * seeds > MAX_WORK:
        raise InputError(
            f"{cluster.name}: messages x ranks x iterations x seeds = {messages} x {cluster.ranks} x {iterations} "
            f"x {seeds}; allowed in the reference engine: at most {MAX_WORK:.0e}"
        )


class References:
    """One :class:`Reference` for each of E seeds; arrays are as those of ``paceenv.sim.engine.simulator.Simulator``."""

    def __init__(self, cluster: Cluster, seeds: Sequence[int], limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._each = [reference_of(cluster, int(seed), limits) for seed in seeds]
        batches = [one.batch for one in self._each]
        self.batch = JobBatch(
            np.concatenate([b.jobs for b in batches]),
            np.concatenate([b.tenants_EK for b in batches]),
            cluster.ranks,
            cluster.groups,
            np.concatenate([b.skewness_E for b in batches]),
            batches[0].program,
        )

    def off(self) -> NDArray[np.float64]:
        """Settings for the batch with every mechanism off."""
        return pacing.off(len(self._each), 1)

    def run(self, settings_ESM2: NDArray[np.float64], iterations: int) -> NDArray[np.float64]:
        """Step times ``(E, T)``, seconds.

        Args:
            settings_ESM2: (threshold, window) of each mechanism, for all ranks of a job or for each; ratios.
        """
        return np.concatenate([one.run(settings_ESM2[e, None], iterations) for e, one in enumerate(self._each)])

    def quiet_start(self) -> None:
        """Run the first iterations of the jobs, in which their limits allow no delay; pacing begins after them."""
        for one in self._each:
            one.quiet_start()

    def record(self, settings_ESM2: NDArray[np.float64], iterations: int) -> Recording:
        """As :meth:`run`, with every stamp."""
        parts = [one.record(settings_ESM2[e, None], iterations) for e, one in enumerate(self._each)]
        return Recording(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def observe(self, *, every_rank: bool = False) -> NDArray[np.float32]:
        """Observations of the last run: ``(E, O)`` of the observer ranks, or ``(E, R, O)`` of every rank."""
        return np.concatenate([one.observe(every_rank=every_rank) for one in self._each])

    def mean_delay_s(self) -> NDArray[np.float64]:
        """Mean delay over ranks and iterations of the last run, ``(E,)``, seconds."""
        return np.concatenate([one.mean_delay_s() for one in self._each])

    def outcome(self) -> Outcome:
        """What the episodes came to so far."""
        parts = [one.outcome() for one in self._each]
        return Outcome(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Outcome)))
