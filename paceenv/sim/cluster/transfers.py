"""What transfers take of a cluster's fabric: of a program's on rates that are numbers, and of the one collective of a
job that is described by times, on rates that each episode may draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.cluster.collectives import BYTES_PER_GBIT, TREE_BELOW_BYTES, Algorithm, Op, Way
from paceenv.sim.cluster.environment import Job
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.program.footprint import Tiers, Topology, Use, Values, laid, use
from paceenv.sim.cluster.program.program_tables import Start
from paceenv.sim.cluster.quantity import Draw


def tiers_of(fabric: Fabric, job: Job, draw: Draw | None = None, *, has_tenants: bool = False) -> Tiers:
    """The links of a fabric for the nodes of a job.

    Where leaves have uplinks of their own, the top tier carries what all of them do. That alone limits no job, so it is
    left out unless tenants share it.

    Args:
        draw: of the episodes, for rates that are drawn; the order of the counted draws is part of every config's
            results. Default: rates are numbers.
    """
    draw = Draw(np.zeros(1, np.uint64), job.nodes) if draw is None else draw
    nic_gbps, inside_gbps = draw(fabric.nic_gbps), draw(fabric.intra_node_gbps)
    uplink_Bps = draw(fabric.uplink_gbps) * BYTES_PER_GBIT
    hop_s = draw(fabric.latency_us) * 1e-6
    rank_Bps = nic_gbps * fabric.nics_per_node / job.ranks_per_node * BYTES_PER_GBIT
    leaf_Bps: Values = math.inf
    if fabric.oversubscription is not None:
        ratio = draw.named("fabric.oversubscription", fabric.oversubscription)
        leaf_Bps = fabric.nodes_per_leaf * rank_Bps * job.ranks_per_node / ratio
        uplink_Bps = -(-job.nodes // fabric.nodes_per_leaf) * leaf_Bps if has_tenants else math.inf
    inside_us = draw.named("fabric.intra_node_latency_us", fabric.intra_node_latency_us)
    return Tiers(
        job.nodes,
        job.ranks_per_node,
        fabric.nodes_per_leaf,
        fabric.nics_per_node,
        inside_gbps * BYTES_PER_GBIT,
        rank_Bps * job.ranks_per_node / fabric.nics_per_node,
        leaf_Bps,
        uplink_Bps,
        hop_s if fabric.intra_node_latency_us is None else inside_us * 1e-6,
        hop_s,
        draw.named("fabric.sqrt", fabric.sqrt_us_per_sqrt_mb) * 1e-9,
        draw.named("fabric.intra_node_sqrt", fabric.intra_node_sqrt_us_per_sqrt_mb) * 1e-9,
    )


def way_of(algorithm: Algorithm, op: Op, size_bytes: float, nodes: int) -> Way:
    """How a transfer of a program between so many nodes is sent: ``auto`` is a tree for small all-reduces."""
    is_tree = algorithm == "tree" or (algorithm == "auto" and size_bytes < TREE_BELOW_BYTES)
    return "tree" if is_tree and op == "all_reduce" and nodes > 1 else "ring"


def use_of(fabric: Fabric, job: Job, *, has_tenants: bool = False) -> Callable[[Start, Sequence[int]], Use]:
    """What a transfer of some ranks of a job takes of the links of a fabric."""
    tiers = tiers_of(fabric, job, has_tenants=has_tenants)

    def use_of_start(start: Start, members: Sequence[int]) -> Use:
        size = start.payload_bytes / start.parts
        way = way_of(job.algorithm, start.op, size, len({rank // tiers.ranks_per_node for rank in members}))
        efficiency, is_lost = fabric.efficiency.get(start.op, 1.0), fabric.unused_rate == "lost"
        one = use(tiers, start.op, members, size, way, efficiency=efficiency, is_lost=is_lost)
        weight = float(one.flows) if fabric.sharing == "flows" else 1.0
        return one._replace(alone_s=one.alone_s * start.parts, latency_s=one.latency_s * start.parts, weight=weight)

    return use_of_start


Times = tuple[Values, Values, Values]
"""Seconds; what ``layout.JOB`` calls ``transfer_alone_s``, ``uplink_work_s`` and ``latency_s``."""
_of_one_byte = lru_cache(256)(laid)


def all_reduce_times(job: Job, fabric: Fabric, tiers: Tiers, payload_bytes: Values) -> Times:
    """The all-reduce of a group of a job that is described by times, with the fabric to itself.

    Args:
        payload_bytes: number or ``(E,)``; ``auto`` is a tree for small payloads, a ring for others.
    """
    S = np.asarray(payload_bytes, np.float64)
    if job.algorithm != "auto":
        return _times_by(job.algorithm, job, fabric, tiers, S)
    tree, ring = (_times_by(way, job, fabric, tiers, S) for way in ("tree", "ring"))
    alone_s, work_s, latency_s = (np.where(TREE_BELOW_BYTES > S, a, b) for a, b in zip(tree, ring, strict=True))
    return alone_s, work_s, latency_s


def _times_by(algorithm: Algorithm, job: Job, fabric: Fabric, tiers: Tiers, S: NDArray[np.float64]) -> Times:
    """By one algorithm: bytes cross NICs and links inside at once, hierarchical ones one after the other.

    The first ranks of the job reduce one byte, of which all else is a multiple.
    """
    place = Topology(tiers.nodes, tiers.ranks_per_node, tiers.nodes_per_leaf, tiers.nics_per_node)
    one = _of_one_byte(place, "all_reduce", range(job.group_nodes * job.ranks_per_node), 1.0, algorithm)
    nodes, per_node = len(one.per_node), max(map(len, one.per_node.values()))
    inside, nic = (float(one.load[links].max()) for links in (place.inside_links, place.nic_links))
    alone_s = np.maximum(inside * S / tiers.inside_Bps, nic * S / tiers.nic_Bps)
    first_s, sqrt_s = one.first_bytes * S / tiers.inside_Bps, tiers.inside_sqrt_s * np.sqrt(one.first_bytes * S)
    hop_s, sqrt_s_of_hop = (tiers.hop_s, tiers.sqrt_s) if nodes > 1 else (tiers.inside_hop_s, tiers.inside_sqrt_s)
    sqrt_s = sqrt_s + sqrt_s_of_hop * np.sqrt(one.sent_bytes * S / (per_node if nodes > 1 else 1))
    latency_s = first_s + (one.rounds * hop_s + one.chain_rounds * tiers.inside_hop_s) + sqrt_s
    hops_above, leaves = float(one.hops_above), -(-job.group_nodes // tiers.nodes_per_leaf)
    if fabric.placement == "spread" and tiers.nodes > tiers.nodes_per_leaf:  # the expected number
        hops_above = one.hops * (tiers.nodes - tiers.nodes_per_leaf) / (tiers.nodes - 1)
        leaves = min(job.group_nodes, tiers.leaves)
    above_bytes = hops_above * (one.hop_bytes * S)
    if fabric.oversubscription is not None:  # a group can use no other's leaves
        alone_s = np.maximum(alone_s, above_bytes / leaves / tiers.leaf_Bps)
    return alone_s, above_bytes / tiers.uplink_Bps, latency_s


def message_s(
    op: Literal["gather", "all_to_all"], job: Job, fabric: Fabric, tiers: Tiers, payload_bytes: Values
) -> Values:
    """How long one sender's message of a gather or an all-to-all takes alone at the port of its receiver, seconds.

    Where the tier above the leaves is slower than the ports for all groups together, its share counts instead.

    Args:
        payload_bytes: of a sender to a gather, or of a member of an all-to-all; number or ``(E,)``.
    """
    n, L, N = job.group_nodes, fabric.nodes_per_leaf, job.nodes
    members = n * job.ranks_per_node
    rank_Bps = tiers.nic_Bps * tiers.nics_per_node / job.ranks_per_node
    port_s = payload_bytes / (1.0 if op == "gather" else float(members)) / rank_Bps
    apart = n - min(n, L) if op == "gather" else (n * n - sum(min(L, n - k) ** 2 for k in range(0, n, L))) / n
    if fabric.placement == "spread" and N > L:
        apart = (n - 1) * (N - L) / (N - 1)
    above_s = job.groups * apart * job.ranks_per_node * np.asarray(payload_bytes) / tiers.uplink_Bps
    return np.maximum(port_s, above_s / max(members - 1, 1))
