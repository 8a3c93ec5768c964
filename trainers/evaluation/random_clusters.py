"""Clusters that nobody chose by hand: structure and sizes drawn from wide ranges by a seed.

Every cluster is a job of one of four forms: process groups that share an uplink, one group, a gather, an all-to-all.
Whatever else a cluster can have (other jobs, work after the collective, slow ranks, drift, stalls, failures) is drawn
beside that, mostly regardless of the form, so that most combinations are ones that no config of ours has. The ranges
are those for which policies are made: 4 to 512 ranks, steps of 20 ms to 60 s, variation of 0.1 to 30 %.

A cluster is a null where none of the mechanisms has anything to take from the critical path: no buffer that can
overflow, and on the uplink never more demand than it carries, or neither another job that keeps a period nor several
groups of which some have work after their collective. So there are nulls that look like the others: with bursty
tenants, with late groups, with incast into a deep buffer.

Relatives of a cluster are the same kind of job and neighbours with other sizes, drawn by a seed, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtri

from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive, drawn
from paceenv.sim.cluster.fabric import BURST_KB
from paceenv.sim.engine.simulator import episode_keys

_DOMAIN, _RELATIVES = 0x7061636565, 0x72656C61
"""In the seed of every draw, so that no other use of the same number draws the same."""
MAX_RANKS = 512
"""Of a job."""
_NIC_GBPS = 100.0
_PROBE_BYTES, _PROBE_GBPS = 1e9, 1e3
_FORMS = {"groups": 0.5, "one group": 0.27, "gather": 0.18, "all-to-all": 0.05}
_INCAST = ("gather", "all-to-all")
_RANKS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CROWDED = 0.85
"""Share of the uplinks that some of the traffic has to share."""
_MAX_INCAST_RANKS = 64
"""Of a gather or an all-to-all: a port of one switch and a buffer is all that is simulated."""


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

    def perhaps(self, chance: float, **ends: tuple[float, float]) -> dict[str, float]:
        """With a chance, numbers drawn log-uniformly; else none."""
        return {key: self.log(*between) for key, between in ends.items()} if self.happens(chance) else {}


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def random_cluster(seed: int, n: int, max_ranks: int = MAX_RANKS) -> tuple[Cluster, bool]:
    """The n-th cluster of a seed, and whether it is a null; clusters of two seeds have nothing in common."""
    draw = _Ranges(seed, n)
    form = draw.choice(list(_FORMS), list(_FORMS.values()))
    largest = min(max_ranks, _MAX_INCAST_RANKS) if form in _INCAST else max_ranks
    sizes = [ranks for ranks in _RANKS if ranks <= largest]
    ranks = draw.choice(sizes, [1.0 / (1 + i) ** 0.7 for i in range(len(sizes))])
    compute_s = draw.log(0.02, 1.0) if form in _INCAST else draw.log(0.015, 40.0)
    data: dict[str, Any] = {
        "name": f"random-{seed}-{n}",
        "description": f"{form}, {ranks} ranks",
        "noise": _noise(draw, ranks, compute_s),
        "reliability": _reliability(draw, ranks),
    }
    if form in _INCAST:
        parts, helped = _incast(draw, form, ranks, compute_s)
    else:
        parts, helped = _uplink(draw, form, ranks, compute_s, data["noise"])
    return Cluster.model_validate(data | parts), not helped


def _variation(draw: _Ranges) -> float:
    """Of compute: most tuned clusters vary by less than 2 %, shared and virtual ones by up to 30 %."""
    return draw.log(0.001, 0.02) if draw.happens(0.75) else draw.log(0.02, 0.3)


def _noise(draw: _Ranges, ranks: int, compute_s: float) -> dict[str, Any]:
    noise: dict[str, Any] = {"jitter_cv": _variation(draw), "transfer_cv": draw.log(0.001, 0.1)}
    noise |= draw.perhaps(0.4, common_cv=(0.002, 0.05))
    noise |= draw.perhaps(0.3, persistent_cv=(0.002, 0.06))
    if draw.happens(0.1):
        noise |= {"slow_ranks": int(draw.choice([1, 1, 2])), "slow_factor": draw.uniform(1.05, 1.5)}
    if draw.happens(0.2):
        noise |= {"imbalance_cv": draw.log(0.01, 0.2), "imbalance_skew": draw.uniform(0.3, 2.0)}
    if draw.happens(0.15):
        noise |= {"fail_slow_share": draw.log(0.001, 0.05) / ranks**0.5, "fail_slow_factor": draw.uniform(1.1, 2.0)}
        noise["fail_slow_mean_iterations"] = draw.log(20.0, 500.0)
    noise |= draw.perhaps(0.25, drift_cv=(0.002, 0.02), drift_iterations=(50.0, 2000.0))
    if draw.happens(0.2):
        noise |= {"stall_rate": draw.log(0.05, 1.0) * 0.02 / ranks, "stall_mean_s": draw.log(0.1, 2.0) * compute_s}
    # how exactly a live rank acts and measures, on quiet and on loaded hosts
    noise |= draw.perhaps(0.5, late_wake_s=(3e-5, 3e-3), stamp_noise_s=(5e-6, 5e-5))
    return noise | draw.perhaps(0.3, missing_share=(0.0005, 0.01))


def _reliability(draw: _Ranges, ranks: int) -> dict[str, Any]:
    reliability: dict[str, Any] = draw.perhaps(0.15, checkpoint_iterations=(100, 1000), checkpoint_s=(0.05, 10.0))
    if reliability:
        reliability["checkpoint_iterations"] = int(reliability["checkpoint_iterations"])
        if draw.happens(0.5):
            reliability |= {"mtbf_iterations": draw.log(500.0, 5000.0) * ranks, "restart_s": draw.log(1.0, 60.0)}
    return reliability


def _uplink(
    draw: _Ranges, form: str, ranks: int, compute_s: float, noise: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Job and fabric of groups that share an uplink, its tenants, work after collectives; whether pacing can matter."""
    members = ranks
    if form == "groups":
        members = draw.choice([size for size in range(2, ranks // 2 + 1) if ranks % size == 0])
    groups = ranks // members
    chances = [0.2, 0.6, 0.13, 0.07] if groups == 1 else [0.65, 0.22, 0.08, 0.05]
    tenants = _tenants(draw, chances, ranks, noise)
    # how much of the uplink all groups could take together, and with the tenants
    demand = draw.log(1.2, 8.0) if draw.happens(_CROWDED) else draw.log(0.3, 1.2)
    crowded = demand + sum(tenant["rate_share"] for tenant in tenants) > 1.0
    data = _collective(draw, form, ranks, members, compute_s, demand) | {"tenants": tenants}
    helped = crowded and any(not tenant["bursty"] for tenant in tenants)
    if groups > 1 and draw.happens(0.85):
        data["post_collective_work"] = _late_groups(draw, groups, compute_s)
        helped = helped or crowded
    return data, helped


def _collective(draw: _Ranges, form: str, ranks: int, members: int, compute_s: float, demand: float) -> dict[str, Any]:
    """Groups that all-reduce across leaves, over an uplink of which all of them at once want ``demand``."""
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
    alone_s, work_s = float(record["transfer_alone_s"]), float(record["uplink_work_s"]) * (ranks // members)
    fabric["uplink_gbps"] = _rounded(_PROBE_GBPS * work_s / (demand * alone_s))
    fabric["latency_us"] = draw.log(2.0, 200.0)
    longest_s = max(alone_s, demand * alone_s / (ranks // members))
    job["gradient_bytes"] = _rounded(_PROBE_BYTES * draw.log(0.2, 1.2) * compute_s / longest_s)
    if form == "one group" and draw.happens(0.3):
        job["overlap"] = draw.uniform(0.1, 0.8)
    return {"job": job, "fabric": fabric}


def _stretch(noise: dict[str, Any], ranks: int) -> float:
    """About how many times longer than ideal the slowest of ``ranks`` computes, by Blom's normal scores."""
    spread = math.hypot(*(noise.get(f"{kind}_cv", 0.0) for kind in ("jitter", "persistent", "imbalance", "drift")))
    slowest = max(float(ndtri((ranks - 0.375) / (ranks + 0.25))), 0.0)
    return max(1.0 + spread * slowest, float(noise.get("slow_factor", 1.0)))


def _tenants(draw: _Ranges, chances: list[float], ranks: int, noise: dict[str, Any]) -> list[dict[str, Any]]:
    """Up to three other jobs; most have our period or nearly, or a multiple or a part of it.

    Noise makes our steps longer. A tenant only shares the jitter, and its period is relative to our ideal one.
    """
    ours = _stretch(noise, ranks)
    tenants: list[dict[str, Any]] = []
    count = draw.choice([0, 1, 2, 3], chances)
    for _ in range(count):
        multiple = draw.choice([1.0, 2.0, 0.5, 3.0], [0.7, 0.12, 0.12, 0.06])
        off = draw.choice([1.0, draw.uniform(0.98, 1.02), draw.uniform(0.8, 1.25)], [0.65, 0.25, 0.1])
        period, tenant_ranks = multiple * off, int(draw.choice([ranks, 1, 4, 8, 16, 32], [5, 1, 1, 1, 1, 1]))
        tenant = {
            "period_ratio": _rounded(period * ours / _stretch({"jitter_cv": noise["jitter_cv"]}, tenant_ranks)),
            "comm_share": _rounded(draw.uniform(0.15, 0.55) / count**0.7),
            "rate_share": draw.choice([1.0, draw.uniform(0.3, 1.0)], [0.8, 0.2]),
            "ranks": tenant_ranks,
            "bursty": draw.happens(0.2),
        }
        if not tenant["bursty"] and draw.happens(0.4):
            tenant |= {"pause_rate": draw.log(0.001, 0.02), "pause_periods": draw.log(1.0, 500.0)}
        tenants.append(tenant)
    return tenants


def _late_groups(draw: _Ranges, groups: int, compute_s: float) -> dict[str, Any]:
    """Work after the collective that some groups always have, or all of them in episodes."""
    if draw.happens(0.6):
        return {
            "groups": int(draw.choice(range(1, max(groups // 2, 1) + 1))),
            "work_s": draw.log(0.12, 2.0) * compute_s,
        }
    return {
        "share": draw.log(0.3, 1.0) * 0.8 / groups,
        "mean_iterations": draw.log(20.0, 600.0),
        "episode_s": draw.log(0.12, 2.0) * compute_s,
        "episode_spread": draw.uniform(0.0, 0.8),
    }


def _incast(draw: _Ranges, form: str, ranks: int, compute_s: float) -> tuple[dict[str, Any], bool]:
    """Everybody sends at once, to one member or to all; into a buffer for a part of them, for all, or without loss."""
    message_s = draw.log(0.1, 1.0) * 0.6 * compute_s / (ranks - 1)
    nic_gbps = draw.log(0.2, 25.0)
    fabric: dict[str, Any] = {
        "nic_gbps": nic_gbps,
        "nodes_per_leaf": ranks,
        "oversubscription": 1.0,
        "latency_us": draw.log(5.0, 500.0),
    }
    fit = draw.choice([draw.log(0.15, 0.8), draw.log(1.1, 3.0), None], [0.6, 0.15, 0.25])
    if fit is not None:
        fabric |= {
            "buffer_kb": _rounded(fit * BURST_KB * (ranks - 1)),
            "timeout_ms": draw.choice([200.0, 5.0], [0.8, 0.2]),
        }
    job = {
        "nodes": ranks,
        "compute_s": compute_s,
        "collective": "gather" if form == "gather" else "all_to_all",
        "gradient_bytes": _rounded(message_s * nic_gbps * 1e9 / 8 * (1 if form == "gather" else ranks)),
    }
    return {"job": job, "fabric": fabric}, fit is not None and fit < 1.0


# Relatives

_FACTORS = {
    "job.compute_s": 1.6,
    "job.gradient_bytes": 1.35,
    "fabric.buffer_kb": 1.3,
    "fabric.uplink_gbps": 1.25,
    "noise.jitter_cv": 2.0,
    "noise.transfer_cv": 2.0,
    "noise.imbalance_cv": 1.5,
    "noise.persistent_cv": 1.5,
    "post_collective_work.work_s": 1.4,
    "post_collective_work.share": 1.6,
    "post_collective_work.mean_iterations": 2.0,
    "post_collective_work.episode_s": 1.4,
}
"""What differs, and by which factor at most, up or down."""
_TENANT_FACTORS = {"comm_share": 1.3, "pause_rate": 2.0, "pause_periods": 1.6}
_PERIOD = 1.03
"""By which factor a tenant's period differs; one that is ours stays so."""
_SIZES = (0.5, 1.0, 1.0, 2.0)
"""Factors of the number of nodes; what nodes share grows with them."""


def relative(cluster: Cluster, seed: int, n: int, name: str, *, resize: bool = True) -> Cluster:
    """The n-th relative of a cluster: what it draws is drawn once, and its numbers change by up to a factor each."""
    generator = np.random.default_rng([_RELATIVES, seed, n])
    base = drawn(cluster, episode_keys([int(generator.integers(2**62))])[0])
    size = float(generator.choice(_SIZES))
    factors = dict(_FACTORS)
    for k, tenant in enumerate(base.tenants):
        factors |= {f"tenants.{k}.{key}": most for key, most in _TENANT_FACTORS.items()}
        if tenant.period_ratio != 1.0:
            factors[f"tenants.{k}.period_ratio"] = _PERIOD
    changes = {key: _times(base, key, float(most ** generator.uniform(-1.0, 1.0))) for key, most in factors.items()}
    for k in range(len(base.tenants)):
        changes[f"tenants.{k}.comm_share"] = min(changes[f"tenants.{k}.comm_share"] or 0.0, 0.6) or None
    kept = {key: value for key, value in changes.items() if value}
    if resize and base.job.collective == "all_reduce" and size != 1.0 and base.ranks * size <= MAX_RANKS:
        larger: dict[str, float | int] = {"job.nodes": int(base.job.nodes * size)}
        if "fabric.uplink_gbps" in kept:
            larger["fabric.uplink_gbps"] = _rounded(kept["fabric.uplink_gbps"] * size)
        try:
            return _changed(base, {**kept, **larger}, name)
        except InputError:
            pass  # a size that its groups do not fit into
    return _changed(base, kept, name)


def _times(part: object, key: str, factor: float) -> float | None:
    """A number of a config times a factor; None where there is none, or nothing to multiply."""
    value: object = part
    for step in key.split("."):
        value = value[int(step)] if isinstance(value, Sequence) else getattr(value, step, None)
    if not isinstance(value, (int, float)) or not 0.0 < value < np.inf:
        return None
    return _rounded(max(value * factor, 1.0) if value >= 1.0 else value * factor)  # a count or a size is never below 1


def _changed(cluster: Cluster, changes: dict[str, float | int], name: str) -> Cluster:
    changed = cluster.changed([f"{key}={json.dumps(value)}" for key, value in changes.items()], name)
    return changed.model_copy(update={"name": name})
