"""A step as a program: phases, compute and links from the trace of a job, as keys of a cluster."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import ClusterBuilder, JobFit, Matched
from paceenv.calibration.compute_noise import add_noise, fit_ratios, length_cv, put_length
from paceenv.calibration.parameters import exact, not_identifiable
from paceenv.calibration.program_links import NO_LIMIT, NONE_ALONE, SETTLES, fit_links, nodes_of
from paceenv.calibration.program_stamps import ProgramStamps
from paceenv.calibration.step_order import StepOrder, read_order
from paceenv.calibration.step_phases import StepPhases, group_growth, step_phases
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine.recording import SIMULATOR

CLOSE: Final = 0.01
"""Error of the simulated mean step from which on single phases may vary by themselves."""
LONG: Final = 0.01
"""Share of a step that a phase must take for its variation to count."""
MAX_MICRO_BATCHES: Final = 4096
Array = NDArray[np.float64]


def fit_program(stamps: ProgramStamps, base: Cluster | None = None, name: str = "calibrated") -> JobFit:
    """Fit a cluster with a program; the fabric of a known ``base`` stands where the trace identifies none."""
    order = read_order(stamps)
    stamps, growth = group_growth(stamps, order)
    phases = step_phases(stamps, order)
    builder = ClusterBuilder(stamps, base, _data(stamps, phases, base, name))
    _add_structure(builder, order)
    builder.add(growth)
    unmeasured = fit_links(builder)
    compute = fit_ratios(builder, phases.ratio_TR, "none")
    if compute is not None:
        add_noise(builder, compute, by_rank=phases.by_rank)
    fit = builder.fit()
    if abs(fit.mean_error) > CLOSE:
        varied = _with_lengths(builder, order, phases)
        other = fit if varied is None else varied.fit()
        if varied is not None and abs(other.mean_error) < abs(fit.mean_error):
            builder, fit = varied, other
    if not unmeasured or not isinstance(matched := builder.match_step(unmeasured, 0.5, 8.0), Matched):
        return fit
    for key in unmeasured:
        builder.drop([key])
        source = f"put so that the step takes as long as measured; {SETTLES}"
        builder.stand_in(key, matched.gbps[key], NONE_ALONE, source)
    return builder.fit()


def _with_lengths(
    builder: ClusterBuilder[ProgramStamps], order: StepOrder, phases: StepPhases
) -> ClusterBuilder[ProgramStamps] | None:
    """The cluster with single phases that vary by themselves; None where they do not."""
    stamps, step = builder.stamps, phases.by_micro_batch()
    relative = []
    for r in range(stamps.ranks):
        compute_TL = order.compute_TRL[stamps.full_T, r]
        used = np.nan_to_num(compute_TL.mean(axis=0)) > LONG * float(stamps.step_T.mean())
        relative.append(compute_TL[:, used] / compute_TL[:, used].mean(axis=0))
    length = length_cv(relative)
    if not length or sum("compute" in one for one in step) > MAX_MICRO_BATCHES:
        return None
    varied = builder.copy()
    varied.data["program"]["step"] = step
    varied.drop(["noise.jitter_cv"])
    put_length(varied, length, np.array([one.seconds for one in phases.phases]), relative)
    return varied


def _data(stamps: ProgramStamps, phases: StepPhases, base: Cluster | None, name: str) -> dict[str, Any]:
    """The cluster as a config, with links that limit nothing and no noise."""
    nodes, each = nodes_of(stamps)
    fabric: dict[str, Any] = {"nic_gbps": NO_LIMIT, "nodes_per_leaf": nodes, "uplink_gbps": NO_LIMIT * nodes}
    if base is not None:
        if base.job.ranks != stamps.ranks:
            raise InputError(f"base: {base.job.ranks} ranks; allowed: the {stamps.ranks} of the trace")
        nodes, each = base.job.nodes, base.job.ranks_per_node
        # rates and latencies are fitted to plain bytes and hops, in which protocol and channels are by then
        of_nccl = {"protocol", "channels", "channel_gbps"}
        fabric = base.fabric.model_dump(exclude_none=True, exclude=of_nccl) | {"latency_us": base.fabric.latency_us}
    return {
        "name": name,
        "description": f"Program fitted to a trace of {stamps.described}.",
        "job": {"nodes": nodes, "ranks_per_node": each},
        "program": {
            "communicators": {key: one.model_dump(exclude_defaults=True) for key, one in stamps.communicators.items()},
            "step": phases.to_config(),
        },
        "fabric": fabric,
        "noise": {},
    }


def _add_structure(builder: ClusterBuilder[ProgramStamps], order: StepOrder) -> None:
    """What the trace says of ranks, transfers and their order."""
    stamps, job = builder.stamps, builder.data["job"]
    rows = f"{len(stamps.step_T)} iterations alike, {stamps.dropped} left out"
    behind, held = int(order.background_K.sum()), int(order.can_wait([one.op for one in stamps.transfers]).sum())
    said = (
        f"a step has {len(stamps.transfers)} transfers on {len({one.communicator for one in stamps.transfers})} "
        f"communicators; {behind} in the background, of which {held} are gradients that can wait"
    )
    hosts = "hosts" if job["ranks_per_node"] > 1 else "ranks"
    builder.add(exact("job.nodes", job["nodes"], f"{hosts} in the trace; {rows}"))
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
