"""What the steps would have taken had some operations lasted as they ideally do: slowdown, and whose it is.

Ideal durations: every compute operation lasts the mean of its kind over all ranks, stages and steps, every collective's
or transfer's own time the median of its kind. A rank that has more operations of a kind than others ideally takes as
long for all of them as the others do: with the mean each, it would hold up the ideal step, and its own durations would
seem to speed it up. What only some steps have (a checkpoint, a restart) ideally takes no
time, nor does a delay that a rank took by its own choice. Slowdown is the mean step time of the replay with the trace's
durations over that with ideal ones. What is due to some operations (a rank's, a stage's, a kind's) is the replay in
which only they have the trace's durations, over the ideal one.

Source: J. Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), equations
1, 2 and 4. Axes: N nodes, T steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceenv.diagnosis.dependency_graph import Graph
from paceenv.diagnosis.graph_replay import replay
from paceenv.diagnosis.operation_matrix import Array, Cells

MOST_WORK: Final = 1e8
"""Cells replayed for one attribution; with more, only the steps at even distances that fit."""


@dataclass(frozen=True)
class Attribution:
    """Slowdowns by what they are due to.

    ``rank`` is the data-parallel rank (all its stages), ``worker`` one rank of the trace, ``step`` an iteration's own.
    """

    rank: Mapping[int, float]
    stage: Mapping[int, float]
    operation: Mapping[str, float]
    worker: Mapping[int, float]
    step: Mapping[int, float]


def ideal_durations(cells: Cells, own_NT: Array) -> Array:
    """What each operation ideally takes, ``(N, T)``, seconds."""
    ideal_NT = np.zeros_like(own_NT)
    communicates = cells.is_collective_N | cells.is_transfer_N
    usual = cells.usual_N & ~cells.is_pace_N
    workers = len(cells.ranks)
    kind_N = cells.kind_N
    for kind in np.unique(kind_N[usual]):
        like = np.flatnonzero((kind_N == kind) & usual)
        present = np.isfinite(cells.start_NT[like])
        if communicates[like].any():
            ideal_NT[like] = np.median(own_NT[like][present])
        else:
            of_rank = np.bincount(cells.rank_N[like], minlength=workers)
            having = np.count_nonzero(of_rank)  # who does not have it does it in no time
            mean_s = own_NT[like].sum() / (present.sum() * workers / having)
            ideal_NT[like] = (mean_s * len(like) / having / of_rank[cells.rank_N[like]])[:, None]
    return ideal_NT


def attribute(cells: Cells, graph: Graph, own_NT: Array, ideal_NT: Array) -> Attribution:
    """Whose the slowdown is."""
    operations = np.array([cells.ops[op] for op in cells.op_N])

    def by(label_N: NDArray[np.generic]) -> dict[Hashable, float]:
        return _by(graph, own_NT, ideal_NT, label_N)

    ranks = np.array(cells.ranks, np.int64)[cells.rank_N]
    rank = by(cells.dp_rank_N)
    stages = len(np.unique(cells.stage_N))
    step_T = _ratio(replay(graph, own_NT), replay(graph, ideal_NT))
    return Attribution(
        rank=rank,  # type: ignore[arg-type]
        stage=by(cells.stage_N) if stages > 1 else {int(cells.stage_N[0]): float(_mean_ratio(graph, own_NT, ideal_NT))},  # type: ignore[arg-type]
        operation=by(operations),  # type: ignore[arg-type]
        worker=by(ranks) if stages > 1 else rank,  # type: ignore[arg-type]
        step={int(i): float(s) for i, s in zip(cells.iteration_T, step_T, strict=True)},
    )


def _ratio(time_s: ArrayLike, ideal_s: ArrayLike) -> Array:
    """A slowdown; 1 where ideally no time is taken."""
    time, ideal = np.broadcast_arrays(np.asarray(time_s, np.float64), np.asarray(ideal_s, np.float64))
    return np.asarray(np.divide(time, ideal, out=np.ones_like(time), where=ideal > 0.0))


def _mean_ratio(graph: Graph, own_NT: Array, ideal_NT: Array) -> float:
    return float(_ratio(replay(graph, own_NT).mean(), replay(graph, ideal_NT).mean()))


def _by(graph: Graph, own_NT: Array, ideal_NT: Array, label_N: NDArray[np.generic]) -> dict[Hashable, float]:
    labels, at_N = np.unique(label_N, return_inverse=True)
    every = max(1, int(np.ceil(own_NT.size * len(labels) / MOST_WORK)))
    own_NT, ideal_NT = np.ascontiguousarray(own_NT[:, ::every]), np.ascontiguousarray(ideal_NT[:, ::every])
    ideal_s, mixed_NT = replay(graph, ideal_NT).mean(), ideal_NT.copy()
    found: dict[Hashable, float] = {}
    for i, label in enumerate(labels.tolist()):
        mine = at_N == i
        mixed_NT[mine] = own_NT[mine]
        found[label] = float(_ratio(replay(graph, mixed_NT).mean(), ideal_s))
        mixed_NT[mine] = ideal_NT[mine]
    return found
