"""A step with one collective: its structure, compute, post-collective work and network, as keys of a cluster.

Axes: T iterations, G process groups.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.calibration.cluster_builder import ClusterBuilder, JobFit
from paceenv.calibration.compute_noise import add_noise, fit_compute
from paceenv.calibration.incast_fit import add_incast
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.links import add_links
from paceenv.calibration.parameters import ROUND_US, bounded, estimated, exact, identified, not_identifiable
from paceenv.calibration.two_state_fit import find_episodes, fit_two_states
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster

ASSUMED_BYTES: Final = 1e6
USUAL_SPREAD: Final = 0.5
"""Usual distance of single episodes from their mean, as in ``episode_spread``."""
PRIOR_EPISODES: Final = 2
MIN_WORK_SHARE: Final = 0.02
"""Share of a step; less work cannot be separated from the overhead of every group."""

Array = NDArray[np.float64]


def fit_collective(
    stamps: JobStamps, base: Cluster | None = None, name: str = "calibrated", probed: JobStamps | None = None
) -> JobFit:
    """Fit a cluster to a job's stamps, its links to those of a probe; ``base`` stands where they tell nothing."""
    probed = stamps if probed is None else probed
    if (probed.members, probed.ops) != (stamps.members, stamps.ops):
        raise InputError("probe: another job than the trace; allowed: the same ranks, groups and collectives")
    if base is not None and base.workload is not None:
        raise InputError(f"base: {base.name} describes a workload; allowed: a job given by its times")
    data: dict[str, Any] = {"fabric": {"nodes_per_leaf": 1, "nic_gbps": 1.0, "uplink_gbps": 1.0}, "job": {}}
    if base is not None:
        data = base.model_dump(exclude={"noise", "post_collective_work", "tenants"})
        data["fabric"] |= {"oversubscription": None, "ecmp_paths": None}
    data |= {"name": name, "description": f"Fitted to a trace of {stamps.described}."}
    builder = ClusterBuilder(stamps, base, data)
    compute = fit_compute(stamps, stamps.compute_TR)
    _add_structure(builder)
    said = "mean of what precedes the payload, healthy ranks"
    builder.put(estimated("job.compute_s", compute.noise.mean_compute_s, said))
    add_noise(builder, compute, by_rank=False)
    _add_post_work(builder)
    if stamps.collective == "all_reduce":
        add_links(builder, probed)
    else:
        add_incast(builder)
    if base is None:
        latency_us = float(str(builder.cluster().fabric.latency_us))
        why = "at one size a round of messages is a part of the payload's time"
        builder.add(not_identifiable("fabric.latency_us", latency_us, why, "assumed", lo=ROUND_US[0], hi=ROUND_US[1]))
    return builder.fit()


def _add_structure(builder: ClusterBuilder[JobStamps]) -> None:
    stamps, job = builder.stamps, builder.data["job"]
    job |= {"ranks_per_node": 1, "collective": stamps.collective, "overlap": 0.0, "tail_bytes": 0.0}
    rows = f"{len(stamps.step_T)} iterations alike, {stamps.dropped} left out"
    members = ", ".join("+".join(map(str, group)) for group in stamps.members)
    collectives = f"an iteration's collectives are {', '.join(stamps.ops)}"
    builder.put(
        exact("job.nodes", stamps.ranks, f"ranks in the trace, one a node; {rows}"),
        exact(
            "job.nodes_per_group", stamps.ranks // stamps.groups, f"ranks of the payload's process groups: {members}"
        ),
        exact("job.barrier", stamps.barrier or stamps.groups > 1, collectives),
    )
    if stamps.payload_bytes:
        builder.put(exact("job.gradient_bytes", float(stamps.payload_bytes), "bytes of the payload's rows"))
        return
    known = builder.known("job", "gradient_bytes")
    size, source = (ASSUMED_BYTES, "assumed, and rates with it") if known is None else (known, "from base")
    builder.put(not_identifiable("job.gradient_bytes", size, "its rows have no bytes", source))


def _add_post_work(builder: ClusterBuilder[JobStamps]) -> None:
    """The time between the end of a group's payload and the end of the step: work of some groups, and the barrier."""
    stamps = builder.stamps
    rest_TG = stamps.ready_TG - stamps.finish_TG
    after_T = stamps.step_T - stamps.ready_TG.max(axis=1)
    least_s = MIN_WORK_SHARE * float(np.median(stamps.step_T))
    on_TG = np.stack([fit_two_states(x, least_s) for x in rest_TG.T], axis=1)
    usual_G = np.array([np.median(rest_TG[~on_TG[:, g], g]) for g in range(stamps.groups)])
    common_s = float(usual_G.min())
    if builder.data["job"]["barrier"]:
        barrier_s, barrier_se = float(after_T.mean()), float(after_T.std(ddof=1) / math.sqrt(len(after_T)))
        said = "from the last group's end of work to the end of the step, and what all groups have in common"
        builder.put(identified("fabric.barrier_us", max(barrier_s + common_s, 0.0) * 1e6, barrier_se * 1e6, said))
    always = [int(g) for g in np.flatnonzero(usual_G - common_s > least_s)]
    work = builder.data["post_collective_work"] = {"groups": len(always), "work_s": 0.0}
    if always:
        own_T = np.where(on_TG, np.nan, rest_TG)[:, always].ravel() - common_s
        own = own_T[np.isfinite(own_T)]
        work_s, work_se = float(own.mean()), float(own.std(ddof=1) / math.sqrt(len(own)))
        named = ", ".join("+".join(map(str, stamps.members[g])) for g in always)
        said = f"between payload and barrier of the group of ranks {named}, beside what all groups have"
        builder.put(exact("post_collective_work.groups", len(always), said))
        builder.put(identified("post_collective_work.work_s", work_s, work_se, said))
    episodes = find_episodes(on_TG)
    if episodes is not None:
        episode_s, se, spread = _of_episodes(_episode_means(rest_TG - usual_G, on_TG))
        said = f"{episodes.count} episodes between payload and barrier"
        builder.put(
            bounded("post_collective_work.share", episodes.share, said),
            bounded("post_collective_work.mean_iterations", episodes.mean_iterations, said),
            identified("post_collective_work.episode_s", episode_s, se, said),
        )
        work |= {"share": min(episodes.share.value, 0.99), "episode_spread": spread}


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
