"""Lossless links packet by packet: what a rate is where a full link pauses the ones before it, beside the fluid.

Hosts send packets of their flows in turn. A switch has a queue for each link that leaves it, and counts what each link
that enters it has there. Above a threshold it pauses the sender of that link, below another one it lets it go on
(IEEE 802.1Qbb). A link that leaves sends first what came first, or one packet of each entering link in turn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks._common import Report, Table, Target, command
from paceenv.sim.reference.network import Flow, Resource, share, share_blocking

PAUSE_AT, GO_ON_AT = 40, 30
"""Packets of an entering link in a switch."""
SLOTS = 30_000
Paths = Mapping[str, Sequence[str]]


@dataclass
class Port:
    """The near end of a link: packets that wait for it, by the link that they came from."""

    rate: float
    """Packets a slot."""
    credit: float = 0.0
    is_paused: bool = False
    waiting: dict[str, deque[str]] = field(default_factory=dict)
    turn: deque[str] = field(default_factory=deque)

    def push(self, entered: str, flow: str) -> None:
        """A packet of ``flow`` came over link ``entered``.

        Args:
            entered: the link; the flow itself on a host.
            flow: its flow.
        """
        if entered not in self.waiting:
            self.waiting[entered] = deque()
            self.turn.append(entered)
        self.waiting[entered].append(flow)

    def pop(self) -> tuple[str, str] | None:
        """The next packet, as (link that it came from, flow): one of each link in turn."""
        for _ in range(len(self.turn)):
            self.turn.rotate(-1)
            if self.waiting[self.turn[-1]]:
                return self.turn[-1], self.waiting[self.turn[-1]].popleft()
        return None


def packets(paths: Paths, rates: Mapping[str, float]) -> dict[str, float]:
    """Packets a slot that each flow delivers, after a settling half, when all send as fast as they may.

    Args:
        paths: of each flow, links in their order; the first leaves its host.
        rates: packets a slot of each link.
    """
    rng = random.Random(0)
    ports = {link: Port(rate) for link, rate in rates.items()}
    inside = dict.fromkeys(rates, 0)  # packets of each entering link in the switch at its far end
    for flow, path in paths.items():
        ports[path[0]].push(flow, flow)
    delivered = dict.fromkeys(paths, 0)
    order = list(rates)
    for slot in range(SLOTS):
        rng.shuffle(order)
        moved: list[tuple[str, str]] = []
        for link in order:
            port = ports[link]
            port.credit = min(port.credit + port.rate, 1.0 + port.rate)
            while port.credit >= 1.0 and not port.is_paused and (packet := port.pop()) is not None:
                entered, flow = packet
                port.credit -= 1.0
                if paths[flow][0] == link:
                    port.push(flow, flow)  # its host has more
                else:
                    inside[entered] -= 1
                    ports[entered].is_paused = ports[entered].is_paused and inside[entered] > GO_ON_AT
                moved.append((link, flow))
        for link, flow in moved:
            after = paths[flow].index(link) + 1
            if after == len(paths[flow]):
                delivered[flow] += slot >= SLOTS // 2
                continue
            ports[paths[flow][after]].push(link, flow)
            inside[link] += 1
            ports[link].is_paused = ports[link].is_paused or inside[link] >= PAUSE_AT
    return {flow: 2.0 * count / SLOTS for flow, count in delivered.items()}


def fluid(paths: Paths, rates: Mapping[str, float], *, queues_block: bool) -> dict[str, float]:
    """The same by the reference engine's division of links.

    Args:
        paths: of each flow.
        rates: of each link.
        queues_block: whether the queue of a full link blocks the links before it.
    """
    links = {name: Resource(name, rate) for name, rate in rates.items()}
    flows = {name: Flow(1.0, tuple(links[link] for link in path), lambda: None) for name, path in paths.items()}
    for flow in flows.values():
        for resource in flow.resources:
            resource.flows[flow] = None
    if queues_block:
        share_blocking(flows.values(), 0.0, float("inf"))
    else:
        share(flows.values())
    return {name: flow.rate_Bps for name, flow in flows.items()}


def _leaf(hosts: int, uplink: float) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Each host of a leaf sends one flow over its uplink and one to its neighbour."""
    paths = {f"across {h}": [f"out {h}", "up", f"far {h}"] for h in range(hosts)}
    paths |= {f"inside {h}": [f"out {h}", f"in {(h + 1) % hosts}"] for h in range(hosts)}
    rates = {link: 1.0 for path in paths.values() for link in path} | {"up": uplink}
    return paths, rates


def _victim(others: int) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Figure 4 of Zhu et al.: H11 to H14 send to R, VS to VR; its uplink is that of two of them. Rates of 40 Gb/s."""
    paths = {f"H1{h}": [f"h{h}", f"T1-L{1 + h % 2}", f"S-L{3 + h % 2}", f"L{3 + h % 2}-T4", "R"] for h in range(4)}
    paths["victim"] = ["vs", "T1-L1", "L1-T2", "vr"]
    paths |= {f"H3{k}": [f"k{k}", f"T3-L{3 + k}", f"L{3 + k}-T4", "R"] for k in range(others)}
    return paths, {link: 1.0 for path in paths.values() for link in path}


CASES: dict[str, tuple[dict[str, list[str]], dict[str, float], str, float, str]] = {
    "4 hosts, uplink of one": (*_leaf(4, 1.0), "inside 0", 1.0, ""),
    "8 hosts, uplink of two": (*_leaf(8, 2.0), "inside 0", 1.0, ""),
    "4 hosts, uplink of three": (*_leaf(4, 3.0), "inside 0", 1.0, ""),
    "Figure 4, no sender at T3": (*_victim(0), "victim", 40.0, "10"),
    "Figure 4, two senders at T3": (*_victim(2), "victim", 40.0, "4.5"),
}
"""Paths, rates, whose rate is looked at, what it is multiplied with, and what was published."""


def run() -> Report:
    """Rates on links that pause each other, packet by packet and as a fluid."""
    rows, data, errors = [], {}, []
    for name, (paths, rates, whose, unit, published) in CASES.items():
        found = [one[whose] * unit for one in (packets(paths, rates), fluid(paths, rates, queues_block=True))]
        fair = fluid(paths, rates, queues_block=False)[whose] * unit
        data[name] = {"packets": found[0], "blocking": found[1], "fair": fair}
        rows.append((name, published, *(f"{value:.2f}" for value in (*found, fair))))
        errors.append(found[1] / found[0] - 1.0)
    worst = max(errors, key=abs)
    because = "Switches serve entering links in turn, the fluid serves flows; with two senders at T3 that differs."
    target = Target(
        "rate of a victim, fluid against packets", "within 15%", f"{worst:+.0%}", abs(worst) <= 0.15, because
    )
    table = Table(
        "rate of the flow that passes no full link: of a NIC, in Figure 4 in Gb/s",
        ("case", "published", "packets", "fluid, queues block", "fluid, fair"),
        rows,
    )
    text = "Every host sends as fast as it may. A flow that passes no full link waits behind others that do."
    return Report("Links that pause each other", text, data, (table,), (target,))


if __name__ == "__main__":
    command(run)
