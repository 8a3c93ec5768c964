"""Which links an operation of a process group uses, and for how long: NVLink or PCIe, NICs, leaf uplinks, the top tier.

Bytes are counted message by message between members and then laid on the links of :class:`Tiers`. A link is one
direction of a port. Of a node's NICs an operation uses those of its own members, evenly, as collectives with several
channels do. Bytes in seconds of a link are its load; the slowest link sets how long the operation takes alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.cluster.collectives import Op, Way, tree_messages, volume
from paceenv.sim.cluster.protocols import AS_GIVEN, Choice

UPLINK = 0
HASHES = 512
"""Draws of the paths that flows are hashed onto."""


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
    fan_in: int = 0
    """Senders that start at once on one receiving NIC; 0: no message passes one."""
    ports: int = 0
    """Receiving NICs."""
    weight: float = 1.0
    """Its share of a link where it meets others, relative to theirs."""


@dataclass(frozen=True)
class Tiers:
    """The links of a fabric of ``nodes``, rates in bytes per second and direction."""

    nodes: int
    ranks_per_node: int
    nodes_per_leaf: int
    nics_per_node: int
    inside_Bps: float
    """Of one rank's link to its node's switch."""
    nic_Bps: float
    """Of one NIC."""
    leaf_Bps: float
    """Of all uplinks of a leaf; infinite without a limit of their own."""
    uplink_Bps: float
    """Of all that passes above the leaves."""
    inside_hop_s: float
    hop_s: float
    sqrt_s: float = 0.0
    """Seconds per square root of a byte that a node sends, between nodes."""
    inside_sqrt_s: float = 0.0
    """The same inside a node."""
    paths: int | None = None
    """Equal-cost paths of a leaf, or of the top tier without leaves' own rates, that flows are hashed onto."""

    @property
    def leaves(self) -> int:
        """Leaf switches."""
        return -(-self.nodes // self.nodes_per_leaf)

    @property
    def links(self) -> int:
        """How many links there are: the top tier, ranks' links, NICs and leaves in both directions."""
        return 1 + 2 * (self.nodes * self.ranks_per_node + self.nodes * self.nics_per_node + self.leaves)

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
    if op == "all_to_all":
        return [(i, j, S / n) for i in range(n) for j in range(n) if i != j]
    if way == "tree":
        return [(a, b, 0.5 * S) for a, b in tree_messages(n)]
    sent_bytes = float(volume(op, "ring", n, S).sent_bytes)
    return [(i, (i + 1) % n, sent_bytes) for i in range(n - 1 if op == "broadcast" else n)]


def use(
    tiers: Tiers,
    op: Op,
    members: Sequence[int],
    payload_bytes: float,
    choice: Choice = AS_GIVEN,
    *,
    efficiency: float = 1.0,
    is_lost: bool = False,
    groups: int = 1,
) -> Use:
    """What an operation of some ranks takes of the links.

    Args:
        members: its ranks, in the order of their group.
        efficiency: the share of its slowest link that one operation alone can use.
        groups: how many process groups do the same beside it, this one included; flows of all are hashed onto paths.
    """
    payload_bytes /= choice.data_share  # flags pass the links like data
    hop_s, inside_hop_s = tiers.hop_s * choice.hop_share, tiers.inside_hop_s * choice.inside_hop_share
    per_node: dict[int, list[int]] = {}
    for rank in members:
        per_node.setdefault(rank // tiers.ranks_per_node, []).append(rank)
    load = np.zeros(tiers.links)
    ports, crossing = Counter[tuple[int, bool]](), Counter[int]()
    if choice.algorithm == "tree" and len(per_node) > 1:
        nodes = list(per_node)
        for i, j, size in messages(op, "tree", len(nodes), payload_bytes):
            _cross(tiers, load, per_node[nodes[i]], per_node[nodes[j]], size, crossing)
            ports.update(((nodes[i], False), (nodes[j], True)))
        for ranks in per_node.values():  # a chain inside
            for a, b in itertools.pairwise(ranks):
                for sender, receiver in ((a, b), (b, a)):
                    _inside(tiers, load, sender, receiver, payload_bytes)
        found = volume(op, "tree", len(nodes), payload_bytes)
        chain = 2.0 * (max(map(len, per_node.values())) - 1) * inside_hop_s
        latency_s = float(found.rounds) * hop_s + chain
    else:
        between: dict[tuple[int, int], list[float]] = {}
        for i, j, size in messages(op, "ring", len(members), payload_bytes):
            here, there = (members[place] // tiers.ranks_per_node for place in (i, j))
            if here == there:
                _inside(tiers, load, members[i], members[j], size)
            if len(per_node) == 1:
                ports.update(((members[i], False), (members[j], True)))
            elif here != there:
                ports.update(((here, False), (there, True)))
                between.setdefault((here, there), []).append(size)
        for (here, there), sizes in between.items():
            _cross(tiers, load, per_node[here], per_node[there], sum(sizes), crossing, len(sizes))
        found = volume(op, "ring", len(members), payload_bytes)
        latency_s = float(found.rounds) * (hop_s if len(per_node) > 1 else inside_hop_s)
    seconds, own_paths_s = load / tiers.rates_Bps(), 0.0
    if tiers.paths is not None and crossing:
        above = [UPLINK, *range(tiers.leaf_link(0, into=False), tiers.links)]
        own_paths_s = float(seconds[above].max()) * hashed_imbalance(crossing, tiers)
        seconds[above] *= hashed_imbalance({leaf: flows * groups for leaf, flows in crossing.items()}, tiers)
    slowest_s = max(float(seconds.max(initial=0.0)), own_paths_s)
    sqrt_s = (tiers.sqrt_s if len(per_node) > 1 else tiers.inside_sqrt_s) * math.sqrt(float(load.max(initial=0.0)))
    inside_bytes = float(load[1 : 1 + 2 * tiers.nodes * tiers.ranks_per_node].max())
    channels_s = max(float(found.sent_bytes), inside_bytes) / choice.channels_Bps
    busy_s, alone_s = max(slowest_s, channels_s), max(slowest_s / efficiency, channels_s)
    links = np.flatnonzero(seconds > 0.0)
    taken_s = (busy_s if is_lost else alone_s) or 1.0
    flows, nics = max(ports.values(), default=1), 0
    if len(per_node) > 1:
        nics = len({nic for ranks in per_node.values() for nic in tiers.nics_of(ranks)})
    fan_in = (flows if op == "all_to_all" else 1) if nics else 0  # in a ring, a tree and a send one sends to one
    fixed_s = latency_s + sqrt_s + choice.operation_s
    return Use(alone_s, fixed_s, links, seconds[links] / taken_s, flows, fan_in, nics)


def _inside(tiers: Tiers, load: NDArray[np.float64], sender: int, receiver: int, size: float) -> None:
    """Lay bytes from one rank to another of its node on their links."""
    load[tiers.inside_link(sender, into=False)] += size
    load[tiers.inside_link(receiver, into=True)] += size


def hashed_imbalance(crossing: Mapping[int, int], tiers: Tiers) -> float:
    """Load of the busiest equal-cost path over the mean one, where each flow keeps the path that it is hashed onto.

    The mean over many hashes: a program meets that, other jobs draw anew in every episode.
    """
    assert tiers.paths is not None
    flows, leaves = max(crossing.values()), len(crossing)
    if math.isinf(tiers.leaf_Bps):  # paths of one tier that all leaves share
        flows, leaves = sum(crossing.values()), 1
    drawn = np.random.default_rng(flows).multinomial(flows, np.full(tiers.paths, 1.0 / tiers.paths), (HASHES, leaves))
    return float(drawn.max(axis=(1, 2)).mean()) * tiers.paths / flows


def _cross(
    tiers: Tiers,
    load: NDArray[np.float64],
    senders: list[int],
    receivers: list[int],
    size: float,
    crossing: Counter[int],
    pairs_of_ranks: int = 1,
) -> None:
    """Lay bytes from one node to another on NICs, leaves and the top tier.

    Counts the flows that leave each leaf: one for each pair of ranks that exchange, or for each NIC if there are more.
    """
    pairs = tiers.nic_pairs(senders, receivers)
    for out, into in pairs:
        part, above = size / len(pairs), tiers.above(out, into)
        load[[tiers.nic_link(out, into=False), tiers.nic_link(into, into=True)]] += part
        load[above] += part
    if above:
        crossing[above[0]] += max(len(pairs), pairs_of_ranks)
