"""Relatives of a cluster: the same kind of job and neighbours with other sizes, drawn by a seed."""

from __future__ import annotations

import json

import numpy as np

from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import drawn
from paceenv.sim.engine.simulator import episode_keys

_DOMAIN = 0x72656C61
"""In the seed of every draw, so that no other use of the same number draws the same."""
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
MAX_RANKS = 512


def relative(cluster: Cluster, seed: int, n: int, name: str, *, resize: bool = True) -> Cluster:
    """The n-th relative of a cluster: what it draws is drawn once, and its numbers change by up to a factor each.

    Args:
        seed: relatives of two seeds have nothing in common.
        n: number of the relative.
    """
    generator = np.random.default_rng([_DOMAIN, seed, n])
    base = drawn(cluster, episode_keys([int(generator.integers(2**62))])[0])
    size = float(generator.choice(_SIZES))
    factors = {key: float(most ** generator.uniform(-1.0, 1.0)) for key, most in _FACTORS.items()}
    changes = {key: _times(base, key, factor) for key, factor in factors.items()}
    for k, tenant in enumerate(base.tenants):
        for key, most in _TENANT_FACTORS.items():
            changes[f"tenants.{k}.{key}"] = _times(tenant, key, float(most ** generator.uniform(-1.0, 1.0)))
        if tenant.period_ratio != 1.0:
            changes[f"tenants.{k}.period_ratio"] = _times(tenant, "period_ratio", _PERIOD ** generator.uniform(-1, 1))
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
        value = getattr(value, step, None)
    if not isinstance(value, (int, float)) or not 0.0 < value < np.inf:
        return None
    return _rounded(max(value * factor, 1.0) if value >= 1.0 else value * factor)  # a count or a size is never below 1


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _changed(cluster: Cluster, changes: dict[str, float | int], name: str) -> Cluster:
    changed = cluster.changed([f"{key}={json.dumps(value)}" for key, value in changes.items()], name)
    return changed.model_copy(update={"name": name})
