"""Closed forms of an all-reduce over a two-tier fabric. Sizes in bytes, times in seconds, rates in bytes per second.

Sources: ring time ``2 (n-1)/n S/B`` (Patarasuk and Yuan 2009); which share of the ring's hops leaves a leaf switch is
counted for packed and derived for random placement.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

BYTES_PER_GBIT = 1e9 / 8.0


def ring_bytes(members: int, payload_bytes: ArrayLike) -> NDArray[np.float64]:
    """Bytes every member of a ring sends (and receives) to all-reduce a payload: ``2 (n-1)/n S``."""
    return np.asarray(2.0 * (members - 1) / members * np.asarray(payload_bytes, dtype=np.float64))


def ring_latency_s(members: int, hop_s: ArrayLike) -> NDArray[np.float64]:
    """Latency part of a ring all-reduce: ``2 (n-1)`` hops, seconds."""
    return np.asarray(2.0 * (members - 1) * np.asarray(hop_s, dtype=np.float64))


def crossing_hops(members: int, total_nodes: int, nodes_per_leaf: int, placement: Literal["packed", "spread"]) -> float:
    """How many of a ring's ``members`` hops lead from one leaf switch to another.

    Packed: the ring passes its leaves one after the other, one hop out of each. Spread: the job's nodes sit in random
    order, so that the next member shares the leaf with probability ``(L-1)/(N-1)``, and the expectation is returned.
    """
    if members < 2 or total_nodes <= nodes_per_leaf:
        return 0.0
    if placement == "packed":
        leaves = -(-members // nodes_per_leaf)
        return float(leaves) if leaves > 1 else 0.0
    return members * (total_nodes - nodes_per_leaf) / (total_nodes - 1)
