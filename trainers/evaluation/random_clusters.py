"""Clusters that nobody chose by hand: structure and sizes drawn from wide ranges by a seed.

Every cluster is a job of one of four forms: process groups that share an uplink, one group, a gather, an all-to-all.
Whatever else a cluster can have (other jobs, work after the collective, slow ranks, drift, stalls, failures) is drawn
beside that, mostly regardless of the form, so that most combinations are ones that no config of ours has. The ranges
are those for which policies are made: 4 to 512 ranks, steps of 20 ms to 60 s, variation of 0.1 to 30 %.

A cluster is a null where none of the mechanisms has anything to take from the critical path: no other job that keeps a
period, no buffer that can overflow, and not several groups of which some have work after their collective.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import episode_keys
from paceenv.ui.config_files import Config

_DOMAIN = 0x7061636565
"""In the seed of every draw, so that no other use of the same number draws the same."""
_NIC_GBPS = 100.0
_PROBE_BYTES, _PROBE_GBPS = 1e9, 1e3
_FORMS = {"groups": 0.5, "one group": 0.26, "gather": 0.14, "all-to-all": 0.1}
_RANKS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MAX_INCAST_RANKS = 64
"""Of a gather or an all-to-all: a port of one switch and a buffer is all that is simulated."""


class RandomClusters(Config):
    """So many clusters from a seed; more of them begin with the same ones."""

    seed: int = Field(ge=0, description="clusters of two seeds have nothing in common")
    clusters: int = Field(48, ge=1, le=10_000)
    max_ranks: int = Field(512, ge=8, le=512, description="of the largest job")

    def draw(self) -> list[tuple[Cluster, bool]]:
        """The clusters, each with whether it is a null."""
        return [_cluster(self.seed, n, self.max_ranks) for n in range(self.clusters)]


class _Ranges:
    """Draws for one cluster, rounded so that a config is readable."""

    def __init__(self, seed: int, n: int) -> None:
        self.generator = np.random.default_rng([_DOMAIN, seed, n])

    def happens(self, chance: float) -> bool:
        return bool(self.generator.random() < chance)

    def choice(self, values: Any, weights: Any = None) -> Any:
        chances = None if weights is None else np.asarray(weights, float) / np.sum(weights)
        return values[int(self.generator.choice(len(values), p=chances))]

    def uniform(self, low: float, high: float) -> float:
        return _rounded(self.generator.uniform(low, high))

    def log(self, low: float, high: float) -> float:
        return _rounded(np.exp(self.generator.uniform(np.log(low), np.log(high))))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _cluster(seed: int, n: int, max_ranks: int) -> tuple[Cluster, bool]:
    draw = _Ranges(seed, n)
    form = draw.choice(list(_FORMS), list(_FORMS.values()))
    most = min(max_ranks, _MAX_INCAST_RANKS) if form in ("gather", "all-to-all") else max_ranks
    sizes = [ranks for ranks in _RANKS if ranks <= most]
    ranks = draw.choice(sizes, [1.0 / (1 + i) ** 0.5 for i in range(len(sizes))])
    compute_s = draw.log(0.015, 40.0)
    data: dict[str, Any] = {
        "name": f"random-{seed}-{n}",
        "description": f"{form}, {ranks} ranks",
        "noise": _noise(draw, ranks, compute_s),
        "reliability": _reliability(draw, ranks),
    }
    helped = False
    if form in ("gather", "all-to-all"):
        compute_s = min(compute_s, 2.0)
        data |= _incast(draw, form, ranks, compute_s)
        helped = "buffer_kb" in data["fabric"]
    else:
        data |= _uplink(draw, form, ranks, compute_s)
        data["tenants"] = _tenants(draw)
        helped = any(not tenant["bursty"] for tenant in data["tenants"])
        groups = ranks // data["job"]["nodes_per_group"]
        if groups > 1 and draw.happens(0.7):
            data["post_collective_work"] = _late_groups(draw, groups, compute_s)
            helped = True
    return Cluster.model_validate(data), not helped


def _noise(draw: _Ranges, ranks: int, compute_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"jitter_cv": draw.log(0.001, 0.3), "transfer_cv": draw.log(0.001, 0.1)}
    if draw.happens(0.4):
        found["common_cv"] = draw.log(0.002, 0.05)
    if draw.happens(0.3):
        found["persistent_cv"] = draw.log(0.002, 0.03)
    if draw.happens(0.2):
        found |= {"slow_ranks": int(draw.choice([1, 1, 2])), "slow_factor": draw.uniform(1.05, 1.5)}
    if draw.happens(0.25):
        found |= {"imbalance_cv": draw.log(0.01, 0.2), "imbalance_skew": draw.uniform(0.3, 2.0)}
    if draw.happens(0.15):
        found |= {"fail_slow_share": draw.log(0.001, 0.05) / ranks**0.5, "fail_slow_factor": draw.uniform(1.1, 2.0)}
        found["fail_slow_mean_iterations"] = draw.log(20.0, 500.0)
    if draw.happens(0.25):
        found |= {"drift_cv": draw.log(0.002, 0.02), "drift_iterations": draw.log(50.0, 2000.0)}
    if draw.happens(0.25):
        found |= {"stall_rate": draw.log(0.05, 1.0) * 0.02 / ranks, "stall_mean_s": draw.log(0.1, 2.0) * compute_s}
    return found


def _reliability(draw: _Ranges, ranks: int) -> dict[str, Any]:
    if not draw.happens(0.15):
        return {}
    found: dict[str, Any] = {"checkpoint_iterations": int(draw.log(100, 1000)), "checkpoint_s": draw.log(0.05, 10.0)}
    if draw.happens(0.5):
        found |= {"mtbf_iterations": draw.log(500.0, 5000.0) * ranks, "restart_s": draw.log(1.0, 60.0)}
    return found


def _uplink(draw: _Ranges, form: str, ranks: int, compute_s: float) -> dict[str, Any]:
    """Groups that all-reduce across leaves, over an uplink that may be too narrow for all of them at once."""
    members = ranks
    if form == "groups":
        members = draw.choice([size for size in range(2, ranks // 2 + 1) if ranks % size == 0])
    job: dict[str, Any] = {
        "nodes": ranks,
        "nodes_per_group": members,
        "compute_s": compute_s,
        "barrier": members < ranks or draw.happens(0.3),
        "gradient_bytes": _PROBE_BYTES,
    }
    fabric = {
        "nic_gbps": _NIC_GBPS,
        "nodes_per_leaf": max(1, min(members // 2, 16)),
        "uplink_gbps": _PROBE_GBPS,
        "latency_us": 0.0,
        "barrier_us": draw.log(20.0, 500.0),
    }
    probe = Cluster.model_validate({"name": "probe", "job": job, "fabric": fabric})
    record = derive(probe, episode_keys([0])).jobs[0]
    # how long the uplink is busy with all groups, over how long one group takes where it is alone
    busy = draw.log(0.3, 8.0)
    alone_s, work_s = float(record["transfer_alone_s"]), float(record["uplink_work_s"]) * (ranks // members)
    fabric["uplink_gbps"] = _rounded(_PROBE_GBPS * work_s / (busy * alone_s))
    fabric["latency_us"] = draw.log(2.0, 200.0)
    longest_s = max(alone_s, busy * alone_s / (ranks // members))
    job["gradient_bytes"] = _rounded(_PROBE_BYTES * draw.log(0.05, 0.8) * compute_s / longest_s)
    if form == "one group" and draw.happens(0.4):
        job["overlap"] = draw.uniform(0.1, 0.9)
    return {"job": job, "fabric": fabric}


def _tenants(draw: _Ranges) -> list[dict[str, Any]]:
    """Up to three other jobs; most have our period, or a multiple or a part of it."""
    found = []
    for _ in range(draw.choice([0, 1, 2, 3], [0.5, 0.3, 0.14, 0.06])):
        period = draw.choice([1.0, 2.0, 0.5, 3.0, draw.uniform(0.8, 1.25)], [0.4, 0.12, 0.12, 0.06, 0.3])
        tenant = {
            "period_ratio": period,
            "comm_share": draw.uniform(0.1, 0.5),
            "rate_share": draw.choice([1.0, draw.uniform(0.3, 1.0)]),
            "ranks": int(draw.choice([1, 4, 8, 16, 32])),
            "bursty": draw.happens(0.25),
        }
        if not tenant["bursty"] and draw.happens(0.4):
            tenant |= {"pause_rate": draw.log(0.001, 0.02), "pause_periods": draw.log(1.0, 500.0)}
        found.append(tenant)
    return found


def _late_groups(draw: _Ranges, groups: int, compute_s: float) -> dict[str, Any]:
    """Work after the collective that some groups always have, or all of them in episodes."""
    if draw.happens(0.5):
        return {
            "groups": int(draw.choice(range(1, max(groups // 2, 1) + 1))),
            "work_s": draw.log(0.05, 2.0) * compute_s,
        }
    return {
        "share": draw.log(0.1, 1.0) * 0.6 / groups,
        "mean_iterations": draw.log(20.0, 600.0),
        "episode_s": draw.log(0.05, 2.0) * compute_s,
        "episode_spread": draw.uniform(0.0, 0.8),
    }


def _incast(draw: _Ranges, form: str, ranks: int, compute_s: float) -> dict[str, Any]:
    """Everybody sends at once, to one member or to all; half of the switches drop what their buffer cannot hold."""
    message_s = draw.log(0.1, 1.0) * 0.6 * compute_s / (ranks - 1)
    nic_gbps = draw.log(0.2, 25.0)
    fabric: dict[str, Any] = {
        "nic_gbps": nic_gbps,
        "nodes_per_leaf": ranks,
        "oversubscription": 1.0,
        "latency_us": draw.log(5.0, 500.0),
    }
    if draw.happens(0.6):
        fabric |= {
            "buffer_kb": draw.log(0.3, 2.0) * 14.48 * (ranks - 1),
            "timeout_ms": draw.choice([200.0, 200.0, 5.0]),
        }
    job = {
        "nodes": ranks,
        "compute_s": compute_s,
        "collective": "gather" if form == "gather" else "all_to_all",
        "gradient_bytes": _rounded(message_s * nic_gbps * 1e9 / 8),
    }
    return {"job": job, "fabric": fabric}
