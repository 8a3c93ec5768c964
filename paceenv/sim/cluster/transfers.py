"""The cost of a step's collective on the fabric of a cluster: alone, on the shared uplink, in latency, and as incast.

Between the closed forms of :mod:`paceenv.sim.cluster.collectives` and the engine's records
(:mod:`paceenv.sim.cluster.derive`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.cluster.collectives import (
    BYTES_PER_GBIT,
    TREE_BELOW_BYTES,
    Algorithm,
    Law,
    Way,
    crossing_bytes,
    crossing_hops,
    volume,
)
from paceenv.sim.cluster.environment import Job
from paceenv.sim.cluster.fabric import INTRA_NODE_GBPS, Fabric
from paceenv.sim.cluster.protocols import Choice, choices
from paceenv.sim.cluster.quantity import Draw
from paceenv.sim.cluster.step_time import Step, plan
from paceenv.sim.cluster.workload import Gpu, Workload

Values = float | NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """Where the members of a process group sit: ``per_node`` on each of ``nodes``; ``sharing`` groups share a node."""

    nodes: int
    per_node: int
    groups: int
    total_nodes: int
    ranks_per_node: int
    sharing: int = 1


@dataclass(frozen=True)
class Links:
    """Rates (bytes per second, one direction) and costs of what a group's collective passes; drawn for E episodes."""

    rank_Bps: Values
    """A rank's share of its node's NICs."""
    inside_Bps: Values
    hop_s: Values
    inside_hop_s: Values
    sqrt_s: Values
    inside_sqrt_s: Values
    uplink_Bps: Values
    leaf_Bps: Values
    """What one leaf can send up; infinite where a single shared tier is given."""
    own_imbalance: Values
    """Load of the busiest equal-cost path over the mean, of one group's flows."""
    imbalance: Values
    """The same of the flows of all groups."""


class Times(NamedTuple):
    """Seconds; what ``layout.JOB`` calls ``transfer_alone_s``, ``uplink_work_s`` and ``latency_s``."""

    alone_s: Values
    uplink_work_s: Values
    latency_s: Values


def draw_links(fabric: Fabric, place: Layout, draw: Draw) -> Links:
    """The links that the members of a group use. The order of the counted draws is part of every config's results."""
    nic_gbps, inside_gbps = draw(fabric.nic_gbps), draw(fabric.intra_node_gbps)
    if fabric.intra_node_gbps is None:
        inside_gbps = INTRA_NODE_GBPS[fabric.intra_node]
    uplink_Bps = np.asarray(draw(fabric.uplink_gbps)) * BYTES_PER_GBIT
    hop_s = np.asarray(draw(fabric.latency_us)) * 1e-6
    rank_Bps: Values = np.asarray(nic_gbps) * fabric.nics_per_node / place.ranks_per_node * BYTES_PER_GBIT
    leaf_Bps: Values = math.inf
    if fabric.oversubscription is not None:
        ratio = np.asarray(draw.named("fabric.oversubscription", fabric.oversubscription))
        leaf_Bps = fabric.nodes_per_leaf * rank_Bps * place.ranks_per_node / ratio
        uplink_Bps = np.asarray(_leaves(place.total_nodes, fabric) * leaf_Bps)
    own, every = _path_imbalance(fabric, place, draw)
    inside_us = draw.named("fabric.intra_node_latency_us", fabric.intra_node_latency_us)
    return Links(
        rank_Bps,
        np.asarray(inside_gbps) * BYTES_PER_GBIT,
        hop_s,
        hop_s if fabric.intra_node_latency_us is None else np.asarray(inside_us) * 1e-6,
        np.asarray(draw.named("fabric.sqrt", fabric.sqrt_us_per_sqrt_mb)) * 1e-9,
        np.asarray(draw.named("fabric.intra_node_sqrt", fabric.intra_node_sqrt_us_per_sqrt_mb)) * 1e-9,
        uplink_Bps,
        leaf_Bps,
        own,
        every,
    )


def plan_step(workload: Workload, gpu: Gpu, fabric: Fabric, job: Job) -> Step:
    """The step of a workload on the GPUs of a job, over the laws of its fabric.

    Raises:
        InputError: where the workload does not fit or does not divide.
    """
    inside, across = link_laws(fabric, job)
    return plan(workload, gpu, job.ranks, job.ranks_per_node, inside, across, algorithm=job.algorithm)


def link_laws(fabric: Fabric, job: Job) -> tuple[Law, Law]:
    """The laws of a rank's link inside its node, and of all NICs of a node together."""
    place = Layout(job.nodes, job.ranks_per_node, 1, job.nodes, job.ranks_per_node)
    links = draw_links(fabric, place, Draw(np.zeros(1, np.uint64), job.nodes))
    node_Bps = float(np.ravel(links.rank_Bps)[0]) * job.ranks_per_node
    inside = Law(float(links.inside_hop_s), float(links.inside_Bps), float(links.inside_sqrt_s))
    return inside, Law(float(links.hop_s), node_Bps, float(links.sqrt_s))


def described_place(job: Job, step: Step) -> Layout:
    """Where a workload's data-parallel groups sit."""
    group = step.group
    nodes = max(group.members // group.per_node, 1)
    return Layout(nodes, group.per_node, step.groups, job.nodes, job.ranks_per_node, group.sharing)


def described_times(algorithm: Algorithm, fabric: Fabric, step: Step, place: Layout, links: Links) -> Times:
    """The data-parallel collectives of a workload: alone as its step says, on the uplink by bytes across leaves."""
    if place.nodes < 2:
        return Times(step.reduce_s, 0.0, 0.0)
    work_s, own_s = _uplink_times(algorithm, fabric, place, links, np.asarray(step.payload_bytes))
    return Times(np.maximum(step.reduce_s, own_s), work_s, 0.0)


def sent_times(algorithm: Algorithm, fabric: Fabric, place: Layout, links: Links, payload_bytes: Values) -> Times:
    """An all-reduce of one group with the fabric to itself, by NCCL's protocols and channels where the fabric has any.

    Args:
        payload_bytes: the full tensor; number or ``(E,)``.
    """
    S = np.asarray(payload_bytes)
    if fabric.sends_as_given:
        return all_reduce_times(algorithm, fabric, place, links, S)
    if algorithm == "auto" and fabric.protocol != "auto":
        return _by_size(S, [sent_times(way, fabric, place, links, S) for way in ("tree", "ring")])
    ways = choices(fabric, "all_reduce", algorithm, 0.0, nodes=place.nodes)
    times = [
        all_reduce_times(one.algorithm, fabric, place, _as_chosen(links, one, place), S / one.data_share)
        for one in ways
    ]
    times = [a._replace(latency_s=a.latency_s + one.operation_s) for a, one in zip(times, ways, strict=True)]
    expected_s = [
        np.maximum(found.alone_s, found.uplink_work_s) / one.expected + found.latency_s
        for one, found in zip(ways, times, strict=True)
    ]
    best = np.argmin(np.broadcast_arrays(*expected_s), axis=0)
    return Times(*(np.choose(best, column) for column in zip(*times, strict=True)))


def _by_size(S: NDArray[np.float64], ways: Sequence[Times]) -> Times:
    """The first of two ways for small payloads, the second for the others."""
    small = TREE_BELOW_BYTES > S
    return Times(*(np.where(small, a, b) for a, b in zip(*ways, strict=True)))


def _as_chosen(links: Links, choice: Choice, place: Layout) -> Links:
    """Links as an operation finds them that has latencies and channels of its own; a node has its channels once."""
    return replace(
        links,
        rank_Bps=np.minimum(links.rank_Bps, choice.channels_Bps / place.per_node),
        inside_Bps=np.minimum(links.inside_Bps, choice.channels_Bps),
        hop_s=links.hop_s * choice.hop_share,
        inside_hop_s=links.inside_hop_s * choice.inside_hop_share,
    )


def all_reduce_times(algorithm: Algorithm, fabric: Fabric, place: Layout, links: Links, payload_bytes: Values) -> Times:
    """An all-reduce of one group with the fabric to itself.

    Args:
        algorithm: ``ring`` is one flat ring over all ranks, whose bytes cross the NICs and the links inside at the same
            time. ``tree`` has the nodes as members, each a chain inside. The others reduce inside first, then across,
            then inside.
        payload_bytes: the full tensor; number or ``(E,)``.
    """
    S, k, nodes = np.asarray(payload_bytes), place.per_node, place.nodes
    if algorithm == "auto":
        return _by_size(S, [all_reduce_times(way, fabric, place, links, S) for way in ("tree", "ring")])
    alone_s: Values
    if algorithm in ("ring", "tree") and k > 1:
        if algorithm == "ring":
            flat = volume("all_reduce", "ring", nodes * k, S)
            inside_bytes, node_bytes = flat.sent_bytes, flat.sent_bytes if nodes > 1 else 0.0 * S
            latency_s = flat.rounds * (links.hop_s if nodes > 1 else links.inside_hop_s)
        else:
            tree = volume("all_reduce", "tree", nodes, S)
            inside_bytes, node_bytes = (min(k, 3) - 1.0) * S, tree.sent_bytes
            latency_s = tree.rounds * links.hop_s + 2.0 * (k - 1) * links.inside_hop_s
        alone_s = np.maximum(inside_bytes / links.inside_Bps, node_bytes / k / _share_Bps(links, place))
        sqrt_bytes = np.maximum(inside_bytes if nodes == 1 else 0.0 * S, node_bytes / k)
        sqrt_s: Values = (links.inside_sqrt_s if nodes == 1 else links.sqrt_s) * sqrt_bytes**0.5
    else:
        way: Way = "tree" if algorithm == "tree" else "ring"
        inside, across = volume("all_reduce", way, k, S), volume("all_reduce", way, nodes, S)
        alone_s = across.sent_bytes / k / _share_Bps(links, place)
        inside_s = inside.sent_bytes / links.inside_Bps
        latency_s = inside_s + (across.rounds * links.hop_s + inside.rounds * links.inside_hop_s)
        sqrt_s = links.inside_sqrt_s * inside.sent_bytes**0.5 + links.sqrt_s * (across.sent_bytes / k) ** 0.5
    work_s, own_s = _uplink_times(algorithm, fabric, place, links, S)
    return Times(np.maximum(alone_s, own_s), work_s, latency_s + sqrt_s)


def message_s(
    op: Literal["gather", "all_to_all"], fabric: Fabric, place: Layout, links: Links, payload_bytes: Values
) -> Values:
    """How long one sender's message of a gather or an all-to-all takes alone at the port of its receiver, seconds.

    Where the tier above the leaves is slower than the ports for all groups together, its share counts instead.

    Args:
        payload_bytes: of a sender to a gather, or of a member of an all-to-all; number or ``(E,)``.
    """
    members = place.nodes * place.per_node
    port_s = payload_bytes / (1.0 if op == "gather" else float(members)) / _share_Bps(links, place)
    crossing = crossing_bytes(
        op,
        "ring",
        place.nodes,
        place.total_nodes,
        fabric.nodes_per_leaf,
        fabric.placement,
        place.per_node * np.asarray(payload_bytes),
    )
    above_s = place.groups * crossing / links.uplink_Bps * links.imbalance
    return np.maximum(port_s, above_s / max(members - 1, 1))


def _share_Bps(links: Links, place: Layout) -> Values:
    """A rank's rate across nodes; groups that share a node leave each other the NICs of the ranks they have there."""
    if place.sharing == 1:
        return links.rank_Bps
    return links.rank_Bps * (place.ranks_per_node / place.per_node / place.sharing)


def _uplink_times(
    algorithm: Algorithm, fabric: Fabric, place: Layout, links: Links, S: NDArray[np.float64]
) -> tuple[Values, Values]:
    """Seconds of the whole uplink that a group's collective takes, and how long its own leaves or paths make it."""
    where = place.nodes, place.total_nodes, fabric.nodes_per_leaf, fabric.placement
    crossing = crossing_bytes("all_reduce", algorithm, *where, S, per_node=place.per_node)
    work_s = crossing / links.uplink_Bps
    if fabric.ecmp_paths is None and fabric.oversubscription is None:
        return work_s, 0.0
    # with leaves of their own, a group that sits on a few of them can use no other's uplinks
    used, own_Bps = _group_leaves(fabric, place), links.leaf_Bps
    own_s = crossing / used / own_Bps if fabric.oversubscription is not None else work_s
    return work_s * links.imbalance, own_s * links.own_imbalance


def _leaves(nodes: int, fabric: Fabric) -> int:
    return -(-nodes // fabric.nodes_per_leaf)


def _group_leaves(fabric: Fabric, place: Layout) -> int:
    """On how many leaves a group sits."""
    if fabric.placement == "packed":
        return _leaves(place.nodes, fabric)
    return min(place.nodes, _leaves(place.total_nodes, fabric))


def _path_imbalance(fabric: Fabric, place: Layout, draw: Draw) -> tuple[Values, Values]:
    """Load of the busiest equal-cost path over the mean load, for one group and for all groups together.

    Every crossing hop of a ring is one flow per NIC. Each flow is hashed onto one of a leaf's paths, drawn for each
    episode (a hash of addresses stays as it is while a job runs). One flow cannot use more than its path: with fewer
    flows than paths the rest stays idle.
    """
    if fabric.ecmp_paths is None:
        return 1.0, 1.0
    hops = crossing_hops(place.nodes, place.total_nodes, fabric.nodes_per_leaf, fabric.placement)
    if hops == 0.0:
        return 1.0, 1.0
    own_leaves, leaves = _group_leaves(fabric, place), _leaves(place.total_nodes, fabric)
    if fabric.oversubscription is None:
        own_leaves = leaves = 1
    own_flows = max(1, round(hops / own_leaves)) * fabric.nics_per_node
    flows = max(own_flows, round(own_flows * place.groups * own_leaves / leaves))
    paths = fabric.ecmp_paths
    path_ELF = draw.integers("fabric.ecmp_paths", paths, leaves * flows).reshape(-1, leaves, flows)
    return (
        _busiest(path_ELF[:, :own_leaves, :own_flows], paths) * paths / own_flows,
        _busiest(path_ELF, paths) * paths / flows,
    )


def _busiest(path_ELF: NDArray[np.int64], paths: int) -> NDArray[np.float64]:
    """Flows on the most loaded path of any leaf, ``(E,)``."""
    E, leaves, _ = path_ELF.shape
    at = path_ELF + paths * np.arange(E * leaves).reshape(E, leaves, 1)
    counts = np.bincount(at.ravel(), minlength=E * leaves * paths)
    return np.asarray(counts.reshape(E, leaves * paths).max(axis=1), dtype=np.float64)
