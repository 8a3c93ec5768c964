"""The fabric section of a cluster config: links inside a node, its NICs, leaf switches and their uplinks."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceenv.sim.cluster.collectives import BYTES_PER_GBIT, Op, Placement
from paceenv.sim.cluster.quantity import Fraction, NonNegative, Positive
from paceenv.ui.config_files import Config

INTRA_NODE_GBPS = {"nvswitch": 2400.0, "nvlink": 450.0, "pcie": 200.0}
"""One GPU's link in each direction where no rate is given: A100 on NVSwitch, a bridge of four NVLinks between two A40,
and what is left of PCIe Gen4 x16 after its protocol."""
CHANNEL_GBPS = {"nvswitch": 160.0, "nvlink": 160.0, "pcie": 96.0}
"""One channel where no rate is given: an NVLink of an A100 (20 GB/s), or PCIe (12 GB/s), as in NCCL's topology."""
BURST_KB = 14.48
"""What a sender sends before the first reply: ten segments of 1448 B."""
SEND_BUFFER_KB = 256.0
"""What the kernel of a gather's sender takes over, so that the sender may go on."""

_NOT_FOLDED = ("efficiency", "unused_rate", "sharing")
_OF_PROGRAMS = (*_NOT_FOLDED, "protocol", "operation_us", "channels")


class Fabric(Config):
    """Two tiers: nodes on leaf switches through their NICs, and leaves on an upper tier."""

    nic_gbps: Positive = Field(description="one NIC, Gb/s in each direction")
    nics_per_node: int = Field(1, ge=1, description="network cards of a node")
    intra_node: Literal["nvswitch", "nvlink", "pcie"] = Field("nvswitch", description="the links between a node's GPUs")
    intra_node_gbps: Positive | None = Field(
        None, description="a GPU's link inside the node, Gb/s in each direction; empty: as usual for intra_node"
    )
    intra_node_latency_us: NonNegative | None = Field(None, description="one hop inside a node, us; empty: latency_us")
    intra_node_sqrt_us_per_sqrt_mb: NonNegative = Field(0.0, description="as sqrt_us_per_sqrt_mb, inside a node")
    nodes_per_leaf: int = Field(ge=1, description="nodes on one leaf switch")
    placement: Placement = Field(
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
    protocol: Literal["simple", "ll128", "ll", "auto"] = Field(
        "simple",
        description="of NCCL, with a workload or a program; auto: for each operation the fastest, with job.algorithm "
        "auto also of ring and tree",
    )
    operation_us: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="what each operation takes beside its hops and bytes by protocol simple, us; 8.4 in NCCL's model; "
        "as protocol. Other protocols take as many times that as in NCCL's model",
    )
    channels: int | None = Field(
        None, ge=1, description="channels of an operation, as protocol; empty: they limit nothing"
    )
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
    timeout_ms: NonNegative = Field(200.0, description="least retransmission timeout, ms; 200 in Linux")

    @model_validator(mode="after")
    def _complete(self) -> Fabric:
        if self.channel_gbps is not None and self.channels is None:
            raise ValueError("channels with channel_gbps")
        if (self.uplink_gbps is None) == (self.oversubscription is None):
            raise ValueError("one of uplink_gbps and oversubscription")
        return self

    @property
    def channels_Bps(self) -> float:
        """What the channels of one operation pass on together, bytes per second; infinite where none are given."""
        if self.channels is None:
            return math.inf
        return self.channels * (self.channel_gbps or CHANNEL_GBPS[self.intra_node]) * BYTES_PER_GBIT

    @property
    def set_for_programs(self) -> list[str]:
        """Keys that do not have their default and count with a workload or a program only."""
        fields = type(self).model_fields
        return [key for key in _OF_PROGRAMS if getattr(self, key) != fields[key].get_default(call_default_factory=True)]

    @property
    def folds(self) -> bool:
        """Whether a step of the simple kind can have this fabric: transfers share its links evenly and lose nothing."""
        return not self.buffer_kb and not set(self.set_for_programs) & set(_NOT_FOLDED)
