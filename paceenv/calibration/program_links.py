"""The rates of a fabric from the transfers of a program: from those that ran alone, or else a stand-in.

A transfer runs alone where no other of any communicator runs between its start and its end. It starts when its last
member entered it and the one before it in its process group was through. Nothing above the NICs is identified: what a
tier above them would add is in the rate of the NICs.

Transfers alone also give the efficiency of each operation: its speed next to that of the fastest one. Those that met
others then choose between what a link can do: divide its rate between operations or flows, and let others use what an
operation leaves, or not. The first choice in the list that explains them as well as any other is taken.

Axes: T steps, K transfers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.cluster_builder import ClusterBuilder, simulate
from paceenv.calibration.parameters import Parameter, identified
from paceenv.calibration.program_stamps import ProgramStamps, Transfer
from paceenv.core.errors import InputError
from paceenv.sim.cluster.collectives import BYTES_PER_GBIT
from paceenv.sim.cluster.program.footprint import Tiers, use

ALIKE: Final = 0.05
"""Efficiencies that differ by less are the same."""
MIN_ALONE: Final = 8
"""So many transfers alone identify a rate."""
MIN_SPREAD: Final = 1.5
"""The largest time on the links over the smallest, from which on latency and rate can be told apart."""
NO_LIMIT: Final = 1e4
"""Rate of the tier above the NICs over that of all of them: it limits nothing."""
MEDIAN_VARIANCE: Final = np.pi / 2.0
"""Of a median of normal values, over that of their mean."""
MATCHED, MATCHED_T = 5e-4, 100
"""Relative precision of a rate that gives the measured step, and the steps that are simulated for it."""
BETTER: Final = 0.02
"""By so much, in logarithms of durations, a choice must be better than one before it."""
MEETS: Final = 0.5
"""Share of steps in which a transfer must meet others to count as one that does."""
CHOICES: Final = [
    {"sharing": sharing, "unused_rate": unused} for sharing in ("operations", "flows") for unused in ("free", "lost")
]

Array = NDArray[np.float64]
Place = Literal["inside", "across"]


@dataclass(frozen=True)
class Durations:
    """How long each transfer took, seconds ``(T, K)``, and whether it ran alone."""

    seconds_TK: Array
    alone_TK: NDArray[np.bool_]


@dataclass(frozen=True)
class LinkRate:
    """The rate and latency of one kind of link.

    ``alone`` counts the transfers that it was fitted to; 0 where none ran alone and the rate is a stand-in.
    ``latency_us`` is None where rate and latency cannot be told apart, and the rate has both; 0 where none shows.
    """

    place: Place
    gbps: float
    se_gbps: float
    latency_us: float | None
    alone: int
    kinds: int
    cv: float
    se_latency_us: float = 0.0

    @property
    def key(self) -> str:
        """The key of a cluster config that has the rate."""
        return "fabric.intra_node_gbps" if self.place == "inside" else "fabric.nic_gbps"

    @property
    def latency_key(self) -> str:
        """The key of a cluster config that has the latency."""
        return "fabric.intra_node_latency_us" if self.place == "inside" else "fabric.latency_us"


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
    begin_TK, end_TK = np.nanmax(_or_low(stamps.start_TRK), axis=1), np.nanmax(_or_low(stamps.end_TRK), axis=1)
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
    for k in range(len(stamps.transfers)):
        for other in range(len(stamps.transfers)):
            if other != k and stamps.transfers[other].communicator != stamps.transfers[k].communicator:
                meet = (begin_TK[:, other] < end_TK[:, k] - tolerance_TK[:, k]) & (
                    end_TK[:, other] > begin_TK[:, k] + tolerance_TK[:, k]
                )
                alone_TK[:, k] &= ~meet
    groups_K = np.array([len(one.groups) for one in stamps.transfers])
    for k in np.flatnonzero(groups_K > 1).tolist():  # the groups of a transfer start and end each by itself
        _by_group(stamps, k, begin_TK, end_TK)
    return Durations(np.maximum(end_TK - begin_TK, 0.0), alone_TK)


def _or_low(x_TRK: Array) -> Array:
    """Not a number as minus infinity, so that a transfer that a step lacks has no maximum."""
    return np.where(np.isfinite(x_TRK), x_TRK, -np.inf)


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
    """Whether a transfer stays inside nodes."""
    is_inside = all(len({rank // ranks_per_node for rank in group}) == 1 for group in one.groups)
    return "inside" if is_inside and ranks_per_node > 1 else "across"


def _unit_tiers(nodes: int, each: int, *, hop: bool) -> Tiers:
    """Links of a byte a second and no latency, or of no limit and a second a hop."""
    rate, hop_s = (np.inf, 1.0) if hop else (1.0, 0.0)
    return Tiers(nodes, each, nodes, 1, rate, rate, np.inf, np.inf, hop_s, hop_s)


def link_bytes(stamps: ProgramStamps, one: Transfer) -> float:
    """Bytes of a transfer on its busiest link."""
    return use(_unit_tiers(*nodes_of(stamps), hop=False), one.op, one.groups[0], one.payload_bytes).alone_s


def fit_rates(stamps: ProgramStamps, found: Durations) -> list[LinkRate]:
    """Rates of the links that the transfers use."""
    nodes, each = nodes_of(stamps)
    by_place: dict[Place, list[int]] = {}
    for k, one in enumerate(stamps.transfers):
        if one.payload_bytes > 0.0:
            by_place.setdefault(place_of(one, each), []).append(k)
    rates = []
    for place, used in by_place.items():
        seen_K = np.isfinite(found.seconds_TK).sum(axis=0)
        alone = [k for k in used if found.alone_TK[:, k].sum() >= min(MIN_ALONE, seen_K[k])]
        alone = [k for k in alone if np.median(found.seconds_TK[found.alone_TK[:, k], k]) > 0.0]
        if alone:
            rates.append(_of_alone(stamps, found, alone, place, nodes, each))
        else:
            rates.append(_of_fastest(stamps, found, used, place))
    return rates


def _of_alone(
    stamps: ProgramStamps, found: Durations, alone: Sequence[int], place: Place, nodes: int, each: int
) -> LinkRate:
    """From transfers that ran alone: latency and rate by least squares of relative errors, neither negative."""
    flat, hops = _unit_tiers(nodes, each, hop=False), _unit_tiers(nodes, each, hop=True)
    rows, cvs, kinds_A, counts = list[tuple[float, float, float, float]](), list[float](), list[str](), 0
    for k in alone:
        one = stamps.transfers[k]
        seconds = found.seconds_TK[found.alone_TK[:, k], k]
        group = one.groups[0]
        link_bytes = use(flat, one.op, group, one.payload_bytes).alone_s
        rounds = use(hops, one.op, group, one.payload_bytes).latency_s
        mean_s, cv = float(np.median(seconds)), float(seconds.std()) / float(seconds.mean())
        rows.append((link_bytes, rounds, mean_s, MEDIAN_VARIANCE * cv**2 / len(seconds)))
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
    latency = (float(solution[1]) * 1e6, float(se[1]) * 1e6) if is_told else (None, 0.0)
    se_gbps = gbps * float(se[0] / solution[0])
    return LinkRate(place, gbps, se_gbps, latency[0], counts, kinds, float(np.mean(cvs)), latency[1])


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


def _of_fastest(stamps: ProgramStamps, found: Durations, used: Sequence[int], place: Place) -> LinkRate:
    """A stand-in: the rate of the transfer that got most of its links; they are no slower than that."""
    seconds = [float(np.nanmean(found.seconds_TK[:, k])) for k in used]
    if sum(seconds) <= 0.0:
        raise InputError(f"trace of {stamps.name}: its transfers take no time; allowed: transfers that do")
    speeds = [link_bytes(stamps, stamps.transfers[k]) / max(s, 1e-9) for k, s in zip(used, seconds, strict=True)]
    return LinkRate(place, max(speeds) / BYTES_PER_GBIT, 0.0, None, 0, 0, 0.0)


class Matched(NamedTuple):
    """Rates by key, and the standard error of their common factor, relative to it."""

    gbps: dict[str, float]
    relative_se: float


def match_step(builder: ClusterBuilder[Any], keys: Sequence[str], low: float, high: float) -> Matched | str:
    """The rates, all changed alike, with which the simulated step is as long as the measured one; or why none are.

    Rates from ``low`` to ``high`` times those known before are tried.
    """
    known = {key: float(builder.data["fabric"][key.partition(".")[2]]) for key in keys}
    mean_s, se_s = builder.measured.mean_s, builder.measured.mean_sd

    def rates(factor: float) -> dict[str, float]:
        return {key: float(f"{factor * gbps:.6g}") for key, gbps in known.items()}

    def step_s(factor: float) -> float:
        fabric = {key.partition(".")[2]: gbps for key, gbps in rates(factor).items()}
        return simulate(builder.cluster(**fabric), MATCHED_T).mean_s

    slow_s, fast_s = step_s(low), step_s(high)
    if slow_s - fast_s < 0.01 * mean_s:
        return "the step does not depend on it"
    if not fast_s < mean_s < slow_s:
        return (
            f"the simulated step is {fast_s:.4g} to {slow_s:.4g} s at any rate near it, the measured one {mean_s:.4g}"
        )
    found = optimize.brentq(lambda x: step_s(float(np.exp(x))) - mean_s, np.log(low), np.log(high), xtol=MATCHED)
    factor = float(np.exp(found))
    slope = abs(step_s(1.1 * factor) - step_s(factor)) / 0.1
    return Matched(rates(factor), max(min(se_s / max(slope, 1e-12), 0.5), 0.01))


class Sharing(NamedTuple):
    """Keys of a fabric, the rates that go with them, and the evidence."""

    keys: dict[str, Any]
    rates: list[LinkRate]
    parameters: list[Parameter]


def fit_sharing(
    stamps: ProgramStamps,
    found: Durations,
    rates: list[LinkRate],
    contended: Callable[[dict[str, Any]], Array],
    *,
    is_known: bool,
) -> Sharing:
    """How transfers between nodes share their links; the rates as they are where the trace does not show it."""
    nothing = Sharing({}, rates, [])
    across = [rate for rate in rates if rate.place == "across" and rate.alone]
    if not across:
        return nothing
    efficiency, gbps, parameters = _efficiencies(stamps, found)
    keys: dict[str, Any] = {"fabric.efficiency": efficiency} if efficiency else {}
    if efficiency:
        rates = [replace(one, gbps=gbps, latency_us=None) if one.place == "across" else one for one in rates]
    meets = [k for k, one in enumerate(stamps.transfers) if one.payload_bytes > 0.0 and _meets(found, k)]
    meets = [k for k in meets if np.nanmean(found.seconds_TK[:, k]) > 0.0]
    if is_known or not meets:
        return Sharing(keys, rates, parameters)
    known = {rate.key: rate.gbps for rate in rates} | {rate.latency_key: rate.latency_us or 0.0 for rate in rates}
    wanted_K = np.log(np.nanmean(found.seconds_TK[:, meets], axis=0))
    errors = []
    for choice in CHOICES:
        seconds_K = contended({**known, **keys, **{f"fabric.{key}": value for key, value in choice.items()}})[meets]
        errors.append(float(np.sqrt(np.mean((np.log(np.maximum(seconds_K, 1e-12)) - wanted_K) ** 2))))
    taken = next(n for n, error in enumerate(errors) if error < min(errors) + BETTER)
    chosen = {f"fabric.{key}": value for key, value in CHOICES[taken].items()} if taken else {}
    return Sharing(keys | chosen, rates, parameters)


def _meets(found: Durations, k: int) -> bool:
    """Whether a transfer meets others in most steps that have it."""
    seen_T = np.isfinite(found.seconds_TK[:, k])
    return bool(seen_T.any()) and float(found.alone_TK[seen_T, k].mean()) < MEETS


def _efficiencies(stamps: ProgramStamps, found: Durations) -> tuple[dict[str, float], float, list[Parameter]]:
    """Efficiencies below 1 of operations that ran alone, and the rate of the fastest one, Gb/s."""
    _, each = nodes_of(stamps)
    speed_of: dict[str, list[tuple[float, float, float]]] = {}
    for k, one in enumerate(stamps.transfers):
        seconds = found.seconds_TK[found.alone_TK[:, k], k]
        if one.payload_bytes > 0.0 and place_of(one, each) == "across" and len(seconds) >= MIN_ALONE:
            mean_s = float(np.median(seconds))
            if not mean_s > 0.0:
                continue
            speed = link_bytes(stamps, one) / mean_s
            speed_of.setdefault(one.op, []).append((speed, mean_s, float(seconds.std() / len(seconds) ** 0.5) / mean_s))
    if len(speed_of) < 2 or any(_spread(rows) > ALIKE for rows in speed_of.values()):
        return {}, 0.0, []  # speeds that depend on the size have latency in them
    speeds = {op: float(np.average([row[0] for row in rows], weights=[row[1] for row in rows])) for op, rows in
              speed_of.items()}  # fmt: skip
    fastest = max(speeds, key=lambda op: speeds[op])
    efficiency, parameters = dict[str, float](), list[Parameter]()
    for op, speed in speeds.items():
        ratio = speed / speeds[fastest]
        if ratio < 1.0 - ALIKE:
            efficiency[op] = float(f"{ratio:.4g}")
            se = ratio * max(float(np.hypot(speed_of[op][0][2], speed_of[fastest][0][2])), 0.01)
            said = f"its transfers alone beside those of {fastest}, the fastest"
            parameters.append(identified(f"fabric.efficiency.{op}", efficiency[op], se, said))
    return efficiency, speeds[fastest] / BYTES_PER_GBIT, parameters


def _spread(rows: Sequence[tuple[float, float, float]]) -> float:
    """The largest speed over the smallest, less 1."""
    speeds = [row[0] for row in rows]
    return max(speeds) / min(speeds) - 1.0
