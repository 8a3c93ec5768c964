"""What ranks do in one step: they compute, hand transfers to communicators, and wait for them.

Every rank runs its instructions in order. A transfer begins once all members of its process group have handed it over
and the one before it in that group is through. It moves its bytes over links that it shares with others (``flows``);
then it takes its latency, in which it uses no link, and is through. Ranks that wait for it go on.

Two kinds of transfers differ:

- One that can wait may be held back (rule ``defer``): its rank hands it over that much later; or at once when it waits
  for it, when it starts another one in the same process group, or when another one that it was blocked for is through.
- In a gather or all-to-all of a job with one collective every message is a flow of its own, on the port of its
  receiver, and begins when both its ends are there.

Where many send to one port at once, its buffer overflows. The m-th sender at once loses a share ``1 - fit / m`` of its
packets. With that to the power of three it loses the last three of its window, which only a timeout repairs (Vasudevan
et al., 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from paceenv.core import pacing
from paceenv.sim.cluster.program.program_tables import Compute, Laid, Operation, Row, Start
from paceenv.sim.engine import draws
from paceenv.sim.engine.draws import bits32, key_of, quantile, uniform
from paceenv.sim.engine.layout import ALL_TO_ALL, GATHER, NO_INCAST, View
from paceenv.sim.engine.program import length_factor
from paceenv.sim.reference.flows import Flow, Links, Process

TAIL = "tail"
"""The communicator of the last gradients of a job with one collective."""


class Rank:
    """A rank in a step: when it begins, how long it computes in all, and holds back what can wait; seconds."""

    def __init__(self, begin_s: float, compute_s: float, hold_s: float) -> None:
        self.begin_s, self.compute_s, self.hold_s = begin_s, compute_s, hold_s
        self.at_s = self.waited_s = self.paid_s = self.computed_s = 0.0
        self.end_I: list[float] = []
        """When each instruction was over."""
        self.held: list[Transfer] = []
        self.awaits: Transfer | None = None
        """What it is blocked for."""
        self.process: Process


class Transfer:
    """An operation in this step, after another one of its process group."""

    def __init__(self, number: int, one: Operation, before: Transfer | None) -> None:
        self.number, self.one, self.before = number, one, before
        self.begin_s = self.through_s = math.inf
        self.handed: dict[int, float] = {}
        self.free: dict[int, float] = {}
        """When each rank that waits for it goes on."""
        self.messages, self.received_s = 0, 0.0
        """Messages on their way, and when the last one that is not was received."""


class Step:
    """The step that a job is in, from its beginning to its end. Times in seconds from the end of the one before.

    The time of a measured collective varies as a whole, of transfers in a program only that of their bytes.
    """

    def __init__(self, laid: Laid, links: Links, view: View, ranks: Sequence[Rank], *, is_measured: bool) -> None:
        self._plan, self._links, self._view, self._job = laid.plan, links, view, view.job
        self._is_measured = is_measured
        self.ranks, self.transfers = ranks, list[Transfer]()
        for number, one in enumerate(laid.operations):
            last = self.transfers[-1] if self.transfers else None
            self.transfers.append(Transfer(number, one, last if last and last.one.group == one.group else None))
        for r, rank in enumerate(ranks):
            rank.process = self._live(r, rank, laid.rows_R[r])
            links.go_on(rank.process)
        self._running = len(ranks)
        while self._running:  # a rank waits for all that it started
            links.run()

    def _live(self, r: int, rank: Rank, rows: Sequence[Row]) -> Process:
        """What a rank does."""
        at_s = yield rank.begin_s
        for one, o, _, pays in rows:
            if isinstance(one, Compute):
                lasts_s = one.seconds / max(self._plan.compute_s, 1e-300) * rank.compute_s
                if one.micro_batch >= 0:
                    lasts_s *= length_factor(self._view, r, one.micro_batch)
                rank.computed_s += lasts_s
                at_s = yield at_s + lasts_s
            elif isinstance(one, Start):
                self._release(r, self.transfers[o], at_s)
                if one.can_wait and rank.hold_s > 0.0:
                    rank.held.append(self.transfers[o])
                    self._links.at(at_s + rank.hold_s, partial(self._release, r, self.transfers[o]))
                else:
                    self._hand_over(r, self.transfers[o], at_s)
            else:
                self._release(r, self.transfers[o], at_s)
                rank.awaits, since_s = self.transfers[o], at_s
                at_s = yield max(rank.awaits.free.get(r, math.inf), at_s)
                at_s = max(at_s, since_s)  # a short transfer is known to be through only after its mean length
                rank.awaits = None
                rank.waited_s += at_s - since_s
                rank.paid_s += (at_s - since_s) * pays
                if pacing.releases(at_s - since_s, rank.hold_s):
                    self._release(r, None, at_s)
            rank.end_I.append(at_s)
            rank.at_s = at_s
        self._running -= 1

    def _free(self, transfer: Transfer, r: int, at_s: float) -> None:
        """A rank that waits for a transfer goes on at ``at_s``, unless it was freed before."""
        if r not in transfer.free:
            transfer.free[r] = at_s
            if self.ranks[r].awaits is transfer:
                self._links.at(at_s, partial(self._links.go_on, self.ranks[r].process))

    def _release(self, r: int, up_to: Transfer | None, at_s: float) -> None:
        """Rank ``r`` hands over what it holds back of a process group up to a transfer, or all."""
        for transfer in list(self.ranks[r].held):
            if up_to is None or (transfer.number <= up_to.number and transfer.one.group == up_to.one.group):
                self.ranks[r].held.remove(transfer)
                self._hand_over(r, transfer, at_s)

    def _hand_over(self, r: int, transfer: Transfer, at_s: float) -> None:
        transfer.handed[r] = at_s
        if self._job["incast_kind"] != NO_INCAST:
            self._exchange(r, transfer, at_s)
        self._begin_if_all_are_there(transfer)

    def _begin_if_all_are_there(self, transfer: Transfer) -> None:
        before_s = transfer.before.through_s if transfer.before else 0.0
        if len(transfer.handed) == len(transfer.one.members) and before_s < math.inf:
            self._links.go_on(self._carry(transfer, max(before_s, *transfer.handed.values())))

    def _carry(self, transfer: Transfer, at_s: float) -> Process:
        """What a transfer does."""
        one, job = transfer.one, self._job
        transfer.begin_s = yield at_s
        if (self._view.clock["iteration"] + 1) % one.start.every != 0:
            self._through(transfer, at_s)
        elif job["incast_kind"] != NO_INCAST:
            if transfer.messages == 0:
                self._moved(transfer, max(at_s, transfer.received_s))
        else:
            alone_s = one.use.alone_s
            if not self._is_measured:
                alone_s *= self._factor(transfer)
            at_s += alone_s
            if one.share_of and alone_s > 0.0:
                at_s = yield Flow(alone_s, one.share_of, weight=one.use.weight)
            self._moved(transfer, at_s)

    def _factor(self, transfer: Transfer) -> float:
        """How much longer a transfer takes than on the mean: lognormal with mean 1."""
        clock, variance = self._view.clock, math.log1p(self._job["transfer_cv"] ** 2)
        bits = bits32(key_of(clock["key"], draws.TRANSFER, clock["iteration"]), transfer.number)
        return math.exp(math.sqrt(variance) * quantile(self._view.normal, bits) - 0.5 * variance)

    def _moved(self, transfer: Transfer, at_s: float) -> None:
        """A transfer has moved its bytes; what is left is latency."""
        lasts_s = at_s + transfer.one.use.latency_s - transfer.begin_s
        if self._is_measured and transfer.one.start.communicator != TAIL:
            lasts_s *= self._factor(transfer)
        self._through(transfer, transfer.begin_s + lasts_s)

    def _through(self, transfer: Transfer, at_s: float) -> None:
        transfer.through_s = at_s
        for r in transfer.one.members:
            self._free(transfer, r, at_s)
        for after in self.transfers[transfer.number + 1 : transfer.number + 2]:
            if after.before is transfer:
                self._begin_if_all_are_there(after)

    def _exchange(self, r: int, transfer: Transfer, at_s: float) -> None:
        """Rank ``r`` is there: its messages from and to all who are there begin."""
        for other in sorted(transfer.handed.keys() - {r}):
            for sender, receiver in ((other, r), (r, other)):
                if self._job["incast_kind"] == ALL_TO_ALL or receiver == transfer.one.members[0]:
                    self._links.go_on(self._send(transfer, sender, receiver, at_s))

    def _send(self, transfer: Transfer, sender: int, receiver: int, at_s: float) -> Process:
        """What a message does. Its sender is through when the rest of it fits the send buffer of its socket."""
        job, clock, port = self._job, self._view.clock, ("port", receiver)
        overflow = max(1.0 - float(job["incast_fit"]) / (len(self._links.on(port)) + 1), 0.0)
        is_lost = uniform(key_of(clock["key"], draws.INCAST, clock["iteration"]), receiver, sender) < overflow**3
        late_s = float(job["incast_timeout_s"]) * is_lost
        rest_s = min(float(job["incast_buffered_s"]), float(job["incast_flow_s"]))
        now_s, transfer.messages = at_s, transfer.messages + 1
        if rest_s < job["incast_flow_s"]:
            now_s = yield Flow(job["incast_flow_s"] - rest_s, {port: 1.0})
            at_s = now_s + late_s
        if rest_s > 0.0:
            self._free(transfer, sender, at_s)
            now_s = yield Flow(rest_s, {port: 1.0})
        elif job["incast_kind"] == GATHER:
            self._free(transfer, sender, at_s + job["latency_s"])
        transfer.messages -= 1
        transfer.received_s = max(transfer.received_s, now_s + late_s)
        if transfer.messages == 0 and transfer.begin_s < math.inf:
            self._moved(transfer, transfer.received_s)
