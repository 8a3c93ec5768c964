"""The links of a program's step, from how long its transfers take: rates and latencies.

A transfer runs alone where no other of any communicator runs between its start and its end. It starts when its last
member entered it and the one before it in its process group was through. Rates come from those that ran alone, or else
are put so that the simulated step is as long as the measured one. Nothing above the NICs is identified: what a tier
above them would add is in the rate of the NICs.

Axes: T steps, K transfers of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.cluster_builder import ClusterBuilder, Matched
from paceenv.calibration.compute_noise import MIN_CV, put_lengths
from paceenv.calibration.noise_fit import MIN_STEPS
from paceenv.calibration.parameters import FROM_BASE, NOT_LIMITING, identified, not_identifiable
from paceenv.calibration.program_stamps import ProgramStamps, Transfer
from paceenv.core.errors import InputError
from paceenv.sim.cluster.collectives import BYTES_PER_GBIT
from paceenv.sim.cluster.program.footprint import Tiers, use

MIN_ALONE: Final = 8
"""So many transfers alone identify a rate."""
MIN_SPREAD: Final = 1.5
"""The largest time on the links over the smallest, from which on latency and rate can be told apart."""
NO_LIMIT: Final = 1e4
"""Rate of the tier above the NICs over that of all of them: it limits nothing."""
MEDIAN_VARIANCE: Final = np.pi / 2.0
"""Of a median of normal values, over that of their mean."""
CLOSE: Final = 0.01
"""Error of the simulated mean step from which on single phases may vary by themselves."""
SETTLES: Final = "a step in which transfers run one at a time, or nccl-tests output of the same links, settles it"
NONE_ALONE: Final = "no transfer ran alone, so each may have been slowed by another"

Array = NDArray[np.float64]
Place = Literal["inside", "across"]
_Kind = tuple[str, float, float]
"""Of transfers: operation, bytes on the busiest link, rounds of messages."""
KEYS: Final[dict[Place, tuple[str, str]]] = {
    "inside": ("fabric.intra_node_gbps", "fabric.intra_node_latency_us"),
    "across": ("fabric.nic_gbps", "fabric.latency_us"),
}
"""Rate and latency of links inside a node and between nodes."""


class Durations(NamedTuple):
    """How long each transfer took, seconds ``(T, K)``, and whether it ran alone."""

    seconds_TK: Array
    alone_TK: NDArray[np.bool_]

    def alone(self, k: int) -> Array:
        return np.asarray(self.seconds_TK[self.alone_TK[:, k], k])

    @property
    def overlap_share(self) -> float:
        """In how many of the steps transfers of several communicators run at the same time."""
        return float((np.isfinite(self.seconds_TK) & ~self.alone_TK).any(axis=1).mean())


def add_transfers(builder: ClusterBuilder[ProgramStamps]) -> None:
    """What the transfers show of the links; ``unseen`` are the keys of rates that nobody knows and none shows."""
    stamps, timings = builder.stamps, durations(builder.stamps)
    by_place, cvs = dict[Place, list[int]](), list[float]()
    for k, one in enumerate(stamps.transfers):
        if one.payload_bytes > 0.0:
            by_place.setdefault(place_of(one, nodes_of(stamps)[1]), []).append(k)
    seen_K = np.isfinite(timings.seconds_TK).sum(axis=0)
    for place, used in by_place.items():
        alone = [k for k in used if timings.alone_TK[:, k].sum() >= min(MIN_ALONE, seen_K[k])]
        alone = [k for k in alone if np.median(timings.alone(k)) > 0.0]
        if alone:
            cvs.append(_put_alone(builder, place, timings, alone))
        else:
            _put_fastest(builder, place, timings, used)
    if builder.base is None:
        _put_no_limits(builder, by_place)
    cvs = [cv for cv in cvs if cv > MIN_CV]
    if cvs and (timings.alone_TK.sum(axis=0) >= MIN_STEPS).any():
        cv = min(float(f"{np.mean(cvs):.3g}"), 1.0)
        said = "durations of transfers that ran alone"
        builder.put(identified("noise.transfer_cv", cv, cv / max(2.0 * timings.alone_TK.sum(), 1.0) ** 0.5, said))


def match_program(builder: ClusterBuilder[ProgramStamps]) -> None:
    """Lengths of phases, and rates that nobody knows and none shows, so that the step takes as long as measured."""
    was, kept = abs(builder.mean_error), (deepcopy(builder.data), list(builder.parameters))
    if was > CLOSE:
        put_lengths(builder)
        if abs(builder.mean_error) >= was:
            builder.data, builder.parameters = kept
    matched = builder.match_step(builder.unseen, 0.5, 8.0) if builder.unseen else ""
    if isinstance(matched, Matched):
        builder.drop(builder.unseen)
        said = f"put so that the step takes as long as measured; {SETTLES}"
        builder.put(*(not_identifiable(key, gbps, NONE_ALONE, said) for key, gbps in matched.gbps.items()))


def _put_no_limits(builder: ClusterBuilder[ProgramStamps], fitted: Collection[Place]) -> None:
    """Rates of links on which the trace has no transfer."""
    nic_gbps, job = float(builder.data["fabric"]["nic_gbps"]), builder.data["job"]
    uplink_gbps = float(f"{nic_gbps * job['nodes'] * 100.0:.6g}")
    if "across" not in fitted:
        builder.put(not_identifiable("fabric.nic_gbps", nic_gbps, "no transfer between nodes", NOT_LIMITING))
    why = "what a tier above the NICs adds is in their rate"
    builder.put(not_identifiable("fabric.uplink_gbps", uplink_gbps, why, NOT_LIMITING))
    if job["ranks_per_node"] > 1 and "inside" not in fitted:
        builder.put(not_identifiable("fabric.intra_node_gbps", NO_LIMIT, "no transfer inside a node", NOT_LIMITING))


def nodes_of(stamps: ProgramStamps) -> tuple[int, int]:
    """Nodes and ranks on each, as the trace names hosts; a node for each rank where it names none or not in order."""
    hosts = list(dict.fromkeys(stamps.hosts))
    if not all(stamps.hosts) or stamps.ranks % len(hosts):
        return stamps.ranks, 1
    each = stamps.ranks // len(hosts)
    in_order = [host for host in hosts for _ in range(each)]
    return (len(hosts), each) if in_order == list(stamps.hosts) else (stamps.ranks, 1)


def durations(stamps: ProgramStamps) -> Durations:
    """How long each transfer took once it could start: the mean of its groups, which start and end each by itself."""
    latest, earlier = np.fmax.reduce, dict[str, list[int]]()  # of what is there: a step may lack a transfer
    begin_TK, end_TK, seconds_TK = (np.empty(stamps.start_TRK[:, 0].shape) for _ in range(3))
    for k, one in enumerate(stamps.transfers):
        before = earlier.setdefault(one.communicator, [])
        starts_TRN = np.concatenate([stamps.start_TRK[:, :, k : k + 1], stamps.end_TRK[:, :, before]], axis=2)
        could_TR, through_TR = latest(starts_TRN, axis=2), stamps.end_TRK[:, :, k]
        begin_TK[:, k], end_TK[:, k] = latest(could_TR, axis=1), latest(through_TR, axis=1)
        members = [list(group) for group in one.groups]
        of_groups = [latest(through_TR[:, own], axis=1) - latest(could_TR[:, own], axis=1) for own in members]
        seconds_TK[:, k] = np.mean(of_groups, axis=0)
        before.append(k)
    alone_TK, tolerance_TK = np.isfinite(seconds_TK), 1e-3 * (end_TK - begin_TK)
    first_TK, last_TK = begin_TK + tolerance_TK, end_TK - tolerance_TK
    name_K = np.array([one.communicator for one in stamps.transfers])
    for k, name in enumerate(name_K):
        meets_TK = (begin_TK < last_TK[:, k : k + 1]) & (end_TK > first_TK[:, k : k + 1]) & (name_K != name)
        alone_TK[:, k] &= ~meets_TK.any(axis=1)
    return Durations(np.maximum(seconds_TK, 0.0), alone_TK)


def place_of(one: Transfer, ranks_per_node: int) -> Place:
    is_inside = all(len({rank // ranks_per_node for rank in group}) == 1 for group in one.groups)
    return "inside" if is_inside and ranks_per_node > 1 else "across"


def _unit_tiers(stamps: ProgramStamps, *, hop: bool) -> Tiers:
    """Links of a byte a second and no latency, or of no limit and a second a hop."""
    (nodes, each), (rate, hop_s) = nodes_of(stamps), (np.inf, 1.0) if hop else (1.0, 0.0)
    return Tiers(nodes, each, nodes, 1, rate, rate, np.inf, np.inf, hop_s, hop_s)


def link_bytes(stamps: ProgramStamps, one: Transfer) -> float:
    """Bytes of a transfer on its busiest link."""
    return use(_unit_tiers(stamps, hop=False), one.op, one.groups[0], one.payload_bytes).alone_s


def _put_alone(builder: ClusterBuilder[ProgramStamps], place: Place, timings: Durations, alone: Sequence[int]) -> float:
    """Rate and latency of one kind of link from transfers that ran alone; returns by how much these vary, as a CV.

    By least squares of relative errors, neither negative. Where the two cannot be told apart, the rate has both.
    """
    stamps, hops, of_kind = builder.stamps, _unit_tiers(builder.stamps, hop=True), dict[_Kind, list[Array]]()
    for k in alone:
        one = stamps.transfers[k]
        rounds = use(hops, one.op, one.groups[0], one.payload_bytes).latency_s
        of_kind.setdefault((one.op, float(f"{link_bytes(stamps, one):.6g}"), rounds), []).append(timings.alone(k))
    seconds, cvs = [np.concatenate(found) for found in of_kind.values()], [_cv(timings.alone(k)) for k in alone]
    bytes_A, rounds_A = np.array([kind[1:] for kind in of_kind]).T
    mean_A = np.array([np.median(of) for of in seconds])
    variance_A = np.array([MEDIAN_VARIANCE * _cv(of) ** 2 / len(of) for of in seconds])
    wanted = np.sqrt(bytes_A / mean_A)  # relative errors, weighted: small transfers say little of a rate
    design = np.stack([bytes_A, rounds_A], axis=1) * (wanted / mean_A)[:, None]
    told = bytes_A / rounds_A
    is_told = told.max() > MIN_SPREAD * told.min()
    solution = optimize.nnls(design, wanted)[0]
    if not is_told or solution[0] <= 0.0:  # a larger transfer was faster than a smaller one
        is_told, design = False, design[:, :1]
        solution = optimize.nnls(design, wanted)[0]
    # a kind has its sampling error, and what the model gets wrong beyond that
    beyond_A = np.maximum((design @ solution / wanted - 1.0) ** 2 - variance_A, 0.0)
    misfit = beyond_A.sum() / max(len(seconds) - len(solution), 1)
    se = np.sqrt(np.linalg.pinv(design) ** 2 @ ((variance_A + misfit) * wanted**2))
    gbps, (key, latency_key) = 1.0 / float(solution[0]) / BYTES_PER_GBIT, KEYS[place]
    said = f"{sum(map(len, seconds))} transfers that ran alone, {len(seconds)} kinds"
    se_gbps = gbps * float(se[0] / solution[0])
    builder.put(identified(key, float(f"{gbps:.6g}"), se_gbps, said))
    if is_told:
        latency_us, said = float(f"{float(solution[1]) * 1e6:.4g}"), "transfers of different sizes that ran alone"
        builder.put(identified(latency_key, latency_us, float(se[1]) * 1e6, said))
    else:
        why = "transfers that ran alone have one size; the rate has their latency"
        source = "none; transfers of another size that run alone settle it"
        builder.put(not_identifiable(latency_key, 0.0, why, source))
    return float(np.mean(cvs))


def _cv(seconds: Array) -> float:
    return float(seconds.std()) / float(seconds.mean())


def _put_fastest(builder: ClusterBuilder[ProgramStamps], place: Place, timings: Durations, used: Sequence[int]) -> None:
    """What is known of a kind of link, or as a stand-in the rate of the transfer that got most of it: the least."""
    stamps, (key, latency_key) = builder.stamps, KEYS[place]
    seconds = [float(np.nanmean(timings.seconds_TK[:, k])) for k in used]
    if sum(seconds) <= 0.0:
        raise InputError(f"trace of {stamps.name}: its transfers take no time; allowed: transfers that do")
    speeds = [link_bytes(stamps, stamps.transfers[k]) / max(s, 1e-9) for k, s in zip(used, seconds, strict=True)]
    known = builder.known(*key.split("."))
    if known is None:
        builder.unseen = [*builder.unseen, key]
        source = f"that of the transfer that got most of it; {SETTLES}"
        builder.put(not_identifiable(key, float(f"{max(speeds) / BYTES_PER_GBIT:.6g}"), NONE_ALONE, source))
    else:
        builder.put(not_identifiable(key, known, NONE_ALONE, FROM_BASE))
    if builder.base is None:
        builder.put(not_identifiable(latency_key, 0.0, NONE_ALONE, "none; the rate has it"))
