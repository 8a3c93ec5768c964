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

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from paceenv.core import pacing
from paceenv.sim.cluster.program.footprint import UPLINK, Use
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, payload_R
from paceenv.sim.engine import draws
from paceenv.sim.engine.layout import ALL_TO_ALL, GATHER, NO_INCAST
from paceenv.sim.reference.chance import Chance
from paceenv.sim.reference.flows import Flow, Links, Then
from paceenv.sim.reference.one_collective import TAIL

ROUNDING = 1e-9


@dataclass
class Operation:
    """A transfer of one process group in every step."""

    number: int
    group: int
    start: Start
    members: Sequence[int]
    use: Use
    is_payload: bool
    """Whether its members count it as one of their payload collectives."""
    share_of: dict[Any, float]
    """The share that it takes, alone, of each link that can be full."""


class Laid:
    """A plan on its links: what every rank does, and the operations of every process group, numbered in their order."""

    def __init__(self, plan: StepPlan, use: Callable[[Start, list[int]], Use], *, has_tenants: bool) -> None:
        self.plan, self.operations = plan, list[Operation]()
        first_of: dict[tuple[str, int], int] = {}
        payload = payload_R(plan)
        most: dict[int, dict[int, float]] = {}
        """What a group takes of a link at most, by link and group."""
        groups = [(name, members) for name, parts in plan.communicators.items() for members in parts]
        for g, (name, members) in enumerate(groups):
            first_of |= {(name, r): len(self.operations) for r in members}
            role = plan.roles[plan.role_R[members[0]]]
            for start in (one for one in role if isinstance(one, Start) and one.communicator == name):
                taken, o = use(start, members), len(self.operations)
                is_payload = start.op != "send" and payload[members[0]] == frozenset(members)
                share_of = dict(zip(taken.link_U.tolist(), taken.share_U.tolist(), strict=True))
                self.operations.append(Operation(o, g, start, members, taken, is_payload, share_of))
                for link, share in share_of.items():
                    of_group = most.setdefault(link, {})
                    of_group[g] = max(of_group.get(g, 0.0), share)
        # a group runs one operation at a time, so most links are never full
        can_be_full = {link for link, shares in most.items() if sum(shares.values()) > 1.0 + ROUNDING}
        can_be_full |= {UPLINK} if has_tenants else set()
        for one in self.operations:
            one.share_of = {link: min(share, 1.0) for link, share in one.share_of.items() if link in can_be_full}
        self.script_R = [self._script(r, first_of) for r in range(len(plan.role_R))]
        """Every rank's instructions, each with its operation; -1 where it computes."""

    def _script(self, r: int, first_of: dict[tuple[str, int], int]) -> list[tuple[Instruction, int]]:
        script: list[tuple[Instruction, int]] = []
        begun = dict.fromkeys(self.plan.communicators, 0)
        for one in self.plan.roles[self.plan.role_R[r]]:
            if isinstance(one, Compute):
                script.append((one, -1))
                continue
            number = begun[one.communicator] if isinstance(one, Start) else one.number
            begun[one.communicator] += isinstance(one, Start)
            script.append((one, first_of[one.communicator, r] + number))
        return script


class Step:
    """One step. Times in seconds from the end of the one before.

    Args:
        job: record of ``paceenv.sim.engine.layout.JOB``.
        t: number of the step.
        begin_R: when each rank begins.
        compute_R: how long each rank computes in all.
        hold_R: how long each rank holds back what can wait.
    """

    def __init__(
        self,
        laid: Laid,
        links: Links,
        chance: Chance,
        job: Any,
        t: int,
        begin_R: Sequence[float],
        compute_R: Sequence[float],
        hold_R: Sequence[float],
    ) -> None:
        self._laid, self._links, self._chance, self._job, self._t = laid, links, chance, job, t
        self._compute_R, self._hold_R = compute_R, hold_R
        ranks, operations = len(begin_R), len(laid.operations)
        self.at_R, self.waited_R, self.paid_R, self.computed_R = ([0.0] * ranks for _ in range(4))
        self.end_RI: list[list[float]] = [[] for _ in range(ranks)]
        """When each instruction of a rank was over."""
        self.begin_O, self.through_O = [math.inf] * operations, [math.inf] * operations
        self._handed_O: list[dict[int, float]] = [{} for _ in laid.operations]
        self._free_O: list[dict[int, float]] = [{} for _ in laid.operations]
        """When each rank that waits for an operation goes on."""
        self._messages_O, self._received_O = [0] * operations, [0.0] * operations
        """Messages on their way, and when the last one that is not was received."""
        self._held_R: list[list[int]] = [[] for _ in range(ranks)]
        self._blocked_R = [-1] * ranks
        self._events: list[tuple[float, int, Then]] = []
        self._order = count()
        self._ranks = [self._run_rank(r, begin_s) for r, begin_s in enumerate(begin_R)]

    def run(self) -> None:
        """Run it until every rank is through, which waits for all that it started."""
        for r, rank in enumerate(self._ranks):
            self._at(next(rank), partial(self._go_on, r))
        self._running = len(self._ranks)
        while self._running:
            if not self._links.run(self._events[0][0] if self._events else math.inf):
                at_s, _, then = heapq.heappop(self._events)
                then(at_s)

    def _at(self, at_s: float, then: Then) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), then))

    # ranks

    def _run_rank(self, r: int, begin_s: float) -> Generator[float, float, None]:
        """What a rank does. It yields until when it stands still, which is infinity until a transfer frees it."""
        plan = self._laid.plan
        at_s = yield begin_s
        for one, o in self._laid.script_R[r]:
            if isinstance(one, Compute):
                lasts_s = one.seconds / max(plan.compute_s, 1e-300) * self._compute_R[r]
                if one.micro_batch >= 0:
                    lasts_s *= self._chance.length(self._t, plan.replica_R[r], one.micro_batch)
                self.computed_R[r] += lasts_s
                at_s = yield at_s + lasts_s
            elif isinstance(one, Start):
                self._release(r, o, at_s)
                if one.can_wait and self._hold_R[r] > 0.0:
                    self._held_R[r].append(o)
                    self._at(at_s + self._hold_R[r], partial(self._release, r, o))
                else:
                    self._hand_over(r, o, at_s)
            else:
                self._release(r, o, at_s)
                self._blocked_R[r], since_s = o, at_s
                at_s = yield max(self._free_O[o].get(r, math.inf), at_s)
                self._blocked_R[r] = -1
                self.waited_R[r] += at_s - since_s
                self.paid_R[r] += (at_s - since_s) * self._laid.operations[o].is_payload
                if pacing.releases(at_s - since_s, self._hold_R[r]):
                    self._release(r, None, at_s)
            self.end_RI[r].append(at_s)
            self.at_R[r] = at_s

    def _go_on(self, r: int, at_s: float) -> None:
        try:
            until_s = self._ranks[r].send(at_s)
        except StopIteration:
            self._running -= 1
            return
        if until_s < math.inf:
            self._at(until_s, partial(self._go_on, r))

    def _free(self, o: int, r: int, at_s: float) -> None:
        """A rank that waits for an operation goes on at ``at_s``, unless it was freed before."""
        if r not in self._free_O[o]:
            self._free_O[o][r] = at_s
            if self._blocked_R[r] == o:
                self._at(at_s, partial(self._go_on, r))

    # transfers

    def _release(self, r: int, up_to: int | None, at_s: float) -> None:
        """Rank ``r`` hands over what it holds back of the group of an operation up to that one, or all."""
        operations = self._laid.operations
        for o in list(self._held_R[r]):
            if up_to is None or (o <= up_to and operations[o].group == operations[up_to].group):
                self._held_R[r].remove(o)
                self._hand_over(r, o, at_s)

    def _hand_over(self, r: int, o: int, at_s: float) -> None:
        self._handed_O[o][r] = at_s
        if self._job["incast_kind"] != NO_INCAST:
            self._exchange(r, o, at_s)
        self._begin_if_all_are_there(o)

    def _begin_if_all_are_there(self, o: int) -> None:
        one, handed = self._laid.operations[o], self._handed_O[o]
        before_s = 0.0
        if o and self._laid.operations[o - 1].group == one.group:
            before_s = self.through_O[o - 1]
        if len(handed) == len(one.members) and before_s < math.inf:
            self._at(max(before_s, *handed.values()), partial(self._begin, o))

    def _begin(self, o: int, at_s: float) -> None:
        one, job = self._laid.operations[o], self._job
        self.begin_O[o] = at_s
        if (self._t + 1) % one.start.every != 0:
            self._through(o, at_s)
        elif job["incast_kind"] != NO_INCAST:
            if self._messages_O[o] == 0:
                self._moved(o, 0.0, max(at_s, self._received_O[o]))
        else:
            moved = partial(self._moved, o, self._timeout_s(one))
            alone_s = one.use.alone_s * job["bytes_scale"]
            if job["has_program"]:
                alone_s *= self._chance.transfer(self._t, o)
            if one.share_of and alone_s > 0.0:
                self._links.start(Flow(alone_s, one.share_of, moved, one.use.weight, one.use.fan_in))
            else:
                moved(at_s + alone_s)

    def _moved(self, o: int, late_s: float, at_s: float) -> None:
        """An operation has moved its bytes; what is left is latency, and a timeout if packets were lost.

        The time of a measured collective varies as a whole, of transfers in a program only that of their bytes.
        """
        one = self._laid.operations[o]
        lasts_s = at_s + one.use.latency_s + late_s - self.begin_O[o]
        if not self._job["has_program"] and one.start.communicator != TAIL:
            lasts_s *= self._chance.transfer(self._t, o)
        self._through(o, self.begin_O[o] + lasts_s)

    def _through(self, o: int, at_s: float) -> None:
        one = self._laid.operations[o]
        self.through_O[o] = at_s
        for r in one.members:
            self._free(o, r, at_s)
        if o + 1 < len(self._laid.operations) and self._laid.operations[o + 1].group == one.group:
            self._begin_if_all_are_there(o + 1)

    # lost packets

    def _timeout_s(self, one: Operation) -> float:
        """How much later an operation is through as a port overflows; all its ports and senders are one draw."""
        if one.use.fan_in == 0 or self._job["incast_fit"] == math.inf:
            return 0.0
        others = max((sum(flow.fan_in for flow in self._links.on(link)) for link in one.share_of), default=0)
        senders = range(others + 1, others + one.use.fan_in + 1)
        kept = math.prod(1.0 - self._overflow(m) ** 3 for m in senders) ** one.use.ports
        is_lost = self._chance.loss(self._t, draws.INCAST, one.number) >= kept
        return float(self._job["incast_timeout_s"]) if is_lost else 0.0

    def _overflow(self, senders: int) -> float:
        return max(1.0 - float(self._job["incast_fit"]) / senders, 0.0)

    def _exchange(self, r: int, o: int, at_s: float) -> None:
        """Rank ``r`` is there: its messages from and to all who are there begin."""
        first, kind = self._laid.operations[o].members[0], self._job["incast_kind"]
        for other in sorted(self._handed_O[o].keys() - {r}):
            for sender, receiver in ((other, r), (r, other)):
                if kind == ALL_TO_ALL or receiver == first:
                    self._send(o, sender, receiver, at_s)

    def _send(self, o: int, sender: int, receiver: int, at_s: float) -> None:
        """A message begins. Its sender is through when the rest of it fits the send buffer of its socket."""
        job, kind, port = self._job, self._job["incast_kind"], ("port", receiver)
        overflow = self._overflow(len(self._links.on(port)) + 1)
        is_lost = self._chance.loss(self._t, receiver, sender) < overflow**3
        late_s, buffered_s = job["incast_timeout_s"] if is_lost else 0.0, job["incast_buffered_s"]
        self._messages_O[o] += 1

        def received(now_s: float) -> None:
            self._messages_O[o] -= 1
            self._received_O[o] = max(self._received_O[o], now_s + late_s)
            if kind == GATHER and buffered_s == 0.0:
                self._free(o, sender, now_s + late_s + job["latency_s"])
            if self._messages_O[o] == 0 and self.begin_O[o] < math.inf:
                self._moved(o, 0.0, self._received_O[o])

        def rest(now_s: float) -> None:
            self._free(o, sender, now_s + late_s)
            self._links.start(Flow(buffered_s, {port: 1.0}, received))

        if buffered_s >= job["incast_flow_s"]:
            self._free(o, sender, at_s)
        is_cut = 0.0 < buffered_s < job["incast_flow_s"]
        left_s = job["incast_flow_s"] - (buffered_s if is_cut else 0.0)
        self._links.start(Flow(left_s, {port: 1.0}, rest if is_cut else received))
