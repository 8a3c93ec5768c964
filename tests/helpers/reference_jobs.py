"""Jobs for the tests of the reference engine."""

from __future__ import annotations

from typing import Any

from paceenv.sim.cluster.model import Cluster

NIC_GBPS, NIC_BPS = 100.0, 12.5e9
WIDE_GBPS = 1e6


def cluster(nodes: int = 4, payload_bytes: float = 1e9, *, job: dict[str, Any] | None = None, **rest: Any) -> Cluster:
    """A job that computes 1 s on 100 Gb/s NICs under one leaf, without noise, unless told otherwise."""
    fabric = {"nic_gbps": NIC_GBPS, "nodes_per_leaf": nodes, "uplink_gbps": WIDE_GBPS, "latency_us": 0.0}
    data = {
        "name": "test",
        "job": {"nodes": nodes, "compute_s": 1.0, "gradient_bytes": payload_bytes} | (job or {}),
        "fabric": fabric | rest.pop("fabric", {}),
    }
    return Cluster.model_validate(data | rest)


def tenant(**changes: Any) -> dict[str, Any]:
    """A tenant that transfers 40 % of its time at half the upper tier, without jitter."""
    return {"period_ratio": 1.0, "comm_share": 0.4, "rate_share": 0.5, "jitter_cv": 0.0} | changes
