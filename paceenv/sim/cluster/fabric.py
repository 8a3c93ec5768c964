"""The fabric section of a cluster config: links inside a node, its NICs, leaf switches and their uplinks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceenv.sim.cluster.collectives import Op, Placement
from paceenv.sim.cluster.quantity import Fraction, NonNegative, Positive
from paceenv.ui.config_files import Config

BURST_KB = 14.48
"""What a sender sends before the first reply: ten segments of 1448 B."""
SEND_BUFFER_KB = 256.0
"""What the kernel of a gather's sender takes over, so that the sender may go on."""

_OF_PROGRAMS = ("efficiency", "unused_rate", "sharing")


def changed_keys(section: Config, keys: Iterable[str]) -> list[str]:
    """Which keys of a section do not have their default."""
    fields = type(section).model_fields
    return [key for key in keys if getattr(section, key) != fields[key].get_default(call_default_factory=True)]


class Fabric(Config):
    """Two tiers: nodes on leaf switches through their NICs, and leaves on an upper tier."""

    nic_gbps: Positive = Field(description="one NIC, Gb/s in each direction")
    nics_per_node: int = Field(1, ge=1, description="network cards of a node")
    intra_node_gbps: Positive = Field(
        2400.0,
        description="a GPU's link inside the node, Gb/s in each direction; by default that of an A100 on NVSwitch",
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
    barrier_us: NonNegative = Field(0.0, description="time of a barrier without waits, us")
    late_share: Fraction = Field(
        1.0,
        description="of us and a tenant, what whichever begins while the other transfers gets of its fair share, until "
        "one is through; about 0.93 between jobs on TCP sockets",
    )
    buffer_kb: Positive | None = Field(
        None,
        description="buffer of a switch port, kB; empty: lossless, as with credit-based flow control. It counts in a "
        "gather and an all-to-all, not in one all-reduce a step; without a program",
    )
    timeout_ms: NonNegative = Field(200.0, description="least retransmission timeout, ms; 200 in Linux")

    @model_validator(mode="after")
    def _complete(self) -> Fabric:
        if (self.uplink_gbps is None) == (self.oversubscription is None):
            raise ValueError("one of uplink_gbps and oversubscription")
        return self

    @property
    def set_for_programs(self) -> list[str]:
        """Keys that do not have their default and count with a workload or a program only."""
        return changed_keys(self, _OF_PROGRAMS)
