"""What lives on the network: one collective of one group, and a co-tenant."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from paceenv.sim.engine import draws
from paceenv.sim.reference.network import Bundle, Flow, Network, Resource
from paceenv.sim.reference.schedules import Schedule
from paceenv.sim.reference.setup import Links, TenantSetup

_START = 1 << 62
Loss = Callable[[int, int, int], float]
"""Seconds of timeout of the message from one rank to another that starts as the given one of many on its port."""


class Wiring:
    """A schedule laid on links: the part that stays the same in every iteration.

    Args:
        first_rank: first rank of the group, whose members follow; only where messages can be lost.
        weight: share of each message in a tie; default: 1.
    """

    def __init__(
        self,
        schedule: Schedule,
        path: list[tuple[Resource, ...]],
        later_s: list[float],
        first_rank: int = 0,
        weight: list[float] | None = None,
        bundle: Bundle | None = None,
    ) -> None:
        self.schedule, self.path, self.later_s = schedule, path, later_s
        self.first_rank, self.bundle = first_rank, bundle
        n, messages = schedule.members, schedule.messages
        self.weight = weight or [1.0] * len(messages)
        self.early_of: list[list[int]] = [[] for _ in range(n)]
        self.late_of: list[list[int]] = [[] for _ in range(n)]
        self.followers: list[list[int]] = [[] for _ in messages]
        for i, m in enumerate(messages):
            of = self.late_of if m.is_tail else self.early_of
            of[m.sender].append(i)
            of[m.receiver].append(i)
            for j in m.after:
                self.followers[j].append(i)

    @classmethod
    def of(cls, links: Links, schedule: Schedule, first_rank: int) -> Wiring:
        """A schedule on a group's links.

        A group weighs 1 on the upper tier, however many of its members send across it at a time.
        """
        ranks = [(first_rank + m.sender, first_rank + m.receiver) for m in schedule.messages]
        path = [links.path(*pair) for pair in ranks]
        later_s = [links.hop_s(*pair) * m.has_latency for pair, m in zip(ranks, schedule.messages, strict=True)]
        return cls(schedule, path, later_s, first_rank, bundle=Bundle(links.upper))


class Collective:
    """One collective of one group: messages start as members enter and as others get through.

    Args:
        loss: timeouts of messages, seconds; default: nothing is lost.
        send_buffer_bytes: how much of a message its sender need not wait for.
    """

    def __init__(
        self,
        network: Network,
        wiring: Wiring,
        on_end: Callable[[], None],
        loss: Loss | None = None,
        send_buffer_bytes: float = 0.0,
        scale: float = 1.0,
        on_begin: Callable[[], None] | None = None,
    ) -> None:
        self._network, self._wiring, self._on_end, self._loss = network, wiring, on_end, loss
        self._on_begin = on_begin
        self._send_buffer_bytes, self._scale, self._has_begun = send_buffer_bytes, scale, False
        self.sent_s: dict[int, float] = {}
        """When a member had handed over its messages to the kernel, as far as that is before they are through."""
        messages, n = wiring.schedule.messages, wiring.schedule.members
        self._waits_for = [len(m.after) + 2 for m in messages]
        self._to_come = 2 * n + len(messages)
        self._to_come_of = [2 + len(wiring.early_of[m]) + len(wiring.late_of[m]) for m in range(n)]
        self._then: dict[int, Callable[[], None]] = {}

    def when_through(self, member: int, action: Callable[[], None]) -> None:
        """Call ``action`` once all messages of a member are through, at once if they are."""
        if self._to_come_of[member] == 0:
            action()
        else:
            self._then[member] = action

    def enter(self, member: int) -> None:
        """A member has its first gradients: messages flow when both of their ends are in."""
        for i in self._wiring.early_of[member]:
            self._one_less(i)
        self._member_one_less(member)
        self._any_one_less()

    def complete(self, member: int) -> None:
        """A member has its last gradients."""
        for i in self._wiring.late_of[member]:
            self._one_less(i)
        self._member_one_less(member)
        self._any_one_less()

    def _one_less(self, i: int) -> None:
        self._waits_for[i] -= 1
        if self._waits_for[i] > 0:
            return
        wiring, message = self._wiring, self._wiring.schedule.messages[i]
        later_s, timeout_s = wiring.later_s[i], 0.0
        path = wiring.path[i]
        if self._loss is not None and not message.after:  # a later one finds its connection's window open
            first = wiring.first_rank
            nth = len(path[-1].flows) + 1
            timeout_s = self._loss(first + message.sender, first + message.receiver, nth)
            later_s += timeout_s
        size_bytes, end = message.size_bytes * self._scale, partial(self._sent, i, later_s)
        if self._send_buffer_bytes >= size_bytes:
            self.sent_s[message.sender] = self._network.now_s
        elif self._send_buffer_bytes > 0.0:
            size_bytes, end = size_bytes - self._send_buffer_bytes, partial(self._hand_over, i, later_s, timeout_s)
        self._send(size_bytes, i, end)

    def _hand_over(self, i: int, later_s: float, timeout_s: float) -> None:
        """The rest of a message fits the send buffer; a window that lost its end was sent before, and is waited for."""
        wiring = self._wiring
        self.sent_s[wiring.schedule.messages[i].sender] = self._network.now_s + timeout_s
        end = partial(self._sent, i, later_s)
        self._send(self._send_buffer_bytes, i, end)

    def _send(self, size_bytes: float, i: int, end: Callable[[], None]) -> None:
        wiring = self._wiring
        if self._on_begin is not None and not self._has_begun:
            self._on_begin()
        self._has_begun = True
        self._network.send(size_bytes, wiring.path[i], end, weight=wiring.weight[i], bundle=wiring.bundle)

    def _sent(self, i: int, later_s: float) -> None:
        if later_s > 0.0:
            self._network.after(later_s, lambda: self._through(i))
        else:
            self._through(i)

    def _through(self, i: int) -> None:
        message = self._wiring.schedule.messages[i]
        self.sent_s.setdefault(message.sender, self._network.now_s)
        for j in self._wiring.followers[i]:
            self._one_less(j)
        self._member_one_less(message.sender)
        self._member_one_less(message.receiver)
        self._any_one_less()

    def _member_one_less(self, member: int) -> None:
        self._to_come_of[member] -= 1
        if self._to_come_of[member] == 0 and member in self._then:
            self._then.pop(member)()

    def _any_one_less(self) -> None:
        self._to_come -= 1
        if self._to_come == 0:
            self._on_end()


class TenantJob:
    """A co-tenant: computes, transfers over the upper tier, computes again. It starts at a random point of its period.

    Args:
        ours_s: ideal step time of the job, seconds; the tenant's period is relative to it.
    """

    def __init__(
        self,
        network: Network,
        upper: Resource,
        key: np.uint64,
        k: int,
        setup: TenantSetup,
        ours_s: float,
        we_transfer: Callable[[], bool] = lambda: False,
    ) -> None:
        self._network, self._upper, self._key = network, upper, key
        self._place = draws.PER_TENANT * k
        self._setup, self._cycle, self._we_transfer = setup, 0, we_transfer
        self._flow: Flow | None = None
        period_s = setup.period_ratio * ours_s
        self._transfer_s = period_s * setup.comm_share
        self._compute_s = period_s - self._transfer_s
        at_s = self._uniform(_START + self._place, None) * period_s
        away = 0.5 * setup.pause_rate * setup.pause_periods if setup.pause_periods > 1.0 else 0.0
        paused = self._uniform(_START + self._place + 1, None) * (1.0 + away)
        if paused < away:  # in a pause already, of which the rest is denser near zero
            rest = setup.pause_periods * (1.0 - math.sqrt(1.0 - paused / away))
            network.at(rest * period_s + self._compute_s, self._begin)
        elif at_s < self._compute_s:
            network.at(self._compute_s - at_s, self._begin)
        else:
            self._send(period_s - at_s)

    def _uniform(self, counter: int, place: int | None) -> float:
        with np.errstate(over="ignore"):  # the hashes want integers that wrap
            if place is None:
                return draws.uniform(self._key, draws.TENANT, counter)
            return draws.uniform(draws.key_of(self._key, draws.TENANT, counter), draws.TENANT, place)

    def _begin(self) -> None:
        transfer_s = self._transfer_s
        if self._setup.is_bursty:
            transfer_s *= -math.log(self._uniform(self._cycle, self._place + 1))
        self._send(transfer_s)

    def _send(self, transfer_s: float) -> None:
        cap_Bps = self._setup.rate_share * self._upper.capacity_Bps
        weight = self._setup.weight * (self._setup.late_share if self._we_transfer() else 1.0)
        self._flow = self._network.send(
            transfer_s * cap_Bps, [self._upper], self._compute, weight=weight, cap_Bps=cap_Bps
        )

    def is_met(self) -> None:
        """The job begins to transfer while none of its transfers is on its way."""
        if self._flow is not None:
            self._network.weigh(self._flow, self._setup.weight / self._setup.late_share)

    def _compute(self) -> None:
        self._flow = None
        self._cycle += 1
        u = self._uniform(self._cycle, self._place)
        if self._setup.is_bursty:
            stretch = -math.log(u)
        else:
            slowest_u = u ** (1.0 / self._setup.ranks)
            slowest = draws.quantile(draws.normal_table(), draws.uniform_bits(slowest_u))
            stretch = max(1.0 + self._setup.jitter_cv * slowest, 0.0)
        pause_s = 0.0
        if self._setup.pause_rate > 0.0:
            share = self._uniform(self._cycle, self._place + 2) / self._setup.pause_rate
            period_s = self._compute_s + self._transfer_s
            pause_s = share * self._setup.pause_periods * period_s if share < 1.0 else 0.0
        self._network.after(self._compute_s * stretch + pause_s, self._begin)
