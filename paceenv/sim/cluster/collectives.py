"""Closed forms of collectives: what each algorithm sends, in how many rounds.

Sizes in bytes. A member is whatever has its own link: a GPU inside a node, or a node behind its NICs. Sources are named
at each algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTES_PER_GBIT = 1e9 / 8.0
TREE_BELOW_BYTES = 25 * 2.0**20
"""Where ``auto`` goes over from tree to ring. NCCL chooses by a cost table that depends on the machine. This value is
inferred from a 2 x 2 GPU cluster: its 25.2 MB messages crossed as by a tree and larger ones as by a ring. It is also
the default cap of a gradient bucket."""

Op = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "gather"]
Way = Literal["ring", "tree"]
Algorithm = Literal[Way, "hierarchical", "auto"]
Placement = Literal["packed", "spread"]
Bytes = float | NDArray[np.float64]


class Volume(NamedTuple):
    """What one collective asks of its members' links."""

    rounds: float
    """Message rounds one after the other; each costs one hop's latency."""
    sent_bytes: Bytes
    """Bytes one after the other in one direction on the busiest member's own link."""


@dataclass(frozen=True)
class Law:
    """Time of a collective on one kind of link: latency + size / bandwidth + sqrt(size).

    The last term is what cutting a message into chunks costs: with the best chunk size a pipeline of depth d takes
    ``S/B + 2 sqrt(d hop S/B) + d hop``. Published bandwidth curves want it (``paceenv.calibration.bandwidth`` fits
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


def volume(op: Op, way: Way, members: int, payload_bytes: Bytes) -> Volume:
    """Rounds and bytes of a collective.

    Around a ring (Patarasuk and Yuan 2009) every member passes ``n - 1`` of n parts on, twice for an all-reduce. A
    broadcast is a pipeline along the ring; an all-to-all has no ring but ``n - 1`` pairwise exchanges.

    An all-reduce by tree takes two binary ones with half of the payload each (Sanders, Speck and Traeff 2009),
    pipelined, as in NCCL. An inner member of one tree is a leaf of the other: it sends half the payload up and down to
    two children, and half up as a leaf: ``2 S``, as much as a large ring, in ``2 ceil(log2 n)`` rounds. With two
    members it is ``S``, with three ``1.5 S``, for want of children. NCCL's members are nodes, each a chain inside.

    Args:
        way: tree for an all-reduce only.
        payload_bytes: number or array. All-reduce, reduce-scatter and all-gather: the full tensor. All-to-all: what one
            member holds. Broadcast, send and gather: the message.
    """
    n, S = members, payload_bytes
    if n < 2:
        return Volume(0.0, 0.0 * S)
    if op in ("send", "gather"):
        return Volume(1.0, 1.0 * S)
    if way == "tree":
        return Volume(2.0 * (n - 1).bit_length(), min(n, 4) / 2.0 * S)
    passes = {"all_reduce": 2.0, "broadcast": n / (n - 1)}.get(op, 1.0)
    return Volume((n - 1) * (2.0 if op == "all_reduce" else 1.0), passes * (n - 1) / n * S)


def tree_messages(n: int) -> list[tuple[int, int]]:
    """Sender and receiver of every message of an all-reduce by two trees, each with half of the payload."""
    edges = list(tree_parents(n).items())
    other = [((i + 1) % n, (j + 1) % n) if n % 2 else (n - 1 - i, n - 1 - j) for i, j in edges]
    return [(a, b) for i, j in edges + other for a, b in ((i, j), (j, i))]


def tree_parents(n: int) -> dict[int, int]:
    """An in-order binary tree over 0 to n - 1 as NCCL builds it: the parent of each member; member 0 is the root."""
    parents = {}
    for i in range(1, n):
        low = i & -i
        up = (i ^ low) | (low << 1)
        parents[i] = up if up < n else i ^ low
    return parents
