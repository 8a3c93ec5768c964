"""Which links an operation of a process group uses, and for how long: NVLink or PCIe, NICs, leaf uplinks, the top tier.

Bytes are counted message by message between members and then laid on the links of :class:`Tiers`. A link is one
direction of a port. Of a node's NICs an operation uses those of its own members, evenly, as collectives with several
channels do. Bytes in seconds of a link are its load; the slowest link sets how long the operation takes alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.cluster.collectives import Algorithm, Op, Way, tree_messages, volume
from paceenv.sim.engine.program_layout import UPLINK


class Use(NamedTuple):
    """An operation alone on the fabric."""

    alone_s: float
    """How long it takes, latency not included."""
    latency_s: float
    link_U: NDArray[np.int64]
    """The links that it uses."""
    share_U: NDArray[np.float64]
    """The share of each link that it takes meanwhile, at most 1."""
    flows: int = 1
    """Pairs of ranks that exchange through its busiest port, in one direction."""
    weight: float = 1.0
    """Its share of a link where it meets others, relative to theirs."""


Values = float | NDArray[np.float64]
"""One number, or one for each episode, ``(E,)``."""


@dataclass(frozen=True)
class Topology:
    """Where the links of a fabric are; a link is one direction of a port."""

    nodes: int
    ranks_per_node: int
    nodes_per_leaf: int
    nics_per_node: int

    @property
    def leaves(self) -> int:
        """Leaf switches."""
        return -(-self.nodes // self.nodes_per_leaf)

    @property
    def links(self) -> int:
        """How many links there are: the top tier, ranks' links, NICs and leaves in both directions."""
        return 1 + 2 * (self.nodes * self.ranks_per_node + self.nodes * self.nics_per_node + self.leaves)

    @property
    def inside_links(self) -> slice:
        """All links of ranks inside their nodes."""
        return slice(1, 1 + 2 * self.nodes * self.ranks_per_node)

    @property
    def nic_links(self) -> slice:
        """All links of NICs."""
        return slice(self.inside_links.stop, self.inside_links.stop + 2 * self.nodes * self.nics_per_node)

    def inside_link(self, rank: int, *, into: bool) -> int:
        """The link of a rank inside its node."""
        return 1 + 2 * rank + into

    def nic_link(self, nic: int, *, into: bool) -> int:
        """A NIC, counted over all nodes."""
        return 1 + 2 * self.nodes * self.ranks_per_node + 2 * nic + into

    def leaf_link(self, leaf: int, *, into: bool) -> int:
        """The uplinks of a leaf."""
        return 1 + 2 * self.nodes * (self.ranks_per_node + self.nics_per_node) + 2 * leaf + into

    def leaf_of(self, nic: int) -> int:
        """The leaf that a NIC, counted over all nodes, is on."""
        return nic // self.nics_per_node // self.nodes_per_leaf

    def above(self, sender: int, receiver: int) -> list[int]:
        """What lies between two NICs above their leaves: nothing, or both leaves' uplinks and the top tier."""
        out, into = self.leaf_of(sender), self.leaf_of(receiver)
        return [] if out == into else [self.leaf_link(out, into=False), UPLINK, self.leaf_link(into, into=True)]

    def nic_pairs(self, senders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int]]:
        """The NICs over which ranks of one node send to those of another: each to its peer, or all to all."""
        out, into = self.nics_of(senders), self.nics_of(receivers)
        return list(zip(out, into, strict=True) if len(out) == len(into) else itertools.product(out, into))

    def nics_of(self, ranks: Sequence[int]) -> list[int]:
        """The NICs of some ranks of one node, counted over all nodes."""
        first = ranks[0] // self.ranks_per_node * self.nics_per_node
        if self.ranks_per_node == 1:
            return [first + i for i in range(self.nics_per_node)]
        locals_ = [rank % self.ranks_per_node for rank in ranks]
        if self.nics_per_node > self.ranks_per_node:
            each = self.nics_per_node // self.ranks_per_node
            return [first + i * each + k for i in locals_ for k in range(each)]
        return sorted({first + i * self.nics_per_node // self.ranks_per_node for i in locals_})


@dataclass(frozen=True)
class Tiers(Topology):
    """The links of a fabric, rates in bytes per second and direction."""

    inside_Bps: Values
    """Of one rank's link to its node's switch."""
    nic_Bps: Values
    """Of one NIC."""
    leaf_Bps: Values
    """Of all uplinks of a leaf; infinite without a limit of their own."""
    uplink_Bps: Values
    """Of all that passes above the leaves."""
    inside_hop_s: Values
    hop_s: Values
    sqrt_s: Values = 0.0
    """Seconds per square root of a byte that a NIC sends, between nodes."""
    inside_sqrt_s: Values = 0.0
    """The same inside a node."""

    def rates_Bps(self) -> NDArray[np.float64]:
        """Of every link, bytes per second."""
        ranks, nics = self.nodes * self.ranks_per_node, self.nodes * self.nics_per_node
        return np.concatenate(
            [
                [self.uplink_Bps],
                np.full(2 * ranks, self.inside_Bps),
                np.full(2 * nics, self.nic_Bps),
                np.full(2 * self.leaves, self.leaf_Bps),
            ]
        )


def messages(op: Op, way: Way, members: int, payload_bytes: float) -> list[tuple[int, int, float]]:
    """All bytes that an operation moves, as (sender, receiver, bytes) between places of its group.

    Args:
        way: of an all-reduce; all others go around a ring, a broadcast along it, an all-to-all from each to each.
    """
    n, S = members, payload_bytes
    if n < 2:
        return []
    if op == "send":
        return [(0, 1, S)]
    if op == "gather":
        return [(i, 0, S) for i in range(1, n)]
    if op == "all_to_all":
        return [(i, j, S / n) for i in range(n) for j in range(n) if i != j]
    if way == "tree":
        return [(a, b, 0.5 * S) for a, b in tree_messages(n)]
    sent_bytes = float(volume(op, "ring", n, S).sent_bytes)
    return [(i, (i + 1) % n, sent_bytes) for i in range(n - 1 if op == "broadcast" else n)]


class Laid(NamedTuple):
    """The bytes of an operation on the links of a fabric, whatever their rates."""

    load: NDArray[np.float64]
    """Of every link."""
    sent_bytes: float
    """That the busiest member sends, one after the other."""
    rounds: float
    """Message rounds one after the other; between nodes if there are several."""
    chain_rounds: float
    """Rounds inside a node besides."""
    first_bytes: float
    """That a member sends inside its node before and after all others (hierarchical)."""
    hop_bytes: float
    """Of one message between nodes."""
    hops: int
    """Messages between nodes."""
    hops_above: int
    """Those of them that leave their leaf."""
    per_node: dict[int, list[int]]
    """The members on each node."""
    flows: int
    """Pairs of ranks that exchange through the busiest port, in one direction."""


def laid(place: Topology, op: Op, members: Sequence[int], payload_bytes: float, algorithm: Algorithm) -> Laid:
    """Lay an operation of some ranks, in the order of their group, on the links.

    A flat ring passes all members one after the other. The members of a tree are nodes, each of them a chain inside.
    ``hierarchical`` reduces inside first, then by a ring of nodes, then inside.
    """
    per_node: dict[int, list[int]] = {}
    for rank in members:
        per_node.setdefault(rank // place.ranks_per_node, []).append(rank)
    nodes, most = list(per_node), max(map(len, per_node.values()))
    load, ports = np.zeros(place.links), Counter[tuple[int, bool]]()
    by_nodes = len(nodes) > 1 and (algorithm == "tree" or (algorithm == "hierarchical" and most > 1))
    hops, chain_rounds, first_bytes = list[tuple[int, int, float]](), 0.0, 0.0
    if by_nodes:
        way: Way = "tree" if algorithm == "tree" else "ring"
        hops = [(nodes[i], nodes[j], size) for i, j, size in messages(op, way, len(nodes), payload_bytes)]
        ports.update(port for here, there, _ in hops for port in ((here, False), (there, True)))
        amount = volume(op, way, len(nodes), payload_bytes)
        if way == "tree":
            chain_rounds = 2.0 * (most - 1)
            for ranks in per_node.values():
                for a, b in itertools.pairwise(ranks):
                    for sender, receiver in ((a, b), (b, a)):
                        _inside(place, load, sender, receiver, payload_bytes)
        else:
            within = volume(op, "ring", most, payload_bytes)
            chain_rounds, first_bytes = within.rounds, float(within.sent_bytes)
    else:
        between: dict[tuple[int, int], list[float]] = {}
        for i, j, size in messages(op, "ring", len(members), payload_bytes):
            here, there = (members[k] // place.ranks_per_node for k in (i, j))
            if here == there:
                _inside(place, load, members[i], members[j], size)
            if len(nodes) == 1:
                ports.update(((members[i], False), (members[j], True)))
            elif here != there:
                ports.update(((here, False), (there, True)))
                between.setdefault((here, there), []).append(size)
        hops = [(here, there, sum(sizes)) for (here, there), sizes in between.items()]
        amount = volume(op, "ring", len(members), payload_bytes)
    above = sum(_cross(place, load, per_node[here], per_node[there], size) for here, there, size in hops)
    return Laid(
        load=load,
        sent_bytes=float(amount.sent_bytes),
        rounds=amount.rounds,
        chain_rounds=chain_rounds,
        first_bytes=first_bytes,
        hop_bytes=max((size for _, _, size in hops), default=0.0),
        hops=len(hops),
        hops_above=above,
        per_node=per_node,
        flows=max(ports.values(), default=1),
    )


def use(
    tiers: Tiers,
    op: Op,
    members: Sequence[int],
    payload_bytes: float,
    way: Way = "ring",
    *,
    efficiency: float = 1.0,
    is_lost: bool = False,
) -> Use:
    """What an operation of some ranks takes of the links of a fabric whose rates are numbers.

    Args:
        members: its ranks, in the order of their group.
        efficiency: the share of its slowest link that one operation alone can use.
        is_lost: whether what it leaves of its links so is lost to others.
    """
    one = laid(tiers, op, members, payload_bytes, way)
    is_inside = len(one.per_node) == 1
    latency_s = one.rounds * (tiers.inside_hop_s if is_inside else tiers.hop_s) + one.chain_rounds * tiers.inside_hop_s
    seconds = one.load / tiers.rates_Bps()
    busy_s = float(seconds.max(initial=0.0))
    alone_s = busy_s / efficiency
    sqrt_s = (tiers.inside_sqrt_s if is_inside else tiers.sqrt_s) * math.sqrt(float(one.load.max(initial=0.0)))
    links = np.flatnonzero(seconds > 0.0)
    taken_s = (busy_s if is_lost else alone_s) or 1.0
    return Use(alone_s, float(latency_s + sqrt_s), links, seconds[links] / taken_s, one.flows)


def _inside(place: Topology, load: NDArray[np.float64], sender: int, receiver: int, size: float) -> None:
    """Lay bytes from one rank to another of its node on their links."""
    load[place.inside_link(sender, into=False)] += size
    load[place.inside_link(receiver, into=True)] += size


def _cross(place: Topology, load: NDArray[np.float64], senders: list[int], receivers: list[int], size: float) -> bool:
    """Lay bytes from one node to another on NICs, leaves and the top tier; whether they leave their leaf."""
    pairs = place.nic_pairs(senders, receivers)
    for out, into in pairs:
        part, above = size / len(pairs), place.above(out, into)
        load[[place.nic_link(out, into=False), place.nic_link(into, into=True)]] += part
        load[above] += part
    return bool(above)
