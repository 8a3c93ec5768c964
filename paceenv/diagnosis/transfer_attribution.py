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

from paceenv.diagnosis.compute_attribution import Components
from paceenv.diagnosis.dependency_graph import QUEUED_OPS, Graph, last_arrivals
from paceenv.diagnosis.operation_matrix import Array, Integers, OperationMatrix
from paceenv.diagnosis.outliers import stall_threshold
from paceenv.diagnosis.own_overlap import Partner, find_partners

MIN_EXCESS: Final = 0.01
"""A class is split if it exceeds its best by this share of a step ..."""
MIN_SHARE: Final = 0.05
"""... or if groups run side by side and their collectives take this share of a step."""
MAX_PAUSE: Final = 0.1
"""Two collectives are buckets of one payload if the pause between them is at most this share of a collective."""
MIN_LINK: Final = 0.08
MIN_TIMEOUT_S: Final = 0.1
"""Steps apart by less are no timeout: TCP's shortest is 200 ms in Linux."""
MIN_COLLAPSED: Final = 3
"""Steps that each of the two modes must have."""
MIN_HICCUP: Final = 3.0
"""A transfer that takes at least so many times the usual is held up by something else than traffic."""
MIN_TENANT: Final = 0.1
"""A tenant makes transfers take longer than the best by at least this share, now and then."""
MIN_PREDICTABILITY: Final = 0.6
"""A tenant's transfers are predicted by their past at least this well, see :func:`predictability`."""
MAX_LAGS: Final = 12
MIN_TENANT_STEPS: Final = 32
_BEST: Final = 0.05
_SIGNIFICANT: Final = 5.0
_ROUNDING: Final = 1e-12
"""Share of its mean by which a constant series may vary."""


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
    """Split a job's collectives into components."""
    operation = np.flatnonzero(graph.meets_N & matrix.usual_N)
    where = np.full(len(matrix.op_N), -1, np.int64)
    where[operation] = np.arange(len(operation))
    shape = (len(operation), matrix.steps)
    base_s, link = np.zeros((len(operation), 1)), np.ones((len(operation), 1))
    beside, tenant, rest = np.ones(shape), np.ones(shape), np.ones(shape)
    timeout_s, hiccup_s = np.zeros(shape), np.zeros(shape)
    classes, uplinks = [], []
    meeting, last_KT = _classes(matrix, graph, operation), last_arrivals(matrix, graph)
    partner_of = find_partners(matrix, meeting, own_NT)
    for chain in _chains(matrix, graph, meeting, own_NT, last_KT):
        at_CK = [[where[m] for m in members] for members in chain]
        own_CKT = [np.stack([own_NT[m].max(axis=0) for m in members]) for members in chain]
        partners = [partner_of.get(int(members[0][0])) for members in chain]
        if not _matters(matrix, chain, own_CKT, step_s, partners):
            for at, own_KT, members in zip(at_CK, own_CKT, chain, strict=True):
                middle_s = float(np.median(own_KT))
                for a, m in zip(at, members, strict=True):
                    base_s[a] = middle_s
                    rest[a] = own_NT[m] / max(middle_s, 1e-12)
            continue
        found_C = [TransferClass(matrix, members, own_KT) for members, own_KT in zip(chain, own_CKT, strict=True)]
        tasks = _tasks(graph, chain[0])
        uplink_s = _contend(last_KT[tasks], found_C, partners)
        if uplink_s is not None:
            uplinks.append(
                Shared(tasks, tuple(np.concatenate(places) for places in zip(*at_CK, strict=True)), *uplink_s)
            )
        link_K = _links(np.sum([transfers.left_KT for transfers in found_C], axis=0))
        for transfers in found_C:
            transfers.link_K, transfers.left_KT = link_K, transfers.left_KT / link_K[:, None]
        is_tenant, predictable, inflated = _tenant([transfers.left_KT for transfers in found_C if not transfers.queued])
        for transfers, at, members in zip(found_C, at_CK, chain, strict=True):
            if not transfers.queued:
                transfers.predictability, transfers.inflated = predictable, inflated
            tenant_KT = transfers.tenant_KT() if is_tenant and not transfers.queued else np.ones_like(transfers.left_KT)
            alone_s = float(np.median(transfers.left_KT / tenant_KT))
            classes.append(transfers)
            for k, a in enumerate(at):
                base_s[a], link[a], tenant[a] = alone_s, link_K[k], tenant_KT[k]
                if transfers.partner is not None:
                    beside[a] = transfers.contention_KT[k]
                timeout_s[a] = transfers.timeout_KT[k]
                explained = base_s[a] * link[a] * transfers.contention_KT[k] * tenant[a]
                rest[a] = np.maximum(own_NT[members[k]] - timeout_s[a], 0.0) / np.maximum(explained, 1e-12)
                beyond_T = transfers.hiccup_KT[k]
                hiccup_s[a] = np.where(beyond_T, np.maximum(rest[a] - 1.0, 0.0) * explained, 0.0)
                rest[a] = np.where(beyond_T, np.minimum(rest[a], 1.0), rest[a])
    factors = {"link": link, "contention": beside, "tenant": tenant, "transfer": rest}
    seconds = {"timeout": timeout_s, "hiccup": hiccup_s}
    return TransferAttribution(operation, base_s, factors, seconds, tuple(classes), tuple(uplinks))


def _classes(matrix: OperationMatrix, graph: Graph, operation: Integers) -> list[list[Integers]]:
    """Sets that meet, by name, bytes, stage and place in the step; each as its operations, in the order of ranks."""
    task = graph.task_of_N[operation]
    order = np.argsort(task, kind="stable")
    sets = np.split(operation[order], np.flatnonzero(np.diff(task[order])) + 1)
    classes: dict[tuple[int, ...], list[Integers]] = {}
    for members in sets:
        first = members[0]
        stage = -1 if matrix.bytes_N[first] else matrix.stage_N[first]  # stages have payloads of different size
        key = (matrix.op_N[first], matrix.bytes_N[first], stage, matrix.micro_batch_N[first])
        classes.setdefault((*map(int, key), int(matrix.position_N[first])), []).append(members)
    return [sorted(sets, key=lambda m: tuple(matrix.rank_N[m])) for sets in classes.values()]


def _tasks(graph: Graph, members: list[Integers]) -> Integers:
    return graph.task_of_N[[m[0] for m in members]]


def _chains(
    matrix: OperationMatrix, graph: Graph, classes: list[list[Integers]], own_NT: Array, last_KT: Array
) -> list[list[list[Integers]]]:
    """Classes of the same groups that follow each other without a pause, as buckets do.

    A group meets the others on the uplink with whatever bucket each of them is at, so they only make sense together.
    """
    chains: list[list[list[Integers]]] = []
    last: dict[tuple[bytes, ...], tuple[list[list[Integers]], Array]] = {}
    begin_CKT = [last_KT[_tasks(graph, members)] for members in classes]
    for i in np.argsort([float(np.median(begin_KT)) for begin_KT in begin_CKT], kind="stable"):
        members, begin_KT = classes[i], begin_CKT[i]
        groups = tuple(matrix.rank_N[m].tobytes() for m in members)
        lasts_KT = np.stack([own_NT[m].max(axis=0) for m in members])
        side_by_side = len(members) > 1 and bool(matrix.is_collective_N[members[0][0]])
        chain, end_KT = last.get(groups, ([], np.full_like(begin_KT, np.nan)))
        there = np.isfinite(begin_KT) & np.isfinite(end_KT)
        pause_s = float(np.median(begin_KT[there] - end_KT[there])) if there.any() else np.inf
        if side_by_side and abs(pause_s) <= MAX_PAUSE * float(np.median(lasts_KT)):
            chain.append(members)
        else:
            chain = [members]
            chains.append(chain)
        last[groups] = chain, begin_KT + lasts_KT
    return chains


def _matters(
    matrix: OperationMatrix,
    chain: list[list[Integers]],
    own_CKT: list[Array],
    step_s: float,
    partners: list[Partner | None],
) -> bool:
    """Whether a chain of collectives costs enough, or could cost its groups enough, to be looked into."""
    if any(partners):
        return True
    spared_s = sum(float(own_KT.mean() - np.quantile(own_KT, _BEST)) for own_KT in own_CKT)
    side_by_side = len(chain[0]) > 1 and sum(float(np.median(own_KT)) for own_KT in own_CKT) > MIN_SHARE * step_s
    return bool(matrix.is_collective_N[chain[0][0][0]]) and (spared_s >= MIN_EXCESS * step_s or side_by_side)


def _contend(
    arrival_KT: Array, classes: list[TransferClass], partners: list[Partner | None]
) -> tuple[float, float] | None:
    """Take off what costs the classes of a chain time on their links, where that explains how long they take.

    Returns:
        The fitted seconds of a shared uplink (:class:`Shared`), None where none is found.
    """
    if any(partners):
        for transfers, one in zip(classes, partners, strict=True):
            if one is not None:
                transfers.contend(True, one.factor_KT, one)
        return None
    left_KT = np.sum([transfers.left_KT for transfers in classes], axis=0)
    if len(left_KT) == 1:
        return None
    # brings SciPy's optimizer and the engine, which take a second
    from paceenv.diagnosis.uplink_contention import contention, fit_uplink

    known_KT = np.where(np.isfinite(arrival_KT), arrival_KT, 0.0)
    fit = fit_uplink(known_KT, left_KT, np.asarray(np.isfinite(arrival_KT).all(axis=0)))
    factor_KT = contention(known_KT, fit.alone_s, fit.work_s) if fit.contended else np.ones_like(left_KT)
    for transfers in classes:
        transfers.contend(fit.contended, factor_KT)
    return (fit.alone_s, fit.work_s) if fit.contended else None


class TransferClass:
    """One class of collectives, of which ``groups`` run side by side, and what was found about it.

    ``left_KT`` is what is left of its durations, from which causes are taken off in turn: timeouts and hiccups, what
    groups or a ``partner`` (the job's own reduction beside them) cost each other, links, a tenant. ``link_K`` are
    factors of the groups, whose ranks are ``ranks_K``, ``contention_KT`` those of contention; ``contended`` is None
    where the trace does not identify it. ``predictability`` is how well the past predicts the next duration,
    ``inflated`` the mean over the best one, less 1. ``timeout_s`` is how much longer collapsed steps take (0: none),
    ``collapsed`` their share.
    """

    contended: bool | None = False
    partner: Partner | None = None
    predictability = inflated = 0.0

    def __init__(self, matrix: OperationMatrix, members: list[Integers], own_KT: Array) -> None:
        self.op, self.groups = matrix.ops[matrix.op_N[members[0][0]]], len(members)
        self.queued = self.op in QUEUED_OPS  # at a port, which hides other traffic on the links
        self.ranks_K = tuple(tuple(matrix.ranks[r] for r in matrix.rank_N[m]) for m in members)
        self.link_K, self.contention_KT = np.ones(self.groups), np.ones(own_KT.shape)
        self.timeout_KT, self.timeout_s, self.collapsed = self._timeouts(own_KT)
        self.left_KT = own_KT - self.timeout_KT
        self.hiccup_KT = np.zeros(own_KT.shape, np.bool_)
        usual_K = np.maximum(np.median(self.left_KT, axis=1, keepdims=True), 1e-12)
        if not self.queued:
            threshold = max(stall_threshold(self.left_KT / usual_K), MIN_HICCUP)
            self.hiccup_KT = self.left_KT > threshold * usual_K
            self.left_KT = np.where(self.hiccup_KT, usual_K, self.left_KT)

    @property
    def contention(self) -> float:
        """How many times longer than alone its collectives take."""
        return float(self.contention_KT.mean())

    def contend(self, contended: bool | None, factor_KT: Array, partner: Partner | None = None) -> None:
        """Take off what the groups cost each other, or a partner costs them."""
        self.contended, self.contention_KT, self.partner = contended, factor_KT, partner
        self.left_KT = self.left_KT / factor_KT

    def tenant_KT(self) -> Array:
        """What a tenant costs, as a factor that all groups have in common."""
        mean_T = self.left_KT.mean(axis=0)
        factor_T = np.maximum(mean_T / max(float(np.quantile(mean_T, _BEST)), 1e-12), 1.0)
        return np.broadcast_to(factor_T, self.left_KT.shape)

    def _timeouts(self, own_KT: Array) -> tuple[Array, float, float]:
        """What collapsed steps take longer than the others, where durations have two modes that far apart."""
        lasts_T = own_KT.max(axis=0)
        ordered = np.sort(lasts_T)
        if not self.queued or len(ordered) < 2 * MIN_COLLAPSED:
            return np.zeros_like(own_KT), 0.0, 0.0
        inner = ordered[MIN_COLLAPSED - 1 : len(ordered) - MIN_COLLAPSED + 1]
        gap = int(np.argmax(np.diff(inner)))  # the widest one, whichever mode has more steps
        upper_T = lasts_T > 0.5 * (inner[gap] + inner[gap + 1])
        low, high = float(np.median(lasts_T[~upper_T])), float(np.median(lasts_T[upper_T]))
        spread = float(lasts_T[~upper_T].std())
        apart = high - low >= max(MIN_TIMEOUT_S, 0.5 * low) and high - low > 3.0 * spread
        if not apart:
            return np.zeros_like(own_KT), 0.0, 0.0
        usual_K = np.median(own_KT[:, ~upper_T], axis=1, keepdims=True)
        timeout_KT = np.where(own_KT > usual_K + 0.5 * (high - low), own_KT - usual_K, 0.0)
        return timeout_KT, high - low, float(upper_T.mean())


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


def _tenant(left_CKT: list[Array]) -> tuple[bool, float, float]:
    """Whether the rest of a payload comes and goes as another job does, how predictable it is, how much it grows.

    Of its buckets together, as a tenant meets any.
    """
    if not left_CKT:
        return False, 0.0, 0.0
    lasts_T = np.maximum(np.sum([left_KT.mean(axis=0) for left_KT in left_CKT], axis=0), 1e-12)
    best_s, much_s = np.quantile(lasts_T, (_BEST, 1.0 - _BEST))
    inflated = float(lasts_T.mean() / best_s) - 1.0
    predictable = predictability(np.log(lasts_T))  # of logarithms: a few outliers would hide what all others share
    returns = len(lasts_T) >= MIN_TENANT_STEPS and predictable >= MIN_PREDICTABILITY
    much = inflated >= 0.5 * MIN_TENANT and bool(much_s >= (1.0 + MIN_TENANT) * best_s)
    return returns and much, predictable, inflated


def predictability(x_T: Array) -> float:
    """Correlation of a series with the prediction from its last values, 0 to 1.

    The prediction is an autoregression (Yule and Walker, by the recursion of Levinson 1947 and Durbin 1960). Its order
    is the one that Schwarz' criterion (1978) prefers, 0 included. A tenant whose period is not ours returns every few
    steps: its autocorrelation is small at most lags, but several lags together predict it well.
    """
    steps, mean = len(x_T), float(x_T.mean())
    x_T = x_T - mean
    most = min(MAX_LAGS, steps // 8)
    covariance_L = np.array([x_T[lag:] @ x_T[: steps - lag] for lag in range(most + 1)]) / max(steps, 1)
    whole = left = kept = float(covariance_L[0])
    if whole <= (_ROUNDING * mean) ** 2:
        return 0.0
    weights, least = np.zeros(0), steps * np.log(whole)
    for order in range(1, most + 1):
        new = (covariance_L[order] - weights @ covariance_L[order - 1 : 0 : -1]) / left
        weights = np.append(weights - new * weights[::-1], new)
        left *= 1.0 - new**2
        if left <= 1e-12 * whole:
            return 1.0
        criterion = steps * np.log(left) + order * np.log(steps)
        if criterion < least:
            least, kept = criterion, left
    return float(np.sqrt(1.0 - kept / whole))
