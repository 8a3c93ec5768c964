"""What a cluster config means message by message: ranks, links, leaves, and how a group's collective is scheduled."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from paceenv.core.errors import InputError
from paceenv.sim.cluster.collectives import BYTES_PER_GBIT, TREE_BELOW_BYTES, Placement
from paceenv.sim.cluster.fabric import BURST_KB, INTRA_NODE_GBPS, SEND_BUFFER_KB
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.quantity import Quantity, Scaled
from paceenv.sim.reference import schedules
from paceenv.sim.reference.network import Resource
from paceenv.sim.reference.schedules import Algorithm, Schedule

FIRST_BUCKET_BYTES = 2.0**20
"""Cap of the first gradient bucket in PyTorch's DistributedDataParallel."""

Kind = Literal["all_reduce", "gather", "all_to_all"]


def number(quantity: Quantity | None, nodes: int) -> float:
    """The value of a quantity that is not drawn; infinite for one that the config does not set."""
    match quantity:
        case None:
            return math.inf
        case float() | int():
            return float(quantity)
        case Scaled():
            law = quantity.power_law
            return float(law.value * (nodes / law.at_nodes) ** law.exponent)
        case _:
            raise InputError(
                f"{quantity}: a setup draws no quantities; allowed: a number, or a cluster as drawn for a seed"
            )


def refuse_what_is_unknown(cluster: Cluster) -> None:
    """The first feature of the config that the fast engine supports and this one does not, in one line."""
    fabric, power, reliability, noise = cluster.fabric, cluster.power, cluster.reliability, cluster.noise
    imperfect = any(quantity != 0.0 for quantity in (noise.late_wake_s, noise.missing_share))
    unknown = {
        "workload without a program": cluster.workload is not None and cluster.is_measured,
        "fabric.oversubscription without a program": fabric.oversubscription is not None and cluster.is_measured,
        "fabric.ecmp_paths": fabric.ecmp_paths is not None,
        "fabric.protocol or channels without a program": not (fabric.sends_as_given or not cluster.is_measured),
        "fabric.sqrt_us_per_sqrt_mb": fabric.sqrt_us_per_sqrt_mb != 0.0,
        "fabric.intra_node_sqrt_us_per_sqrt_mb": fabric.intra_node_sqrt_us_per_sqrt_mb != 0.0,
        "noise.transfer_cv without a program": noise.transfer_cv != 0.0 and cluster.is_measured,
        "synchronization.staleness with late or missing ranks": cluster.synchronization.staleness > 0 and imperfect,
        "power.heat_slowdown": power.heat_slowdown != 0.0,
        "reliability.checkpoint_iterations": reliability.checkpoint_iterations > 0,
        "reliability.mtbf_iterations": reliability.mtbf_iterations is not None,
    }
    for name, is_used in unknown.items():
        if is_used:
            raise InputError(f"{cluster.name}: {name} is set; allowed in the reference engine: not set")


@dataclass(frozen=True)
class TenantSetup:
    """A co-tenant: its uncontended compute and transfer times and how it shares the upper tier."""

    period_ratio: float
    comm_share: float
    rate_share: float
    weight: float
    ranks: int
    jitter_cv: float
    is_bursty: bool = False
    pause_rate: float = 0.0
    pause_periods: float = 1.0
    late_share: float = 1.0


def tenant_setups(cluster: Cluster) -> tuple[TenantSetup, ...]:
    """The co-tenants of a cluster whose quantities are numbers."""
    every, nodes = cluster.synchronization.sync_period, cluster.job.nodes
    return tuple(
        TenantSetup(
            number(t.period_ratio, nodes),
            number(t.comm_share, nodes),
            number(t.rate_share, nodes),
            number(t.weight, nodes),
            t.ranks,
            number(cluster.noise.jitter_cv, nodes) / math.sqrt(every)
            if t.jitter_cv is None
            else number(t.jitter_cv, nodes),
            t.bursty,
            number(t.pause_rate, nodes),
            number(t.pause_periods, nodes),
            number(cluster.fabric.late_share, nodes),
        )
        for t in cluster.tenants
    )


@dataclass(frozen=True)
class Setup:
    """One job in plain numbers; rates in bytes per second."""

    name: str
    nodes: int
    ranks_per_node: int
    group_nodes: int
    has_barrier: bool
    compute_s: float
    payload_bytes: float
    nic_Bps: float
    inside_Bps: float
    upper_Bps: float
    nodes_per_leaf: int
    placement: Placement
    hop_s: float
    inside_hop_s: float
    barrier_s: float
    tenants: tuple[TenantSetup, ...] = ()
    collective: Kind = "all_reduce"
    algorithm: Algorithm = "hierarchical"
    first_bucket_bytes: float = FIRST_BUCKET_BYTES
    """The payload passes in two parts, this much first; infinite: in one."""
    pieces: int = 16
    """In how many pieces a tree passes its payload on."""
    overlap_share: float = 0.0
    """Share of compute still to come when a rank enters the collective with its first gradients."""
    tail_bytes: float = 0.0
    """Last part of the payload, which only flows between ranks that have computed everything."""
    staleness: int = 0
    """By how many steps a rank may run ahead of the last complete collective."""
    incast_fit: float = math.inf
    """How many senders' opening windows a receiver's port can buffer."""
    send_buffer_bytes: float = 0.0
    """What the kernel of a gather's sender takes over from it."""
    timeout_s: float = 0.0
    """Retransmission timeout of a message whose window lost its end."""

    @classmethod
    def of(cls, cluster: Cluster) -> Setup:
        """The setup of a cluster config whose quantities are numbers, or follow the number of nodes."""
        refuse_what_is_unknown(cluster)
        job, fabric, every = cluster.job, cluster.fabric, cluster.synchronization.sync_period

        def value(quantity: Quantity | None) -> float:
            return number(quantity, job.nodes)

        inside_us = fabric.latency_us if fabric.intra_node_latency_us is None else fabric.intra_node_latency_us
        inside_gbps = fabric.intra_node_gbps or INTRA_NODE_GBPS[fabric.intra_node]
        payload_bytes = value(job.gradient_bytes)
        algorithm = job.algorithm
        if algorithm == "auto":
            algorithm = "tree" if payload_bytes < TREE_BELOW_BYTES else "ring"
        is_all_reduce = job.collective == "all_reduce"
        return cls(
            name=cluster.name,
            nodes=job.nodes,
            ranks_per_node=job.ranks_per_node,
            group_nodes=job.group_nodes,
            has_barrier=cluster.barrier,
            compute_s=value(job.compute_s) * every,
            payload_bytes=payload_bytes,
            nic_Bps=value(fabric.nic_gbps) * fabric.nics_per_node * BYTES_PER_GBIT,
            inside_Bps=value(inside_gbps) * BYTES_PER_GBIT,
            upper_Bps=value(fabric.uplink_gbps) * BYTES_PER_GBIT,
            nodes_per_leaf=fabric.nodes_per_leaf,
            placement=fabric.placement,
            hop_s=value(fabric.latency_us) * 1e-6,
            inside_hop_s=value(inside_us) * 1e-6,
            barrier_s=value(fabric.barrier_us) * 1e-6 if cluster.barrier else 0.0,
            tenants=tenant_setups(cluster),
            collective=job.collective,
            algorithm=algorithm,
            overlap_share=value(job.overlap) / every,
            tail_bytes=min(value(job.tail_bytes), payload_bytes),
            staleness=cluster.synchronization.staleness,
            # of an all-reduce they have no meaning, and are not drawn
            incast_fit=math.inf if is_all_reduce else value(fabric.buffer_kb) / BURST_KB,
            send_buffer_bytes=SEND_BUFFER_KB * 1e3 if job.collective == "gather" else 0.0,
            timeout_s=0.0 if is_all_reduce else value(fabric.timeout_ms) * 1e-3,
        )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def members(self) -> int:
        """Ranks of one process group."""
        return self.group_nodes * self.ranks_per_node

    @property
    def groups(self) -> int:
        return self.nodes // self.group_nodes

    @property
    def messages(self) -> int:
        """Messages of a step, all groups together: as many as :meth:`schedule` has, without making them."""
        n, nodes, k = self.members, self.group_nodes, self.ranks_per_node
        if self.collective != "all_reduce":
            return self.groups * (n - 1) * (1 if self.collective == "gather" else n)
        each = {
            "ring": 2 * n * (n - 1),
            "hierarchical": 2 * n * (k - 1 + nodes - 1),
            "tree": 4 * self.pieces * (n - 1),
        }
        parts_bytes = schedules.buckets(self.payload_bytes, self.first_bucket_bytes, self.tail_bytes)
        return self.groups * each[self.algorithm] * sum(part_bytes > 0.0 for part_bytes in parts_bytes)

    def schedule(self) -> Schedule:
        """The messages of one group's collective."""
        payload_bytes, nodes = self.payload_bytes, self.group_nodes
        if self.collective == "gather":
            return schedules.gather(self.members, payload_bytes)
        if self.collective == "all_to_all":
            return schedules.all_to_all(self.members, payload_bytes)
        if self.ranks_per_node > 1 and self.algorithm == "tree":
            raise InputError(f"algorithm tree with {self.ranks_per_node} ranks on a node; allowed: ring, hierarchical")
        parts_bytes = schedules.buckets(payload_bytes, self.first_bucket_bytes, self.tail_bytes)
        return schedules.all_reduce(self.algorithm, nodes, self.ranks_per_node, parts_bytes, self.pieces)


@dataclass
class Links:
    """The links of a job: NICs and GPU links in both directions, leaves, and the tier above them."""

    setup: Setup
    seed: int
    upper: Resource = field(init=False)

    def __post_init__(self) -> None:
        s = self.setup
        self._nic_out = [Resource(f"NIC out {a}", s.nic_Bps) for a in range(s.nodes)]
        self._nic_in = [Resource(f"NIC in {a}", s.nic_Bps) for a in range(s.nodes)]
        self._gpu_out = [Resource(f"GPU out {r}", s.inside_Bps) for r in range(s.ranks)]
        self._gpu_in = [Resource(f"GPU in {r}", s.inside_Bps) for r in range(s.ranks)]
        self.upper = Resource("upper tier", s.upper_Bps)
        self._leaf_of = leaves(s, self.seed)

    def crosses(self, sender: int, receiver: int) -> bool:
        """Whether a message from one rank to another leaves its leaf."""
        per_node = self.setup.ranks_per_node
        return self._leaf_of[sender // per_node] != self._leaf_of[receiver // per_node]

    def hop_s(self, sender: int, receiver: int) -> float:
        """Latency of a message from one rank to another."""
        per_node = self.setup.ranks_per_node
        return self.setup.inside_hop_s if sender // per_node == receiver // per_node else self.setup.hop_s

    def path(self, sender: int, receiver: int) -> tuple[Resource, ...]:
        """What a message from one rank to another passes, the receiver's port last."""
        a, b = sender // self.setup.ranks_per_node, receiver // self.setup.ranks_per_node
        if a == b:
            return (self._gpu_out[sender], self._gpu_in[receiver])
        if self.crosses(sender, receiver):
            return (self._nic_out[a], self.upper, self._nic_in[b])
        return (self._nic_out[a], self._nic_in[b])


def leaves(setup: Setup, seed: int) -> list[int]:
    """The leaf of every node.

    Packed: groups that fit into the rest of a leaf share it; larger ones start a leaf of their own. Spread: the nodes
    in random order.
    """
    if setup.placement == "spread":
        place = list(range(setup.nodes))
        random.Random(seed).shuffle(place)
        return [p // setup.nodes_per_leaf for p in place]
    leaf, free, result = -1, 0, []
    for a in range(setup.nodes):
        if free == 0 or (a % setup.group_nodes == 0 and free < setup.group_nodes):
            leaf, free = leaf + 1, setup.nodes_per_leaf
        result.append(leaf)
        free -= 1
    return result
