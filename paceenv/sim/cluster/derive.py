"""From a cluster config to the engine's parameter records: draws what is random and applies the closed forms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from paceenv.core.errors import InputError
from paceenv.core.limits import LIMITS, Limits
from paceenv.sim.cluster.environment import Noise
from paceenv.sim.cluster.fabric import BURST_KB, SEND_BUFFER_KB
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_run import program_alone_s, program_key, program_of
from paceenv.sim.cluster.quantity import Draw
from paceenv.sim.cluster.transfers import all_reduce_times, message_s, tiers_of
from paceenv.sim.engine import layout
from paceenv.sim.engine.program_layout import Program
from paceenv.sim.engine.simulator import JobBatch, Simulator, episode_keys


def derive(cluster: Cluster, keys_E: NDArray[np.uint64], *, tenants: int | None = None) -> JobBatch:
    """Parameter records of E episodes of a cluster.

    Args:
        keys_E: episode keys (:func:`paceenv.sim.engine.simulator.episode_keys`); they decide what is drawn.
        tenants: tenant places of each record, at least as many as the cluster has; unused ones are absent. Default: as
            many as the cluster has.
    """
    return _derive(cluster, program_of(cluster), Draw(keys_E, cluster.job.nodes), len(keys_E), tenants)


def start(
    cluster: Cluster, seeds: Iterable[int] | NDArray[np.integer], threads: int = 1, limits: Limits = LIMITS
) -> Simulator:
    """A simulator with one episode per seed; the same seeds give every policy the same draws and noise."""
    keys_E = episode_keys(list(seeds))
    return Simulator(derive(cluster, keys_E), keys_E, threads, limits)


def drawn(cluster: Cluster, key: np.uint64) -> Cluster:
    """The cluster with the numbers that :func:`derive` draws for one episode in place of what is drawn.

    With the same key it derives to the same records, bit for bit.
    """
    apart = Cluster.model_validate(cluster.model_dump())  # so that no two places share one quantity
    draw = Draw(np.array([key], np.uint64), apart.job.nodes)
    _derive(apart, program_of(apart), draw, 1, None)

    def numbers(value: Any) -> Any:
        """A config as plain data, with its numbers in place of what is drawn."""
        if id(value) in draw.drawn:
            return float(draw.drawn[id(value)][0])
        if isinstance(value, BaseModel):
            return {name: numbers(getattr(value, name)) for name in type(value).model_fields}
        return [numbers(part) for part in value] if isinstance(value, list) else value

    return Cluster.model_validate(numbers(apart))


def _derive(cluster: Cluster, program: Program | None, draw: Draw, E: int, tenants: int | None) -> JobBatch:
    # the order of the draws below is part of every config's results
    jobs = layout.default_job(E)
    jobs["compute_s"] = draw(cluster.job.compute_s)
    payload_bytes = draw(cluster.job.gradient_bytes)
    _communicate(cluster, draw, jobs, payload_bytes)
    jobs["barrier_s"] = np.asarray(draw(cluster.fabric.barrier_us)) * 1e-6 * cluster.barrier
    for name in sorted(Noise.model_fields, key="imbalance_skew".__eq__):  # which is drawn last
        value = getattr(cluster.noise, name)
        if name in _DRAWN_BY_NAME:
            jobs[name] = draw.named(f"noise.{name}", value)
        else:
            jobs[name] = value if isinstance(value, int) else draw(value)
    work = cluster.post_collective_work
    jobs["post_work_groups"], jobs["post_work_s"] = work.groups, draw(work.work_s)
    jobs["post_work_share"], jobs["post_work_mean_iterations"] = draw(work.share), draw(work.mean_iterations)
    jobs["post_work_episode_s"], jobs["post_work_spread"] = draw(work.episode_s), draw(work.episode_spread)
    if cluster.power.compute_w != 0.0:
        for name in ("compute_w", "wait_w", "delay_w", "heat_slowdown", "heat_iterations"):
            jobs[name] = draw.named(f"power.{name}", getattr(cluster.power, name))
    jobs["ranks_per_node"] = cluster.job.ranks_per_node
    jobs["staleness"] = cluster.synchronization.staleness
    _synchronize(jobs, cluster.synchronization.sync_period)
    jobs["imbalance_skew"] = np.round(jobs["imbalance_skew"], 2)
    if program is None:
        jobs["ideal_step_s"] = ideal_step_s(jobs, cluster.groups)
    else:
        jobs["ideal_step_s"] = program_alone_s(program, float(jobs["compute_s"][0])) + jobs["barrier_s"]
    _fail(cluster, draw, jobs)
    return JobBatch(jobs, _tenants(cluster, draw, jobs, tenants), cluster.ranks, cluster.groups, program)


_DRAWN_BY_NAME = ("transfer_cv", "late_wake_s", "stamp_noise_s", "missing_share")


def _communicate(cluster: Cluster, draw: Draw, jobs: NDArray[np.void], payload_bytes: Any) -> None:
    """What a group's collective costs, into the records."""
    job, fabric, folded = cluster.job, cluster.fabric, cluster.folded
    jobs["has_barrier"] = cluster.barrier
    if cluster.has_program:
        jobs["compute_s"] = cluster.plan().compute_s
        jobs["length_cv"] = cluster.program.length_cv if cluster.program is not None else 0.0
        return
    if folded is not None:
        jobs["compute_s"], jobs["tail_s"] = folded.compute_s, folded.tail_s
        jobs["transfer_alone_s"], jobs["uplink_work_s"] = folded.reduce_s, folded.uplink_work_s
        jobs["overlap_share"] = folded.overlap_s / folded.compute_s
        return
    tiers = tiers_of(fabric, job, draw, has_tenants=True)
    if job.collective == "all_reduce":
        times = all_reduce_times(job, fabric, tiers, payload_bytes)
        jobs["transfer_alone_s"], jobs["uplink_work_s"], jobs["latency_s"] = times
        jobs["overlap_share"] = draw.named("job.overlap", job.overlap)
        tail_bytes = np.minimum(draw.named("job.tail_bytes", job.tail_bytes), payload_bytes)
        alone_s, work_s, latency_s = all_reduce_times(job, fabric, tiers, tail_bytes)
        jobs["tail_s"] = np.where(tail_bytes > 0.0, np.maximum(alone_s, work_s) + latency_s, 0.0)
        return
    members = job.group_nodes * job.ranks_per_node
    jobs["incast_kind"] = layout.GATHER if job.collective == "gather" else layout.ALL_TO_ALL
    jobs["incast_flow_s"] = message_s(job.collective, job, fabric, tiers, payload_bytes)
    jobs["transfer_alone_s"] = (members - 1) * jobs["incast_flow_s"]
    jobs["latency_s"] = tiers.hop_s
    jobs["incast_fit"] = math.inf
    if fabric.buffer_kb is not None:  # how many senders' opening windows a port can buffer
        jobs["incast_fit"] = np.asarray(draw.named("fabric.buffer_kb", fabric.buffer_kb)) / BURST_KB
    jobs["incast_timeout_s"] = np.asarray(draw.named("fabric.timeout_ms", fabric.timeout_ms)) * 1e-3
    if job.collective == "gather":
        buffered = np.minimum(SEND_BUFFER_KB * 1e3 / np.maximum(payload_bytes, 1.0), 1.0)
        jobs["incast_buffered_s"] = buffered * jobs["incast_flow_s"]


def _synchronize(jobs: NDArray[np.void], every: int) -> None:
    """Local SGD: one engine step becomes the K steps between two synchronizations.

    Exact for noise that is independent from step to step: K times the mean, 1/sqrt(K) of the relative spread and of the
    skewness. Stalls keep their mean: K times as many, or longer ones where that is more than one a period. An effect
    that lasts for iterations lasts for K times fewer, at least for one. Drift and episodes shorter than K steps are
    therefore overstated. Only the last of the K steps can overlap with the collective. Tenants keep their ratio to the
    period.
    """
    if every == 1:
        return
    jobs["compute_s"] *= every
    jobs["overlap_share"] /= every
    for name in ("jitter_cv", "common_cv", "imbalance_cv", "imbalance_skew"):
        jobs[name] /= math.sqrt(every)
    stalls = jobs["stall_rate"] * every
    jobs["stall_rate"] = np.minimum(stalls, 1.0)
    jobs["stall_mean_s"] *= np.maximum(stalls, 1.0)
    for name in ("fail_slow_mean_iterations", "drift_iterations", "post_work_mean_iterations", "heat_iterations"):
        jobs[name] = np.maximum(jobs[name] / every, 1.0)


def _fail(cluster: Cluster, draw: Draw, jobs: NDArray[np.void]) -> None:
    """Checkpoints and failures, in units of engine steps: K iterations each under local SGD."""
    rules, every = cluster.reliability, cluster.synchronization.sync_period
    jobs["checkpoint_iterations"] = rules.checkpoint_iterations // every
    jobs["warmup_iterations"] = -(-rules.warmup_iterations // every)
    for name in ("checkpoint_s", "failure_heat", "restart_s", "warmup_factor"):
        jobs[name] = draw.named(f"reliability.{name}", getattr(rules, name))
    if rules.mtbf_iterations is not None:
        steps = np.asarray(draw.named("reliability.mtbf", rules.mtbf_iterations)) / every
        jobs["failure_per_s"] = cluster.job.nodes / (steps * jobs["ideal_step_s"])


def ideal_step_s(jobs: NDArray[np.void], groups: int = 1) -> Any:
    """Step time with every rank equal and no other job, seconds, as of a program.

    The job's own groups share the uplink, and work that some always have after their collective is part of the step.

    A collective that overlaps starts with the first gradients and ends no earlier than the last ones alone let it.
    """
    alone_s = np.maximum(jobs["transfer_alone_s"], groups * jobs["uplink_work_s"])
    early_s = (1.0 - jobs["overlap_share"]) * jobs["compute_s"] + alone_s + jobs["latency_s"]
    late_s = np.where(jobs["overlap_share"] > 0.0, jobs["compute_s"] + jobs["tail_s"], 0.0)
    after_s = np.where(jobs["post_work_groups"] > 0, jobs["post_work_s"], 0.0) + jobs["barrier_s"]
    step_s = np.maximum(early_s, late_s) + after_s
    # running ahead hides the collective, up to as many steps as it may take
    ahead_s = np.maximum(np.maximum(jobs["compute_s"], alone_s), step_s / (jobs["staleness"] + 1.0))
    return np.where(jobs["staleness"] > 0, ahead_s, step_s)


def _tenants(cluster: Cluster, draw: Draw, jobs: NDArray[np.void], places: int | None) -> NDArray[np.void]:
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
        records["late_share"][:, k] = draw.named("fabric.late_share", cluster.fabric.late_share)
        records["bursty"][:, k] = tenant.bursty
        records["pause_rate"][:, k] = draw.named(f"tenants.{k}.pause_rate", tenant.pause_rate)
        records["pause_periods"][:, k] = draw.named(f"tenants.{k}.pause_periods", tenant.pause_periods)
        records["jitter_cv"][:, k] = jobs["jitter_cv"] if tenant.jitter_cv is None else draw(tenant.jitter_cv)
    return records


def shape_of(cluster: Cluster) -> tuple[int, int, str]:
    """What clusters of one batch share: ranks, process groups, and what decides the program, empty without one."""
    return cluster.ranks, cluster.groups, program_key(cluster)


class ClusterMix:
    """Clusters of which every episode draws one, by their weights; they must agree in ranks and groups."""

    def __init__(self, clusters: Sequence[Cluster], weights: Sequence[float] | None = None) -> None:
        first, share_C = clusters[0], np.ones(len(clusters)) if weights is None else np.asarray(weights, np.float64)
        if share_C.shape != (len(clusters),) or not (share_C >= 0).all() or not 0 < share_C.sum() < np.inf:
            raise InputError(f"weights = {weights}; allowed: one non-negative number for each cluster, not all zero")
        for other in clusters[1:]:
            if (other.ranks, other.groups) != (first.ranks, first.groups):
                raise InputError(
                    f"{other.name} has {other.ranks} ranks in {other.groups} groups, {first.name} has "
                    f"{first.ranks} in {first.groups}; allowed: the same for all clusters of a batch. "
                    "Make a batch for each; NativeVecEnv takes several"
                )
            if shape_of(other) != shape_of(first):
                raise InputError(
                    f"{other.name} and {first.name} differ in program, nodes, fabric or whether there are tenants; "
                    "allowed: the same for all clusters of a batch with a program"
                )
        self.clusters, self.ranks, self.groups = tuple(clusters), first.ranks, first.groups
        self._ends_C = np.cumsum(share_C / share_C.sum())
        self._tenants = max(len(c.tenants) for c in clusters)
        self._fixed: dict[int, JobBatch] = {}

    @cached_property
    def _program(self) -> Program | None:
        """Of all clusters; held here, because a simulator goes on with the very tables that it began with."""
        return program_of(self.clusters[0])

    def _derive(self, c: int, keys_E: NDArray[np.uint64]) -> JobBatch:
        """As :func:`derive`, once and for all where a cluster has nothing to draw."""
        fixed = self._fixed.get(c)
        if fixed is not None:
            return fixed.take(np.zeros(len(keys_E), np.int64))
        draw = Draw(keys_E, self.clusters[c].job.nodes)
        batch = _derive(self.clusters[c], self._program, draw, len(keys_E), self._tenants)
        if not draw.drawn and len(keys_E):
            self._fixed[c] = batch.take(np.zeros(1, np.int64))
        return batch

    def draw(self, keys_E: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Index of the cluster that each episode draws, ``(E,)``."""
        u = (episode_keys(keys_E, 0) >> np.uint64(12)).astype(np.float64) * 2.0**-52
        return np.minimum(np.searchsorted(self._ends_C, u, side="right"), len(self.clusters) - 1)

    def derive(self, keys_E: NDArray[np.uint64], which: NDArray[np.int64]) -> JobBatch:
        """Parameter records of E episodes; ``which`` is the index of the cluster of each, ``(E,)``."""
        if len(self.clusters) == 1:
            return self._derive(0, keys_E)
        jobs = np.zeros(len(keys_E), layout.JOB)
        tenants_EK = np.zeros((len(keys_E), self._tenants), layout.TENANT)
        for c in np.unique(which):
            at = np.flatnonzero(which == c)
            part = self._derive(c, keys_E[at])
            jobs[at], tenants_EK[at] = part.jobs, part.tenants_EK
        return JobBatch(jobs, tenants_EK, self.ranks, self.groups, self._program)
