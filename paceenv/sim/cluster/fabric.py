"""The fabric section of a cluster config: links inside a node, its NICs and where they sit, leaves, uplinks, torus."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceenv.sim.cluster.collectives import BYTES_PER_GBIT, TREE_BELOW_BYTES, Op
from paceenv.sim.cluster.protocols import CHANNEL_GBPS
from paceenv.sim.cluster.quantity import Fraction, NonNegative, Positive
from paceenv.ui.config_files import Config

INTRA_NODE_GBPS = {"nvswitch": 2400.0, "nvlink": 450.0, "pcie": 200.0}
"""One GPU's link in each direction where no rate is given: A100 on NVSwitch, a bridge of four NVLinks between two A40,
and what is left of PCIe Gen4 x16 after its protocol."""

_OF_PROGRAMS = ("efficiency", "unused_rate", "sharing", "rails", "flow_control", "ecn_reaction_us")


class Torus(Config):
    """Chips with a link in both directions of every dimension, instead of NICs and switches."""

    dims: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1, max_length=6, description="chips along each dimension"
    )
    link_gbps: Positive = Field(description="one link, Gb/s in each direction")

    @property
    def chips(self) -> int:
        return math.prod(self.dims)


class Fabric(Config):
    """Two tiers, nodes on leaf switches through their NICs and leaves on an upper tier, or a torus."""

    nic_gbps: Positive | None = Field(None, description="one NIC, Gb/s in each direction")
    nics_per_node: int = Field(1, ge=1, description="network cards of a node")
    gpus_per_node: int | None = Field(
        None, ge=1, description="GPUs behind the NICs; empty: ranks_per_node, or a NIC each"
    )
    numa_nodes: int = Field(1, ge=1, description="sockets of a node; GPUs are spread evenly over them")
    nic_numa: list[int] | None = Field(None, description="the socket of each NIC; empty: spread evenly")
    inter_socket_gbps: Positive | None = Field(
        None, description="link between sockets, Gb/s in each direction, shared by GPUs whose NIC is on another socket"
    )
    intra_node: Literal["nvswitch", "nvlink", "pcie"] = Field("nvswitch", description="the links between a node's GPUs")
    intra_node_gbps: Positive | None = Field(
        None, description="a GPU's link inside the node, Gb/s in each direction; empty: as usual for intra_node"
    )
    intra_node_latency_us: NonNegative | None = Field(None, description="one hop inside a node, us; empty: latency_us")
    intra_node_sqrt_us_per_sqrt_mb: NonNegative = Field(0.0, description="as sqrt_us_per_sqrt_mb, inside a node")
    nodes_per_leaf: int | None = Field(None, ge=1, description="nodes on one leaf switch")
    rails: bool = Field(
        False,
        description="of a program: the first NICs of nodes_per_leaf nodes have a leaf of their own, so have the second "
        "ones, and so on; each has its share of the uplinks",
    )
    placement: Literal["packed", "spread"] = Field(
        "packed",
        description="packed: a group's nodes share leaves where they can; spread, only without a program: nodes in "
        "random order",
    )
    uplink_gbps: Positive | None = Field(
        None, description="capacity of the tier above the leaves that all traffic shares, Gb/s"
    )
    oversubscription: Positive | None = Field(
        None, description="instead: rate of a leaf's nodes over the rate of its uplinks; 1 is non-blocking"
    )
    ecmp_paths: int | None = Field(
        None, ge=1, description="equal-cost paths that flows are hashed onto; empty: traffic spreads evenly"
    )
    flow_control: Literal["fair", "pauses", "credits", "ecn"] = Field(
        "fair",
        description="what the queue of a full link does to other transfers of a program in links before it: nothing "
        "(fair), or it blocks them (pauses of lossless Ethernet, credits of InfiniBand), until senders slow down (ecn)",
    )
    ecn_reaction_us: float = Field(
        1000.0, gt=0, description="flow_control ecn: how long from its start a transfer blocks others, us"
    )
    torus: Torus | None = Field(None, description="instead of NICs, leaves and uplinks")
    latency_us: NonNegative = Field(10.0, description="one hop of a collective, us")
    efficiency: dict[Op, Annotated[float, Field(ge=0.01, le=1.0)]] = Field(
        default_factory=dict,
        description="with a program: speed of an operation alone over what its bytes and its slowest link allow, a "
        "ratio by operation; 1 where none is given",
    )
    unused_rate: Literal["free", "lost"] = Field(
        "free",
        description="with a program: whether others can use what an operation with an efficiency below 1 leaves of "
        "its links. lost: its messages leave gaps on different links at different times, as on TCP",
    )
    sharing: Literal["operations", "flows"] = Field(
        "operations",
        description="with a program: between what a link divides its rate evenly. operations: each has its channels, "
        "as in NCCL. flows: pairs of ranks that exchange, as TCP does",
    )
    sqrt_us_per_sqrt_mb: NonNegative = Field(
        0.0,
        description="cost of cutting a message into chunks, us per square root of a megabyte (paceenv calibrate)",
    )
    barrier_us: NonNegative = Field(0.0, description="the barrier itself when everybody is there, us")
    tree_below_bytes: float = Field(
        TREE_BELOW_BYTES, ge=0, description="algorithm auto without protocol auto: messages below go by tree"
    )
    protocol: Literal["simple", "ll128", "ll", "auto"] = Field(
        "simple",
        description="of NCCL; auto: for each operation the fastest, with job.algorithm auto also of ring and tree",
    )
    operation_us: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="what each operation takes beside its hops and bytes by protocol simple, us; 8.4 in NCCL's model. "
        "Other protocols take as many times that as in NCCL's model",
    )
    channels: int | None = Field(None, ge=1, description="channels of an operation; empty: they limit nothing")
    channel_gbps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="what one channel passes on, Gb/s; empty: 160, with intra_node pcie 96"
    )
    late_share: Fraction = Field(
        1.0,
        description="of us and a tenant, what whichever begins while the other transfers gets of its fair share, until "
        "one is through; about 0.93 between jobs on TCP sockets",
    )
    buffer_kb: Positive | None = Field(
        None,
        description="buffer of a switch port, kB; empty: lossless, as with credit-based flow control. It counts in a "
        "gather, an all-to-all and a program, not in one all-reduce a step",
    )
    burst_kb: Positive = Field(
        14.48, description="bytes a sender sends before the first reply, kB: ten segments of 1448 B"
    )
    send_buffer_kb: NonNegative = Field(
        256.0,
        description="what the kernel of a gather's sender takes over, kB, so that the sender may go on; 0: nothing, "
        "it waits until the receiver has all",
    )
    timeout_ms: NonNegative = Field(200.0, description="least retransmission timeout, ms; 200 in Linux")

    @model_validator(mode="after")
    def _sending(self) -> Fabric:
        if self.protocol == "auto" and self.tree_below_bytes != TREE_BELOW_BYTES:
            raise ValueError("tree_below_bytes or protocol auto, not both: auto chooses a tree by its time")
        if self.channel_gbps is not None and self.channels is None:
            raise ValueError("channels with channel_gbps")
        if self.torus is not None and not self.sends_as_given:
            raise ValueError("torus or protocol, operation_us and channels, not both: these are of NCCL")
        return self

    @model_validator(mode="after")
    def _complete(self) -> Fabric:
        if self.torus is not None:
            named = {"nic_gbps", "nodes_per_leaf", "uplink_gbps", "oversubscription", "ecmp_paths", "buffer_kb"}
            given = sorted(key for key in named if getattr(self, key) is not None)
            if given:
                raise ValueError(f"torus or {given[0]}, not both")
            return self
        for key in ("nic_gbps", "nodes_per_leaf"):
            if getattr(self, key) is None:
                raise ValueError(f"{key} given, or a torus")
        if self.buffer_kb is not None and self.flow_control != "fair":
            raise ValueError(f"buffer_kb, whose packets are lost, or flow_control {self.flow_control}, not both")
        if (self.uplink_gbps is None) == (self.oversubscription is None):
            raise ValueError("one of uplink_gbps and oversubscription")
        self._check_sockets()
        return self

    def _check_sockets(self) -> None:
        if self.nic_numa is not None and len(self.nic_numa) != self.nics_per_node:
            raise ValueError(f"nic_numa with one socket for each of the {self.nics_per_node} NICs")
        if any(not 0 <= socket < self.numa_nodes for socket in self.nic_numa or []):
            raise ValueError(f"nic_numa from 0 to {self.numa_nodes - 1}, the sockets of a node")
        if self.inter_socket_gbps is None and len(set(self.nic_sockets)) < self.numa_nodes:
            raise ValueError("inter_socket_gbps where a socket has no NIC of its own")

    @property
    def sends_as_given(self) -> bool:
        """Whether rates and hops are all: protocol Simple, no channels that limit anything, no time of an operation."""
        return self.protocol == "simple" and self.channels is None and self.operation_us == 0.0

    @property
    def channels_Bps(self) -> float:
        """What the channels of one operation pass on together, bytes per second; infinite where none are given."""
        if self.channels is None:
            return math.inf
        return self.channels * (self.channel_gbps or CHANNEL_GBPS[self.intra_node]) * BYTES_PER_GBIT

    @property
    def set_for_programs(self) -> list[str]:
        """Keys that count with a program only and do not have their default."""
        fields = type(self).model_fields
        return [key for key in _OF_PROGRAMS if getattr(self, key) != fields[key].get_default(call_default_factory=True)]

    @property
    def nic_sockets(self) -> list[int]:
        """The socket of each NIC."""
        if self.nic_numa is not None:
            return self.nic_numa
        return [i * self.numa_nodes // self.nics_per_node for i in range(self.nics_per_node)]
