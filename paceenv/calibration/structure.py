"""What the stamps alone tell of a job, as keys of a cluster: ranks, groups, the step, and work behind a collective.

Axes: T steps, R ranks, G process groups.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, stats

from paceenv.calibration.cluster_builder import ClusterBuilder, RankCompute
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.parameters import FROM_BASE, bounded, exact, identified, not_identifiable
from paceenv.calibration.program_links import NO_LIMIT, nodes_of
from paceenv.calibration.program_stamps import ProgramStamps
from paceenv.calibration.step_order import StepOrder, read_order
from paceenv.calibration.step_phases import group_growth, step_phases
from paceenv.calibration.two_state_fit import find_episodes, fit_two_states
from paceenv.core.errors import InputError
from paceenv.sim.engine.recording import SIMULATOR

ASSUMED_BYTES: Final = 1e6
USUAL_SPREAD: Final = 0.5
"""Usual distance of single episodes from their mean, as in ``episode_spread``."""
PRIOR_EPISODES: Final = 2
MIN_WORK_SHARE: Final = 0.02
"""Share of a step; less work cannot be separated from the overhead of every group."""

Array = NDArray[np.float64]


def add_collective(builder: ClusterBuilder[JobStamps]) -> None:
    """Ranks, groups, and their one collective."""
    stamps, base, probed = builder.stamps, builder.base, builder.probed
    if (probed.members, probed.ops) != (stamps.members, stamps.ops):
        raise InputError("probe: another job than the trace; allowed: the same ranks, groups and collectives")
    if base is not None and base.workload is not None:
        raise InputError(f"base: {base.name} describes a workload; allowed: a job given by its times")
    data: dict[str, Any] = {"fabric": {"nodes_per_leaf": 1, "nic_gbps": 1.0, "uplink_gbps": 1.0}, "job": {}}
    if base is not None:
        data = base.model_dump(exclude={"noise", "post_collective_work", "tenants"})
        data["fabric"]["oversubscription"] = None
    builder.data = data | builder.data | {"description": f"Fitted to a trace of {stamps.described}."}
    builder.compute = RankCompute(stamps.compute_TR)
    builder.data["job"] |= {"ranks_per_node": 1, "collective": stamps.collective, "overlap": 0.0, "tail_bytes": 0.0}
    members = ", ".join("+".join(map(str, group)) for group in stamps.members)
    said = f"ranks of the payload's process groups: {members}"
    collectives = f"an iteration's collectives are {', '.join(stamps.ops)}"
    builder.put(
        exact("job.nodes", stamps.ranks, f"ranks in the trace, one a node; {stamps.counted}"),
        exact("job.nodes_per_group", stamps.ranks // stamps.groups, said),
        exact("job.barrier", stamps.barrier or stamps.groups > 1, collectives),
    )
    if stamps.payload_bytes:
        builder.put(exact("job.gradient_bytes", float(stamps.payload_bytes), "bytes of the payload's rows"))
        return
    known = builder.known("job", "gradient_bytes")
    size, source = (ASSUMED_BYTES, "assumed, and rates with it") if known is None else (known, FROM_BASE)
    builder.put(not_identifiable("job.gradient_bytes", size, "its rows have no bytes", source))


def add_post_work(builder: ClusterBuilder[JobStamps]) -> None:
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
        work["episode_spread"] = spread


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
    means = list[float]()
    for work_T, on_T in zip(work_TG.T, on_TG.T, strict=True):
        labels_T, count = ndimage.label(on_T)
        means += ndimage.mean(work_T, labels_T, np.arange(count) + 1).tolist()
    return means


def add_program(builder: ClusterBuilder[ProgramStamps]) -> None:
    """Phases, and links that limit nothing; the fabric of a known base stands where the trace identifies none."""
    order = read_order(builder.stamps)
    stamps, growth = group_growth(builder.stamps, order)
    builder.stamps, base, (nodes, each) = stamps, builder.base, nodes_of(stamps)
    step, builder.compute = step_phases(stamps, order)
    fabric: dict[str, Any] = {"nic_gbps": NO_LIMIT, "nodes_per_leaf": nodes, "uplink_gbps": NO_LIMIT * nodes}
    if base is not None:
        if base.job.ranks != stamps.ranks:
            raise InputError(f"base: {base.job.ranks} ranks; allowed: the {stamps.ranks} of the trace")
        nodes, each = base.job.nodes, base.job.ranks_per_node
        fabric = base.fabric.model_dump(exclude_none=True, exclude={"buffer_kb"})
    communicators = {key: one.model_dump(exclude_defaults=True) for key, one in stamps.communicators.items()}
    builder.data |= {
        "description": f"Program fitted to a trace of {stamps.described}.",
        "job": {"nodes": nodes, "ranks_per_node": each},
        "program": {"communicators": communicators, "step": step},
        "fabric": fabric,
    }
    _say_structure(builder, order)
    builder.add(growth)


def _say_structure(builder: ClusterBuilder[ProgramStamps], order: StepOrder) -> None:
    """The evidence of ranks, transfers and their order."""
    stamps, job = builder.stamps, builder.data["job"]
    behind, held = int(order.background_K.sum()), int(order.can_wait_K.sum())
    said = (
        f"a step has {len(stamps.transfers)} transfers on {len({one.communicator for one in stamps.transfers})} "
        f"communicators; {behind} in the background, of which {held} are gradients that can wait"
    )
    hosts = "hosts" if job["ranks_per_node"] > 1 else "ranks"
    builder.add(exact("job.nodes", job["nodes"], f"{hosts} in the trace; {stamps.counted}"))
    builder.add(exact("program.transfers", len(stamps.transfers), said))
    is_one_each = builder.base is None and job["ranks_per_node"] == 1
    if is_one_each and len(set(stamps.hosts)) < stamps.ranks and stamps.source != SIMULATOR:
        why = "hosts have unequal numbers of ranks, or not in their order"
        why = why if all(stamps.hosts) else "the trace names no hosts"
        builder.add(not_identifiable("job.ranks_per_node", 1, why, "each rank counts as a node"))
    unseen = order.background_K & ~order.is_seen_K & (order.wait_K < len(stamps.transfers))
    if unseen.any():
        why = f"no rank was ever seen to wait for {int(unseen.sum())} transfers in the background"
        source = "awaited as soon as they are through; a slower link, or a profile with the calls that wait, settles it"
        builder.add(not_identifiable("program.wait", None, why, source))
