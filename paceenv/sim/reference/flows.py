"""How transfers share links: each is a fluid, and fluids that meet on a link divide it by weighted max-min.

A flow that runs alone has rate 1 and takes some share of every link on its way. Its *level* is what it has of its
busiest link, divided by its weight. All levels rise together until a link is full or a flow is as fast as alone; what
is held by that stays, the others rise on (Bertsekas and Gallager, Data Networks, 1992, 6.5.2). Between two events all
rates are constant.

Tenants are other jobs on the uplink. Of us and a tenant, whichever begins while the other transfers is late: a TCP
flow that comes late has ``late_share`` of its weight beside the other's until one of the two is through.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from paceenv.sim.engine import fluid
from paceenv.sim.engine.layout import LEFT_S, NEXT_S, View
from paceenv.sim.engine.program_layout import UPLINK

Then = Callable[[float], None]
"""What happens next; it is told when, seconds."""
Process = Generator["float | Flow", float, None]
"""What a rank, a transfer or a tenant does. It yields until when it stands still, infinity until somebody lets it go
on, or a flow until that is through; and is told when it goes on."""
SPENT = 1e-12
"""Share of a flow below which the rest of it is rounding."""
SLOWEST = 1e-9


@dataclass(eq=False)
class Flow:
    """A transfer on its way: how many seconds of running alone it still needs, and its share of each of its links."""

    left_s: float
    share_of: Mapping[Any, float]
    then: Then = lambda now_s: None
    weight: float = 1.0
    tenant: Any = None
    """The record of whose it is; None: ours."""
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.spent_s, self.top = SPENT * self.left_s, max(self.share_of.values())

    @property
    def per_level(self) -> float:
        """Its rate at level 1."""
        return self.weight / self.top


def divide(flows: Sequence[Flow]) -> None:
    """Set the rate of every flow."""
    left: dict[Hashable, float] = {link: 1.0 for flow in flows for link in flow.share_of}
    rising = list(flows)
    while rising:
        slope = dict.fromkeys((link for flow in rising for link in flow.share_of), 0.0)
        for flow in rising:
            for link, share in flow.share_of.items():
                slope[link] += flow.per_level * share
        full_at = {link: left[link] / per_level for link, per_level in slope.items()}
        level = min(min(1.0 / flow.per_level for flow in rising), *full_at.values())
        nearly = level * (1.0 + SPENT)
        full = {link for link, at in full_at.items() if at <= nearly}
        held = {flow for flow in rising if nearly * flow.per_level >= 1.0 or not full.isdisjoint(flow.share_of)}
        for flow in held:
            flow.rate = max(min(level * flow.per_level, 1.0), SLOWEST)
            for link, share in flow.share_of.items():
                left[link] = max(left[link] - flow.rate * share, 0.0)
        rising = [flow for flow in rising if flow not in held]


class Links:
    """All that is on its way, what happens next, and the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.flows: list[Flow] = []
        self._events: list[tuple[float, int, Then]] = []
        self._order = count()

    def on(self, link: Hashable) -> list[Flow]:
        """Our flows on a link."""
        return [flow for flow in self.flows if link in flow.share_of and flow.tenant is None]

    def at(self, at_s: float, then: Then) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (at_s, next(self._order), then))

    def go_on(self, process: Process, at_s: float | None = None) -> None:
        """Let a process begin, or go on at a time."""
        with suppress(StopIteration):
            until = process.send(at_s)  # type: ignore[arg-type]
            if isinstance(until, Flow):
                until.then = partial(self.go_on, process)
                self._start(until)
            elif until < math.inf:
                self.at(until, partial(self.go_on, process))

    def _start(self, flow: Flow) -> None:
        """A flow begins; where we are late beside tenants, they weigh more."""
        if flow.tenant is None and UPLINK in flow.share_of and not self.on(UPLINK):
            for other in self.flows:
                if other.tenant is not None:
                    other.weight = other.tenant["weight"] / other.tenant["late_share"]
        self.flows.append(flow)

    def run(self) -> None:
        """Let time pass until the next thing happens: a flow is through, or it is time for something."""
        divide(self.flows)
        next_s = self._events[0][0] if self._events else math.inf
        first = min(self.flows, key=lambda flow: flow.left_s / flow.rate, default=None)
        wait_s = first.left_s / first.rate if first is not None else math.inf
        is_through = self.now_s + wait_s <= next_s
        wait_s = wait_s if is_through else max(next_s - self.now_s, 0.0)
        self.now_s += wait_s
        for flow in self.flows:
            flow.left_s -= flow.rate * wait_s
        if not is_through:
            at_s, _, then = heapq.heappop(self._events)
            then(at_s)
            return
        through = [flow for flow in self.flows if flow is first or flow.left_s <= flow.spent_s]
        self.flows = [flow for flow in self.flows if flow not in through]
        for flow in through:
            flow.then(self.now_s)

    def rewind(self, step_s: float, *, is_shared: bool) -> None:
        """Count time from the end of the step, which took ``step_s``; links that nobody else uses are free by then."""
        self.now_s = (self.now_s if is_shared else min(self.now_s, step_s)) - step_s
        self._events = [(at_s - step_s, order, then) for at_s, order, then in self._events]


def tenant_life(view: View, k: int, links: Links) -> Process:
    """What the k-th other job does: it computes, transfers over the uplink, computes again.

    How long, and where in its period it starts, is drawn by the engine (``fluid``), which counts its cycles.
    """
    one, (clock, tenants, state) = view.tenants[k], (view.clock, view.tenants, view.tenant)
    until_s, left_s = float(state[NEXT_S, k]), float(state[LEFT_S, k])
    while True:
        if left_s == 0.0:
            yield until_s
            left_s = fluid.transfer_work_s(clock, tenants, state, k)
        weight = one["weight"] * (one["late_share"] if links.on(UPLINK) else 1.0)
        takes = {UPLINK: float(one["rate_cap"])}
        now_s = yield Flow(left_s / one["rate_cap"], takes, weight=weight, tenant=one)
        until_s, left_s = now_s + fluid.next_compute_s(clock, tenants, state, k, view.normal), 0.0
