"""How NCCL sends: its protocols and channels, as far as they change bytes, latency and rates, and what it chooses.

Protocol LL writes 8 bytes at a time, 4 of data and 4 of a flag; LL128 writes 128, of which 120 are data; Simple sends
data only and synchronizes for each chunk. So LL has the least latency and the least rate, Simple the most of both.
An operation is cut over a number of channels, and each of them passes on no more than its own rate.

Sources: NCCL, ``src/graph/tuning.cc`` at commit b647562 (latencies of an operation and of a hop, what it expects of LL
and of trees) and ``src/graph/topo.h`` (rates of an NVLink and of PCIe); its maintainer in issue 281 (bytes of LL and
LL128); Hu et al., "Demystifying NCCL", arXiv 2507.04786 (LL at 25 to 50 % of the rate, LL128 at 95 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from paceenv.sim.cluster.collectives import TREE_BELOW_BYTES, Algorithm, Op, Way
from paceenv.sim.cluster.fabric import Fabric

Protocol = Literal["simple", "ll128", "ll"]
PROTOCOLS: tuple[Protocol, ...] = ("simple", "ll128", "ll")

DATA_SHARE = {"simple": 1.0, "ll128": 120.0 / 128.0, "ll": 0.5}
"""Bytes of data in a byte on a link."""

_RING_SIMPLE_US = {"nvlink": 3.4, "pcie": 5.7, "net": 14.0}
"""One hop of a ring by Simple, in NCCL's model: the latency that a config gives."""
_HOP_US: dict[str, dict[str, dict[str, float]]] = {
    "nvlink": {"ring": {"ll": 0.6, "ll128": 1.9}, "tree": {"ll": 0.6, "ll128": 1.25}},
    "pcie": {"ring": {"ll": 1.0, "ll128": 2.5}, "tree": {"ll": 1.0, "ll128": 1.9}},
    "net": {"ring": {"ll": 2.7, "ll128": 4.0}, "tree": {"ll": 5.0, "ll128": 8.5}},
}
_FIXED_US = {"simple": 8.4, "ll128": 14.0, "ll": 6.6}
"""What an operation takes beside its hops and bytes, in NCCL's model of a ring."""

EXPECTED_LL = 0.5
"""What NCCL expects of LL, relative to the rate that its flags leave: a quarter of the link in all."""
EXPECTED_TREE = 0.92
"""What NCCL expects of a tree, relative to a ring with the same bytes on its busiest link."""


class Choice(NamedTuple):
    """How one operation is sent; the default changes nothing."""

    algorithm: Way = "ring"
    protocol: Protocol = "simple"
    hop_share: float = 1.0
    """Latency of a hop between nodes, relative to the one in the config."""
    inside_hop_share: float = 1.0
    """The same inside a node."""
    channels_Bps: float = math.inf
    """What all its channels pass on, of one member in one direction."""
    operation_s: float = 0.0
    """What it takes beside its hops and bytes, once."""

    @property
    def data_share(self) -> float:
        """Bytes of data in a byte on a link."""
        return DATA_SHARE[self.protocol]

    @property
    def expected(self) -> float:
        """The rate that NCCL counts on when it chooses, relative to what the operation reaches."""
        return (EXPECTED_LL if self.protocol == "ll" else 1.0) * (EXPECTED_TREE if self.algorithm == "tree" else 1.0)


AS_GIVEN = Choice()


def choices(fabric: Fabric, op: Op, algorithm: Algorithm, payload_bytes: float, *, nodes: int = 2) -> list[Choice]:
    """The ways in which NCCL may do an operation: one, or with ``protocol: auto`` those from which it takes the best.

    Algorithms other than tree and auto count as a ring. Messages from each to each, and sends, know no LL128.
    """
    ways = []
    for way in _algorithms(fabric, op, algorithm, payload_bytes, nodes):
        for protocol in _protocols(fabric, op):
            fixed_s = fabric.operation_us * 1e-6 * _FIXED_US[protocol] / _FIXED_US["simple"]
            if protocol == "simple":
                ways.append(Choice(way, channels_Bps=fabric.channels_Bps, operation_s=fixed_s))
                continue
            inside = "pcie" if fabric.intra_node == "pcie" else "nvlink"
            across, within = (_HOP_US[link][way][protocol] / _RING_SIMPLE_US[link] for link in ("net", inside))
            ways.append(Choice(way, protocol, across, within, fabric.channels_Bps, fixed_s))
    return ways


def _algorithms(fabric: Fabric, op: Op, algorithm: Algorithm, payload_bytes: float, nodes: int) -> Iterator[Way]:
    is_small = payload_bytes < TREE_BELOW_BYTES
    has_tree = op == "all_reduce" and nodes > 1 and algorithm in ("tree", "auto")
    if has_tree and (algorithm == "tree" or fabric.protocol == "auto" or is_small):
        yield "tree"
        if algorithm == "tree" or fabric.protocol != "auto":
            return
    yield "ring"


def _protocols(fabric: Fabric, op: Op) -> tuple[Protocol, ...]:
    has_ll128 = op not in ("send", "all_to_all")
    if fabric.protocol != "auto":
        return ("simple" if fabric.protocol == "ll128" and not has_ll128 else fabric.protocol,)
    # NCCL trusts LL128 only where a node's GPUs are on NVLink
    has_ll128 = has_ll128 and fabric.intra_node != "pcie"
    return tuple(one for one in PROTOCOLS if has_ll128 or one != "ll128")
