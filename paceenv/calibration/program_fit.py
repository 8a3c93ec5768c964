"""A step as a program: phases, compute and links from the trace of a job, as keys of a cluster."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import ClusterBuilder, JobFit, simulator_of
from paceenv.calibration.compute_noise import MIN_CV, add_noise, fit_ratios, length_cv, put_length
from paceenv.calibration.measurements import MIN_STEPS
from paceenv.calibration.parameters import exact, identified, not_identifiable
from paceenv.calibration.program_links import (
    NO_LIMIT,
    Durations,
    LinkRate,
    Matched,
    durations,
    fit_rates,
    fit_sharing,
    match_step,
    nodes_of,
)
from paceenv.calibration.program_stamps import ProgramStamps
from paceenv.calibration.step_order import StepOrder, read_order
from paceenv.calibration.step_phases import StepPhases, group_growth, step_phases
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine.program_layout import START
from paceenv.sim.engine.recording import SIMULATOR

CLOSE: Final = 0.01
"""Error of the simulated mean step from which on single phases may vary by themselves."""
LONG: Final = 0.01
"""Share of a step that a phase must take for its variation to count."""
MAX_MICRO_BATCHES: Final = 4096
SETTLES: Final = "a step in which transfers run one at a time, or nccl-tests output of the same links, settles it"

NONE_ALONE: Final = "no transfer ran alone, so each may have been slowed by another"

Array = NDArray[np.float64]


def fit_program(stamps: ProgramStamps, base: Cluster | None = None, name: str = "calibrated") -> JobFit:
    """Fit a cluster with a program; the fabric of a known ``base`` stands where the trace identifies none."""
    order = read_order(stamps)
    stamps, growth = group_growth(stamps, order)
    phases = step_phases(stamps, order)
    builder = ClusterBuilder(stamps, base, _data(stamps, phases, base, name))
    _add_structure(builder, order)
    builder.add(growth)
    found = durations(stamps)
    contended = partial(_simulated_s, builder)
    rates = fit_rates(stamps, found)
    sharing = fit_sharing(stamps, found, rates, contended, is_known=base is not None)
    _put_rates(builder, sharing.rates, found)
    builder.add(*sharing.parameters)
    builder.data["fabric"] |= {key.partition(".")[2]: value for key, value in sharing.keys.items()}
    compute = fit_ratios(builder, phases.ratio_TR, "none")
    if compute is not None:
        add_noise(builder, compute, by_rank=phases.by_rank)
    fit = builder.fit()
    if abs(fit.mean_error) > CLOSE:
        varied = _with_lengths(builder, order, phases)
        other = fit if varied is None else varied.fit()
        if varied is not None and abs(other.mean_error) < abs(fit.mean_error):
            builder, fit = varied, other
    unmeasured = [rate.key for rate in sharing.rates if not rate.alone and rate.key in builder.stand_ins]
    if not unmeasured or not isinstance(matched := match_step(builder, unmeasured, 0.5, 8.0), Matched):
        return fit
    for key in unmeasured:
        builder.drop([key])
        source = f"put so that the step takes as long as measured; {SETTLES}"
        _put_unknown(builder, key, matched.gbps[key], NONE_ALONE, source)
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


def _simulated_s(builder: ClusterBuilder[ProgramStamps], keys: dict[str, Any]) -> Array:
    """Seconds of each transfer of the trace in the simulated step without noise, with some keys of the fabric."""
    transfers = builder.stamps.transfers
    simulator = simulator_of(builder.cluster(**{key.partition(".")[2]: value for key, value in keys.items()}))
    program = simulator.batch.program
    iterations = int(np.lcm.reduce([one.every for one in transfers]))
    recording = simulator.record(simulator.off(), iterations)
    seconds_O = (recording.through_ETO - recording.start_ETO)[0].max(axis=0)
    # a rank starts its transfers in the order of the trace's
    found = np.zeros(len(transfers))
    for k, one in enumerate(transfers):
        rank = one.groups[0][0]
        mine = [i for i, other in enumerate(transfers) if rank in other.ranks]
        first, last = int(program.first_R[rank]), int(program.first_R[rank + 1])
        starts = [i for i in range(first, last) if program.kind_I[i] == START]
        found[k] = seconds_O[program.operation_I[starts[mine.index(k)]]]
    return found


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


def _put_rates(builder: ClusterBuilder[ProgramStamps], rates: list[LinkRate], found: Durations) -> None:
    """Rates of links, with those that are stand-ins, and the noise of transfers that ran alone."""
    for rate in rates:
        gbps = float(f"{rate.gbps:.6g}")
        if not rate.alone:
            known = builder.known(*rate.key.split("."))
            why = NONE_ALONE
            source = "from base" if known is not None else f"that of the transfer that got most of it; {SETTLES}"
            _put_unknown(builder, rate.key, gbps if known is None else known, why, source, is_known=known is not None)
            if builder.base is None:
                _put_unknown(builder, rate.latency_key, 0.0, why, "none; the rate has it")
            continue
        said = f"{rate.alone} transfers that ran alone, {rate.kinds} kinds"
        builder.put(identified(rate.key, gbps, rate.se_gbps, said))
        if rate.latency_us is None:
            why = "transfers that ran alone have one size; the rate has their latency"
            source = "none; transfers of another size that run alone settle it"
            _put_unknown(builder, rate.latency_key, 0.0, why, source)
        else:
            said, latency_us = "transfers of different sizes that ran alone", float(f"{rate.latency_us:.4g}")
            builder.put(identified(rate.latency_key, latency_us, rate.se_latency_us, said))
    if builder.base is None:
        _put_no_limits(builder, {rate.key for rate in rates})
    cvs = [rate.cv for rate in rates if rate.alone and rate.cv > MIN_CV]
    if cvs and (found.alone_TK.sum(axis=0) >= MIN_STEPS).any():
        cv = min(float(f"{np.mean(cvs):.3g}"), 1.0)
        said = "durations of transfers that ran alone"
        builder.put(identified("noise.transfer_cv", cv, cv / max(2.0 * found.alone_TK.sum(), 1.0) ** 0.5, said))


def _put_no_limits(builder: ClusterBuilder[ProgramStamps], fitted: set[str]) -> None:
    """Rates of links on which the trace has no transfer."""
    nic_gbps, job = float(builder.data["fabric"]["nic_gbps"]), builder.data["job"]
    if "fabric.nic_gbps" not in fitted:
        _put_unknown(builder, "fabric.nic_gbps", nic_gbps, "no transfer between nodes", "assumed not to limit")
    uplink_gbps = float(f"{nic_gbps * job['nodes'] * 100.0:.6g}")
    why = "what a tier above the NICs adds is in their rate"
    _put_unknown(builder, "fabric.uplink_gbps", uplink_gbps, why, "assumed not to limit")
    if job["ranks_per_node"] > 1 and "fabric.intra_node_gbps" not in fitted:
        builder.data["fabric"]["intra_node_gbps"] = builder.stand_ins["fabric.intra_node_gbps"] = NO_LIMIT


def _put_unknown(
    builder: ClusterBuilder[ProgramStamps], key: str, value: float, why: str, source: str, *, is_known: bool = False
) -> None:
    """A value that the trace does not identify, among the stand-ins where nobody else knows it either."""
    builder.put(not_identifiable(key, value, why, source))
    if not is_known:
        builder.stand_ins[key] = value
