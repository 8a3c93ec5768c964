"""The links of a program's step, from how long its transfers take: rates and latencies.

A transfer runs alone where no other of any communicator runs between its start and its end. It starts when its last
member entered it and the one before it in its process group was through. Rates come from those that ran alone, or else
are stand-ins. Nothing above the NICs is identified: what a tier above them would add is in the rate of the NICs.

Axes: T steps, K transfers of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.cluster_builder import ClusterBuilder
from paceenv.calibration.compute_noise import MIN_CV
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
SETTLES: Final = "a step in which transfers run one at a time, or nccl-tests output of the same links, settles it"
NONE_ALONE: Final = "no transfer ran alone, so each may have been slowed by another"

Array = NDArray[np.float64]
Place = Literal["inside", "across"]
KEYS: Final[dict[Place, tuple[str, str]]] = {
    "inside": ("intra_node_gbps", "intra_node_latency_us"),
    "across": ("nic_gbps", "latency_us"),
}
"""Rate and latency of links inside a node and between nodes, as keys of a fabric."""


class Durations(NamedTuple):
    """How long each transfer took, seconds ``(T, K)``, and whether it ran alone."""

    seconds_TK: Array
    alone_TK: NDArray[np.bool_]

    def alone(self, k: int) -> Array:
        return np.asarray(self.seconds_TK[self.alone_TK[:, k], k])


@dataclass(frozen=True)
class LinkRate:
    """The rate and latency of one kind of link.

    ``alone`` counts the transfers that it was fitted to; 0 where none ran alone and the rate is a stand-in.
    ``latency_us`` is None where rate and latency cannot be told apart, and the rate has both; 0 where none shows.
    """

    gbps: float
    se_gbps: float = 0.0
    latency_us: float | None = None
    se_latency_us: float = 0.0
    alone: int = 0
    kinds: int = 0
    cv: float = 0.0


def add_program_links(builder: ClusterBuilder[ProgramStamps]) -> list[str]:
    """Add what the transfers show of the links; the keys of rates that nobody knows and none shows."""
    stamps, timings = builder.stamps, durations(builder.stamps)
    rates = _rates(stamps, timings)
    for place, rate in rates.items():
        _put_rate(builder, place, rate)
    if builder.base is None:
        _put_no_limits(builder, rates)
    cvs = [rate.cv for rate in rates.values() if rate.alone and rate.cv > MIN_CV]
    if cvs and (timings.alone_TK.sum(axis=0) >= MIN_STEPS).any():
        cv = min(float(f"{np.mean(cvs):.3g}"), 1.0)
        said = "durations of transfers that ran alone"
        builder.put(identified("noise.transfer_cv", cv, cv / max(2.0 * timings.alone_TK.sum(), 1.0) ** 0.5, said))
    unseen = [f"fabric.{KEYS[place][0]}" for place, rate in rates.items() if not rate.alone]
    return [key for key in unseen if key in builder.stand_ins]


def _put_rate(builder: ClusterBuilder[ProgramStamps], place: Place, rate: LinkRate) -> None:
    """The rate and latency of one kind of link, and stand-ins where no transfer shows them."""
    key, latency_key = (f"fabric.{key}" for key in KEYS[place])
    gbps = float(f"{rate.gbps:.6g}")
    if not rate.alone:
        known = builder.known("fabric", KEYS[place][0])
        if known is None:
            builder.stand_in(key, gbps, NONE_ALONE, f"that of the transfer that got most of it; {SETTLES}")
        else:
            builder.put(not_identifiable(key, known, NONE_ALONE, FROM_BASE))
        if builder.base is None:
            builder.stand_in(latency_key, 0.0, NONE_ALONE, "none; the rate has it")
        return
    said = f"{rate.alone} transfers that ran alone, {rate.kinds} kinds"
    builder.put(identified(key, gbps, rate.se_gbps, said))
    if rate.latency_us is None:
        why = "transfers that ran alone have one size; the rate has their latency"
        builder.stand_in(latency_key, 0.0, why, "none; transfers of another size that run alone settle it")
    else:
        said, latency_us = "transfers of different sizes that ran alone", float(f"{rate.latency_us:.4g}")
        builder.put(identified(latency_key, latency_us, rate.se_latency_us, said))


def _put_no_limits(builder: ClusterBuilder[ProgramStamps], fitted: Collection[Place]) -> None:
    """Rates of links on which the trace has no transfer."""
    nic_gbps, job = float(builder.data["fabric"]["nic_gbps"]), builder.data["job"]
    if "across" not in fitted:
        builder.stand_in("fabric.nic_gbps", nic_gbps, "no transfer between nodes", NOT_LIMITING)
    uplink_gbps = float(f"{nic_gbps * job['nodes'] * 100.0:.6g}")
    why = "what a tier above the NICs adds is in their rate"
    builder.stand_in("fabric.uplink_gbps", uplink_gbps, why, NOT_LIMITING)
    if job["ranks_per_node"] > 1 and "inside" not in fitted:
        builder.data["fabric"]["intra_node_gbps"] = builder.stand_ins["fabric.intra_node_gbps"] = NO_LIMIT


def nodes_of(stamps: ProgramStamps) -> tuple[int, int]:
    """Nodes and ranks on each, as the trace names hosts; a node for each rank where it names none or not in order."""
    hosts = list(dict.fromkeys(stamps.hosts))
    if not all(stamps.hosts) or stamps.ranks % len(hosts):
        return stamps.ranks, 1
    each = stamps.ranks // len(hosts)
    in_order = [host for host in hosts for _ in range(each)]
    return (len(hosts), each) if in_order == list(stamps.hosts) else (stamps.ranks, 1)


def durations(stamps: ProgramStamps) -> Durations:
    """How long each transfer took once it could start."""
    begin_TK, end_TK = (  # minus infinity where a step lacks a transfer
        np.where(np.isfinite(x_TRK), x_TRK, -np.inf).max(axis=1) for x_TRK in (stamps.start_TRK, stamps.end_TRK)
    )
    last: dict[str, int] = {}
    for k, one in enumerate(stamps.transfers):
        if one.communicator in last:
            before = end_TK[:, last[one.communicator]]
            begin_TK[:, k] = np.maximum(begin_TK[:, k], np.where(np.isfinite(before), before, -np.inf))
        last[one.communicator] = k
    begin_TK[~np.isfinite(begin_TK)] = np.nan
    end_TK[~np.isfinite(end_TK)] = np.nan
    alone_TK = np.isfinite(begin_TK)
    tolerance_TK = 1e-3 * (end_TK - begin_TK)
    first_TK, last_TK = begin_TK + tolerance_TK, end_TK - tolerance_TK
    name_K = np.array([one.communicator for one in stamps.transfers])
    for k, name in enumerate(name_K):
        meets_TK = (begin_TK < last_TK[:, k : k + 1]) & (end_TK > first_TK[:, k : k + 1]) & (name_K != name)
        alone_TK[:, k] &= ~meets_TK.any(axis=1)
    groups_K = np.array([len(one.groups) for one in stamps.transfers])
    for k in np.flatnonzero(groups_K > 1).tolist():  # the groups of a transfer start and end each by itself
        _by_group(stamps, k, begin_TK, end_TK)
    return Durations(np.maximum(end_TK - begin_TK, 0.0), alone_TK)


def _by_group(stamps: ProgramStamps, k: int, begin_TK: Array, end_TK: Array) -> None:
    """Put the mean duration of a transfer's groups in place, from its begin on."""
    seconds = []
    for group in stamps.transfers[k].groups:
        ranks = list(group)
        first_T = stamps.start_TRK[:, ranks, k].max(axis=1)
        for before in range(k):
            if stamps.transfers[before].communicator == stamps.transfers[k].communicator:
                first_T = np.fmax(first_T, stamps.end_TRK[:, ranks, before].max(axis=1))
        seconds.append(stamps.end_TRK[:, ranks, k].max(axis=1) - first_T)
    begin_TK[:, k] = end_TK[:, k] - np.mean(seconds, axis=0)


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


def _rates(stamps: ProgramStamps, timings: Durations) -> dict[Place, LinkRate]:
    by_place: dict[Place, list[int]] = {}
    for k, one in enumerate(stamps.transfers):
        if one.payload_bytes > 0.0:
            by_place.setdefault(place_of(one, nodes_of(stamps)[1]), []).append(k)
    rates: dict[Place, LinkRate] = {}
    for place, used in by_place.items():
        seen_K = np.isfinite(timings.seconds_TK).sum(axis=0)
        alone = [k for k in used if timings.alone_TK[:, k].sum() >= min(MIN_ALONE, seen_K[k])]
        alone = [k for k in alone if np.median(timings.alone(k)) > 0.0]
        rates[place] = _of_alone(stamps, timings, alone) if alone else _of_fastest(stamps, timings, used)
    return rates


def _of_alone(stamps: ProgramStamps, timings: Durations, alone: Sequence[int]) -> LinkRate:
    """From transfers that ran alone: latency and rate by least squares of relative errors, neither negative."""
    hops = _unit_tiers(stamps, hop=True)
    rows, cvs, kinds_A, counts = list[tuple[float, float, float, float]](), list[float](), list[str](), 0
    for k in alone:
        one, seconds = stamps.transfers[k], timings.alone(k)
        rounds = use(hops, one.op, one.groups[0], one.payload_bytes).latency_s
        mean_s, cv = float(np.median(seconds)), float(seconds.std()) / float(seconds.mean())
        rows.append((link_bytes(stamps, one), rounds, mean_s, MEDIAN_VARIANCE * cv**2 / len(seconds)))
        cvs.append(cv)
        kinds_A.append(f"{one.op} {one.payload_bytes:g}")
        counts += len(seconds)
    link_bytes_A, rounds_A, mean_A, variance_A = np.array(rows).T
    weight_A = link_bytes_A / mean_A**2  # small transfers say little of a rate
    design = np.stack([link_bytes_A, rounds_A], axis=1) * np.sqrt(weight_A / mean_A)[:, None]
    wanted = mean_A * np.sqrt(weight_A / mean_A)
    told = link_bytes_A / rounds_A
    is_told = told.max() > MIN_SPREAD * told.min()
    solution = optimize.nnls(design, wanted)[0]
    if not is_told or solution[0] <= 0.0:  # a larger transfer was faster than a smaller one
        is_told, design = False, design[:, :1]
        solution = optimize.nnls(design, wanted)[0]
    se, kinds = _errors(design, solution, wanted, variance_A, kinds_A)
    gbps = 1.0 / float(solution[0]) / BYTES_PER_GBIT
    latency_us, se_us = (float(solution[1]) * 1e6, float(se[1]) * 1e6) if is_told else (None, 0.0)
    se_gbps = gbps * float(se[0] / solution[0])
    return LinkRate(gbps, se_gbps, latency_us, se_us, counts, kinds, float(np.mean(cvs)))


def _errors(
    design: Array, solution: Array, wanted: Array, variance_A: Array, kinds_A: Sequence[str]
) -> tuple[Array, int]:
    """Standard errors of a solution, and how many kinds of transfers it is from.

    A transfer has its own sampling error; what the model gets wrong beyond that, all of a kind have in common.
    """
    kind_A = np.unique(kinds_A, return_inverse=True)[1]
    kinds, apart_A = int(kind_A.max()) + 1, design @ solution / wanted - 1.0
    mine_KA = kind_A == np.arange(kinds)[:, None]
    beyond2 = [max(float(apart_A[a].mean()) ** 2 - float(variance_A[a].mean()) / a.sum(), 0.0) for a in mine_KA]
    solve = np.linalg.pinv(design)
    shared2 = np.array([(solve * wanted)[:, a].sum(axis=1) ** 2 for a in mine_KA]).sum(axis=0)
    misfit2 = sum(beyond2) / max(kinds - len(solution), 1)
    return np.sqrt((solve**2) @ (variance_A * wanted**2) + misfit2 * shared2), kinds


def _of_fastest(stamps: ProgramStamps, timings: Durations, used: Sequence[int]) -> LinkRate:
    """A stand-in: the rate of the transfer that got most of its links; they are no slower than that."""
    seconds = [float(np.nanmean(timings.seconds_TK[:, k])) for k in used]
    if sum(seconds) <= 0.0:
        raise InputError(f"trace of {stamps.name}: its transfers take no time; allowed: transfers that do")
    speeds = [link_bytes(stamps, stamps.transfers[k]) / max(s, 1e-9) for k, s in zip(used, seconds, strict=True)]
    return LinkRate(max(speeds) / BYTES_PER_GBIT)
