"""Who keeps the others waiting: a heat map, rank by step, of lateness where ranks meet.

Axes: N operations, K tasks, R ranks, T steps; B bins of ranks, C bins of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch

from paceenv.diagnosis.dependency_graph import Graph
from paceenv.diagnosis.operation_matrix import Array, Integers, OperationMatrix
from paceenv.trainers.report.picture import Numbers, Picture, Unit, drawn
from paceenv.trainers.report.spans import label, met_s
from paceenv.ui import figures

MAX_RANKS: Final = 96
MAX_STEPS: Final = 160
"""Cells of the heat map; with more ranks or steps, several share one."""
_EXTREME = 99.0
"""Percentile of lateness at which colours end, so that one restart does not make all else pale."""

_SHADES: Final = ("#f6f1ee", "#f3b48f", "#c9302c", "#67000d")
"""From pale (on time, or waiting) to dark red (waited for)."""


@dataclass(frozen=True)
class Arrivals:
    """``late_RT``: how long a rank keeps its typical peer waiting in a step, seconds.

    That is its lateness after the median of those it meets, summed over the step's collectives; 0 where it is on time
    or waits itself. It is not a number where the rank did not take part. ``last_R`` is the share of steps in which no
    rank keeps others waiting longer. ``op`` is the kind of collective with the most waiting.
    """

    op: str
    late_RT: Array
    last_R: Array


def arrivals(matrix: OperationMatrix, graph: Graph) -> Arrivals | None:
    """Lateness at all collectives; None where ranks meet in none.

    Ranks of one pipeline stage are compared with each other. Collectives across stages count only where there are no
    others.

    Args:
        matrix: of the job.
        graph: which operation waits for which.
    """
    operation = np.flatnonzero(graph.meets_N & ~matrix.is_transfer_N)
    operation = operation[np.isfinite(matrix.start_NT[operation]).any(axis=1)]
    if not len(operation):
        return None
    low_K, high_K = np.full(len(graph.queued_K), np.iinfo(np.int64).max), np.full(len(graph.queued_K), -1)
    np.minimum.at(low_K, graph.task_of_N[operation], matrix.stage_N[operation])
    np.maximum.at(high_K, graph.task_of_N[operation], matrix.stage_N[operation])
    alike_n = (low_K == high_K)[graph.task_of_N[operation]]
    operation = operation[alike_n] if alike_n.any() else operation
    waited_n = np.maximum(np.nansum(met_s(matrix, graph)[operation] - matrix.start_NT[operation], axis=1), 0.0)
    op = int(np.argmax(np.bincount(matrix.op_N[operation], waited_n + 1e-12)))
    late_nT = _against_peers(matrix, graph, operation)
    late_RT, there_RT = np.zeros((2, len(matrix.ranks), matrix.steps))
    np.add.at(late_RT, matrix.rank_N[operation], np.maximum(np.nan_to_num(late_nT), 0.0))
    np.add.at(there_RT, matrix.rank_N[operation], np.isfinite(late_nT))
    longest_T = late_RT.max(axis=0)
    last_RT = (late_RT >= longest_T) & (longest_T > 0.0)
    late_RT = np.where(there_RT > 0, late_RT, np.nan)
    return Arrivals(matrix.ops[op], late_RT, last_RT.sum(axis=1) / np.maximum((there_RT > 0).sum(axis=1), 1))


def _against_peers(matrix: OperationMatrix, graph: Graph, operation: Integers) -> Array:
    """How long after the median of those it meets each operation began, seconds, ``(n, T)``."""
    start_nT = matrix.start_NT[operation]
    late_nT = np.full_like(start_nT, np.nan)
    order = np.argsort(graph.task_of_N[operation], kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(graph.task_of_N[operation][order])) + 1):
        start_mT = start_nT[members]
        there_T = np.isfinite(start_mT).sum(axis=0) >= 2
        mine_mT = start_mT[:, there_T]
        late_nT[np.ix_(members, there_T)] = mine_mT - np.nanmedian(mine_mT, axis=0)
    return late_nT


def heat_map(matrix: OperationMatrix, found: Arrivals) -> Picture:
    """Rank by step: dark where the others wait for the rank, pale where it is on time or waits itself.

    Args:
        matrix: of the job.
        found: lateness of each rank in each step.
    """
    R, T = found.late_RT.shape
    ranks, steps = -(-R // MAX_RANKS), -(-T // MAX_STEPS)
    shared = _shared(ranks, steps)
    late_BC = binned(found.late_RT, ranks, steps)
    edge_s = max(float(np.nanpercentile(late_BC, _EXTREME)), 1e-9)
    unit = Unit.of(edge_s)
    figure, (panel, beside) = figures.figure(2)
    figure.set_size_inches(11.2, 1.3 + min(max(0.24 * len(late_BC), 1.6), 5.0))
    grid = panel.get_gridspec()
    assert grid is not None
    grid.set_width_ratios([4.2, 1.0])
    colours = LinearSegmentedColormap.from_list("lateness", _SHADES)
    image = panel.imshow(
        unit.per_s * late_BC, aspect="auto", cmap=colours, vmin=0.0, vmax=unit.per_s * edge_s, interpolation="nearest"
    )
    ticks_C = np.unique(np.linspace(0, late_BC.shape[1] - 1, 9).astype(int))
    ticks_B = np.unique(np.linspace(0, len(late_BC) - 1, min(len(late_BC), 16)).astype(int))
    panel.set_xticks(ticks_C, [str(matrix.iteration_T[c * steps]) for c in ticks_C])
    panel.set_yticks(ticks_B, [label(matrix, int(b) * ranks) for b in ticks_B], fontsize=8)
    panel.set(xlabel="iteration")
    panel.grid(visible=False)
    bar = figure.colorbar(image, ax=panel, pad=0.01)
    bar.ax.set_title(f"{unit.name} a step", fontsize=8)
    keys = [Patch(fc=_SHADES[-1], label="the others wait for it"), Patch(fc=_SHADES[0], ec="#999", label="it waits")]
    figure.legend(handles=keys, loc="outside lower left", ncols=2, fontsize=9, frameon=False)
    panel.set_title(shared, loc="left", fontsize=9)
    last_B = np.array([found.last_R[b * ranks : (b + 1) * ranks].max() for b in range(len(late_BC))])
    height = 1.0 if len(late_BC) > 24 else 0.8
    beside.barh(range(len(late_BC)), 100.0 * last_B, color=_SHADES[-2], height=height)
    beside.set(
        ylim=panel.get_ylim(), yticks=[], xlabel="waited for most, % of steps", xlim=(0.0, max(100.0 * last_B) + 1)
    )
    caption = (
        "Dark red: the others wait for this rank. Pale: it is on time, or waits itself. "
        f"{_culprit(matrix, found)} A cell is a rank's lateness after the median of those it meets, summed over a "
        "step's collectives: two ranks that are late together are both dark. The text counts only by how much the last "
        f"one of all comes after the one before it. All ranks together wait longest at {found.op}. {shared} "
        f"Colours end at the {_EXTREME:.0f}th percentile."
    )
    return drawn("Arrival skew", caption, figure, _per_rank(matrix, found, unit), _cells(matrix, late_BC, ranks, steps))


def _culprit(matrix: OperationMatrix, found: Arrivals) -> str:
    """The rank that is waited for most, in a sentence; how long is in the numbers."""
    late_R = np.nan_to_num(np.nanmean(np.nan_to_num(found.late_RT), axis=1))
    worst = int(np.argmax(late_R))
    return f"Most is waited for {label(matrix, worst)}." if late_R[worst] > 0.0 else "No rank keeps others waiting."


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
    columns = (
        "rank", "which is", f"others wait for it, mean {unit.name}", f"95th percentile, {unit.name}",
        "most of all, % of steps",
    )  # fmt: skip
    return Numbers("arrivals-by-rank", columns, rows)


def _cells(matrix: OperationMatrix, late_BC: Array, ranks: int, steps: int) -> Numbers:
    rows = [
        (str(matrix.ranks[b * ranks]), str(matrix.iteration_T[c * steps]), f"{value:.4g}" if np.isfinite(value) else "")
        for b, row_C in enumerate(late_BC)
        for c, value in enumerate(row_C.tolist())
    ]
    columns = ("from rank", "from iteration", "others wait for it, s")
    return Numbers("arrivals", columns, rows)
