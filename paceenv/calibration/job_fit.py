"""A cluster config from the trace of a job: structure, compute, post-collective work, network; with evidence.

Every part is fitted by its own module from the same stamps (:mod:`paceenv.calibration.structure`) and becomes keys of a
cluster: the work of single ranks here, the shared network in :mod:`paceenv.calibration.fits.network_fit`. The cluster
is then simulated and compared with the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceenv.calibration.cluster_builder import ClusterBuilder
from paceenv.calibration.fits.network_fit import fit_network
from paceenv.calibration.fits.noise_fit import ComputeFit, fit_compute
from paceenv.calibration.fits.post_collective_fit import PostCollectiveFit, fit_post_collective
from paceenv.calibration.parameters import Parameter, bounded, estimated, identified, not_identifiable
from paceenv.calibration.step_statistics import Steps, simulate
from paceenv.calibration.structure import JobStamps, read_job
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.sim.cluster import Cluster

ASSUMED_BYTES: Final = 1e6


@dataclass(frozen=True)
class JobFit:
    """A calibrated cluster, its parameters with evidence, and how well it does what the job did.

    ``measured`` are the trace's steps without pacing (all, where too few), ``simulated`` those of the cluster.
    """

    cluster: Cluster
    parameters: tuple[Parameter, ...]
    measured: Steps
    simulated: Steps

    def to_json(self) -> dict[str, Any]:
        """Every parameter, and how well the cluster does what the job did, as plain data."""
        return {
            "parameters": [{"key": p.key, "told": p.is_identified} | p.to_record() for p in self.parameters],
            "measured": {"step_mean_s": self.measured.mean_s, "step_cv": self.measured.cv},
            "simulated": {"step_mean_s": self.simulated.mean_s, "step_cv": self.simulated.cv},
        }

    @property
    def mean_error(self) -> float:
        """Of the mean step, relative."""
        return self.simulated.mean_s / self.measured.mean_s - 1.0

    @property
    def cv_error(self) -> float:
        """Of the coefficient of variation."""
        return self.simulated.cv - self.measured.cv


def calibrate_job(
    trace: Trace,
    *,
    base: Cluster | None = None,
    name: str = "calibrated",
    probe: Trace | None = None,
    job: str | None = None,
) -> JobFit:
    """Fit a cluster config to a trace.

    Args:
        trace: the trace of a job.
        base: known cluster, whose numbers stand where the trace identifies none.
        name: name of the new config.
        probe: a second trace of the same job with small random delays, to which links are fitted.
        job: which job, where the trace holds several.

    Raises:
        InputError: the trace holds no job that can be described.
    """
    stamps = read_job(trace, job=job)
    return calibrate_stamps(stamps, None if probe is None else read_job(probe, job=job), base, name)


def calibrate_stamps(stamps: JobStamps, probed: JobStamps | None, base: Cluster | None, name: str) -> JobFit:
    """As :func:`calibrate_job`, from stamps.

    Args:
        stamps: the job's stamps.
        probed: stamps of a probe of the same job, if any.
        base: known cluster, if any.
        name: name of the new config.

    Raises:
        InputError: the probe is of another job, or ``base`` describes a workload or a torus.
    """
    probed = stamps if probed is None else probed
    if (probed.members, probed.ops) != (stamps.members, stamps.ops):
        raise InputError("probe: another job than the trace; allowed: the same ranks, groups and collectives")
    if base is not None and (base.workload is not None or base.fabric.torus is not None):
        raise InputError(f"base: {base.name} describes a workload or a torus; allowed: a job given by its times")
    builder = ClusterBuilder(stamps, probed, base, name)
    compute, after = fit_compute(stamps), fit_post_collective(stamps)
    _structure(builder, compute)
    _noise(builder, compute)
    _post_work(builder, after)
    fit_network(builder)
    cluster = builder.cluster()
    simulated = simulate(cluster, len(stamps.step_T))
    source = f"{stamps.name} ({stamps.source}), {len(stamps.step_T)} iterations"
    record = record_of(source, builder.parameters, builder.measured, simulated, builder.correlations)
    cluster = cluster.model_copy(update={"calibration": record})
    return JobFit(cluster, tuple(builder.parameters), builder.measured, simulated)


def record_of(
    source: str,
    parameters: Sequence[Parameter],
    measured: Steps,
    simulated: Steps,
    correlations: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Where each number of a cluster comes from, as plain data.

    Args:
        source: the trace.
        parameters: that were looked for.
        measured: steps of the trace.
        simulated: steps of the cluster.
        correlations: between errors, by pair of parameters.
    """
    return {
        "source": source,
        "fitted": {p.key: p.to_record() for p in parameters if p.is_identified},
        "cannot_tell": {p.key: p.to_record() for p in parameters if not p.is_identified},
        "correlations": correlations or {},
        "measured": {"step_mean_s": measured.mean_s, "step_mean_se_s": measured.mean_sd, "step_cv": measured.cv},
        "simulated": {"step_mean_s": simulated.mean_s, "step_cv": simulated.cv},
    }


def _structure(builder: ClusterBuilder, compute: ComputeFit) -> None:
    stamps, job = builder.stamps, builder.data["job"]
    job |= {"nodes": stamps.ranks, "ranks_per_node": 1, "nodes_per_group": stamps.ranks // stamps.groups}
    job |= {"barrier": stamps.barrier or stamps.groups > 1, "collective": stamps.collective}
    job |= {"compute_s": compute.noise.mean_compute_s.value, "overlap": 0.0, "tail_bytes": 0.0}
    rows = f"{len(stamps.step_T)} iterations alike, {stamps.dropped} left out"
    members = ", ".join("+".join(map(str, group)) for group in stamps.members)
    builder.add_exact("job.nodes", stamps.ranks, f"ranks in the trace, one a node; {rows}")
    builder.add_exact(
        "job.nodes_per_group", job["nodes_per_group"], f"ranks of the payload's process groups: {members}"
    )
    builder.add_exact("job.barrier", float(job["barrier"]), f"an iteration's collectives are {', '.join(stamps.ops)}")
    known = builder.known("job", "gradient_bytes")
    if stamps.payload_bytes:
        job["gradient_bytes"] = float(stamps.payload_bytes)
        builder.add_exact("job.gradient_bytes", stamps.payload_bytes, "bytes of the payload's rows")
    else:
        job["gradient_bytes"] = ASSUMED_BYTES if known is None else known
        source = "assumed, and rates with it" if known is None else "from base"
        builder.add(not_identifiable("job.gradient_bytes", job["gradient_bytes"], "its rows have no bytes", source))


_VARIES: Final = {
    "jitter_cv": "compute varies from step to step",
    "common_cv": "compute of all ranks together varies",
    "persistent_cv": "the ranks' compute differs lastingly",
    "imbalance_cv": "compute varies with the data",
}
"""Coefficients of variation, in words."""


def _noise(builder: ClusterBuilder, compute: ComputeFit) -> None:
    found, noise = compute.noise, compute.noise.to_config()["noise"]
    for key, said in _VARIES.items():
        if noise.get(key, 0.0) > 1.0:
            raise InputError(
                f"trace of {builder.stamps.name}: {said} by {noise[key]:.0%}; "
                "allowed: at most 100 %, the simulator's limit"
            )
    builder.add(estimated("job.compute_s", found.mean_compute_s, "mean of what precedes the payload, healthy ranks"))
    for key in ("jitter_cv", "common_cv", "persistent_cv", "imbalance_cv", "imbalance_skew"):
        estimate = getattr(found, key)
        if estimate is not None:
            builder.add(estimated(f"noise.{key}", estimate, "variance components of compute, jackknife over steps"))
    if found.slow_factor is not None:
        slow = [builder.stamps.order_R[position] for position in found.slow_workers]
        said = f"persistently slower than their peers: {', '.join(f'rank {r}' for r in slow)}"
        builder.add_exact("noise.slow_ranks", len(slow), said)
        builder.add(estimated("noise.slow_factor", found.slow_factor, said))
    episodes = compute.episodes
    if episodes is not None:
        noise |= {"fail_slow_share": min(episodes.share.value, 0.99), "fail_slow_factor": max(compute.factor, 1.0)}
        noise["fail_slow_mean_iterations"] = max(episodes.mean_iterations.value, 1.0)
        ranks = [builder.stamps.order_R[r] for r in np.flatnonzero(episodes.on_TN.any(axis=0))]
        said = f"{episodes.count} episodes on {', '.join(f'rank {r}' for r in ranks)}"
        builder.add(bounded("noise.fail_slow_share", episodes.share, said))
        builder.add(bounded("noise.fail_slow_mean_iterations", episodes.mean_iterations, said))
        builder.add(identified("noise.fail_slow_factor", compute.factor, compute.factor_se, said))
    builder.data["noise"] = noise


def _post_work(builder: ClusterBuilder, found: PostCollectiveFit) -> None:
    barrier_us = max(found.barrier_s, 0.0) * 1e6
    if builder.data["job"]["barrier"]:
        builder.data["fabric"]["barrier_us"] = barrier_us
        said = "from the last group's end of work to the end of the step, and what all groups have in common"
        builder.add(identified("fabric.barrier_us", barrier_us, found.barrier_se * 1e6, said))
    work: dict[str, Any] = {"groups": len(found.always), "work_s": max(found.work_s, 0.0)}
    if found.always:
        named = ", ".join("+".join(map(str, builder.stamps.members[g])) for g in found.always)
        said = f"between payload and barrier of the group of ranks {named}, beside what all groups have"
        builder.add_exact("post_collective_work.groups", len(found.always), said)
        builder.add(identified("post_collective_work.work_s", found.work_s, found.work_se, said))
    if found.episodes is not None:
        episodes, said = found.episodes, f"{found.episodes.count} episodes between payload and barrier"
        work |= {
            "share": min(episodes.share.value, 0.99),
            "mean_iterations": max(episodes.mean_iterations.value, 1.0),
        }
        work |= {"episode_s": found.episode_s, "episode_spread": found.spread}
        builder.add(bounded("post_collective_work.share", episodes.share, said))
        builder.add(bounded("post_collective_work.mean_iterations", episodes.mean_iterations, said))
        builder.add(identified("post_collective_work.episode_s", found.episode_s, found.episode_se, said))
    builder.data["post_collective_work"] = work
