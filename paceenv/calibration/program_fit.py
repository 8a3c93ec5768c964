"""A cluster config with a program from the trace of a job: phases, noise of compute, rates of links; with evidence."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import of_trace, simulate, simulator_of
from paceenv.calibration.compute_noise import MIN_CV, fit_ratios, length_cv, noise_of_compute
from paceenv.calibration.group_growth import group_growth
from paceenv.calibration.job_fit import JobFit, record_of
from paceenv.calibration.measurements import MIN_STEPS
from paceenv.calibration.noise_fit import NoiseFit
from paceenv.calibration.parameters import Parameter, exact, identified, not_identifiable
from paceenv.calibration.program_links import NO_LIMIT, Durations, LinkRate, durations, fit_rates, fit_sharing, nodes_of
from paceenv.calibration.program_stamps import ProgramStamps
from paceenv.calibration.step_order import StepOrder, read_order
from paceenv.calibration.step_phases import StepPhases, step_phases
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.model import STAND_INS
from paceenv.sim.engine.program_layout import START
from paceenv.sim.engine.recording import SIMULATOR
from paceenv.ui import config_files

CLOSE: Final = 0.01
"""Error of the simulated mean step from which on single phases may vary by themselves."""
LONG: Final = 0.01
"""Share of a step that a phase must take for its variation to count."""
MAX_MICRO_BATCHES: Final = 4096
SETTLES: Final = "a step in which transfers run one at a time, or nccl-tests output of the same links, settles it"

Array = NDArray[np.float64]


def fit_program(stamps: ProgramStamps, base: Cluster | None, name: str) -> JobFit:
    """Fit a cluster with a program; the fabric of a known ``base`` stands where the trace identifies none."""
    order = read_order(stamps)
    growth = group_growth(stamps, order)
    stamps = growth.stamps
    phases = step_phases(stamps, order)
    noise = fit_ratios(stamps.name, stamps.source, stamps.iteration_T, stamps.step_T, phases.ratio_TR)
    found = durations(stamps)
    data = _data(stamps, phases, base, name)

    def contended(keys: dict[str, Any]) -> Array:
        return _simulated_s(stamps, _with(data, keys), name)

    rates = fit_rates(stamps, found, contended)
    sharing = fit_sharing(stamps, found, rates, contended, is_known=base is not None)
    parameters = [*_structure(stamps, order, data, base), growth.parameter]
    parameters += _noise_parameters(stamps, noise, data, by_rank=phases.by_rank)
    parameters += [*_rate_parameters(sharing.rates, found, data, base), *sharing.parameters]
    data = _with(data, sharing.keys)
    cluster = config_files.parse(Cluster, data, f"calibration of {stamps.name}")
    measured, simulated = of_trace(stamps.step_T), simulate(cluster, max(len(stamps.step_T), 2))
    if abs(simulated.mean_s / measured.mean_s - 1.0) > CLOSE:
        varied = _with_lengths(stamps, order, phases, data)
        if varied is not None:
            other = config_files.parse(Cluster, varied[0], f"calibration of {stamps.name}")
            steps = simulate(other, len(stamps.step_T))
            if abs(steps.mean_s - measured.mean_s) < abs(simulated.mean_s - measured.mean_s):
                cluster, simulated = other, steps
                parameters = [*(p for p in parameters if p.key != "noise.jitter_cv"), varied[1]]
    source = f"{stamps.name} ({stamps.source}), {len(stamps.step_T)} iterations"
    record = record_of(source, parameters, measured, simulated) | {STAND_INS: data["calibration"][STAND_INS]}
    record |= {"sharing": sharing.said} if sharing.said else {}
    cluster = cluster.model_copy(update={"calibration": record})
    return JobFit(cluster, tuple(parameters), measured, simulated)


def _with_lengths(
    stamps: ProgramStamps, order: StepOrder, phases: StepPhases, data: dict[str, Any]
) -> tuple[dict[str, Any], Parameter] | None:
    """The config with phases that vary each by itself, and how much; None where they do not."""
    step = phases.by_micro_batch()
    relative = []
    for r in range(stamps.ranks):
        compute_TL = order.compute_TRL[stamps.full_T, r]
        used = np.nan_to_num(compute_TL.mean(axis=0)) > LONG * float(stamps.step_T.mean())
        relative.append(compute_TL[:, used] / compute_TL[:, used].mean(axis=0))
    length = length_cv(relative)
    if not length or sum("compute" in one for one in step) > MAX_MICRO_BATCHES:
        return None
    length = float(f"{length:.4g}")
    share = np.array([one.seconds for one in phases.phases])
    share = share / share.sum()
    jitter_cv = max(data["noise"].get("jitter_cv", 0.0) ** 2 - length**2 * float((share**2).sum()), 0.0) ** 0.5
    count = sum(len(one) for one in relative)
    said = "variation of single phases beyond that of whole steps"
    found = data | {
        "program": data["program"] | {"step": step, "length_cv": length},
        "noise": data["noise"] | {"jitter_cv": jitter_cv},
    }
    return found, identified("program.length_cv", length, length / (2.0 * count) ** 0.5, said)


def _data(stamps: ProgramStamps, phases: StepPhases, base: Cluster | None, name: str) -> dict[str, Any]:
    """The cluster as a config, with links that limit nothing and no noise."""
    nodes, each = nodes_of(stamps)
    fabric: dict[str, Any] = {"nic_gbps": NO_LIMIT, "nodes_per_leaf": nodes, "uplink_gbps": NO_LIMIT * nodes}
    job: dict[str, Any] = {"nodes": nodes, "ranks_per_node": each}
    if base is not None:
        # rates and latencies are fitted to plain bytes and hops, in which protocol and channels are by then
        of_nccl = {"protocol", "channels", "channel_gbps"}
        fabric = base.fabric.model_dump(exclude_none=True, exclude=of_nccl) | {"latency_us": base.fabric.latency_us}
        job = {"nodes": base.job.nodes, "ranks_per_node": base.job.ranks_per_node}
        if base.job.ranks != stamps.ranks:
            raise InputError(f"base: {base.job.ranks} ranks; allowed: the {stamps.ranks} of the trace")
    return {
        "name": name,
        "description": f"Program fitted to a trace of {stamps.name} ({stamps.source}).",
        "job": job,
        "program": {
            "communicators": {key: one.model_dump(exclude_defaults=True) for key, one in stamps.communicators.items()},
            "step": phases.to_config(),
        },
        "fabric": fabric,
        "noise": {},
        "calibration": {STAND_INS: {}},
    }


def _with(data: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    return data | {"fabric": data["fabric"] | {key.partition(".")[2]: value for key, value in keys.items()}}


def _simulated_s(stamps: ProgramStamps, data: dict[str, Any], name: str) -> Array:
    """Seconds of each transfer of the trace in the simulated step without noise."""
    cluster = config_files.parse(Cluster, data, f"calibration of {name}")
    simulator = simulator_of(cluster)
    program = simulator.batch.program
    iterations = int(np.lcm.reduce([one.every for one in stamps.transfers]))
    recording = simulator.record(simulator.off(), iterations)
    seconds_O = (recording.through_ETO - recording.start_ETO)[0].max(axis=0)
    # a rank starts its transfers in the order of the trace's
    found = np.zeros(len(stamps.transfers))
    for k, one in enumerate(stamps.transfers):
        rank = one.groups[0][0]
        mine = [i for i, other in enumerate(stamps.transfers) if rank in other.ranks]
        first, last = int(program.first_R[rank]), int(program.first_R[rank + 1])
        starts = [i for i in range(first, last) if program.kind_I[i] == START]
        found[k] = seconds_O[program.operation_I[starts[mine.index(k)]]]
    return found


def _structure(stamps: ProgramStamps, order: StepOrder, data: dict[str, Any], base: Cluster | None) -> list[Parameter]:
    """What the trace says of ranks, transfers and their order."""
    nodes, each = data["job"]["nodes"], data["job"]["ranks_per_node"]
    rows = f"{len(stamps.step_T)} iterations alike, {stamps.dropped} left out"
    behind, held = int(order.background_K.sum()), int(order.can_wait([one.op for one in stamps.transfers]).sum())
    said = (
        f"a step has {len(stamps.transfers)} transfers on {len({one.communicator for one in stamps.transfers})} "
        f"communicators; {behind} in the background, of which {held} are gradients that can wait"
    )
    found = [
        exact("job.nodes", nodes, f"{'hosts' if each > 1 else 'ranks'} in the trace; {rows}"),
        exact("program.transfers", len(stamps.transfers), said),
    ]
    unseen = order.background_K & ~order.is_seen_K & (order.wait_K < len(stamps.transfers))
    if base is None and each == 1 and len(set(stamps.hosts)) < stamps.ranks and stamps.source != SIMULATOR:
        why = "hosts have unequal numbers of ranks, or not in their order"
        why = why if all(stamps.hosts) else "the trace names no hosts"
        found.append(not_identifiable("job.ranks_per_node", 1, why, "each rank counts as a node"))
    if unseen.any():
        why = f"no rank was ever seen to wait for {int(unseen.sum())} transfers in the background"
        source = "awaited as soon as they are through; a slower link, or a profile with the calls that wait, settles it"
        found.append(not_identifiable("program.wait", None, why, source))
    return found


def _noise_parameters(
    stamps: ProgramStamps, noise: NoiseFit | None, data: dict[str, Any], *, by_rank: bool
) -> list[Parameter]:
    """Noise of compute, into the config too."""
    if noise is None:
        why = f"{len(stamps.step_T)} steps of {stamps.ranks} ranks"
        source = f"none; {MIN_STEPS} steps of two ranks settle it"
        return [not_identifiable("noise.jitter_cv", 0.0, why, source)]
    data["noise"], found = noise_of_compute(noise, stamps.names, by_rank=by_rank)
    return found


def _rate_parameters(
    rates: list[LinkRate], found: Durations, data: dict[str, Any], base: Cluster | None
) -> list[Parameter]:
    """Rates of links, into the config too, with those that are stand-ins."""
    parameters, stand_ins = list[Parameter](), data["calibration"][STAND_INS]

    def put(key: str, value: float, *, is_known: bool) -> None:
        data["fabric"][key.partition(".")[2]] = value
        if not is_known:
            stand_ins[key] = value

    for rate in rates:
        if rate.alone:
            gbps = float(f"{rate.gbps:.6g}")
            put(rate.key, gbps, is_known=True)
            said = f"{rate.alone} transfers that ran alone, {rate.kinds} kinds"
            parameters.append(identified(rate.key, gbps, rate.se_gbps, said))
            if rate.latency_us is None:
                put(rate.latency_key, 0.0, is_known=False)
                why = "transfers that ran alone have one size; the rate has their latency"
                source = "none; transfers of another size that run alone settle it"
                parameters.append(not_identifiable(rate.latency_key, 0.0, why, source))
            else:
                latency_us = float(f"{rate.latency_us:.4g}")
                put(rate.latency_key, latency_us, is_known=True)
                said = "transfers of different sizes that ran alone"
                parameters.append(identified(rate.latency_key, latency_us, rate.se_latency_us, said))
            continue
        known = None if base is None else getattr(base.fabric, rate.key.partition(".")[2])
        value = float(f"{rate.gbps:.6g}") if known is None else float(known)
        put(rate.key, value, is_known=known is not None)
        why = "no transfer ran alone, so each may have been slowed by another"
        source = "from base" if known is not None else f"put so that transfers take as long as measured; {SETTLES}"
        parameters.append(not_identifiable(rate.key, value, why, source))
        if base is None:
            put(rate.latency_key, 0.0, is_known=False)
            parameters.append(not_identifiable(rate.latency_key, 0.0, why, "none; the rate has it"))
    if base is None:
        nic_gbps = data["fabric"]["nic_gbps"]
        if "fabric.nic_gbps" not in {rate.key for rate in rates}:
            put("fabric.nic_gbps", nic_gbps, is_known=False)
            why = "no transfer between nodes"
            parameters.append(not_identifiable("fabric.nic_gbps", nic_gbps, why, "assumed not to limit"))
        value = float(f"{nic_gbps * data['job']['nodes'] * 100.0:.6g}")
        put("fabric.uplink_gbps", value, is_known=False)
        why = "what a tier above the NICs adds is in their rate"
        parameters.append(not_identifiable("fabric.uplink_gbps", value, why, "assumed not to limit"))
        if data["job"]["ranks_per_node"] > 1 and "fabric.intra_node_gbps" not in {rate.key for rate in rates}:
            put("fabric.intra_node_gbps", NO_LIMIT, is_known=False)
    cvs = [rate.cv for rate in rates if rate.alone and rate.cv > MIN_CV]
    if cvs and (found.alone_TK.sum(axis=0) >= MIN_STEPS).any():
        cv = min(float(f"{np.mean(cvs):.3g}"), 1.0)
        data["noise"]["transfer_cv"] = cv
        said = "durations of transfers that ran alone"
        parameters.append(identified("noise.transfer_cv", cv, cv / max(2.0 * found.alone_TK.sum(), 1.0) ** 0.5, said))
    return parameters
