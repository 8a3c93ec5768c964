"""Replays a dependency graph with given durations: when every operation ends, and how long the steps take.

An operation begins, without launch delay, when everything that it waits for has ended. Operations that meet (a
collective, a transfer) begin when the last of them arrives; each then takes its own transfer time. A port at which
messages queue starts with the first arrival; after the last arrival it still takes the time of one message.
Axes: N operations, K tasks, T steps.
"""

from __future__ import annotations

from typing import Final

import numba
import numpy as np
from numpy.typing import NDArray

from paceenv.core.operation_matrix import Array, Integers, OperationMatrix
from paceenv.diagnosis.dependency_graph import Graph, last_arrivals
from paceenv.sim.engine.code_cache import base_directory, numba_cache

_BLOCK = 64
"""Steps replayed together, so that the ends of a graph's operations stay in the cache."""


def _replay(
    task_K: Integers,
    member_N: Integers,
    before_N: Integers,
    before: Integers,
    queued_K: NDArray[np.bool_],
    duration_NT: Array,
    wanted_K: Integers,
    end_NB: Array,
    step_s_T: Array,
    begin_WT: Array,
) -> None:
    steps, width = duration_NT.shape[1], end_NB.shape[1]
    begin_B, own_B, first_B = np.empty(width), np.empty(width), np.empty(width)
    for first in range(0, steps, width):
        count = min(width, steps - first)
        step_s_T[first : first + count] = 0.0
        for k in range(task_K.shape[0] - 1):
            members = task_K[k + 1] - task_K[k]
            for b in range(count):
                begin_B[b], first_B[b] = 0.0, np.inf
            for i in range(task_K[k], task_K[k + 1]):
                n = member_N[i]
                for b in range(count):
                    own_B[b] = 0.0
                for j in range(before_N[n], before_N[n + 1]):
                    m = before[j]
                    for b in range(count):
                        own_B[b] = max(own_B[b], end_NB[m, b])
                for b in range(count):
                    begin_B[b] = max(begin_B[b], own_B[b])
                    first_B[b] = min(first_B[b], own_B[b])
            if wanted_K[k] >= 0:
                for b in range(count):
                    begin_WT[wanted_K[k], first + b] = begin_B[b]
            for i in range(task_K[k], task_K[k + 1]):
                n = member_N[i]
                for b in range(count):
                    lasts_s = duration_NT[n, first + b]
                    end_s = begin_B[b] + lasts_s
                    if queued_K[k]:
                        end_s = max(first_B[b] + lasts_s, begin_B[b] + lasts_s / members)
                    end_NB[n, b] = end_s
                    if end_s > step_s_T[first + b]:
                        step_s_T[first + b] = end_s


with numba_cache(base_directory() / "replay") as _writable:
    _replay_compiled = numba.njit(nogil=True, cache=_writable, error_model="numpy")(_replay)


def replay(graph: Graph, duration_NT: Array) -> Array:
    """Step times ``(T,)`` in seconds with these durations; those of operations that meet are transfer times."""
    return _run(graph, duration_NT, np.empty(0, np.int64))[0]


def begins(graph: Graph, duration_NT: Array, tasks: Integers) -> Array:
    """When tasks begin in the replay, seconds from the begin of a step, ``(tasks, T)``."""
    return _run(graph, duration_NT, tasks)[1]


def _run(graph: Graph, duration_NT: Array, tasks: Integers) -> tuple[Array, Array]:
    steps = duration_NT.shape[1]
    step_s_T, begin_WT = np.empty(steps), np.empty((len(tasks), steps))
    wanted_K = np.full(len(graph.queued_K), -1, np.int64)
    wanted_K[tasks] = np.arange(len(tasks))
    end_NB = np.empty((len(duration_NT), min(_BLOCK, steps)))
    lists = (graph.task_K, graph.member_N, graph.before_N, graph.before, graph.queued_K)
    _replay_compiled(*lists, np.ascontiguousarray(duration_NT), wanted_K, end_NB, step_s_T, begin_WT)
    return step_s_T, begin_WT


def own_durations(matrix: OperationMatrix, graph: Graph) -> Array:
    """Durations without waiting ``(N, T)``, seconds: those of operations that meet count from the last arrival.

    A collective that a rank begins while the one before it in its stream still runs counts from that one's end: it
    waits for it, or shares the network with it. The replay adds the waiting again. Where only some members are in a
    step, those count.
    """
    duration_NT = matrix.duration_NT
    meets = np.flatnonzero(graph.meets_N)
    task = graph.task_of_N[meets]
    last_KT = last_arrivals(matrix, graph)
    for n, m in _overlapping(matrix, graph):
        k = graph.task_of_N[n]
        last_KT[k] = np.fmax(last_KT[k], matrix.end_NT[m])
    transfer_NT = matrix.end_NT[meets] - last_KT[task]
    queued = graph.queued_K[task]
    if queued.any():
        first_KT = np.full_like(last_KT, np.inf)
        np.minimum.at(first_KT, task, np.nan_to_num(matrix.start_NT[meets], nan=np.inf))
        members = np.diff(graph.task_K)[task[queued]]
        since_first = matrix.end_NT[meets[queued]] - first_KT[task[queued]]
        transfer_NT[queued] = np.minimum(since_first, members[:, None] * transfer_NT[queued])
    duration_NT[meets] = np.maximum(np.nan_to_num(transfer_NT, nan=0.0), 0.0)
    return duration_NT


def _overlapping(matrix: OperationMatrix, graph: Graph) -> list[tuple[int, int]]:
    """Collectives that usually begin before one that they follow in the graph has ended, with that one."""
    later = np.repeat(np.arange(len(graph.before_N) - 1), np.diff(graph.before_N))
    of_stream = matrix.is_collective_N[later] & matrix.is_collective_N[graph.before] & graph.meets_N[later]
    later, earlier = later[of_stream], graph.before[of_stream]
    pairs = []
    for n, m in zip(later.tolist(), earlier.tolist(), strict=True):
        both_T = np.isfinite(matrix.start_NT[n]) & np.isfinite(matrix.end_NT[m])
        if both_T.any() and (matrix.start_NT[n, both_T] < matrix.end_NT[m, both_T]).mean() > 0.5:
            pairs.append((n, m))
    return pairs


MAX_WORK: Final = 1e8
"""Cells of the matrix that one attribution replays; of a larger matrix, steps at even distances."""


def ideal_durations(matrix: OperationMatrix, own_NT: Array) -> Array:
    """Ideal durations ``(N, T)``, seconds, from durations without waiting."""
    ideal_NT = np.zeros_like(own_NT)
    communicates = matrix.is_collective_N | matrix.is_transfer_N
    usual = matrix.usual_N & ~matrix.is_pace_N
    workers = len(matrix.ranks)
    kind_N = matrix.kind_N
    for kind in np.unique(kind_N[usual]):
        like = np.flatnonzero((kind_N == kind) & usual)
        present = np.isfinite(matrix.start_NT[like])
        if communicates[like].any():
            ideal_NT[like] = np.median(own_NT[like][present])
        else:
            of_rank = np.bincount(matrix.rank_N[like], minlength=workers)
            having = np.count_nonzero(of_rank)  # a rank without it takes no time for it
            mean_s = own_NT[like].sum() / (present.sum() * workers / having)
            ideal_NT[like] = (mean_s * len(like) / having / of_rank[matrix.rank_N[like]])[:, None]
    return ideal_NT
