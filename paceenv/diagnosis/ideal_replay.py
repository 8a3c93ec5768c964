"""Slowdown: the step time of a trace over the step time with ideal durations, and which operations it is due to.

| operation | ideal duration |
| --- | --- |
| compute | the mean of its kind over all ranks, stages and steps; a rank with more operations of a kind shares it out |
| collective, transfer | the median of its kind, without waiting |
| only some steps have it (checkpoint, restart), or a delay that a rank took on purpose | none |

Slowdown is the mean step time of the replay with the trace's durations over that with ideal ones. The part of some
operations (a rank's, a stage's, a kind's) is the replay in which only they have the trace's durations, over the ideal.

Source: J. Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), equations
1, 2 and 4. Axes: N operations, T steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceenv.diagnosis.dependency_graph import Graph
from paceenv.diagnosis.graph_replay import replay
from paceenv.diagnosis.operation_matrix import Array, OperationMatrix

MAX_WORK: Final = 1e8
"""Cells of the matrix that one attribution replays; of a larger matrix, steps at even distances."""


@dataclass(frozen=True)
class SlowdownAttribution:
    """Slowdowns by what they are due to.

    ``rank`` is the data-parallel rank (all its stages), ``worker`` one rank of the trace, ``step`` an iteration's own.
    """

    rank: Mapping[int, float]
    stage: Mapping[int, float]
    operation: Mapping[str, float]
    worker: Mapping[int, float]
    step: Mapping[int, float]


def ideal_durations(matrix: OperationMatrix, own_NT: Array) -> Array:
    """Ideal durations ``(N, T)``, seconds, from durations without waiting.

    Args:
        matrix: of the job.
        own_NT: durations without waiting, ``(N, T)``, seconds.
    """
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


def attribute(matrix: OperationMatrix, graph: Graph, own_NT: Array, ideal_NT: Array) -> SlowdownAttribution:
    """The slowdown by rank, stage, kind of operation, worker and step.

    Args:
        matrix: the traced operations.
        graph: their dependency graph.
        own_NT: durations without waiting, seconds.
        ideal_NT: ideal durations, seconds, from :func:`ideal_durations`.
    """
    operations = np.array([matrix.ops[op] for op in matrix.op_N])
    by = partial(_by, graph, own_NT, ideal_NT)
    ranks = np.array(matrix.ranks, np.int64)[matrix.rank_N]
    rank = by(matrix.dp_rank_N)
    step_T = _ratio(replay(graph, own_NT), replay(graph, ideal_NT))
    return SlowdownAttribution(
        rank=rank,  # type: ignore[arg-type]
        stage=by(matrix.stage_N),  # type: ignore[arg-type]
        operation=by(operations),  # type: ignore[arg-type]
        worker=by(ranks) if np.ptp(matrix.stage_N) else rank,  # type: ignore[arg-type]
        step={int(i): float(s) for i, s in zip(matrix.iteration_T, step_T, strict=True)},
    )


def add_attributions(parts: Sequence[tuple[SlowdownAttribution, float]]) -> SlowdownAttribution:
    """That of steps of several kinds, from each kind's and its share of the ideal time.

    What a kind lacks is ideal in it.
    """
    found: dict[str, dict[Any, float]] = {}
    for name in ("rank", "stage", "operation", "worker"):
        labels = dict.fromkeys(label for one, _ in parts for label in getattr(one, name))
        found[name] = {
            label: sum(share * getattr(one, name).get(label, 1.0) for one, share in parts) for label in labels
        }
    steps = dict(sorted((i, s) for one, _ in parts for i, s in one.step.items()))
    return SlowdownAttribution(**found, step=steps)


def _ratio(time_s: ArrayLike, ideal_s: ArrayLike) -> Array:
    """A slowdown; 1 where ideally no time is taken."""
    time, ideal = np.broadcast_arrays(np.asarray(time_s, np.float64), np.asarray(ideal_s, np.float64))
    return np.asarray(np.divide(time, ideal, out=np.ones_like(time), where=ideal > 0.0))


def _by(graph: Graph, own_NT: Array, ideal_NT: Array, label_N: NDArray[np.generic]) -> dict[Hashable, float]:
    labels, at_N = np.unique(label_N, return_inverse=True)
    every = max(1, int(np.ceil(own_NT.size * len(labels) / MAX_WORK)))
    own_NT, ideal_NT = np.ascontiguousarray(own_NT[:, ::every]), np.ascontiguousarray(ideal_NT[:, ::every])
    ideal_s, mixed_NT = replay(graph, ideal_NT).mean(), ideal_NT.copy()
    found: dict[Hashable, float] = {}
    for i, label in enumerate(labels.tolist()):
        mine = at_N == i
        mixed_NT[mine] = own_NT[mine]
        found[label] = float(_ratio(replay(graph, mixed_NT).mean(), ideal_s))
        mixed_NT[mine] = ideal_NT[mine]
    return found
