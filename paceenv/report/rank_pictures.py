"""Pictures of ranks: a timeline of a usual and the worst step, and who keeps the others waiting.

They show how ranks spend their time: computing, waiting for peers, communicating, other work. An operation that meets
others waits until the last of them arrives, and communicates from then on.

Axes: N operations, K tasks, R ranks, T steps; B bins of ranks, C bins of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch

from paceenv.core.operation_matrix import Array, Integers, OperationMatrix
from paceenv.core.trace import PACE_OP
from paceenv.core.wording import duration
from paceenv.diagnosis.dependency_graph import build_graph, last_arrivals
from paceenv.report.pictures import drawn, in_time
from paceenv.report.section import Section
from paceenv.ui import figures

WAIT: Final = "wait for peers"
OTHER: Final = "other work"
_NAMES: Final = {
    "compute": "compute",
    "forward-compute": "forward",
    "backward-compute": "backward",
    PACE_OP: "delay",
    "restart": "restart",
    "checkpoint": "checkpoint",
    **dict.fromkeys(("optimizer", "optimizer-clip-main-grad"), "optimizer"),
}
MAX_LINES: Final = 16
"""Ranks of a timeline."""
MIN_WIDTH: Final = 1.0 / 1500.0
"""Of the picture: what is shorter cannot be seen."""
MAX_RANKS: Final = 96
MAX_STEPS: Final = 160
"""Cells of the heat map; with more ranks or steps, several share one."""
_EXTREME = 99.0
"""Percentile of lateness at which colours end, so that one restart does not make all else pale."""
_SHADES: Final = ("#f6f1ee", "#f3b48f", "#c9302c", "#67000d")
"""From pale (on time, or waiting) to dark red (waited for)."""


@dataclass(frozen=True)
class Spans:
    """One kind of time of the operations ``operation_n``; seconds from the begin of a step, not a number where absent.

    ``beside`` says whether it may overlap what the rank computes.
    """

    name: str
    operation_n: Integers
    start_nT: Array
    end_nT: Array
    beside: bool


def spans(matrix: OperationMatrix) -> list[Spans]:
    graph = build_graph(matrix)
    met_NT = np.minimum(last_arrivals(matrix, graph)[graph.task_of_N], matrix.end_NT)
    meets_N = matrix.is_collective_N | matrix.is_transfer_N | graph.meets_N
    named = np.array([_NAMES.get(op, OTHER) for op in matrix.ops])[matrix.op_N]
    name_N = np.where(matrix.is_transfer_N, "send, receive", np.where(meets_N, "collective", named))
    node = np.flatnonzero(meets_N)
    kinds = [Spans(WAIT, node, matrix.start_NT[node], met_NT[node], True)] if len(node) else []
    for name in np.unique(name_N).tolist():
        node = np.flatnonzero(name_N == name)
        begin_nT = np.where(meets_N[node, None], met_NT[node], matrix.start_NT[node])
        kinds.append(Spans(name, node, begin_nT, matrix.end_NT[node], bool(meets_N[node[0]])))
    return kinds


def _label(matrix: OperationMatrix, r: int) -> str:
    """The name of a rank in pictures: in a pipeline by its replica and stage."""
    if int(matrix.stage_N.max()) == int(matrix.stage_N.min()):
        return f"rank {matrix.ranks[r]}"
    node = int(np.argmax(matrix.rank_N == r))
    return f"dp {matrix.dp_rank_N[node]}, stage {matrix.stage_N[node]}"


# --- a timeline -------------------------------------------------------------------------------------------------------
def _shown_ranks(matrix: OperationMatrix, late_s_R: Array) -> Integers:
    """At most MAX_LINES places of ranks, evenly from the most punctual to the latest; whole pipelines if any."""
    dp_rank_R, stage_R = np.zeros(len(matrix.ranks), np.int64), matrix.stage_R
    dp_rank_R[matrix.rank_N] = matrix.dp_rank_N
    replicas, of_R, per_replica = np.unique(dp_rank_R, return_inverse=True, return_counts=True)
    late_s = np.asarray(np.bincount(of_R, late_s_R), np.float64)
    chosen = replicas[figures.representative(late_s, max(MAX_LINES // int(per_replica.max()), 1))]
    at = np.flatnonzero(np.isin(dp_rank_R, chosen))
    at = at[np.lexsort((stage_R[at], dp_rank_R[at]))]
    return at[figures.representative(np.arange(len(at), dtype=np.float64), MAX_LINES)]


def timeline(matrix: OperationMatrix, kinds: Sequence[Spans], late_s_R: Array) -> Section:
    """What some ranks did in a usual step and in the worst one, on the same scale."""
    at_R, usual_s = _shown_ranks(matrix, late_s_R), np.median(matrix.step_s_T)
    steps = int(np.argmin(np.abs(matrix.step_s_T - usual_s))), int(np.argmax(matrix.step_s_T))
    height = 0.6 + 0.21 * len(at_R)
    figure, panels = figures.stack([height, height])
    end_s = 1.01 * max(float(matrix.step_s_T[list(steps)].max()), 1e-9)
    rows: list[tuple[str, ...]] = []
    for panel, t, word in zip(panels, steps, ("a usual step", "the worst step"), strict=True):
        rows += _bars(panel, matrix, kinds, at_R, t, end_s)
        panel.axvline(float(matrix.step_s_T[t]), color="black", lw=0.9)
        title = f"{word}, iteration {matrix.iteration_T[t]}: {duration(float(matrix.step_s_T[t]))}"
        panel.set_title(title, loc="left", fontsize=10)
        panel.set(xlim=(0.0, end_s), ylim=(len(at_R) - 0.5, -0.5), xlabel="time from the step's begin")
        in_time(panel.xaxis)
        panel.set_yticks(range(len(at_R)), [_label(matrix, int(r)) for r in at_R], fontsize=8)
        panel.grid(visible=False)
    seen = {row[2] for row in rows}
    handles = [Patch(fc=colour, label=name) for name, colour in figures.PHASE_COLOURS.items() if name in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=9, frameon=False)
    some = ""
    if len(at_R) < len(matrix.ranks):
        some = f" {len(at_R)} of {len(matrix.ranks)} ranks are shown, from the most punctual to the latest."
    caption = (
        "Every rank is a row: above what it computes, below what it communicates and how long it waits for others. "
        f"The black line is the end of the step.{some} White is time without an operation in the trace."
    )
    columns = ("iteration", "rank", "what", "operation", "start, s", "end, s")
    return drawn("Timeline of ranks", caption, figure, columns, rows)


def _bars(
    panel: Axes, matrix: OperationMatrix, kinds: Sequence[Spans], at_R: Integers, t: int, end_s: float
) -> list[tuple[str, ...]]:
    """Draw one step; the bars as rows of a table."""
    row_of = np.full(len(matrix.ranks), -1)
    row_of[at_R] = np.arange(len(at_R))
    table = []
    for kind in kinds:
        row_n, start_n, end_n = row_of[matrix.rank_N[kind.operation_n]], kind.start_nT[:, t], kind.end_nT[:, t]
        keep = np.flatnonzero((row_n >= 0) & (end_n > start_n))
        low, high = (0.05, 0.42) if kind.beside else (-0.42, 0.05)
        for row in np.unique(row_n[keep]):
            mine = keep[row_n[keep] == row]
            bars = _merged(start_n[mine], end_n[mine], MIN_WIDTH * end_s)
            corners = [[(a, row + low), (b, row + low), (b, row + high), (a, row + high)] for a, b in bars]
            panel.add_collection(PolyCollection(corners, fc=figures.PHASE_COLOURS[kind.name], lw=0))
        for i in keep:
            op, rank = matrix.ops[matrix.op_N[kind.operation_n[i]]], matrix.ranks[at_R[row_n[i]]]
            times = (f"{float(x[i]):.6g}" for x in (start_n, end_n))
            table.append((str(matrix.iteration_T[t]), str(rank), kind.name, op, *times))
    return table


def _merged(start: Array, end: Array, least: float) -> list[tuple[float, float]]:
    """Bars as they are seen: those closer than ``least`` as one, without what is shorter."""
    bars: list[tuple[float, float]] = []
    for a, b in sorted(zip(start.tolist(), end.tolist(), strict=True)):
        if bars and a <= bars[-1][1] + 0.5 * least:
            bars[-1] = (bars[-1][0], max(bars[-1][1], b))
        else:
            bars.append((a, b))
    return [(a, b) for a, b in bars if b - a >= 0.5 * least]


# --- who keeps the others waiting -------------------------------------------------------------------------------------
def heat_map(matrix: OperationMatrix, late_RT: Array) -> Section:
    """Rank by step: dark where the others wait for the rank, pale where it is on time or waits itself."""
    R, T = late_RT.shape
    ranks, steps = -(-R // MAX_RANKS), -(-T // MAX_STEPS)
    latest = f" of the latest of {ranks} ranks" if ranks > 1 else ""
    shared = f"Binned: a cell is the mean over {steps} steps{latest}." if ranks > 1 or steps > 1 else ""
    starts = np.arange(0, T, steps)
    latest_BT = np.fmax.reduceat(late_RT, np.arange(0, R, ranks), axis=0)
    late_BC = np.add.reduceat(latest_BT, starts, axis=1) / np.diff(np.append(starts, T))
    edge_s = max(float(np.nanpercentile(late_BC, _EXTREME)), 1e-9)
    figure, (panel,) = figures.stack([1.3 + min(max(0.24 * len(late_BC), 1.6), 5.0)])
    colours = LinearSegmentedColormap.from_list("lateness", _SHADES)
    image = panel.imshow(late_BC, aspect="auto", cmap=colours, vmin=0.0, vmax=edge_s, interpolation="nearest")
    ticks_C = np.unique(np.linspace(0, late_BC.shape[1] - 1, 9).astype(int))
    ticks_B = np.unique(np.linspace(0, len(late_BC) - 1, min(len(late_BC), 16)).astype(int))
    panel.set_xticks(ticks_C, [str(matrix.iteration_T[c * steps]) for c in ticks_C])
    panel.set_yticks(ticks_B, [_label(matrix, int(b) * ranks) for b in ticks_B], fontsize=8)
    panel.set(xlabel="iteration")
    panel.grid(visible=False)
    bar = figure.colorbar(image, ax=panel, pad=0.01)
    bar.ax.set_title("a step", fontsize=8)
    in_time(bar.ax.yaxis)
    keys = [Patch(fc=_SHADES[-1], label="the others wait for it"), Patch(fc=_SHADES[0], ec="#999", label="it waits")]
    figure.legend(handles=keys, loc="outside lower left", ncols=2, fontsize=9, frameon=False)
    panel.set_title(shared, loc="left", fontsize=9)
    late_R = np.nan_to_num(late_RT).mean(axis=1)
    worst = int(np.argmax(late_R))
    most = f"Most is waited for {_label(matrix, worst)}." if late_R[worst] > 0.0 else "No rank keeps others waiting."
    caption = (
        "Dark red: the others wait for this rank. Pale: it is on time, or waits itself. "
        f"{most} A cell is by how much longer a rank works in a step than the median of the others: two ranks that are "
        f"late together are both dark. {shared} Colours end at the {_EXTREME:.0f}th percentile."
    )
    rows = [
        (str(matrix.ranks[b * ranks]), str(matrix.iteration_T[c * steps]), f"{value:.4g}" if np.isfinite(value) else "")
        for b, row_C in enumerate(late_BC)
        for c, value in enumerate(row_C.tolist())
    ]
    columns = ("from rank", "from iteration", "works longer, s")
    return drawn("Lateness of ranks", caption, figure, columns, rows)
