"""Splits the transfer times of collectives into components, one per cause, that multiply or add up to the trace.

| component | meaning |
| --- | --- |
| alone | the collective by itself; always stays |
| link | fixed per process group: a worse way to the network |
| contention | what the job's own groups cost each other on a shared uplink, from the engine's fluid uplink |
| | ... or what its own reduction on another communicator costs them, from when it runs beside them |
| tenant | comes and goes over iterations: another job |
| timeout | the distance of a collapsed step: incast |
| transfer | without memory |
| hiccup | beyond the tail of the bulk |

Transfer times count from the last arrival. Only collectives that cost enough are split. Of the others, and of transfers
between stages, everything but the median is rest.

Axes: N operations (those that meet), K collectives of a class side by side, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from paceenv.calibration.two_state_fit import timed_out
from paceenv.core.metrics import BEST, other_job
from paceenv.core.operation_matrix import Array, Integers, OperationMatrix
from paceenv.diagnosis.compute_attribution import Components
from paceenv.diagnosis.dependency_graph import QUEUED_OPS, Graph, last_arrivals
from paceenv.diagnosis.outliers import stall_threshold
from paceenv.diagnosis.own_overlap import Partner, find_partners

MIN_EXCESS: Final = 0.01
"""A class is split if it exceeds its best by this share of a step ..."""
MIN_SHARE: Final = 0.05
"""... or if groups run side by side and their collectives take this share of a step."""
MAX_PAUSE: Final = 0.1
"""Two collectives are buckets of one payload if the pause between them is at most this share of a collective."""
MIN_LINK: Final = 0.08
MIN_HICCUP: Final = 3.0
"""A transfer that takes at least so many times the usual is held up by something else than traffic."""
_SIGNIFICANT: Final = 5.0


@dataclass(frozen=True)
class Shared:
    """Groups that share an uplink: their tasks, the places of their operations in the components, fitted seconds."""

    tasks: Integers
    places: tuple[Integers, ...]
    alone_s: float
    work_s: float


@dataclass(frozen=True)
class TransferAttribution(Components):
    """Components of the operations that meet.

    The factor ``contention`` is what the job's own reductions on another communicator cost; ``uplinks`` cost the rest.
    """

    classes: tuple[TransferClass, ...]
    uplinks: tuple[Shared, ...]


def attribute_transfers(matrix: OperationMatrix, graph: Graph, own_NT: Array, step_s: float) -> TransferAttribution:
    operation = np.flatnonzero(graph.meets_N & matrix.usual_N)
    every, last_KT = _classes(matrix, graph, operation, own_NT), last_arrivals(matrix, graph)
    partner_of = find_partners(matrix, [one.members for one in every], own_NT)
    for one in every:
        one.partner = partner_of.get(int(one.members[0][0]))
    classes, uplinks = [], []
    for chain in _chains(matrix, every, last_KT):
        if not _matters(matrix, chain, step_s):
            continue
        classes += chain
        for one in chain:
            one.take_off_modes()
        seconds = _contend(last_KT[chain[0].tasks_K], chain)
        if seconds is not None:
            mine = (np.concatenate([one.members[k] for one in chain]) for k in range(chain[0].groups))
            places = tuple(np.flatnonzero(np.isin(operation, m)) for m in mine)
            uplinks.append(Shared(chain[0].tasks_K, places, *seconds))
        link_K = _links(np.sum([one.left_KT for one in chain], axis=0))
        for one in chain:
            one.link_K, one.left_KT = link_K, one.left_KT / link_K[:, None]
        _take_off_tenant([one for one in chain if not one.queued])
        for one in chain:
            one.alone_K = np.full(one.groups, float(np.median(one.left_KT / one.tenant_KT)))
    group_N = np.zeros(len(matrix.op_N), np.int64)
    for k, members in enumerate(members for one in every for members in one.members):
        group_N[members] = k

    def of_operations(name: str) -> Array:
        """What the classes have by group, for each operation."""
        of_groups = [np.reshape(getattr(one, name), (one.groups, -1)) for one in every]
        return np.concatenate(of_groups)[group_N[operation]] if every else np.ones((0, matrix.steps))

    base_s, link, tenant, timeout_s = map(of_operations, ("alone_K", "link_K", "tenant_KT", "timeout_KT"))
    explained, beyond = base_s * link * of_operations("contention_KT") * tenant, of_operations("hiccup_KT") > 0.0
    rest = np.maximum(own_NT[operation] - timeout_s, 0.0) / np.maximum(explained, 1e-12)
    hiccup_s = np.where(beyond, np.maximum(rest - 1.0, 0.0) * explained, 0.0)
    rest = np.where(beyond, np.minimum(rest, 1.0), rest)
    factors = {"link": link, "contention": of_operations("partner_KT"), "tenant": tenant, "transfer": rest}
    more_s = {"timeout": timeout_s, "hiccup": hiccup_s}
    return TransferAttribution(operation, base_s, factors, more_s, tuple(classes), tuple(uplinks))


def _classes(matrix: OperationMatrix, graph: Graph, operation: Integers, own_NT: Array) -> list[TransferClass]:
    """Sets that meet, by name, bytes, stage and place in the step."""
    task = graph.task_of_N[operation]
    order = np.argsort(task, kind="stable")
    sets = np.split(operation[order], np.flatnonzero(np.diff(task[order])) + 1) if len(operation) else []
    classes: dict[tuple[int, ...], list[Integers]] = {}
    for members in sets:
        first = members[0]
        stage = -1 if matrix.bytes_N[first] else matrix.stage_N[first]  # stages have payloads of different size
        key = (matrix.op_N[first], matrix.bytes_N[first], stage, matrix.micro_batch_N[first])
        classes.setdefault((*map(int, key), int(matrix.position_N[first])), []).append(members)
    in_order = (sorted(sets, key=lambda m: tuple(matrix.rank_N[m])) for sets in classes.values())
    return [TransferClass(matrix, graph, members, own_NT) for members in in_order]


def _chains(matrix: OperationMatrix, classes: list[TransferClass], last_KT: Array) -> list[list[TransferClass]]:
    """Classes of the same groups that follow each other without a pause, as buckets do.

    A group meets the others on the uplink with whatever bucket each of them is at, so they only make sense together.
    """
    chains: list[list[TransferClass]] = []
    last: dict[tuple[tuple[int, ...], ...], tuple[list[TransferClass], Array]] = {}
    for one in sorted(classes, key=lambda one: float(np.median(last_KT[one.tasks_K]))):
        begin_KT = last_KT[one.tasks_K]
        side_by_side = one.groups > 1 and bool(matrix.is_collective_N[one.members[0][0]])
        chain, end_KT = last.get(one.ranks_K, ([], np.full_like(begin_KT, np.nan)))
        there = np.isfinite(begin_KT) & np.isfinite(end_KT)
        pause_s = float(np.median(begin_KT[there] - end_KT[there])) if there.any() else np.inf
        if side_by_side and abs(pause_s) <= MAX_PAUSE * float(np.median(one.left_KT)):
            chain.append(one)
        else:
            chain = [one]
            chains.append(chain)
        last[one.ranks_K] = chain, begin_KT + one.left_KT
    return chains


def _matters(matrix: OperationMatrix, chain: list[TransferClass], step_s: float) -> bool:
    """Whether a chain of collectives costs enough, or could cost its groups enough, to be looked into."""
    if any(one.partner for one in chain):
        return True
    spared_s = sum(float(one.left_KT.mean() - np.quantile(one.left_KT, BEST)) for one in chain)
    side_by_side = chain[0].groups > 1 and sum(float(np.median(one.left_KT)) for one in chain) > MIN_SHARE * step_s
    return bool(matrix.is_collective_N[chain[0].members[0][0]]) and (spared_s >= MIN_EXCESS * step_s or side_by_side)


def _contend(arrival_KT: Array, classes: list[TransferClass]) -> tuple[float, float] | None:
    """Take off what costs the classes of a chain time on their links, where that explains how long they take.

    Returns:
        The fitted seconds of a shared uplink (:class:`Shared`), None where none is found.
    """
    if any(one.partner for one in classes):
        for one in classes:
            if one.partner is not None:
                one.contend(True, one.partner.factor_KT)
                one.partner_KT = one.contention_KT
        return None
    left_KT = np.sum([one.left_KT for one in classes], axis=0)
    if len(left_KT) == 1:
        return None
    # brings SciPy's optimizer and the engine, which take a second
    from paceenv.diagnosis.uplink_contention import contention, fit_uplink

    known_KT = np.where(np.isfinite(arrival_KT), arrival_KT, 0.0)
    fit = fit_uplink(known_KT, left_KT, np.asarray(np.isfinite(arrival_KT).all(axis=0)))
    factor_KT = contention(known_KT, fit.alone_s, fit.work_s) if fit.contended else np.ones_like(left_KT)
    for one in classes:
        one.contend(fit.contended, factor_KT)
    return (fit.alone_s, fit.work_s) if fit.contended else None


class TransferClass:
    """One class of collectives, of which ``groups`` run side by side, and what was found about it.

    ``members`` are the operations of each group, in the order of ranks, ``tasks_K`` their tasks. ``left_KT`` is what is
    left of its durations, from which causes are taken off in turn: timeouts and hiccups, what groups or a ``partner``
    (the job's own reduction beside them) cost each other, links, a tenant. ``alone_K`` is what they take by themselves;
    ``link_K``, whose ranks are ``ranks_K``, ``contention_KT`` (``partner_KT`` of a partner) and ``tenant_KT`` are
    factors. ``contended`` is None where the trace does not identify it. ``predictability`` is how well the past
    predicts the next duration, ``inflated`` the mean over the best one, less 1. ``timeout_s`` is how much longer
    collapsed steps take (0: none), ``collapsed`` their share.
    """

    contended: bool | None = False
    partner: Partner | None = None
    predictability = inflated = timeout_s = collapsed = 0.0

    def __init__(self, matrix: OperationMatrix, graph: Graph, members: list[Integers], own_NT: Array) -> None:
        self.members, self.tasks_K = members, graph.task_of_N[[m[0] for m in members]]
        self.op, self.groups = matrix.ops[matrix.op_N[members[0][0]]], len(members)
        self.queued = self.op in QUEUED_OPS  # at a port, which hides other traffic on the links
        self.ranks_K = tuple(tuple(matrix.ranks[r] for r in matrix.rank_N[m]) for m in members)
        self.left_KT = np.stack([own_NT[m].max(axis=0) for m in members])
        self.alone_K, self.link_K = np.full(self.groups, float(np.median(self.left_KT))), np.ones(self.groups)
        self.contention_KT = self.partner_KT = self.tenant_KT = np.ones(self.left_KT.shape)
        self.timeout_KT = self.hiccup_KT = np.zeros(self.left_KT.shape)

    @property
    def contention(self) -> float:
        """How many times longer than alone its collectives take."""
        return float(self.contention_KT.mean())

    def contend(self, contended: bool | None, factor_KT: Array) -> None:
        """Take off what the groups cost each other, or a partner costs them."""
        self.contended, self.contention_KT = contended, factor_KT
        self.left_KT = self.left_KT / factor_KT

    def take_off_modes(self) -> None:
        """Take off timeouts of those that queue, or hiccups of the others."""
        if self.queued:
            self._take_off_timeouts()
            return
        usual_K = np.maximum(np.median(self.left_KT, axis=1, keepdims=True), 1e-12)
        threshold = max(stall_threshold(self.left_KT / usual_K), MIN_HICCUP)
        self.hiccup_KT = (self.left_KT > threshold * usual_K).astype(np.float64)
        self.left_KT = np.where(self.hiccup_KT > 0.0, usual_K, self.left_KT)

    def _take_off_timeouts(self) -> None:
        """What collapsed steps take longer than the others."""
        lasts_T = self.left_KT.max(axis=0)
        upper_T = timed_out(lasts_T)
        if upper_T.any():
            usual_K = np.median(self.left_KT[:, ~upper_T], axis=1, keepdims=True)
            self.timeout_s = float(np.median(lasts_T[upper_T]) - np.median(lasts_T[~upper_T]))
            self.collapsed, is_late = float(upper_T.mean()), self.left_KT > usual_K + 0.5 * self.timeout_s
            self.timeout_KT = np.where(is_late, self.left_KT - usual_K, 0.0)
            self.left_KT = self.left_KT - self.timeout_KT


def _links(left_KT: Array) -> Array:
    """Groups that always take longer than the others."""
    groups, steps = left_KT.shape
    level_K = np.median(left_KT, axis=1)
    if groups < 2:
        return np.ones(groups)
    usual = np.sort(level_K)[(groups - 1) // 2]
    se = 1.25 * left_KT.std(axis=1) / np.sqrt(steps) / max(usual, 1e-12)
    factor_K = level_K / max(usual, 1e-12)
    differs_K = np.abs(factor_K - 1.0) > np.maximum(MIN_LINK, _SIGNIFICANT * np.median(se))
    return np.where(differs_K, factor_K, 1.0)


def _take_off_tenant(chain: list[TransferClass]) -> None:
    """Whether the rest of a payload comes and goes as another job does, how predictable it is, how much it grows.

    Of its buckets together, as a tenant meets any.
    """
    if not chain:
        return
    predictable, inflated, is_there = other_job(np.sum([one.left_KT.mean(axis=0) for one in chain], axis=0))
    for one in chain:
        one.predictability, one.inflated = predictable, inflated
        if is_there:  # as a factor that all groups have in common
            mean_T = one.left_KT.mean(axis=0)
            factor_T = np.maximum(mean_T / max(float(np.quantile(mean_T, BEST)), 1e-12), 1.0)
            one.tenant_KT = np.broadcast_to(factor_T, one.left_KT.shape)
