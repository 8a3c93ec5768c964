"""How groups of consecutive GPUs lie on nodes, and what a collective of such a group costs inside and between them.

GPUs are numbered node by node. Tensor-parallel ranks are neighbours, data-parallel replicas come next, pipeline stages
are outermost (Megatron-LM's order), so that what communicates most stays inside a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceenv.sim.cluster.collectives import TREE_BELOW_BYTES, Algorithm, Law, Op, Volume, Way, volume
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.protocols import Choice, choices


class Cost(NamedTuple):
    """What a collective takes when nothing else is on the links."""

    time_s: float
    nic_bytes: float
    """Bytes a node sends through its NICs in one direction, all its groups of the kind together."""

    def times(self, count: float) -> Cost:
        return Cost(self.time_s * count, self.nic_bytes * count)


class Group(NamedTuple):
    """Members of one process group, how many of them share a node, and how many such groups use a node's NICs."""

    members: int
    per_node: int
    sharing: int = 1


@dataclass(frozen=True)
class Links:
    """The laws of a GPU's link inside its node and of a node's NICs taken together."""

    inside: Law
    across: Law
    gpus_per_node: int
    algorithm: Algorithm = "auto"
    fabric: Fabric | None = None
    """Whose protocols and channels collectives have; without one they go by the laws as they are."""

    def tensor_group(self, width: int) -> Group:
        """``width`` neighbours."""
        return Group(width, min(width, self.gpus_per_node))

    def data_group(self, width: int, tensor: int) -> Group:
        """``width`` GPUs ``tensor`` apart. Where they do not lie regularly on nodes, as few as do share one."""
        per_node = math.gcd(width, max(self.gpus_per_node // tensor, 1))
        return Group(width, per_node, self.gpus_per_node // per_node)

    def crosses(self, first: int, second: int) -> bool:
        """Whether two GPUs are on different nodes."""
        return first // self.gpus_per_node != second // self.gpus_per_node

    def send(self, payload_bytes: float, block: int, tensor: int, crosses: bool, rounds: float = 1.0) -> Cost:
        """Every rank of a block of GPUs passes its share of a payload to the same rank of another block."""
        if not crosses:
            return Cost(float(self.inside.time_s(Volume(rounds, payload_bytes / tensor))), 0.0)
        node_bytes = payload_bytes * min(block, self.gpus_per_node) / tensor
        return Cost(float(self.across.time_s(Volume(rounds, node_bytes))), node_bytes)

    def collective(self, op: Op, group: Group, payload_bytes: float) -> Cost:
        """Time and NIC traffic of a collective of a group and of those that share its nodes, all at once.

        A ring passes through the GPUs of a node one after the other and crosses its NICs once. The members of a tree
        are nodes, with a chain inside (NCCL): there an inner GPU sends the payload up and down, the first and the last
        one once. ``auto`` chooses between the two by size. ``hierarchical`` reduces inside first, and every GPU
        sends its own part between nodes.
        """
        n, k, sharing = group
        if n < 2:
            return Cost(0.0, 0.0)
        if self.fabric is not None and not self.fabric.sends_as_given:
            ways = choices(self.fabric, op, self.algorithm, payload_bytes, nodes=n // k)

            def cost(choice: Choice, rate: float = 1.0) -> Cost:
                chosen = self._as_chosen(choice, sharing, rate)
                found = chosen.collective(op, group, payload_bytes / choice.data_share)
                return found._replace(time_s=found.time_s + choice.operation_s)

            return cost(min(ways, key=lambda one: cost(one, one.expected).time_s))
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = "tree" if op == "all_reduce" and payload_bytes < TREE_BELOW_BYTES else "ring"
        way: Way = "tree" if algorithm == "tree" else "ring"
        if n == k:
            return Cost(float(self.inside.time_s(volume(op, way, n, payload_bytes))), 0.0)
        nodes = n // k
        if algorithm == "hierarchical":
            within, between = volume(op, "ring", k, payload_bytes), volume(op, "ring", nodes, payload_bytes / k)
            across = self._shared(sharing * k)
            return Cost(
                float(self.inside.time_s(within) + across.time_s(between)), float(between.sent_bytes) * sharing * k
            )
        across, latency_s = self._shared(sharing), 0.0
        if algorithm == "tree" and op == "all_reduce":
            # bytes pass the tree and its chains at once, but their latencies follow each other
            tree = volume(op, "tree", nodes, payload_bytes)
            latency_s = float(tree.rounds) * across.hop_s + 2.0 * (k - 1) * self.inside.hop_s
            within, between = Volume(0.0, (min(k, 3) - 1.0) * payload_bytes), tree._replace(rounds=0.0)
        else:
            within = between = volume(op, "ring" if k > 1 else way, n, payload_bytes)
        slower_s = max(float(across.time_s(between)), float(self.inside.time_s(within)) if k > 1 else 0.0)
        return Cost(latency_s + slower_s, float(between.sent_bytes) * sharing)

    def _as_chosen(self, choice: Choice, sharing: int, rate: float) -> Links:
        """The laws as an operation finds them that has latencies and channels of its own.

        Args:
            rate: share of the rates to count on.
        """

        def law(one: Law, hop_share: float, channels_Bps: float) -> Law:
            return Law(one.hop_s * hop_share, min(one.bandwidth_Bps, channels_Bps) * rate, one.sqrt_s)

        return replace(
            self,
            inside=law(self.inside, choice.inside_hop_share, choice.channels_Bps),
            across=law(self.across, choice.hop_share, choice.channels_Bps * sharing),
            algorithm=choice.algorithm,
            fabric=None,
        )

    def _shared(self, groups: int) -> Law:
        return replace(self.across, bandwidth_Bps=self.across.bandwidth_Bps / groups)
