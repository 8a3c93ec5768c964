"""Which operation of a step waits for which: the dependency graph that every step shares.

On a rank:
- compute is one chain in its usual order, and collectives that do not overlap it are links of that chain;
- collectives that overlap compute, or each other, form one chain per process group, in which those that begin together
  do not wait for each other. Each waits for the last compute that ended before it began, and the first operation that
  begins after it waits for it;
- sends and receives of a pipeline form one chain per kind. A send waits for the compute whose result it carries, a
  compute for what it receives. A receive waits for the compute before it, unless it was posted ahead.

The members of a collective, and the two ends of a transfer, begin together when the last of them arrives.

Rare operations, and collectives that a rank runs on several threads, can have different orders on different ranks and
then wait for each other in a circle. Circles are cut at the operation that usually begins first.

Source: J. Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), section 3,
and the artefact's notes on what its profiler records. Axes: N operations, K tasks (operations that begin together).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.operation_matrix import Array, Integers, OperationMatrix, meetings

QUEUED_OPS: Final = ("gather", "all_to_all")
"""Collectives in which many ranks send to one port."""
_ALWAYS: Final = 0.9
"""An operation that may wait for another does so if it follows it in this share of steps."""
_TOLERANCE: Final = 1e-3
"""Share of a step by which two stamps of the same moment may differ."""


@dataclass(frozen=True)
class Graph:
    """Tasks in topological order.

    Task k has the operations ``member_N[task_K[k] : task_K[k + 1]]``. Operation n waits for the operations
    ``before[before_N[n] : before_N[n + 1]]``. ``meets_N`` marks operations whose task has others: their own time counts
    from the last arrival. Tasks in ``queued_K`` are messages that queue at a port, which serves the first ones while
    others are still on their way.
    """

    task_K: Integers
    member_N: Integers
    before_N: Integers
    before: Integers
    meets_N: NDArray[np.bool_]
    task_of_N: Integers
    queued_K: NDArray[np.bool_]


def last_arrivals(matrix: OperationMatrix, graph: Graph) -> Array:
    """When the last operation of each task begins, seconds ``(K, T)``; minus infinity where a step has none of it."""
    last_KT = np.full((len(graph.queued_K), matrix.steps), -np.inf)
    np.maximum.at(last_KT, graph.task_of_N, np.nan_to_num(matrix.start_NT, nan=-np.inf))
    return last_KT


def build_graph(matrix: OperationMatrix) -> Graph:
    """The graph of a job's usual step."""
    order = _Order(matrix)
    is_compute, is_collective = matrix.is_compute_N, matrix.is_collective_N
    bounds = np.flatnonzero(np.diff(matrix.rank_N)) + 1
    for operations in np.split(np.arange(len(matrix.op_N)), bounds):
        order.of_rank(operations, *(operations[which[operations]] for which in (is_compute, is_collective)))
    return _sorted(matrix, meetings(matrix), order.before, order.start_N)


class _Order:
    """What each operation waits for on its own rank, ``before``; ``start_N`` is when it usually begins."""

    def __init__(self, matrix: OperationMatrix) -> None:
        self.before: list[list[int]] = [[] for _ in matrix.op_N]
        self.start_N = np.nanmedian(matrix.start_NT, axis=1)
        self._matrix, self._is_transfer_N = matrix, matrix.is_transfer_N
        self._tolerance_s = _TOLERANCE * float(np.median(matrix.step_s_T))

    def of_rank(self, operations: Integers, computes: Integers, collectives: Integers) -> None:
        """All operations of a rank in their usual order."""
        collectives = collectives[np.argsort(self.start_N[collectives], kind="stable")]
        apart = self._after(collectives, computes) | self._after(computes, collectives).T
        beside = set(collectives[(~apart & self._share_steps(collectives, computes)).any(axis=1)].tolist())
        in_turn = [n for n in collectives.tolist() if n not in beside]
        beside |= {b for a, b in pairwise(in_turn) if not self._is_after(b, a)}
        main = [n for n in operations.tolist() if not self._is_transfer_N[n] and n not in beside]
        self._chain(main)
        self._beside(sorted(beside), np.array(main, np.int64))
        self._transfers(operations, computes)

    def _share_steps(self, one: Integers, other: Integers) -> NDArray[np.bool_]:
        """Which operations are in most of each other's steps, ``(one, other)``."""
        has_AT, has_BT = (np.isfinite(self._matrix.start_NT[of]).astype(np.float64) for of in (one, other))
        both = has_AT @ has_BT.T
        return np.asarray(both >= 0.5 * np.maximum(has_AT.sum(axis=1)[:, None], has_BT.sum(axis=1)[None, :]))

    def _after(self, later: Integers, earlier: Integers) -> NDArray[np.bool_]:
        """Which of some operations usually begin when others have ended, ``(later, earlier)``.

        Compared step by step: medians over the steps of each would mix steps that are early with others that are late.
        An operation that few steps have says nothing of one that most have.
        """
        follows = np.zeros((len(later), len(earlier)), np.bool_)
        end_MT = self._matrix.end_NT[earlier] - self._tolerance_s
        steps_M = np.isfinite(end_MT).sum(axis=1)
        for i, n in enumerate(later.tolist()):
            start_T = self._matrix.start_NT[n]
            follows[i] = (start_T >= end_MT).sum(axis=1) >= 0.5 * np.maximum(steps_M, np.isfinite(start_T).sum())
        return follows

    def _is_after(self, later: int, earlier: int) -> bool:
        return bool(self._after(np.array([later]), np.array([earlier])).all())

    def _chain(self, operations: list[int]) -> None:
        for earlier, later in pairwise(operations):
            self.before[later].append(earlier)

    def _beside(self, beside: list[int], main: Integers) -> None:
        """Collectives that overlap the chain ``main`` of their rank."""
        streams: dict[int, list[int]] = defaultdict(list)
        operations = np.array(beside, np.int64)
        begins_after, released = self._after(operations, main), self._after(main, operations).T
        for n, after, releases in zip(beside, begins_after, released, strict=True):
            streams[int(self._matrix.group_N[n])].append(n)
            earlier, later = np.flatnonzero(after), np.flatnonzero(releases)
            if len(earlier):
                self.before[n].append(int(main[earlier[-1]]))
            if len(later) and not (len(earlier) and later[0] <= earlier[-1]):
                self.before[int(main[later[0]])].append(n)
        for stream in streams.values():
            for a, b in pairwise(sorted(stream, key=lambda n: float(self.start_N[n]))):
                if self.start_N[b] >= self.start_N[a] + self._tolerance_s or self._is_after(b, a):
                    self.before[b].append(a)

    def _transfers(self, operations: Integers, computes: Integers) -> None:
        """Sends and receives of one rank's pipeline stage."""
        matrix = self._matrix
        for direction in ("forward", "backward"):
            of_direction = computes[matrix.is_op(f"{direction}-compute")[computes]].tolist()
            served = {(int(matrix.micro_batch_N[n]), int(matrix.chunk_N[n])): i for i, n in enumerate(of_direction)}
            for way in ("send", "recv"):
                stream = operations[matrix.is_op(f"{direction}-{way}")[operations]].tolist()
                self._chain(stream)
                for n in stream:
                    i = served.get((int(matrix.micro_batch_N[n]), int(matrix.chunk_N[n])))
                    if i is None:
                        continue
                    if way == "send":
                        self.before[n].append(of_direction[i])
                        continue
                    self.before[of_direction[i]].append(n)
                    if i and self._follows(n, of_direction[i - 1]):
                        self.before[n].append(of_direction[i - 1])
                if direction == "backward" and stream:
                    self._first_backward(stream[0], computes)

    def _first_backward(self, transfer: int, computes: Integers) -> None:
        """It is not posted before the last but one forward compute that precedes any backward."""
        backward = np.flatnonzero(self._matrix.is_op("backward-compute")[computes])
        if len(backward) and backward[0] >= 2 and self._follows(transfer, forward := int(computes[backward[0] - 2])):
            self.before[transfer].append(forward)

    def _follows(self, later: int, earlier: int) -> bool:
        """Whether the trace allows that one waits for the other: a receive may have been posted ahead."""
        waited_T = self._matrix.start_NT[later] >= self._matrix.end_NT[earlier] - self._tolerance_s
        return float(waited_T.mean()) >= _ALWAYS


def _sorted(
    matrix: OperationMatrix, sets: list[list[int]], before: list[list[int]], start_N: NDArray[np.float64]
) -> Graph:
    """Tasks in topological order (Kahn), circles cut where the trace is earliest."""
    operations = len(before)
    task_of_N = np.full(operations, -1, np.int64)
    tasks = list(sets)
    for k, members in enumerate(sets):
        task_of_N[members] = k
    for n in np.flatnonzero(task_of_N < 0).tolist():
        task_of_N[n] = len(tasks)
        tasks.append([n])
    waits_for = [0] * len(tasks)
    releases: list[list[int]] = [[] for _ in tasks]
    of = task_of_N.tolist()
    for n, earlier in enumerate(before):
        for m in earlier:
            releases[of[m]].append(of[n])
            waits_for[of[n]] += 1
    met_s_K = [float(start_N[members].max()) for members in tasks]
    ready = deque(k for k, count in enumerate(waits_for) if not count)
    order: list[int] = []
    ordered = np.zeros(len(tasks), np.bool_)
    blocked = iter(sorted(range(len(tasks)), key=met_s_K.__getitem__))
    while len(order) < len(tasks):
        k = ready.popleft() if ready else next(k for k in blocked if not ordered[k])
        if ordered[k]:
            continue
        ordered[k] = True
        order.append(k)
        for later in releases[k]:
            waits_for[later] -= 1
            if not waits_for[later]:
                ready.append(later)
    place = np.empty(len(tasks), np.int64)
    place[order] = np.arange(len(tasks))
    before = [[m for m in earlier if place[of[m]] < place[of[n]]] for n, earlier in enumerate(before)]
    sizes = np.array([len(tasks[k]) for k in order], np.int64)
    queued = [len(tasks[k]) > 1 and matrix.ops[matrix.op_N[tasks[k][0]]] in QUEUED_OPS for k in order]
    return Graph(
        task_K=np.concatenate([[0], np.cumsum(sizes)]),
        member_N=np.array([n for k in order for n in tasks[k]], np.int64),
        before_N=np.concatenate([[0], np.cumsum([len(b) for b in before])]).astype(np.int64),
        before=np.array([m for b in before for m in b], np.int64),
        meets_N=np.array([len(tasks[k]) > 1 for k in of], np.bool_),
        task_of_N=place[task_of_N],
        queued_K=np.array(queued, np.bool_),
    )
