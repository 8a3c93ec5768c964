"""Arrivals at the operations in which ranks meet: a heat map, rank by step, early to late.

Axes: N operations, K tasks, R ranks, T steps; B bins of ranks, C bins of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from paceenv.diagnosis.dependency_graph import Graph
from paceenv.diagnosis.operation_matrix import Array, Integers, OperationMatrix
from paceenv.trainers.report.picture import Numbers, Picture, Unit, drawn
from paceenv.trainers.report.spans import label, met_s
from paceenv.ui import figures

MAX_RANKS: Final = 96
MAX_STEPS: Final = 160
"""Cells of the heat map; with more ranks or steps, several share one."""
_EXTREME = 99.0
"""Percentile of arrivals at which colours end, so that one restart does not make all else pale."""


@dataclass(frozen=True)
class Arrivals:
    """``late_RT`` is a rank's arrival at ``op`` after the median of the ranks that it meets, seconds.

    It is not a number where the rank did not take part. ``last_R`` is the share of steps in which the rank was last.
    """

    op: str
    late_RT: Array
    last_R: Array


def arrivals(matrix: OperationMatrix, graph: Graph) -> Arrivals | None:
    """Arrivals at the kind of collective with the most waiting; None where ranks meet in none.

    Ranks of one pipeline stage are compared with each other. Collectives across stages count only where there are no
    others. If a rank has several such operations in a step, their mean counts.
    """
    operation = np.flatnonzero(graph.meets_N & ~matrix.is_transfer_N)
    operation = operation[np.isfinite(matrix.start_NT[operation]).any(axis=1)]
    if not len(operation):
        return None
    waited_n = np.maximum(np.nansum(met_s(matrix, graph)[operation] - matrix.start_NT[operation], axis=1), 0.0) + 1e-12
    low_K, high_K = np.full(len(graph.queued_K), np.iinfo(np.int64).max), np.full(len(graph.queued_K), -1)
    np.minimum.at(low_K, graph.task_of_N[operation], matrix.stage_N[operation])
    np.maximum.at(high_K, graph.task_of_N[operation], matrix.stage_N[operation])
    alike_n = (low_K == high_K)[graph.task_of_N[operation]]
    op = int(np.argmax(np.bincount(matrix.op_N[operation], np.where(alike_n, waited_n, 1e-15 * waited_n))))
    operation = operation[matrix.op_N[operation] == op]
    late_nT, last_nT = _against_peers(matrix, graph, operation)
    rank_n, (R, T) = matrix.rank_N[operation], (len(matrix.ranks), matrix.steps)
    there_nT, late_RT, count_RT = np.isfinite(late_nT), np.zeros((R, T)), np.zeros((R, T))
    np.add.at(late_RT, rank_n, np.nan_to_num(late_nT))
    np.add.at(count_RT, rank_n, there_nT)
    late_RT = np.where(count_RT > 0, late_RT / np.maximum(count_RT, 1), np.nan)
    seen_R = np.maximum(np.bincount(rank_n, there_nT.sum(axis=1), R), 1)
    return Arrivals(matrix.ops[op], late_RT, np.bincount(rank_n, last_nT.sum(axis=1), R) / seen_R)


def _against_peers(matrix: OperationMatrix, graph: Graph, operation: Integers) -> tuple[Array, Array]:
    """How long after the median of those it meets each operation began, and whether it was the last, ``(n, T)``."""
    start_nT = matrix.start_NT[operation]
    late_nT, last_nT = np.full_like(start_nT, np.nan), np.zeros_like(start_nT)
    order = np.argsort(graph.task_of_N[operation], kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(graph.task_of_N[operation][order])) + 1):
        start_mT = start_nT[members]
        there_T = np.isfinite(start_mT).sum(axis=0) >= 2
        mine_mT = start_mT[:, there_T]
        late_nT[np.ix_(members, there_T)] = mine_mT - np.nanmedian(mine_mT, axis=0)
        last_nT[np.ix_(members, there_T)] = mine_mT == np.nanmax(mine_mT, axis=0)
    return late_nT, last_nT


def heat_map(matrix: OperationMatrix, found: Arrivals) -> Picture:
    """Rank by step, early to late, and how often each rank is the last."""
    R, T = found.late_RT.shape
    ranks, steps = -(-R // MAX_RANKS), -(-T // MAX_STEPS)
    shared = _shared(ranks, steps)
    late_BC = binned(found.late_RT, ranks, steps)
    edge_s = max(float(np.nanpercentile(np.abs(late_BC), _EXTREME)), 1e-9)
    unit = Unit.of(edge_s)
    figure, (panel, beside) = figures.figure(2)
    figure.set_size_inches(11.2, 1.3 + min(max(0.24 * len(late_BC), 1.6), 5.0))
    grid = panel.get_gridspec()
    assert grid is not None
    grid.set_width_ratios([4.2, 1.0])
    limit = unit.per_s * edge_s
    image = panel.imshow(
        unit.per_s * late_BC, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest"
    )
    ticks_C = np.unique(np.linspace(0, late_BC.shape[1] - 1, 9).astype(int))
    ticks_B = np.unique(np.linspace(0, len(late_BC) - 1, min(len(late_BC), 16)).astype(int))
    panel.set_xticks(ticks_C, [str(matrix.iteration_T[c * steps]) for c in ticks_C])
    panel.set_yticks(ticks_B, [label(matrix, int(b) * ranks) for b in ticks_B], fontsize=8)
    panel.set(xlabel="iteration")
    panel.grid(visible=False)
    bar = figure.colorbar(image, ax=panel, pad=0.01)
    bar.ax.set_title(f"late, {unit.name}", fontsize=8)
    panel.set_title(shared, loc="left", fontsize=9)
    last_B = np.array([found.last_R[b * ranks : (b + 1) * ranks].max() for b in range(len(late_BC))])
    beside.barh(range(len(late_BC)), 100.0 * last_B, color="#4c72b0", height=1.0 if len(late_BC) > 24 else 0.8)
    beside.set(ylim=panel.get_ylim(), yticks=[], xlabel="is the last, % of steps", xlim=(0.0, max(100.0 * last_B) + 1))
    caption = (
        f"When each rank arrives at {found.op}, in which ranks wait longest for each other, against the median of "
        "those it meets there. Red is late: the others wait. Blue is early: it waits."
        f" {shared} Colours end at the {_EXTREME:.0f}th percentile."
    )
    return drawn("Arrival skew", caption, figure, _per_rank(matrix, found, unit), _cells(matrix, late_BC, ranks, steps))


def _shared(ranks: int, steps: int) -> str:
    """The meaning of a cell that is more than one rank in one step."""
    if ranks > 1:
        return f"Binned: a cell is the mean over {steps} steps of the latest of {ranks} ranks."
    return f"Binned: a cell is the mean over {steps} steps." if steps > 1 else ""


def binned(late_RT: Array, ranks: int, steps: int) -> Array:
    """Arrivals in bins: the latest of neighbouring ranks, in the mean over neighbouring steps; ``(B, C)``.

    Args:
        late_RT: lateness, seconds; not a number where a rank is missing.
        ranks: ranks of a bin.
        steps: steps of a bin; a rest has a bin of its own.
    """
    R, T = late_RT.shape
    missing = np.isnan(late_RT)
    latest_BT = np.maximum.reduceat(np.where(missing, -np.inf, late_RT), np.arange(0, R, ranks), axis=0)
    there_BT = np.isfinite(latest_BT)
    sum_BC = np.add.reduceat(np.where(there_BT, latest_BT, 0.0), np.arange(0, T, steps), axis=1)
    count_BC = np.add.reduceat(there_BT.astype(np.float64), np.arange(0, T, steps), axis=1)
    return np.where(count_BC > 0, sum_BC / np.maximum(count_BC, 1.0), np.nan)


def _per_rank(matrix: OperationMatrix, found: Arrivals, unit: Unit) -> Numbers:
    rows = []
    for r, rank in enumerate(matrix.ranks):
        late_T = found.late_RT[r][np.isfinite(found.late_RT[r])]
        if len(late_T):
            mean, p95 = (f"{unit.per_s * x:.4g}" for x in (late_T.mean(), np.percentile(late_T, 95)))
            rows.append((str(rank), label(matrix, r), mean, p95, f"{100.0 * found.last_R[r]:.1f}"))
    columns = ("rank", "which is", f"mean, {unit.name}", f"95th percentile, {unit.name}", "last, % of steps")
    return Numbers("arrivals-by-rank", columns, rows)


def _cells(matrix: OperationMatrix, late_BC: Array, ranks: int, steps: int) -> Numbers:
    rows = [
        (str(matrix.ranks[b * ranks]), str(matrix.iteration_T[c * steps]), f"{value:.4g}" if np.isfinite(value) else "")
        for b, row_C in enumerate(late_BC)
        for c, value in enumerate(row_C.tolist())
    ]
    columns = ("from rank", "from iteration", "arrives after the median, s")
    return Numbers("arrivals", columns, rows)
