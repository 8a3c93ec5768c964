"""From a cluster config to the engine's parameter records: draws what is random and applies the closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from paceenv.cluster.collectives import BYTES_PER_GBIT, crossing_hops, volume
from paceenv.cluster.model import Cluster, LogUniform, Normal, Quantity, Scaled, Uniform
from paceenv.engine import layout
from paceenv.engine.simulator import JobBatch, episode_keys
from paceenv.errors import InputError


class _Draw:
    """Values of quantities for many episodes: each quantity, by its place in the config, draws its own uniforms."""

    def __init__(self, keys_E: NDArray[np.uint64], nodes: int) -> None:
        self._keys_E, self._nodes, self._place = keys_E, nodes, 0
        self.random = False

    def __call__(self, quantity: Quantity) -> NDArray[np.float64] | float:
        self._place += 1
        match quantity:
            case Uniform():
                low, high = quantity.uniform
                return np.asarray(low + (high - low) * self._uniform())
            case LogUniform():
                low, high = quantity.loguniform
                return np.asarray(low * (high / low) ** self._uniform())
            case Normal():
                mean, sd = quantity.normal
                return np.asarray(np.clip(mean + sd * ndtri(self._uniform()), *quantity.within))
            case Scaled():
                law = quantity.power_law
                return float(law.value * (self._nodes / law.at_nodes) ** law.exponent)
            case _:
                return float(quantity)

    def _uniform(self) -> NDArray[np.float64]:
        self.random = True
        bits = episode_keys(self._keys_E, self._place) >> np.uint64(12)
        return (bits.astype(np.float64) + 0.5) * 2.0**-52


def derive(cluster: Cluster, keys_E: NDArray[np.uint64], *, tenants: int | None = None) -> JobBatch:
    """Parameter records of E episodes of a cluster.

    ``keys_E`` are episode keys (:func:`paceenv.engine.simulator.episode_keys`) and decide what is drawn. ``tenants``
    is how many tenant places each record gets, at least as many as the cluster has; unused ones are absent.
    """
    return _derive(cluster, _Draw(keys_E, cluster.job.nodes), len(keys_E), tenants)


def _derive(cluster: Cluster, draw: _Draw, E: int, tenants: int | None) -> JobBatch:
    job, fabric = cluster.job, cluster.fabric
    jobs = layout.default_job(E)
    jobs["compute_s"] = draw(job.compute_s)
    payload_bytes = draw(job.gradient_bytes)
    nic_Bps = np.asarray(draw(fabric.nic_gbps)) * fabric.nics_per_node / job.ranks_per_node * BYTES_PER_GBIT
    inside_Bps = np.asarray(draw(fabric.intra_node_gbps)) * BYTES_PER_GBIT
    uplink_Bps = np.asarray(draw(fabric.uplink_gbps)) * BYTES_PER_GBIT
    members, nodes = job.group_nodes * job.ranks_per_node, job.group_nodes
    # each of a node's ranks reduces its share of the payload across nodes (hierarchical), after reducing inside
    inside_s = volume("all_reduce", "ring", job.ranks_per_node, payload_bytes).sent_bytes / inside_Bps
    across_bytes = volume("all_reduce", "ring", nodes, payload_bytes).sent_bytes
    jobs["transfer_alone_s"] = across_bytes / job.ranks_per_node / nic_Bps
    hops = crossing_hops(nodes, job.nodes, fabric.nodes_per_leaf, fabric.placement)
    jobs["uplink_work_s"] = hops * across_bytes / uplink_Bps
    rounds = volume("all_reduce", "ring", members, payload_bytes).rounds
    jobs["latency_s"] = inside_s + rounds * np.asarray(draw(fabric.latency_us)) * 1e-6
    jobs["has_barrier"] = job.barrier
    jobs["barrier_s"] = np.asarray(draw(fabric.barrier_us)) * 1e-6
    for name in _NOISE:
        value = getattr(cluster.noise, name)
        jobs[name] = value if isinstance(value, int) else draw(value)
    skewness_E = np.broadcast_to(np.round(draw(cluster.noise.imbalance_skew), 2), E).astype(np.float64)
    jobs["exposed_groups"], jobs["exposed_s"] = cluster.exposed.groups, draw(cluster.exposed.work_s)
    jobs["exposed_share"], jobs["exposed_mean_iterations"] = (
        draw(cluster.exposed.share),
        draw(cluster.exposed.mean_iterations),
    )
    jobs["exposed_episode_s"] = draw(cluster.exposed.episode_s)
    jobs["exposed_spread"] = draw(cluster.exposed.episode_spread)
    jobs["ideal_step_s"] = ideal_step_s(jobs)
    jobs["cap_s"] = cluster.pacing.cap * jobs["ideal_step_s"]
    return JobBatch(jobs, _tenants(cluster, draw, jobs, tenants), job.ranks, job.groups, skewness_E)


_NOISE = (
    "jitter_cv",
    "common_cv",
    "persistent_cv",
    "slow_ranks",
    "slow_factor",
    "imbalance_cv",
    "fail_slow_share",
    "fail_slow_mean_iterations",
    "fail_slow_factor",
    "drift_cv",
    "drift_iterations",
    "stall_rate",
    "stall_mean_s",
)


def ideal_step_s(jobs: NDArray[np.void]) -> Any:
    """Step time with every rank equal and every link free, seconds: compute, one collective alone, latency, barrier."""
    alone_s = np.maximum(jobs["transfer_alone_s"], jobs["uplink_work_s"])
    return jobs["compute_s"] + alone_s + jobs["latency_s"] + jobs["barrier_s"]


def _tenants(cluster: Cluster, draw: _Draw, jobs: NDArray[np.void], places: int | None) -> NDArray[np.void]:
    places = len(cluster.tenants) if places is None else places
    records = np.zeros((len(jobs), places), layout.TENANT)
    for k, tenant in enumerate(cluster.tenants):
        period_s = np.asarray(draw(tenant.period_ratio)) * jobs["ideal_step_s"]
        share, rate = np.asarray(draw(tenant.comm_share)), np.asarray(draw(tenant.rate_share))
        records["compute_s"][:, k] = period_s * (1.0 - share)
        records["uplink_work_s"][:, k] = period_s * share * rate
        records["rate_cap"][:, k] = rate
        records["weight"][:, k] = np.where(share > 0.0, draw(tenant.weight), 0.0)
        records["ranks"][:, k] = tenant.ranks
        records["jitter_cv"][:, k] = jobs["jitter_cv"] if tenant.jitter_cv is None else draw(tenant.jitter_cv)
    return records


class ClusterMix:
    """Clusters with weights, from which every episode draws one; they must agree in ranks and groups."""

    def __init__(self, clusters: Sequence[Cluster], weights: Sequence[float] | None = None) -> None:
        if not clusters:
            raise InputError("clusters: none given; allowed: at least one")
        first = clusters[0].job
        for other in clusters[1:]:
            if (other.job.ranks, other.job.groups) != (first.ranks, first.groups):
                raise InputError(
                    f"{other.name} has {other.job.ranks} ranks in {other.job.groups} groups, {clusters[0].name} has "
                    f"{first.ranks} in {first.groups}; allowed: the same for all clusters of a batch"
                )
        share = np.ones(len(clusters)) if weights is None else np.asarray(weights, dtype=np.float64)
        if len(share) != len(clusters) or not (share >= 0).all() or not 0 < share.sum() < np.inf:
            raise InputError(
                f"weights = {list(share)}; allowed: one non-negative number for each cluster, not all zero"
            )
        self.clusters, self.ranks, self.groups = tuple(clusters), first.ranks, first.groups
        self._edges = np.cumsum(share / share.sum())
        self._tenants = max(len(c.tenants) for c in clusters)
        self._fixed: dict[int, JobBatch] = {}

    def _derive(self, c: int, keys_E: NDArray[np.uint64]) -> JobBatch:
        """As :func:`derive`, once and for all where a cluster has nothing to draw."""
        fixed = self._fixed.get(c)
        if fixed is not None:
            return fixed.take(np.zeros(len(keys_E), np.int64))
        draw = _Draw(keys_E, self.clusters[c].job.nodes)
        batch = _derive(self.clusters[c], draw, len(keys_E), self._tenants)
        if not draw.random and len(keys_E):
            self._fixed[c] = batch.take(np.zeros(1, np.int64))
        return batch

    def which(self, keys_E: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Index of the cluster that each episode draws, ``(E,)``."""
        u = (episode_keys(keys_E, 0) >> np.uint64(12)).astype(np.float64) * 2.0**-52
        return np.minimum(np.searchsorted(self._edges, u, side="right"), len(self.clusters) - 1)

    def derive(self, keys_E: NDArray[np.uint64]) -> JobBatch:
        """Parameter records of E episodes."""
        if len(self.clusters) == 1:
            return self._derive(0, keys_E)
        which = self.which(keys_E)
        jobs = np.zeros(len(keys_E), layout.JOB)
        tenants_EK = np.zeros((len(keys_E), self._tenants), layout.TENANT)
        skewness_E = np.zeros(len(keys_E))
        for c in np.unique(which):
            at = np.flatnonzero(which == c)
            part = self._derive(c, keys_E[at])
            jobs[at], tenants_EK[at], skewness_E[at] = part.jobs, part.tenants_EK, part.skewness_E
        return JobBatch(jobs, tenants_EK, self.ranks, self.groups, skewness_E)
