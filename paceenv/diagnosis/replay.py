"""Replays a dependency graph with given durations: when every operation ends, and how long the steps take.

An operation begins when all it waits for has ended, without launch delays. Those that meet (a collective, a transfer)
all begin when the last of them is there, and each takes its own transfer time from then on. Axes: N nodes, T steps.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from paceenv.diagnosis.cells import Array, Cells, Integers
from paceenv.diagnosis.graph import Graph
from paceenv.engine import compiled

_BLOCK = 64
"""Steps replayed together, so that the ends of a graph's nodes stay in the cache."""


def _replay(
    task_K: Integers,
    member_N: Integers,
    before_N: Integers,
    before: Integers,
    duration_NT: Array,
    end_NB: Array,
    step_s_T: Array,
) -> None:
    steps, width = duration_NT.shape[1], end_NB.shape[1]
    begin_B = np.empty(width)
    for first in range(0, steps, width):
        count = min(width, steps - first)
        step_s_T[first : first + count] = 0.0
        for k in range(task_K.shape[0] - 1):
            for b in range(count):
                begin_B[b] = 0.0
            for i in range(task_K[k], task_K[k + 1]):
                n = member_N[i]
                for j in range(before_N[n], before_N[n + 1]):
                    m = before[j]
                    for b in range(count):
                        if end_NB[m, b] > begin_B[b]:
                            begin_B[b] = end_NB[m, b]
            for i in range(task_K[k], task_K[k + 1]):
                n = member_N[i]
                for b in range(count):
                    end_s = begin_B[b] + duration_NT[n, first + b]
                    end_NB[n, b] = end_s
                    if end_s > step_s_T[first + b]:
                        step_s_T[first + b] = end_s


with compiled._numba_cache(compiled.cache_directory()) as _writable:
    _replay_compiled = numba.njit(nogil=True, cache=_writable, error_model="numpy")(_replay)


def replay(graph: Graph, duration_NT: Array) -> Array:
    """How long every step takes with these durations, seconds, ``(T,)``; of nodes that meet they are transfer times."""
    step_s_T = np.empty(duration_NT.shape[1])
    end_NB = np.empty((len(duration_NT), min(_BLOCK, duration_NT.shape[1])))
    lists = (graph.task_K, graph.member_N, graph.before_N, graph.before)
    _replay_compiled(*lists, np.ascontiguousarray(duration_NT), end_NB, step_s_T)
    return step_s_T


def own_durations(cells: Cells, graph: Graph) -> Array:
    """What the replay takes: durations, but for nodes that meet from the last start among them, ``(N, T)``, seconds.

    What came before that is waiting, which follows from the replay. Where only some members are in a step, those count.
    """
    duration_NT = cells.duration_NT
    meets = np.flatnonzero(graph.meets_N)
    task = graph.task_of_N[meets]
    last_KT = np.full((len(graph.task_K) - 1, cells.steps), -np.inf)
    start_NT = np.nan_to_num(cells.start_NT[meets], nan=-np.inf)
    np.maximum.at(last_KT, task, start_NT)
    transfer = cells.end_NT[meets] - last_KT[task]
    duration_NT[meets] = np.maximum(np.nan_to_num(transfer, nan=0.0), 0.0)
    return duration_NT


def replayed_share(step_s_T: NDArray[np.float64], replayed_T: NDArray[np.float64]) -> float:
    """How much of the measured time the replay explains; the rest is launch delays, which no operation has."""
    return float(replayed_T.mean() / step_s_T.mean())
