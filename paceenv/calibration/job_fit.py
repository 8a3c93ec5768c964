"""A cluster config from the trace of a job: structure, compute, post-collective work, network; with evidence.

Every part is fitted from the same stamps (:mod:`paceenv.calibration.job_stamps`) and becomes keys of a cluster. The
cluster is then simulated and compared with the trace. Axes: T iterations, G process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.calibration.cluster_builder import ClusterBuilder, Steps, simulate
from paceenv.calibration.compute_noise import ComputeFit, fit_compute
from paceenv.calibration.incast_fit import add_incast
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.links import add_links
from paceenv.calibration.parameters import ROUND_US, Parameter, bounded, estimated, identified, not_identifiable
from paceenv.calibration.two_state_fit import Episodes, find_episodes, fit_two_states
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster

ASSUMED_BYTES: Final = 1e6
USUAL_SPREAD: Final = 0.5
"""Usual distance of single episodes from their mean, as in ``episode_spread``."""
PRIOR_EPISODES: Final = 2
MIN_WORK_SHARE: Final = 0.02
"""Share of a step; less work cannot be separated from the overhead of every group."""

Array = NDArray[np.float64]


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


def calibrate_stamps(stamps: JobStamps, probed: JobStamps | None, base: Cluster | None, name: str) -> JobFit:
    """Fit a cluster to a job's stamps and a probe's; a known ``base`` stands where they tell nothing.

    Raises InputError where the probe is of another job, or ``base`` describes a workload.
    """
    probed = stamps if probed is None else probed
    if (probed.members, probed.ops) != (stamps.members, stamps.ops):
        raise InputError("probe: another job than the trace; allowed: the same ranks, groups and collectives")
    if base is not None and base.workload is not None:
        raise InputError(f"base: {base.name} describes a workload; allowed: a job given by its times")
    builder = ClusterBuilder(stamps, probed, base, name)
    compute, after = fit_compute(stamps), fit_post_collective(stamps)
    _structure(builder, compute)
    _noise(builder, compute)
    _post_work(builder, after)
    _network(builder)
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
    """Where each number of a cluster comes from, as plain data."""
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


@dataclass(frozen=True)
class PostCollectiveFit:
    """``always`` are the groups that always have it, ``work_s`` how long on average, with its standard error.

    ``episode_s`` is an episode's mean per step and ``spread`` how far single ones lie from it (uniform, as a share).
    ``barrier_s`` is the time after the last group is ready, with the overhead that all groups have.
    """

    always: tuple[int, ...]
    work_s: float
    work_se: float
    episodes: Episodes | None
    episode_s: float
    episode_se: float
    spread: float
    barrier_s: float
    barrier_se: float


def fit_post_collective(stamps: JobStamps) -> PostCollectiveFit:
    """Fit the time between the end of a group's payload and the end of the step."""
    rest_TG = stamps.ready_TG - stamps.finish_TG
    after_T = stamps.step_T - stamps.ready_TG.max(axis=1)
    least_s = MIN_WORK_SHARE * float(np.median(stamps.step_T))
    on_TG = np.stack([fit_two_states(x, least_s) for x in rest_TG.T], axis=1)
    usual_G = np.array([np.median(rest_TG[~on_TG[:, g], g]) for g in range(stamps.groups)])
    common_s = float(usual_G.min())
    always = tuple(int(g) for g in np.flatnonzero(usual_G - common_s > least_s))
    work_TG = rest_TG - usual_G
    work_s, work_se = 0.0, 0.0
    if always:
        own_T = np.where(on_TG, np.nan, rest_TG)[:, list(always)].ravel() - common_s
        own = own_T[np.isfinite(own_T)]
        work_s, work_se = float(own.mean()), float(own.std(ddof=1) / math.sqrt(len(own)))
    episodes = find_episodes(on_TG)
    single = _episode_means(work_TG, on_TG)
    episode_s, se, spread = _of_episodes(single) if episodes else (0.0, 0.0, 0.0)
    barrier_s, barrier_se = float(after_T.mean()), float(after_T.std(ddof=1) / math.sqrt(len(after_T)))
    return PostCollectiveFit(always, work_s, work_se, episodes, episode_s, se, spread, barrier_s + common_s, barrier_se)


def _of_episodes(single: list[float]) -> tuple[float, float, float]:
    """Mean work of episodes, its standard error, and how far single ones lie from it (uniform, as a share).

    The spread of a few episodes is hardly known, so USUAL_SPREAD counts as two more of them. Student's t widens the
    error.
    """
    mean_s, n = float(np.mean(single)), len(single)
    usual_s = USUAL_SPREAD / math.sqrt(3.0) * mean_s
    freedom = PRIOR_EPISODES + n - 1
    sd_s = math.sqrt((PRIOR_EPISODES * usual_s**2 + float(np.sum((np.array(single) - mean_s) ** 2))) / freedom)
    wider = float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))
    spread = min(math.sqrt(3.0) * float(np.std(single)) / mean_s, 1.0) if n > 2 else 0.0
    return mean_s, wider * sd_s / math.sqrt(n), spread


def _episode_means(work_TG: Array, on_TG: NDArray[np.bool_]) -> list[float]:
    """The mean work of every single episode."""
    means = []
    for work_T, on_T in zip(work_TG.T, on_TG.T, strict=True):
        bounds = np.flatnonzero(np.diff(on_T.astype(np.int8))) + 1
        parts = np.split(np.arange(len(on_T)), bounds)
        means += [float(work_T[part].mean()) for part in parts if on_T[part[0]]]
    return means


def _network(builder: ClusterBuilder) -> None:
    """Links that groups share, a tenant on them, or incast; on top of compute and post-collective work."""
    if builder.stamps.collective == "all_reduce":
        add_links(builder)
    else:
        add_incast(builder)
    if builder.base is None:
        _round(builder)


def _round(builder: ClusterBuilder) -> None:
    """The assumed time of a round of messages, and its bounds."""
    latency_us = builder.cluster().fabric.latency_us
    assert isinstance(latency_us, float)
    why = "at one size a round of messages is a part of the payload's time"
    builder.add(not_identifiable("fabric.latency_us", latency_us, why, "assumed", lo=ROUND_US[0], hi=ROUND_US[1]))
