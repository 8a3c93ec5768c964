"""Closed forms of collectives: what each algorithm sends in how many rounds, and how long that takes on a kind of link.

Sizes in bytes, times in seconds, rates in bytes per second. A member is whatever has its own link: a GPU inside a node,
a node behind its NICs, a chip of a torus. Sources are named at each algorithm; the tests execute them chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTES_PER_GBIT = 1e9 / 8.0
TREE_BELOW_BYTES = 25 * 2.0**20
"""Where ``auto`` goes over from tree to ring by default. NCCL chooses by a cost table that depends on the machine. This
value is inferred from a 2 x 2 GPU cluster: its 25.2 MB messages crossed as by a tree and larger ones as by a ring. It
is also the default cap of a gradient bucket."""

Op = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send"]
Algorithm = Literal["ring", "tree", "halving_doubling", "hierarchical", "torus", "auto"]
Bytes = float | NDArray[np.float64]


class Volume(NamedTuple):
    """What one collective asks of its members' links."""

    rounds: Bytes
    """Message rounds one after the other; each costs one hop's latency."""
    sent_bytes: Bytes
    """Bytes one after the other in one direction on the busiest member's own link (of a torus: on one of its links)."""


@dataclass(frozen=True)
class Law:
    """Time of a collective on one kind of link: latency + size / bandwidth + sqrt(size).

    The last term is what cutting a message into chunks costs: with the best chunk size a pipeline of depth d takes
    ``S/B + 2 sqrt(d hop S/B) + d hop``. Published bandwidth curves want it (``paceenv.calibration.fits.bandwidth`` fits
    it).
    """

    hop_s: float
    bandwidth_Bps: float
    sqrt_s: float = 0.0
    """Seconds per square root of a byte."""

    def time_s(self, volume: Volume) -> Bytes:
        """Seconds a collective of this volume takes when the links are free."""
        bytes_s = volume.sent_bytes / self.bandwidth_Bps
        return volume.rounds * self.hop_s + bytes_s + self.sqrt_s * volume.sent_bytes**0.5


def volume(
    op: Op,
    algorithm: Algorithm,
    members: int,
    payload_bytes: Bytes,
    *,
    per_node: int = 1,
    dims: Sequence[int] = (),
    tree_below_bytes: float = TREE_BELOW_BYTES,
) -> Volume:
    """Rounds and bytes of a collective.

    Args:
        op: the collective.
        algorithm: how it is done. ``hierarchical`` gives the part between nodes; :func:`hierarchical` gives both.
        members: ranks that take part.
        payload_bytes: number or array. All-reduce, reduce-scatter and all-gather: the full tensor. All-to-all: what one
            member holds. Broadcast and send: the message.
        per_node: members that share a node.
        dims: size of a torus in each dimension.
        tree_below_bytes: payload below which ``auto`` chooses the tree.
    """
    n, S = members, payload_bytes
    if n < 2:
        return Volume(0.0, 0.0 * S)
    if op == "send":
        return Volume(1.0, 1.0 * S)
    match algorithm:
        case "ring":
            return _ring(op, n, S)
        case "tree":
            return _tree(op, n, S)
        case "halving_doubling":
            return _halving_doubling(op, n, S)
        case "hierarchical":
            return hierarchical(op, n // per_node, per_node, S)[1]
        case "torus":
            return _torus(op, n, S, dims)
        case "auto":
            ring = _ring(op, n, S)
            if op != "all_reduce":
                return ring
            tree, small = _tree(op, n, S), tree_below_bytes > S
            if isinstance(S, np.ndarray):
                return Volume(*(np.where(small, a, b) for a, b in zip(tree, ring, strict=True)))
            return tree if small else ring


def _ring(op: Op, n: int, S: Bytes) -> Volume:
    """Ring (Patarasuk and Yuan 2009): every member passes ``n - 1`` of n parts on, twice for an all-reduce.

    A broadcast is a pipeline along the ring; an all-to-all has no ring but ``n - 1`` pairwise exchanges.
    """
    passes = {"all_reduce": 2.0, "broadcast": n / (n - 1)}.get(op, 1.0)
    return Volume((n - 1) * (2.0 if op == "all_reduce" else 1.0), passes * (n - 1) / n * S)


def _tree(op: Op, n: int, S: Bytes) -> Volume:
    """Two binary trees with half of the payload each (Sanders, Speck and Traeff 2009), pipelined, as in NCCL.

    An inner member of one tree is a leaf of the other: for an all-reduce it sends half the payload up and down to two
    children, and half up as a leaf: ``2 S``, as much as a large ring, in ``2 ceil(log2 n)`` rounds. With two members
    it is ``S``, with three ``1.5 S``, for want of children. NCCL's members are nodes, each of them a chain inside.
    Reduce-scatter and all-gather use one binomial tree per part, aggregated (PAT, NCCL 2.23): see halving/doubling.
    """
    if op == "all_reduce":
        return Volume(2.0 * _log2(n), min(n, 4) / 2.0 * S)
    if op == "broadcast":
        return Volume(float(_log2(n)), 1.0 * S)
    return _ring(op, n, S) if op == "all_to_all" else _halving_doubling(op, n, S)


def _halving_doubling(op: Op, n: int, S: Bytes) -> Volume:
    """Recursive halving and doubling (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005).

    An all-reduce halves the vector in log2(n) rounds and doubles it in as many: ``2 (n-1)/n S``. Where n is not a power
    of two, p = 2^floor(log2 n), the n - p members too many first send all they have to a partner and are sent the
    result at the end: two more rounds, each of S one after the other. All-gather (and by duality reduce-scatter) is
    Bruck's, ceil(log2 n) rounds for any n; broadcast is scatter and all-gather (van de Geijn); all-to-all is Bruck's,
    which sends every part once for each 1 in the binary form of its distance.
    """
    parts = (n - 1) / n * S
    match op:
        case "all_reduce":
            p = 2 ** math.floor(math.log2(n))
            fold = 0.0 if p == n else 2.0
            return Volume(2.0 * math.log2(p) + fold, (2.0 * (p - 1) / p + fold) * S)
        case "broadcast":
            return Volume(2.0 * _log2(n), 2.0 * parts)
        case "all_to_all":
            return Volume(float(_log2(n)), sum(k.bit_count() for k in range(n)) / n * S)
        case _:
            return Volume(float(_log2(n)), parts)


def _torus(op: Op, n: int, S: Bytes, dims: Sequence[int]) -> Volume:
    """Rings along every dimension of a torus at once, each in both directions: 2 links per dimension and member.

    The payload is cut into one part per link and each part takes the dimensions in another order (Sack and Gropp 2015):
    every link carries ``2 (n-1)/n S / links``, exact for equal dimensions, and for unequal ones with parts cut in
    proportion. An all-to-all is bound by the links of the longest dimension: a message travels d/4 of them on average
    (``(d^2 - 1) / 4d`` for odd d), half in either direction.
    """
    long = [d for d in dims if d > 1]
    if math.prod(long) != n:
        raise ValueError(f"torus dims {list(dims)} multiply to {math.prod(dims)}, not to the {n} members")
    links, steps = 2 * len(long), float(sum(d - 1 for d in long))
    match op:
        case "all_reduce":
            return Volume(2.0 * steps, 2.0 * (n - 1) / n * S / links)
        case "all_to_all":
            hops = max((d * d - d % 2) / (4.0 * d) for d in long)
            return Volume(float(sum(d // 2 for d in long)), hops / 2.0 * S)
        case "broadcast":
            return Volume(steps, S / links)
        case _:
            return Volume(steps, (n - 1) / n * S / links)


def hierarchical(op: Op, nodes: int, per_node: int, payload_bytes: Bytes) -> tuple[Volume, Volume]:
    """A collective in two levels, for one member of a node: the part inside the node and the part between nodes.

    All-reduce: reduce-scatter inside, ring all-reduce of each member's own part between nodes, all-gather inside.
    Reduce-scatter and all-gather: the same with one of the halves. Broadcast: across, then inside. All-to-all: data for
    other nodes is first gathered by local index inside the node, then exchanged among equal indices.

    Args:
        op: the collective.
        nodes: that take part.
        per_node: members on a node.
        payload_bytes: as in :func:`volume`.
    """
    S, k = payload_bytes, per_node
    part = S if op in ("broadcast", "all_to_all") else S / k
    return volume(op, "ring", k, S), volume(op, "ring", nodes, part)


def _log2(n: int) -> int:
    """``ceil(log2 n)``, exact."""
    return (n - 1).bit_length()


def crossing_hops(members: int, total_nodes: int, nodes_per_leaf: int, placement: Literal["packed", "spread"]) -> float:
    """How many hops of a ring lead from one leaf switch to another.

    Packed: the ring passes its leaves one after the other, one hop out of each. Spread: the nodes of the job are in
    random order, so the next member shares the leaf with probability ``(L-1)/(N-1)``. The expectation is returned.

    Args:
        members: of the ring.
        total_nodes: N, in the job.
        nodes_per_leaf: L, under one leaf switch.
        placement: of the job's nodes.
    """
    if members < 2 or total_nodes <= nodes_per_leaf:
        return 0.0
    if placement == "packed":
        leaves = -(-members // nodes_per_leaf)
        return float(leaves) if leaves > 1 else 0.0
    return members * (total_nodes - nodes_per_leaf) / (total_nodes - 1)


def crossing_bytes(
    op: Literal["all_reduce", "gather", "all_to_all"],
    algorithm: Algorithm,
    nodes: int,
    total_nodes: int,
    nodes_per_leaf: int,
    placement: Literal["packed", "spread"],
    payload_bytes: Bytes,
    *,
    per_node: int = 1,
) -> Bytes:
    """Bytes of one collective that leave a leaf switch, all nodes together.

    Packed placement is counted message by message, with the trees in NCCL's order; halving/doubling exchanges most with
    its nearest nodes. For spread nodes the expectation is returned, as every message crosses with the same probability.

    Args:
        op: the collective.
        algorithm: of an all-reduce.
        nodes: that take part.
        total_nodes: in the job.
        nodes_per_leaf: under one leaf switch.
        placement: of the job's nodes.
        payload_bytes: as in :func:`volume`; of a gather, what each sender sends.
        per_node: members on a node. A flat ``ring`` passes all of them one after the other. It crosses as often as a
            ring of nodes but cuts its payload into more parts.
    """
    n, S = nodes, payload_bytes
    if n < 2 or total_nodes <= nodes_per_leaf:
        return 0.0 * S
    if op == "all_reduce" and algorithm not in ("tree", "halving_doubling"):
        members = n * per_node if algorithm == "ring" else n
        passed = volume("all_reduce", "ring", members, S).sent_bytes
        return crossing_hops(n, total_nodes, nodes_per_leaf, placement) * passed
    source, target, share = (np.array(column) for column in zip(*_messages(op, algorithm, n), strict=True))
    if placement == "spread":
        return float(share.sum()) * (total_nodes - nodes_per_leaf) / (total_nodes - 1) * S
    return float(share[source // nodes_per_leaf != target // nodes_per_leaf].sum()) * S


def halving_doubling_rounds(
    nodes: int, total_nodes: int, nodes_per_leaf: int, placement: Literal["packed", "spread"]
) -> list[tuple[float, float]]:
    """The rounds of an all-reduce by halving and doubling, as shares of the payload.

    Near partners keep the NICs busy and far ones the tier above the leaves, in turns: neither works while a round waits
    for the other. The sums over rounds are :func:`volume` and :func:`crossing_bytes`.

    Args:
        nodes: that take part.
        total_nodes: in the job.
        nodes_per_leaf: under one leaf switch.
        placement: of the job's nodes.

    Returns:
        For each round, the share that a node sends and the share of all nodes together that leaves a leaf.
    """
    p = 2 ** math.floor(math.log2(nodes))

    def one_round(pairs: list[tuple[int, int]], share: float) -> tuple[float, float]:
        if total_nodes <= nodes_per_leaf:
            crossing = 0.0
        elif placement == "spread":
            crossing = len(pairs) * (total_nodes - nodes_per_leaf) / (total_nodes - 1)
        else:
            crossing = float(sum(a // nodes_per_leaf != b // nodes_per_leaf for a, b in pairs))
        return share, crossing * share

    fold = [one_round([(i, i - p) for i in range(p, nodes)], 1.0)] if nodes > p else []
    halving = [one_round([(i, i ^ 2**k) for i in range(p)], 0.5 ** (k + 1)) for k in range(p.bit_length() - 1)]
    return fold + halving + halving[::-1] + fold


def _messages(op: str, algorithm: Algorithm, n: int) -> list[tuple[int, int, float]]:
    """Bytes that each member sends to each other in all, as a share of the payload."""
    if op == "gather":
        return [(i, 0, 1.0) for i in range(1, n)]
    if op == "all_to_all":
        return [(i, j, 1.0 / n) for i in range(n) for j in range(n) if i != j]
    if algorithm == "tree":
        edges = list(tree_parents(n).items())
        other = [((i + 1) % n, (j + 1) % n) if n % 2 else (n - 1 - i, n - 1 - j) for i, j in edges]
        return [(a, b, 0.5) for i, j in edges + other for a, b in ((i, j), (j, i))]
    p = 2 ** math.floor(math.log2(n))
    folded = [(a, b, 1.0) for i in range(p, n) for a, b in ((i, i - p), (i - p, i))]
    return folded + [(i, i ^ 2**k, 2.0**-k) for k in range(p.bit_length() - 1) for i in range(p)]


def tree_parents(n: int) -> dict[int, int]:
    """An in-order binary tree over 0 to n - 1 as NCCL builds it: the parent of each member; member 0 is the root."""
    parents = {}
    for i in range(1, n):
        low = i & -i
        up = (i ^ low) | (low << 1)
        parents[i] = up if up < n else i ^ low
    return parents
