"""A job whose step is a program, rank by rank and message by message.

Every rank runs its instructions in order: it computes, hands transfers to communicators, and waits for them. A transfer
moves messages between those of its members that have handed it over (``program_messages``). It is through when all its
messages are. The next one on its communicator begins only then.

So pairs of an all-to-all exchange what they have before the last member is there, as NCCL's and gloo's do. The fast
engine does not count that: there a collective starts with its last member. ``is_together`` makes this engine alike.

With rule ``defer`` a rank hands over a transfer that can wait so much later. It does so at once when it waits for the
transfer, when it hands another one to the same communicator, or when another transfer for which it was blocked is
through.

Nothing is taken from the fast engine but the draws of noise, the estimator, the rules, and what NCCL chooses. It is an
independent account of the same step, and so a referee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, timing
from paceenv.core.limits import LIMITS, Limits
from paceenv.sim.cluster.derive import drawn
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_tables import Compute, Start, StepPlan, payload_R
from paceenv.sim.cluster.transfers import choice_of, tiers_of
from paceenv.sim.engine import draws
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import episode_keys
from paceenv.sim.reference.flows import Collective, Loss, TenantJob, Wiring
from paceenv.sim.reference.network import Network
from paceenv.sim.reference.paced_job import PacedJob
from paceenv.sim.reference.program_messages import Operation, Wires, operations
from paceenv.sim.reference.schedules import Schedule
from paceenv.sim.reference.setup import TenantSetup, refuse_what_is_unknown, tenant_setups


class Step:
    """One iteration: the ranks' instructions and the operations that they have handed over.

    Args:
        scale_O: factor of the bytes of each operation; 0: it does not happen.
        loss_O: timeouts of the messages of each operation; None where nothing is lost.
    """

    def __init__(
        self,
        network: Network,
        program: Laid,
        compute_R: NDArray[np.float64],
        length: Callable[[int, int], float],
        scale_O: Sequence[float],
        hold_R: NDArray[np.float64],
        loss_O: Sequence[Loss | None],
        on_end: Callable[[], None],
    ) -> None:
        self._network, self._program, self._on_end = network, program, on_end
        self._compute_R, self._length, self._hold_R = compute_R, length, hold_R
        ranks = len(compute_R)
        self.begin_s = network.now_s
        self.end_I = np.full(program.first_R[-1], math.nan)
        self.start_O, self.through_O = (np.full(len(program.operations), math.inf) for _ in range(2))
        self.waited_R, self.paid_R, self.computed_R = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
        self.exit_R = np.full(ranks, math.nan)
        self._next_R, self._ranks_to_come = [0] * ranks, ranks
        self._handed_O: list[list[int]] = [[] for _ in program.operations]
        self._waiting_O: list[list[tuple[int, float]]] = [[] for _ in program.operations]
        self._held: dict[tuple[int, int], None] = {}
        """Rank and operation of transfers that are held back, in their order."""
        self._collective_O = [
            Collective(
                network,
                one.wiring if scale > 0.0 else Wiring(Schedule(len(one.members)), [], []),
                partial(self._through, o),
                loss,
                scale=scale,
            )
            for o, (one, scale, loss) in enumerate(zip(program.operations, scale_O, loss_O, strict=True))
        ]

    def go_on(self, r: int) -> None:
        """Rank ``r`` runs its instructions until one takes time."""
        program, now_s = self._program, self._network.now_s
        row = program.plan.roles[program.plan.role_R[r]]
        while self._next_R[r] < len(row):
            one, o = row[self._next_R[r]], program.operation_R[r][self._next_R[r]]
            if isinstance(one, Compute):
                lasts_s = one.seconds * self._compute_R[r]
                if one.micro_batch >= 0:
                    lasts_s *= self._length(program.plan.replica_R[r], one.micro_batch)
                self.computed_R[r] += lasts_s
                self._network.after(lasts_s, partial(self._computed, r))
                return
            if isinstance(one, Start):
                self._start(r, o, can_wait=one.can_wait)
            elif self.through_O[o] == math.inf:
                self._waiting_O[o].append((r, now_s))
                self._hand_over(r, o)
                return
            self._over(r)
        self.exit_R[r] = now_s
        self._ranks_to_come -= 1
        if self._ranks_to_come == 0:
            self._on_end()

    def _computed(self, r: int) -> None:
        self._over(r)
        self.go_on(r)

    def _over(self, r: int) -> None:
        """The instruction of rank ``r`` is over."""
        self.end_I[self._program.first_R[r] + self._next_R[r]] = self._network.now_s
        self._next_R[r] += 1

    def _start(self, r: int, o: int, *, can_wait: bool) -> None:
        self._hand_over(r, o)
        if can_wait and self._hold_R[r] > 0.0:
            self._held[r, o] = None
            self._network.after(float(self._hold_R[r]), partial(self._release, r, o))
        else:
            self._hand(r, o)

    def _hand_over(self, r: int, last: int) -> None:
        """Rank ``r`` hands over what it holds of a communicator, up to operation ``last``."""
        first = self._program.first_of(last)
        for rank, o in [(rank, o) for rank, o in self._held if rank == r and first <= o <= last]:
            self._release(rank, o)

    def _release(self, r: int, o: int) -> None:
        if (r, o) in self._held:
            del self._held[r, o]
            self._hand(r, o)

    def _hand(self, r: int, o: int) -> None:
        """A member has handed over operation ``o``, which it enters once the one before is through."""
        one = self._program.operations[o]
        self._handed_O[o].append(one.members.index(r))
        if one.is_first or self.through_O[o - 1] < math.inf:
            self._enter(o, one.members.index(r))

    def _enter(self, o: int, place: int) -> None:
        is_complete = len(self._handed_O[o]) == len(self._program.operations[o].members)
        if is_complete:
            self.start_O[o] = self._network.now_s
        if is_complete or not self._program.is_together:
            for member in self._handed_O[o] if self._program.is_together else [place]:
                self._collective_O[o].enter(member)
                self._collective_O[o].complete(member)

    def _through(self, o: int) -> None:
        """All messages of operation ``o`` are through: the next one begins, and ranks that waited go on."""
        self.through_O[o] = now_s = self._network.now_s
        if not self._program.operations[o].is_last:
            for place in list(self._handed_O[o + 1])[-1 if self._program.is_together else 0 :]:
                self._enter(o + 1, place)
        for r, since_s in self._waiting_O[o]:
            self.waited_R[r] += now_s - since_s
            if self._program.pays(r, o):
                self.paid_R[r] += now_s - since_s
            if self._hold_R[r] > 0.0 and pacing.releases(now_s - since_s, float(self._hold_R[r])):
                for rank, held in [one for one in self._held if one[0] == r]:
                    self._release(rank, held)
            self._over(r)
            self.go_on(r)


class Laid:
    """A program on its fabric: instructions of the ranks and operations of the communicators.

    Args:
        is_together: whether no message starts before all members are there, as in the fast engine.
    """

    def __init__(self, cluster: Cluster, *, is_together: bool = False) -> None:
        self.is_together = is_together
        refuse_what_is_unknown(cluster)
        plan = cluster.plan()
        assert plan is not None
        self.plan: StepPlan = plan
        self._payload_R = payload_R(plan)
        tiers = tiers_of(cluster.fabric, cluster.job, has_tenants=bool(cluster.tenants))
        self.wires = Wires(tiers)
        choose = choice_of(cluster.fabric, cluster.job, tiers)
        self.operations: list[Operation]
        self.operations, first = operations(
            self.plan, self.wires, choose, cluster.fabric, has_tenants=bool(cluster.tenants)
        )
        self.operation_R: list[list[int]] = []
        """For each rank the operation of each of its instructions; -1 where it computes."""
        for r, role in enumerate(self.plan.role_R):
            row, begun = [], dict.fromkeys(self.plan.communicators, 0)
            for one in self.plan.roles[role]:
                if isinstance(one, Compute):
                    row.append(-1)
                    continue
                number = begun[one.communicator] if isinstance(one, Start) else one.number
                begun[one.communicator] += isinstance(one, Start)
                row.append(first[one.communicator, r] + number)
            self.operation_R.append(row)
        self.first_R = np.concatenate([[0], np.cumsum([len(row) for row in self.operation_R])])

    def pays(self, r: int, o: int) -> bool:
        """Whether rank ``r`` counts operation ``o`` as one of its payload collectives."""
        one = self.operations[o]
        return one.start.op != "send" and frozenset(one.members) == self._payload_R[r]

    def first_of(self, o: int) -> int:
        """The first operation of the communicator of ``o``."""
        while not self.operations[o].is_first:
            o -= 1
        return o

    @property
    def messages(self) -> int:
        """Messages of a step."""
        return sum(len(one.wiring.schedule.messages) for one in self.operations)

    def alone_s(self) -> float:
        """A step without noise and without other jobs, seconds."""
        network, ranks = Network(), len(self.plan.role_R)
        ends: list[float] = []
        happens = [1.0 if one.start.every <= 1 else 0.0 for one in self.operations]
        step = Step(
            network, self, np.ones(ranks), lambda replica, micro: 1.0, happens, np.zeros(ranks),
            [None] * len(happens), lambda: ends.append(network.now_s),
        )  # fmt: skip
        for r in range(ranks):
            step.go_on(r)
        network.run_until(lambda: bool(ends))
        return ends[0]


def program_messages(cluster: Cluster) -> int:
    """Messages of a step of a cluster with a program."""
    return Laid(cluster).messages


class _Stamps:
    """An iteration as it is kept: what was drawn for it, and the step that ran."""

    def __init__(self, step: Step, compute_R: NDArray[np.float64], delay_R: NDArray[np.float64]) -> None:
        self.step, self.compute_R, self.delay_R = step, compute_R, delay_R


class ProgramReference(PacedJob):
    """A job whose step is a program, in simulation, message by message.

    Its tenants are those of the fast engine: their periods are relative to that engine's ideal step. The ideal step
    that is found here, message by message, is ``ideal_step_s``.

    Args:
        is_together: whether no message starts before all members of its collective are there.
    """

    def __init__(self, cluster: Cluster, seed: int, limits: Limits = LIMITS, *, is_together: bool = False) -> None:
        keys_E = episode_keys([seed])
        fixed = drawn(cluster, keys_E[0])
        self.laid = Laid(fixed, is_together=is_together)
        super().__init__(cluster, keys_E, limits)
        self._barrier_s = float(self.batch.jobs[0]["barrier_s"])
        self.ideal_step_s = self.laid.alone_s() + self._barrier_s
        self._steps: list[_Stamps] = []
        upper, ours_s = self.laid.wires.upper, float(self.batch.jobs[0]["ideal_step_s"])
        setups = tenant_setups(fixed)
        for k, one in enumerate(setups):
            if one.comm_share > 0.0:
                TenantJob(self.network, upper, keys_E[0], k, _in_bytes(one, upper.capacity_Bps), ours_s)
        self._begin()

    def _begin(self) -> None:
        """All ranks start their next iteration now."""
        t, view, ranks = len(self._end_T), self._view, self._ranks
        with np.errstate(over="ignore"):  # the hashes want integers that wrap
            compute_R, stall_R = self._draw_compute()
        view.clock["iteration"] += 1
        delay_R = np.array([self._real_delay_s(t, r) for r in range(ranks)])
        scale_O = [self._scale(t, o) for o in range(len(self.laid.operations))]
        step = Step(
            self.network,
            self.laid,
            compute_R / float(view.job["compute_s"]) if view.job["compute_s"] > 0.0 else compute_R,
            partial(self._length, t),
            scale_O,
            self._rank[timing.DEFER_S, :ranks].astype(np.float64),
            [self._loss(t, o) for o in range(len(self.laid.operations))],
            partial(self._finish, t),
        )
        self._steps.append(_Stamps(step, compute_R, delay_R))
        for r in range(ranks):
            self.network.after(float(delay_R[r] + stall_R[r]), partial(step.go_on, r))

    def _scale(self, t: int, o: int) -> float:
        """How many times its bytes operation ``o`` moves in iteration ``t``; 0: it does not happen."""
        every, job = self.laid.operations[o].start.every, self._view.job
        if (t + 1) % every != 0:
            return 0.0
        scale = float(job["bytes_scale"])
        if job["transfer_cv"] > 0.0:
            with np.errstate(over="ignore"):
                bits = draws.bits32(draws.key_of(self._view.clock["key"], draws.TRANSFER, t), o)
            sd = math.sqrt(math.log1p(job["transfer_cv"] ** 2))
            scale *= math.exp(sd * draws.quantile(self._view.normal, bits) - 0.5 * sd * sd)
        return scale

    def _loss(self, t: int, o: int) -> Loss | None:
        """Timeouts of the messages of an operation in iteration ``t``: only a switch between nodes loses some."""
        fit, numbers = float(self._view.job["incast_fit"]), count()
        if fit == math.inf:
            return None
        nodes = [rank // self.laid.wires.tiers.ranks_per_node for rank in self.laid.operations[o].members]

        def timeout_s(sender: int, receiver: int, nth: int) -> float:
            overflow = max(1.0 - fit / nth, 0.0)
            if nodes[sender] == nodes[receiver] or overflow == 0.0:
                return 0.0
            with np.errstate(over="ignore"):
                key = draws.key_of(draws.key_of(self._view.clock["key"], draws.INCAST, t), draws.INCAST, o)
                is_lost = draws.uniform(key, draws.INCAST, next(numbers)) < overflow**3
            return float(self._view.job["incast_timeout_s"]) if is_lost else 0.0

        return timeout_s

    def _length(self, t: int, replica: int, micro: int) -> float:
        """How much longer than the mean a micro-batch of a replica takes in iteration ``t``."""
        if not self._view.job["length_cv"] > 0.0:
            return 1.0
        with np.errstate(over="ignore"):
            bits = draws.bits32(draws.key_of(self._view.clock["key"], draws.LENGTH, t * 4096 + micro), replica)
        return max(1.0 + float(self._view.job["length_cv"]) * draws.quantile(self._view.normal, bits), 0.0)

    def _finish(self, t: int) -> None:
        """The last rank is through; the barrier itself follows."""
        end_s = self.network.now_s + self._barrier_s
        self.network.at(end_s, partial(self._end, t, end_s))

    def _end(self, t: int, end_s: float) -> None:
        """The step is over for all: every rank takes in its timing, decides, and goes on."""
        one, begin_s = self._steps[t], self._end_T[-1] if self._end_T else 0.0
        self._end_T.append(end_s)
        self._spend(float(one.step.computed_R.sum()), float(one.delay_R.sum()), end_s - begin_s)
        wait_R = end_s - self._barrier_s - one.step.exit_R
        self._decide(t, end_s - begin_s, one.step.paid_R.astype(np.float32), wait_R.astype(np.float32))
        self._begin()

    def _recording(self, first: int, end_T1: NDArray[np.float64]) -> Recording:
        kept, begin_T1 = self._steps[first : first + len(end_T1) - 1], end_T1[:-1, None]
        exit_TR = np.array([one.step.exit_R for one in kept]) - begin_T1
        last_TG = np.repeat(exit_TR.max(axis=1, keepdims=True), self._groups, axis=1)
        return Recording(
            np.diff(end_T1)[None],
            np.zeros((1, *exit_TR.shape)),
            (exit_TR - np.array([one.step.waited_R for one in kept]))[None],
            np.array([one.delay_R for one in kept])[None],
            exit_TR[None],
            last_TG[None],
            last_TG[None].copy(),
            (np.array([one.step.end_I for one in kept]) - begin_T1)[None],
            (np.array([one.step.start_O for one in kept]) - begin_T1)[None],
            (np.array([one.step.through_O for one in kept]) - begin_T1)[None],
        )


def _in_bytes(one: TenantSetup, upper_Bps: float) -> TenantSetup:
    """A tenant whose weight is in bytes per second, as that of our messages is."""
    return TenantSetup(
        one.period_ratio,
        one.comm_share,
        one.rate_share,
        one.weight * upper_Bps,
        one.ranks,
        one.jitter_cv,
        one.is_bursty,
        one.pause_rate,
        one.pause_periods,
    )
