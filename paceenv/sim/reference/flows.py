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

from paceenv.sim.cluster.program.footprint import UPLINK
from paceenv.sim.reference.chance import TenantChance

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
        self.spent_s = SPENT * self.left_s
        self.per_level = self.weight / max(self.share_of.values())
        """Its rate at level 1."""


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
    """Another job: it computes as long as the slowest of its ranks, transfers over the uplink, and computes again."""

    def __init__(self, record: Any, chance: TenantChance) -> None:
        self.record, self.chance, self.cycles = record, chance, 0
        self.flow: Flow | None = None
        self.next_s, self._left = chance.first()
        """When its next transfer begins; infinite while one is on its way."""

    def begin(self, now_s: float, *, is_late: bool) -> Flow:
        """Its transfer begins."""
        share = self._left if self._left > 0.0 else self.chance.transfer(self.cycles)
        alone_s = share * self.record["uplink_work_s"] / self.record["rate_cap"]
        weight = self.record["weight"] * (self.record["late_share"] if is_late else 1.0)
        self.flow = Flow(alone_s, {UPLINK: float(self.record["rate_cap"])}, self._compute, weight)
        self.next_s, self._left = math.inf, 0.0
        return self.flow

    def _compute(self, now_s: float) -> None:
        self.flow, self.cycles = None, self.cycles + 1
        self.next_s = now_s + self.chance.compute_s(self.cycles)

    def meets_late_comer(self) -> None:
        """We begin while it transfers: it weighs more, as we have ``late_share`` of our weight beside it."""
        if self.flow is not None:
            self.flow.weight = self.record["weight"] / self.record["late_share"]
            self.flow.per_level = self.flow.weight / self.flow.share_of[UPLINK]


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
        begins = min(self.tenants, key=lambda tenant: tenant.next_s, default=None)
        wait_s = first.left_s / first.rate if first is not None else math.inf
        if begins is not None and begins.next_s - self.now_s <= wait_s:
            first, wait_s = None, max(begins.next_s - self.now_s, 0.0)
        happens = self.now_s + wait_s <= until_s
        if not happens:
            wait_s = max(until_s - self.now_s, 0.0)
        self.now_s += wait_s
        for flow in flows:
            flow.left_s -= flow.rate * wait_s
        if happens:
            self._happen([flow for flow in flows if flow is first or flow.left_s <= flow.spent_s])
        return happens

    def _happen(self, through: list[Flow]) -> None:
        for tenant in self.tenants:
            if tenant.next_s <= self.now_s:
                tenant.begin(self.now_s, is_late=bool(self.on(UPLINK)))
        self.ours = [flow for flow in self.ours if flow not in through]
        for flow in through:
            flow.then(self.now_s)

    def rewind(self, step_s: float) -> None:
        """Count time from the end of the step, which took ``step_s``."""
        self.now_s -= step_s
        for tenant in self.tenants:
            tenant.next_s -= step_s
