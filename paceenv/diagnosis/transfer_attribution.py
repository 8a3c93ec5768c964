"""Splits what collectives take, once all their members are there, into layers, each the mark of one cause.

    transfer = alone * link * contention * tenant * rest + timeout + hiccup

alone is the collective by itself; link is fixed per process group (a worse way to the network), contention is what the
job's own groups cost each other on a shared uplink (the engine's fluid uplink under the trace's own arrivals), tenant
what comes and goes over iterations, timeout the distance of a collapsed step, rest is memoryless, hiccup what no
bulk explains. Only collectives that
matter are split; of the others, and of transfers between stages, everything but the median is rest.

Axes: N nodes (those that meet), K collectives of a class side by side, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from paceenv.diagnosis.autoregression import memory
from paceenv.diagnosis.dependency_graph import QUEUED_OPS, Graph
from paceenv.diagnosis.operation_matrix import Array, Cells, Integers
from paceenv.diagnosis.outliers import stall_threshold

LEAST_MATTER: Final = 0.01
"""Share of a step by which a class must exceed its best to be looked into."""
LEAST_SHARE: Final = 0.05
"""Share of a step from which on groups side by side are looked into even if their collectives hardly vary."""
MOST_PAUSE: Final = 0.1
"""Share of a collective that may lie between it and the one before for the two to be buckets of one payload."""
LEAST_LINK: Final = 0.08
LEAST_TIMEOUT_S: Final = 0.1
"""Steps apart by less are no timeout: TCP's shortest is 200 ms in Linux."""
LEAST_HICCUP: Final = 3.0
"""How many times longer than usual a single transfer takes that is held up by something else than traffic."""
LEAST_TENANT: Final = 0.1
"""Share by which transfers take longer than the best now and then, for a tenant to be behind it."""
LEAST_MEMORY: Final = 0.6
"""From which on what comes and goes counts as foretold by its past: see ``paceenv.diagnosis.autoregression``."""
LEAST_TENANT_STEPS: Final = 32
_BEST: Final = 0.05
_SIGNIFICANT: Final = 5.0


@dataclass(frozen=True)
class TransferClass:
    """What was found in one class of collectives: name, how many side by side, and the numbers behind its layers.

    ``link_K`` are factors of the groups, ``contention`` how many times longer than alone they take together, with the
    ends of what is 90 % likely, ``memory`` how far what comes and goes is foretold by its past, ``timeout_s`` how much
    longer collapsed steps take (0: none do) and ``collapsed`` their share. ``contended`` is None where it cannot be
    told.
    """

    op: str
    groups: int
    link_K: Array
    ranks_K: tuple[tuple[int, ...], ...]
    contention: float
    contention_between: tuple[float, float]
    contended: bool | None
    memory: float
    inflated: float
    timeout_s: float
    collapsed: float


@dataclass(frozen=True)
class Shared:
    """Groups that share an uplink: the tasks they begin with, their nodes' places in the layers, the fitted seconds."""

    tasks: Integers
    places: tuple[Integers, ...]
    alone_s: float
    work_s: float


@dataclass(frozen=True)
class TransferLayers:
    """As ``ComputeLayers``, for the nodes that meet; factors are ``(n, T)`` or ``(n, 1)``."""

    node: Integers
    base_s: Array
    link: Array
    contention: Array
    tenant: Array
    rest: Array
    timeout_s: Array
    hiccup_s: Array
    hiccups: int
    classes: tuple[TransferClass, ...]
    uplinks: tuple[Shared, ...]


def split_transfers(cells: Cells, graph: Graph, own_NT: Array, step_s: float) -> TransferLayers:
    """The layers of a job's collectives; ``step_s`` is the mean step, to which what matters is relative."""
    node = np.flatnonzero(graph.meets_N & cells.usual_N)
    where = np.full(len(cells.op_N), -1, np.int64)
    where[node] = np.arange(len(node))
    shape = (len(node), cells.steps)
    base_s, link = np.zeros((len(node), 1)), np.ones((len(node), 1))
    contention, tenant, rest = np.ones(shape), np.ones(shape), np.ones(shape)
    timeout_s, hiccup_s = np.zeros(shape), np.zeros(shape)
    hiccups = 0
    classes, uplinks = [], []
    for chain in _chains(cells, _classes(cells, graph, node), own_NT):
        at_CK = [[where[m] for m in members] for members in chain]
        own_CKT = [np.stack([own_NT[m].max(axis=0) for m in members]) for members in chain]
        if not _matters(cells, chain, own_CKT, step_s):
            for at, own_KT, members in zip(at_CK, own_CKT, chain, strict=True):
                middle_s = float(np.median(own_KT))
                for a, m in zip(at, members, strict=True):
                    base_s[a] = middle_s
                    rest[a] = own_NT[m] / max(middle_s, 1e-12)
            continue
        found_C = [_Class(cells, members, own_KT) for members, own_KT in zip(chain, own_CKT, strict=True)]
        contended = _contend(_arrivals(cells, chain[0]), found_C)
        if contended.uplink_s is not None:
            tasks = np.array([graph.task_of_N[m[0]] for m in chain[0]], np.int64)
            uplinks.append(
                Shared(tasks, tuple(np.concatenate(places) for places in zip(*at_CK, strict=True)), *contended.uplink_s)
            )
        for found in found_C:
            found.share(contended)
        somebody = _tenant([found.left_KT for found in found_C if not found.queued])
        for found in found_C:
            found.meet(somebody)
        for found, at, members in zip(found_C, at_CK, chain, strict=True):
            classes.append(found.describe())
            for k, a in enumerate(at):
                base_s[a], link[a] = found.alone_s, found.link_K[k]
                contention[a], tenant[a] = contended.factor_KT[k], found.tenant_KT[k]
                timeout_s[a] = found.timeout_KT[k]
                explained = base_s[a] * link[a] * contention[a] * tenant[a]
                rest[a] = np.maximum(own_NT[members[k]] - timeout_s[a], 0.0) / np.maximum(explained, 1e-12)
                beyond_T = found.hiccup_KT[k]
                hiccup_s[a] = np.where(beyond_T, np.maximum(rest[a] - 1.0, 0.0) * explained, 0.0)
                rest[a] = np.where(beyond_T, np.minimum(rest[a], 1.0), rest[a])
                hiccups += int(beyond_T.sum())
    return TransferLayers(
        node, base_s, link, contention, tenant, rest, timeout_s, hiccup_s, hiccups, tuple(classes), tuple(uplinks)
    )


def _classes(cells: Cells, graph: Graph, node: Integers) -> list[list[Integers]]:
    """Sets that meet, by operation, bytes, stage and place in the step; each as its nodes, in the order of ranks."""
    task = graph.task_of_N[node]
    order = np.argsort(task, kind="stable")
    sets = np.split(node[order], np.flatnonzero(np.diff(task[order])) + 1)
    found: dict[tuple[int, ...], list[Integers]] = {}
    for members in sets:
        first = members[0]
        stage = -1 if cells.bytes_N[first] else cells.stage_N[first]  # stages have payloads of different size
        key = (cells.op_N[first], cells.bytes_N[first], stage, cells.micro_batch_N[first])
        found.setdefault((*map(int, key), int(cells.position_N[first])), []).append(members)
    return [sorted(sets, key=lambda m: tuple(cells.rank_N[m])) for sets in found.values()]


def _arrivals(cells: Cells, members: list[Integers]) -> Array:
    """When the last of each group is there, seconds ``(K, T)``; minus infinity where nobody is."""
    return np.stack([np.nan_to_num(cells.start_NT[m], nan=-np.inf).max(axis=0) for m in members])


def _chains(cells: Cells, classes: list[list[Integers]], own_NT: Array) -> list[list[list[Integers]]]:
    """Classes of the same groups that follow each other without a pause, as buckets do.

    A group meets the others on the uplink with whatever bucket each of them is at, so they only make sense together.
    """
    chains: list[list[list[Integers]]] = []
    last: dict[tuple[bytes, ...], tuple[list[list[Integers]], Array]] = {}
    begin_CKT = [_arrivals(cells, members) for members in classes]
    for i in np.argsort([float(np.median(begin_KT)) for begin_KT in begin_CKT], kind="stable"):
        members, begin_KT = classes[i], begin_CKT[i]
        groups = tuple(cells.rank_N[m].tobytes() for m in members)
        lasts_KT = np.stack([own_NT[m].max(axis=0) for m in members])
        side_by_side = len(members) > 1 and bool(cells.is_collective_N[members[0][0]])
        chain, end_KT = last.get(groups, ([], np.full_like(begin_KT, np.nan)))
        there = np.isfinite(begin_KT) & np.isfinite(end_KT)
        pause_s = float(np.median((begin_KT - end_KT)[there])) if there.any() else np.inf
        if side_by_side and abs(pause_s) <= MOST_PAUSE * float(np.median(lasts_KT)):
            chain.append(members)
        else:
            chain = [members]
            chains.append(chain)
        last[groups] = chain, begin_KT + lasts_KT
    return chains


def _matters(cells: Cells, chain: list[list[Integers]], own_CKT: list[Array], step_s: float) -> bool:
    """Whether a chain of collectives costs enough, or could cost its groups enough, to be looked into."""
    spared_s = sum(float(own_KT.mean() - np.quantile(own_KT, _BEST)) for own_KT in own_CKT)
    side_by_side = len(chain[0]) > 1 and sum(float(np.median(own_KT)) for own_KT in own_CKT) > LEAST_SHARE * step_s
    return bool(cells.is_collective_N[chain[0][0][0]]) and (spared_s >= LEAST_MATTER * step_s or side_by_side)


@dataclass(frozen=True)
class _Contended:
    """What groups cost each other: whether they do, the factors, what is likely of their mean, the fitted seconds."""

    contended: bool | None
    factor_KT: Array
    between: tuple[float, float] = (1.0, 1.0)
    uplink_s: tuple[float, float] | None = None


def _contend(arrival_KT: Array, classes: list[_Class]) -> _Contended:
    """What the groups of a chain cost each other, where a shared uplink explains how long they take."""
    left_KT = np.sum([found.left_KT for found in classes], axis=0)
    if len(left_KT) == 1:
        return _Contended(False, np.ones_like(left_KT))
    from paceenv.diagnosis.uplink_contention import (
        fit_uplink,  # brings SciPy's optimizer and the engine, which take a second
    )

    known_KT = np.where(np.isfinite(arrival_KT), arrival_KT, 0.0)
    fit = fit_uplink(known_KT, left_KT, np.asarray(np.isfinite(arrival_KT).all(axis=0)))
    if not fit.contended:
        return _Contended(fit.contended, np.ones_like(left_KT))
    return _Contended(True, fit.contention_KT(known_KT), fit.between(known_KT), (fit.alone_s, fit.work_s))


@dataclass(frozen=True)
class _Tenant:
    """Whether somebody else comes and goes; how far that is foretold by its past, and by how much a payload grows."""

    there: bool
    memory: float
    inflated: float


_NO_TENANT: Final = _Tenant(False, 0.0, 0.0)


class _Class:
    """The layers of one class, taken off one after the other: of rare steps at once, then ``share``, then ``meet``."""

    def __init__(self, cells: Cells, members: list[Integers], own_KT: Array) -> None:
        self._op = cells.ops[cells.op_N[members[0][0]]]
        self.queued = self._op in QUEUED_OPS  # at a port, which hides who else is on the links
        self._ranks = tuple(tuple(cells.ranks[r] for r in cells.rank_N[m]) for m in members)
        self.timeout_KT, self._timeout_s, self._collapsed = self._timeouts(own_KT)
        self.left_KT = own_KT - self.timeout_KT
        self.hiccup_KT = np.zeros(own_KT.shape, np.bool_)
        usual_K = np.maximum(np.median(self.left_KT, axis=1, keepdims=True), 1e-12)
        if not self.queued:
            threshold = max(stall_threshold(self.left_KT / usual_K), LEAST_HICCUP)
            self.hiccup_KT = self.left_KT > threshold * usual_K
            self.left_KT = np.where(self.hiccup_KT, usual_K, self.left_KT)

    def share(self, contended: _Contended) -> None:
        """Take off what the groups cost each other, then what their links do."""
        self._contended = contended
        self.left_KT = self.left_KT / contended.factor_KT
        self.link_K = _links(self.left_KT)
        self.left_KT = self.left_KT / self.link_K[:, None]

    def meet(self, tenant: _Tenant) -> None:
        """Take off what a tenant costs."""
        self._tenant = _NO_TENANT if self.queued else tenant
        self.tenant_KT = np.ones_like(self.left_KT)
        if self._tenant.there:
            mean_T = self.left_KT.mean(axis=0)
            self.tenant_KT[:] = np.maximum(mean_T / max(float(np.quantile(mean_T, _BEST)), 1e-12), 1.0)
        self.alone_s = float(np.median(self.left_KT / self.tenant_KT))

    def describe(self) -> TransferClass:
        return TransferClass(
            op=self._op,
            groups=len(self._ranks),
            link_K=self.link_K,
            ranks_K=self._ranks,
            contention=float(self._contended.factor_KT.mean()),
            contention_between=self._contended.between,
            contended=self._contended.contended,
            memory=self._tenant.memory,
            inflated=self._tenant.inflated,
            timeout_s=self._timeout_s,
            collapsed=self._collapsed,
        )

    def _timeouts(self, own_KT: Array) -> tuple[Array, float, float]:
        """What collapsed steps take longer than the others, where durations have two modes that far apart."""
        lasts_T = own_KT.max(axis=0)
        low, high = float(lasts_T.min()), float(lasts_T.max())
        upper_T = np.zeros(len(lasts_T), np.bool_)
        for _ in range(50):
            upper_T = lasts_T > (low + high) / 2.0
            if upper_T.all() or not upper_T.any():
                break
            low, high = float(np.median(lasts_T[~upper_T])), float(np.median(lasts_T[upper_T]))
        spread = float(lasts_T[~upper_T].std()) if not upper_T.all() else np.inf
        apart = high - low >= max(LEAST_TIMEOUT_S, 0.5 * low) and high - low > 3.0 * spread
        if not self.queued or not apart or upper_T.sum() < 3:
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
    differs_K = np.abs(factor_K - 1.0) > np.maximum(LEAST_LINK, _SIGNIFICANT * np.median(se))
    return np.where(differs_K, factor_K, 1.0)


def _tenant(left_CKT: list[Array]) -> _Tenant:
    """Whether what is left of a payload comes and goes with a memory; of its buckets together, as a tenant meets now
    one of them, now another."""
    if not left_CKT:
        return _NO_TENANT
    lasts_T = np.maximum(np.sum([left_KT.mean(axis=0) for left_KT in left_CKT], axis=0), 1e-12)
    best_s, much_s = np.quantile(lasts_T, (_BEST, 1.0 - _BEST))
    inflated = float(lasts_T.mean() / best_s) - 1.0
    remembered = memory(np.log(lasts_T))  # of logarithms, because a few outliers would hide what all others share
    returns = len(lasts_T) >= LEAST_TENANT_STEPS and remembered >= LEAST_MEMORY
    much = inflated >= 0.5 * LEAST_TENANT and bool(much_s >= (1.0 + LEAST_TENANT) * best_s)
    return _Tenant(returns and much, remembered, inflated)
