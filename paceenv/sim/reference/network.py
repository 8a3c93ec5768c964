"""A network of shared resources in continuous time: flows divide them by weighted max-min, events happen in order.

Knows nothing of training jobs. Sizes in bytes, rates in bytes per second, times in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

Action = Callable[[], None]

SAME_TIME_S = 1e-12
"""Events closer together than this are one: lockstep rounds of many members end within a few roundings."""
SPENT = 1e-9
"""Share of a flow's bytes below which it is through, for the same reason."""


@dataclass(eq=False)
class Resource:
    """Something flows share: one direction of a link, or a whole tier of switches."""

    name: str
    capacity_Bps: float
    flows: dict[Flow, None] = field(default_factory=dict, repr=False)  # ordered, so that sums are reproducible


@dataclass(eq=False)
class Bundle:
    """Flows that together weigh as one where they are most likely to meet others: ``flows`` of them pass ``tier``."""

    tier: Resource
    flows: int = 0


@dataclass(eq=False)
class Flow:
    """Bytes on their way through every one of ``resources`` at once, never faster than ``cap_Bps``.

    Flows of a bundle share a weight of 1 among those of them that pass its tier.
    """

    bytes_left: float
    resources: tuple[Resource, ...]
    on_end: Action
    weight: float = 1.0
    cap_Bps: float = math.inf
    bundle: Bundle | None = None
    rate_Bps: float = 0.0
    spent_bytes: float = 0.0


class Network:
    """Flows and timed actions, run event by event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.flows: dict[Flow, None] = {}
        self._timed: list[tuple[float, int, Action]] = []
        self._order = count()
        self._stale = False

    def at(self, time_s: float, action: Action) -> None:
        """Call ``action`` at ``time_s``."""
        heapq.heappush(self._timed, (time_s, next(self._order), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Call ``action`` in ``delay_s``."""
        self.at(self.now_s + delay_s, action)

    def send(
        self,
        size_bytes: float,
        resources: Iterable[Resource],
        on_end: Action,
        *,
        weight: float = 1.0,
        cap_Bps: float = math.inf,
        bundle: Bundle | None = None,
    ) -> Flow | None:
        """Start a flow now; a flow without bytes is through at once, and None.

        Args:
            weight: its share in a tie, relative to other flows.
            cap_Bps: its highest rate, bytes per second.
        """
        if size_bytes <= 0.0:
            self.after(0.0, on_end)
            return None
        flow = Flow(size_bytes, tuple(resources), on_end, weight, cap_Bps, bundle, 0.0, SPENT * size_bytes)
        self.flows[flow] = None
        for resource in flow.resources:
            resource.flows[flow] = None
        self._count(flow, 1)
        self._stale = True
        return flow

    def weigh(self, flow: Flow, weight: float) -> None:
        """Give a flow another weight from now on."""
        flow.weight, self._stale = weight, True

    def step(self) -> None:
        """Go to the next time at which anything happens, and let all of it happen."""
        if self._stale:
            share(self.flows)
            self._stale = False
        first = min(self.flows, key=_left_s, default=None)
        wait_s = _left_s(first) if first is not None else math.inf
        if self._timed and self._timed[0][0] - self.now_s <= wait_s:
            first, wait_s = None, max(self._timed[0][0] - self.now_s, 0.0)
        if wait_s == math.inf:
            raise RuntimeError(f"nothing is left to happen at {self.now_s} s: some member waits for ever")
        self.now_s += wait_s
        through = []
        for flow in self.flows:
            flow.bytes_left -= flow.rate_Bps * wait_s
            if flow is first or flow.bytes_left <= flow.spent_bytes:
                through.append(flow)
        for flow in through:
            del self.flows[flow]
            for resource in flow.resources:
                del resource.flows[flow]
            self._count(flow, -1)
            self._stale = True
        for flow in through:
            flow.on_end()
        while self._timed and self._timed[0][0] <= self.now_s + SAME_TIME_S:
            heapq.heappop(self._timed)[2]()

    def _count(self, flow: Flow, change: int) -> None:
        if flow.bundle is not None and flow.bundle.tier in flow.resources:
            flow.bundle.flows += change

    def run_until(self, done: Callable[[], bool]) -> None:
        """Step until ``done()``."""
        while not done():
            self.step()


def _left_s(flow: Flow) -> float:
    return flow.bytes_left / flow.rate_Bps


def share(flows: Iterable[Flow]) -> None:
    """Set every flow's rate: weighted max-min fairness by progressive filling (Bertsekas and Gallager 1992, 6.5.2).

    All rates rise in proportion to their weights until a resource is full or a flow is at its cap; what is held by it
    stays, the others rise on. A resource that one flow has to itself is but a cap on that flow.
    """
    cap_of: dict[Flow, float] = {}
    weight_of: dict[Flow, float] = {}
    shared: dict[Resource, None] = {}
    for flow in flows:
        cap_Bps = flow.cap_Bps
        for resource in flow.resources:
            if len(resource.flows) == 1:
                cap_Bps = min(cap_Bps, resource.capacity_Bps)
            else:
                shared[resource] = None
        cap_of[flow] = cap_Bps
        weight_of[flow] = flow.weight / max(flow.bundle.flows, 1) if flow.bundle is not None else flow.weight
    free = {resource: resource.capacity_Bps for resource in shared}
    rising = dict.fromkeys(cap_of)
    weight_on = {resource: sum(weight_of[f] for f in resource.flows) for resource in shared}
    while rising:
        level = min(cap_of[f] / weight_of[f] for f in rising)
        full = None
        for resource, weight in weight_on.items():
            if free[resource] / weight < level:
                full, level = resource, free[resource] / weight
        if full is None:
            held = [f for f in rising if cap_of[f] / weight_of[f] <= level]
        else:
            held = [f for f in rising if full in f.resources]
        for flow in held:
            flow.rate_Bps = min(cap_of[flow], level * weight_of[flow])
            del rising[flow]
            for resource in flow.resources:
                if resource in free:
                    free[resource] = max(free[resource] - flow.rate_Bps, 0.0)
                    weight_on[resource] -= weight_of[flow]
        for resource in [r for r in weight_on if not any(f in rising for f in r.flows)]:
            del weight_on[resource], free[resource]
