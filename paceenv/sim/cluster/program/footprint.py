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

from paceenv.sim.cluster.collectives import Algorithm, Op, tree_parents, volume

UPLINK = 0


class Use(NamedTuple):
    """An operation alone on the fabric."""

    alone_s: float
    """How long it takes, latency not included."""
    latency_s: float
    link_U: NDArray[np.int64]
    """The links that it uses."""
    share_U: NDArray[np.float64]
    """The share of each link that it takes meanwhile, at most 1."""
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
    path_imbalance: float = 1.0
    """Load of the busiest equal-cost path above a leaf over the mean."""

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
        """The link of a rank inside its node.

        Args:
            rank: its number.
            into: whether bytes come in or go out.
        """
        return 1 + 2 * rank + into

    def nic_link(self, nic: int, *, into: bool) -> int:
        """A NIC, counted over all nodes.

        Args:
            nic: its number over all nodes.
            into: whether bytes come in or go out.
        """
        return 1 + 2 * self.nodes * self.ranks_per_node + 2 * nic + into

    def leaf_link(self, leaf: int, *, into: bool) -> int:
        """The uplinks of a leaf.

        Args:
            leaf: its number.
            into: whether bytes come in or go out.
        """
        return 1 + 2 * self.nodes * (self.ranks_per_node + self.nics_per_node) + 2 * leaf + into

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


def messages(op: Op, algorithm: Algorithm, members: int, payload_bytes: float) -> list[tuple[int, int, float]]:
    """All bytes that an operation moves, as (sender, receiver, bytes) between places of its group.

    Args:
        op: the operation.
        algorithm: of an all-reduce; all others go around a ring, a broadcast along it, an all-to-all from each to each.
        members: of the group.
        payload_bytes: as in :func:`paceenv.sim.cluster.collectives.volume`.
    """
    n, S = members, payload_bytes
    if n < 2:
        return []
    if op == "send":
        return [(0, 1, S)]
    if op == "all_to_all":
        return [(i, j, S / n) for i in range(n) for j in range(n) if i != j]
    if op == "all_reduce" and algorithm == "tree":
        edges = list(tree_parents(n).items())
        other = [((i + 1) % n, (j + 1) % n) if n % 2 else (n - 1 - i, n - 1 - j) for i, j in edges]
        return [(a, b, 0.5 * S) for i, j in edges + other for a, b in ((i, j), (j, i))]
    sent_bytes = float(volume(op, "ring", n, S).sent_bytes)
    return [(i, (i + 1) % n, sent_bytes) for i in range(n - 1 if op == "broadcast" else n)]


def use(
    tiers: Tiers,
    op: Op,
    members: Sequence[int],
    payload_bytes: float,
    *,
    algorithm: Algorithm = "ring",
    efficiency: float = 1.0,
    is_lost: bool = False,
) -> Use:
    """What an operation of some ranks takes of the links.

    Args:
        tiers: of the fabric.
        op: the operation.
        members: its ranks, in the order of their group. A ``send`` of one member goes to storage above the leaves.
        payload_bytes: as in :func:`messages`.
        algorithm: of an all-reduce: ``ring`` or ``tree``, whose members are nodes.
        efficiency: the share of its slowest link that one operation alone can use.
        is_lost: whether the rest of its links is of no use to others meanwhile.
    """
    per_node: dict[int, list[int]] = {}
    for rank in members:
        per_node.setdefault(rank // tiers.ranks_per_node, []).append(rank)
    load = np.zeros(tiers.links)
    if algorithm == "tree" and len(per_node) > 1:
        nodes = list(per_node)
        for i, j, size in messages(op, "tree", len(nodes), payload_bytes):
            _cross(tiers, load, per_node[nodes[i]], per_node[nodes[j]], size)
        for ranks in per_node.values():  # a chain inside
            for a, b in itertools.pairwise(ranks):
                for sender, receiver in ((a, b), (b, a)):
                    load[tiers.inside_link(sender, into=False)] += payload_bytes
                    load[tiers.inside_link(receiver, into=True)] += payload_bytes
        found = volume(op, "tree", len(nodes), payload_bytes)
        chain = 2.0 * (max(map(len, per_node.values())) - 1) * tiers.inside_hop_s
        latency_s = float(found.rounds) * tiers.hop_s + chain
    elif op == "send" and len(members) == 1:  # to storage above the leaves
        _leave(tiers, load, list(members), payload_bytes)
        latency_s = tiers.hop_s
    else:
        for i, j, size in messages(op, "ring", len(members), payload_bytes):
            sender, receiver = members[i], members[j]
            if sender // tiers.ranks_per_node == receiver // tiers.ranks_per_node:
                load[tiers.inside_link(sender, into=False)] += size
                load[tiers.inside_link(receiver, into=True)] += size
            else:
                there = receiver // tiers.ranks_per_node
                _cross(tiers, load, per_node[sender // tiers.ranks_per_node], per_node[there], size)
        rounds = 1.0 if op == "send" else float(volume(op, "ring", len(members), payload_bytes).rounds)
        latency_s = rounds * (tiers.hop_s if len(per_node) > 1 else tiers.inside_hop_s)
    seconds = load / tiers.rates_Bps()
    slowest_s = float(seconds.max(initial=0.0))
    sqrt_s = (tiers.sqrt_s if len(per_node) > 1 else tiers.inside_sqrt_s) * math.sqrt(float(load.max(initial=0.0)))
    alone_s = slowest_s / efficiency
    links = np.flatnonzero(seconds > 0.0)
    taken_s = (slowest_s if is_lost else alone_s) or 1.0
    return Use(alone_s, latency_s + sqrt_s, links, seconds[links] / taken_s)


def flows(tiers: Tiers, op: Op, members: Sequence[int], *, algorithm: Algorithm = "ring") -> int:
    """How many pairs of ranks exchange through the busiest port of an operation, in one direction.

    Args:
        tiers: of the fabric.
        op: the operation.
        members: its ranks, as in :func:`use`.
        algorithm: of an all-reduce, as in :func:`use`.
    """
    nodes = [rank // tiers.ranks_per_node for rank in members]
    is_inside = len(set(nodes)) == 1
    places = list(members) if is_inside else nodes
    if algorithm == "tree" and not is_inside:
        places = list(dict.fromkeys(places))
    found = messages(op, "ring" if is_inside else algorithm, len(places), 1.0)
    pairs = [(places[i], places[j]) for i, j, _ in found]
    ports = Counter(port for a, b in pairs if a != b for port in ((a, False), (b, True)))
    return max(ports.values(), default=1)


def _cross(tiers: Tiers, load: NDArray[np.float64], senders: list[int], receivers: list[int], size: float) -> None:
    """Lay bytes from one node to another on NICs, leaves and the top tier."""
    for ranks, into in ((senders, False), (receivers, True)):
        nics = tiers.nics_of(ranks)
        for nic in nics:
            load[tiers.nic_link(nic, into=into)] += size / len(nics)
    leaves = [ranks[0] // tiers.ranks_per_node // tiers.nodes_per_leaf for ranks in (senders, receivers)]
    if leaves[0] != leaves[1]:
        load[tiers.leaf_link(leaves[0], into=False)] += size * tiers.path_imbalance
        load[tiers.leaf_link(leaves[1], into=True)] += size * tiers.path_imbalance
        load[UPLINK] += size * tiers.path_imbalance


def _leave(tiers: Tiers, load: NDArray[np.float64], ranks: list[int], size: float) -> None:
    """Lay bytes on the way from one node to what lies above the leaves."""
    nics = tiers.nics_of(ranks)
    for nic in nics:
        load[tiers.nic_link(nic, into=False)] += size / len(nics)
    load[tiers.leaf_link(ranks[0] // tiers.ranks_per_node // tiers.nodes_per_leaf, into=False)] += size
    load[UPLINK] += size
