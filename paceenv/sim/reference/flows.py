"""How transfers share links: each is a fluid, and fluids that meet on a link divide it by weighted max-min.

A flow that runs alone has rate 1 and takes some share of every link on its way. Its *level* is what it has of its
busiest link, divided by its weight. All levels rise together until a link is full or a flow is as fast as alone; what
is held by that stays, the others rise on (Bertsekas and Gallager, Data Networks, 1992, 6.5.2). Between two events all
rates are constant.

Tenants are other jobs on the uplink. Of us and a tenant, whichever begins while the other transfers is late: a TCP
flow that comes late has ``late_share`` of its weight beside the other's until one of the two is through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceenv.sim.cluster.program.footprint import UPLINK
from paceenv.sim.engine import draws
from paceenv.sim.engine.draws import key_of, quantile, uniform
from paceenv.sim.reference.chance import ONCE

Then = Callable[[float], None]
"""What happens next; it is told when, seconds."""

SPENT = 1e-12
"""Share of a flow below which the rest of it is rounding."""
SLOWEST = 1e-9


@dataclass(eq=False)
class Flow:
    """A transfer on its way: how many seconds of running alone it still needs, and its share of each of its links."""

    left_s: float
    share_of: dict[Hashable, float]
    then: Then
    weight: float = 1.0
    fan_in: int = 0
    """How many senders start at once on one port."""
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


class Tenant:
    """The k-th other job: it computes as long as the slowest of its ranks, transfers over the uplink, computes again.

    ``record`` is one of ``layout.TENANT``. It starts at any point of its period; or in a pause, of which it has had
    more the longer it is.
    """

    def __init__(self, record: Any, key: np.uint64, k: int) -> None:
        self.record, self.place, self.cycles, self._key = record, k, 0, key
        self.flow: Flow | None = None
        alone_s, compute_s = record["uplink_work_s"] / record["rate_cap"], float(record["compute_s"])
        self._period_s, self._first = compute_s + alone_s, 0.0
        at_s = uniform(key, draws.TENANT, ONCE + draws.PER_TENANT * k) * self._period_s
        away = 0.5 * record["pause_rate"] * record["pause_periods"] if record["pause_periods"] > 1.0 else 0.0
        u = uniform(key, draws.TENANT, ONCE + draws.PER_TENANT * k + 1) * (1.0 + away)
        self.next_s = max(compute_s - at_s, 0.0)
        """When its next transfer begins; infinite while one is on its way."""
        if u < away:
            self.next_s = record["pause_periods"] * (1.0 - math.sqrt(1.0 - u / away)) * self._period_s + compute_s
        elif at_s >= compute_s:
            self._first = 1.0 - (at_s - compute_s) / alone_s

    def _uniform(self, place: int) -> float:
        """A draw of its present cycle."""
        return uniform(
            key_of(self._key, draws.TENANT, self.cycles), draws.TENANT, draws.PER_TENANT * self.place + place
        )

    def begin(self, *, is_late: bool) -> None:
        """Its transfer begins, of what it had left when the episode began, or of a whole one."""
        record, share = self.record, self._first
        if share == 0.0:
            share = -math.log(self._uniform(1)) if record["bursty"] else 1.0
        weight = record["weight"] * (record["late_share"] if is_late else 1.0)
        alone_s = share * record["uplink_work_s"] / record["rate_cap"]
        self.flow = Flow(alone_s, {UPLINK: float(record["rate_cap"])}, self._compute, weight)
        self.next_s, self._first = math.inf, 0.0

    def _compute(self, now_s: float) -> None:
        """Its transfer is through; it computes until the next one, and pauses now and then."""
        self.flow, self.cycles = None, self.cycles + 1
        record, u = self.record, self._uniform(0)
        if record["bursty"]:
            self.next_s = now_s - record["compute_s"] * math.log(u)
            return
        slowest = quantile(draws.normal_table(), draws.uniform_bits(u ** (1.0 / record["ranks"])))
        self.next_s = now_s + record["compute_s"] * max(1.0 + record["jitter_cv"] * slowest, 0.0)
        pause = self._uniform(2)
        if pause < record["pause_rate"]:
            self.next_s += pause / record["pause_rate"] * record["pause_periods"] * self._period_s

    def meets_late_comer(self) -> None:
        """We begin while it transfers: it weighs more, as we have ``late_share`` of our weight beside it."""
        if self.flow is not None:
            self.flow.weight = self.record["weight"] / self.record["late_share"]


class Links:
    """All that is on its way, and the time."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self.now_s, self.tenants = 0.0, tenants
        self.ours: list[Flow] = []

    def on(self, link: Hashable) -> list[Flow]:
        """Our flows on a link."""
        return [flow for flow in self.ours if link in flow.share_of]

    def start(self, flow: Flow) -> None:
        """A flow of ours begins."""
        if UPLINK in flow.share_of and not self.on(UPLINK):
            for tenant in self.tenants:
                tenant.meets_late_comer()
        self.ours.append(flow)

    def run(self, until_s: float) -> bool:
        """Let time pass up to ``until_s``, or until a flow is through or a tenant begins; returns whether one did."""
        flows = [*self.ours, *(tenant.flow for tenant in self.tenants if tenant.flow is not None)]
        divide(flows)
        first = min(flows, key=lambda flow: flow.left_s / flow.rate, default=None)
        wait_s = first.left_s / first.rate if first is not None else math.inf
        begins_s = min((tenant.next_s for tenant in self.tenants), default=math.inf) - self.now_s
        if begins_s <= wait_s:
            first, wait_s = None, max(begins_s, 0.0)
        happens = self.now_s + wait_s <= until_s
        wait_s = wait_s if happens else max(until_s - self.now_s, 0.0)
        self.now_s += wait_s
        for flow in flows:
            flow.left_s -= flow.rate * wait_s
        if not happens:
            return False
        for tenant in self.tenants:
            if tenant.next_s <= self.now_s:
                tenant.begin(is_late=bool(self.on(UPLINK)))
        through = [flow for flow in flows if flow is first or flow.left_s <= flow.spent_s]
        self.ours = [flow for flow in self.ours if flow not in through]
        for flow in through:
            flow.then(self.now_s)
        return True

    def rewind(self, step_s: float) -> None:
        """Count time from the end of the step, which took ``step_s``; what nobody else uses is free by then."""
        self.now_s = (self.now_s if self.tenants else min(self.now_s, step_s)) - step_s
        for tenant in self.tenants:
            tenant.next_s -= step_s
