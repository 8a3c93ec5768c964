"""Timeline of ranks in a usual and in the worst step, and the same steps for a trace viewer.

Axes: N operations, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from paceenv.diagnosis.operation_matrix import Array, Integers, OperationMatrix
from paceenv.trainers.report.picture import Numbers, Picture, Unit, drawn
from paceenv.trainers.report.spans import Spans, label
from paceenv.ui import figures
from paceenv.ui.chrome_trace import ChromeTraceWriter

MAX_RANKS: Final = 16
MIN_WIDTH: Final = 1.0 / 1500.0
"""Of the picture: what is shorter cannot be seen."""
TRACE_EVENTS: Final = 200_000
"""About what a viewer takes at once without slowing down."""


def usual_and_worst(matrix: OperationMatrix) -> tuple[int, int]:
    """The step nearest to the median time, and the longest one, by their places."""
    step_s_T = matrix.step_s_T
    return int(np.argmin(np.abs(step_s_T - np.median(step_s_T)))), int(np.argmax(step_s_T))


def shown_ranks(matrix: OperationMatrix, slowdown_of: dict[int, float]) -> Integers:
    """At most MAX_RANKS places of ranks, evenly from the cheapest to the most expensive; whole pipelines if any.

    ``slowdown_of`` is the slowdown by data-parallel rank (``paceenv.diagnosis.ideal_replay``).

    Args:
        matrix: of the job.
        slowdown_of: by data-parallel rank.
    """
    dp_rank_R, stage_R = (np.zeros(len(matrix.ranks), np.int64) for _ in range(2))
    dp_rank_R[matrix.rank_N], stage_R[matrix.rank_N] = matrix.dp_rank_N, matrix.stage_N
    replicas, per_replica = np.unique(dp_rank_R, return_counts=True)
    cost = np.array([slowdown_of.get(int(r), 1.0) for r in replicas])
    chosen = replicas[figures.representative(cost, max(MAX_RANKS // int(per_replica.max()), 1))]
    at = np.flatnonzero(np.isin(dp_rank_R, chosen))
    at = at[np.lexsort((stage_R[at], dp_rank_R[at]))]
    return at[figures.representative(np.arange(len(at), dtype=np.float64), MAX_RANKS)]


def timeline(matrix: OperationMatrix, kinds: Sequence[Spans], slowdown_of: dict[int, float]) -> Picture:
    """What some ranks did in a usual step and in the worst one, on the same scale.

    Args:
        matrix: the traced operations.
        kinds: their spans by kind.
        slowdown_of: slowdown by data-parallel rank, by which ranks are chosen.
    """
    at_R, steps = shown_ranks(matrix, slowdown_of), usual_and_worst(matrix)
    unit = Unit.of(float(matrix.step_s_T[list(steps)].max()))
    height = 0.6 + 0.21 * len(at_R)
    figure, panels = figures.stack([height, height])
    end = unit.per_s * 1.01 * max(float(matrix.step_s_T[list(steps)].max()), 1e-9)
    rows: list[tuple[str, ...]] = []
    seen: dict[str, None] = {}
    for panel, t, word in zip(panels, steps, ("a usual step", "the worst step"), strict=True):
        rows += _bars(panel, matrix, kinds, at_R, t, unit, seen, end)
        panel.axvline(unit.per_s * float(matrix.step_s_T[t]), color="black", lw=0.9)
        title = f"{word}, iteration {matrix.iteration_T[t]}: {unit.text(float(matrix.step_s_T[t]))}"
        panel.set_title(title, loc="left", fontsize=10)
        panel.set(xlim=(0.0, end), ylim=(len(at_R) - 0.5, -0.5), xlabel=f"time from the step's begin, {unit.name}")
        panel.set_yticks(range(len(at_R)), [label(matrix, int(r)) for r in at_R], fontsize=8)
        panel.grid(visible=False)
    handles = [Patch(fc=colour, label=name) for name, colour in figures.PHASE_COLOURS.items() if name in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=9, frameon=False)
    some = (
        f" {len(at_R)} of {len(matrix.ranks)} ranks are shown, from the cheapest to the most expensive."
        if len(at_R) < len(matrix.ranks)
        else ""
    )
    caption = (
        "Every rank is a row: above what it computes, below what it communicates and how long it waits for others. "
        f"The black line is the end of the step.{some} White is time without an operation in the trace."
    )
    columns = ("iteration", "rank", "what", "operation", f"start, {unit.name}", f"end, {unit.name}")
    return drawn("Timeline of ranks", caption, figure, Numbers("timeline", columns, rows))


def _bars(
    panel: Axes,
    matrix: OperationMatrix,
    kinds: Sequence[Spans],
    at_R: Integers,
    t: int,
    unit: Unit,
    seen: dict[str, None],
    end: float,
) -> list[tuple[str, ...]]:
    """Draw one step; the bars as rows of a table, and the names of what was drawn into ``seen``."""
    row_of = np.full(len(matrix.ranks), -1)
    row_of[at_R] = np.arange(len(at_R))
    table = []
    for kind in kinds:
        row_n, start_n, end_n = row_of[matrix.rank_N[kind.operation_n]], kind.start_nT[:, t], kind.end_nT[:, t]
        keep = np.flatnonzero((row_n >= 0) & (end_n > start_n))
        low, high = (0.05, 0.42) if kind.beside else (-0.42, 0.05)
        if len(keep):
            seen[kind.name] = None
        for row in np.unique(row_n[keep]):
            mine = keep[row_n[keep] == row]
            spans = _merged(unit.per_s * start_n[mine], unit.per_s * end_n[mine], MIN_WIDTH * end)
            corners = [[(a, row + low), (b, row + low), (b, row + high), (a, row + high)] for a, b in spans]
            panel.add_collection(PolyCollection(corners, fc=figures.PHASE_COLOURS[kind.name], lw=0))
        for i in keep:
            op, rank = matrix.ops[matrix.op_N[kind.operation_n[i]]], matrix.ranks[at_R[row_n[i]]]
            times = (f"{unit.per_s * float(x[i]):.6g}" for x in (start_n, end_n))
            table.append((str(matrix.iteration_T[t]), str(rank), kind.name, op, *times))
    return table


def _merged(start: Array, end: Array, least: float) -> list[tuple[float, float]]:
    """Bars as they are seen: those closer than ``least`` as one, without what is shorter."""
    spans: list[tuple[float, float]] = []
    for i in np.argsort(start, kind="stable"):
        a, b = float(start[i]), float(end[i])
        if spans and a <= spans[-1][1] + 0.5 * least:
            spans[-1] = (spans[-1][0], max(spans[-1][1], b))
        else:
            spans.append((a, b))
    return [(a, b) for a, b in spans if b - a >= 0.5 * least]


def write_steps(matrix: OperationMatrix, kinds: Sequence[Spans], path: Path) -> tuple[int, int]:
    """Write steps end to end for a trace viewer, around the worst one where not all fit.

    Args:
        matrix: the traced operations.
        kinds: their spans by kind.
        path: the file to write.

    Returns:
        The places of the first and the last written step.
    """
    per_step = max(sum(len(kind.operation_n) for kind in kinds), 1)
    count = min(max(TRACE_EVENTS // per_step, 1), matrix.steps)
    first = min(max(usual_and_worst(matrix)[1] - count // 2, 0), matrix.steps - count)
    with ChromeTraceWriter(path, {"job": matrix.name, "source": matrix.source}) as writer:
        writer.process(1, matrix.name, {int(r): f"rank {r}" for r in matrix.ranks})
        at_s, rank_R = 0.0, np.array(matrix.ranks)
        for t in range(first, first + count):
            parts = [_events(matrix, kind, rank_R, t, at_s) for kind in kinds]
            writer.operations(1, {key: np.concatenate([p[key] for p in parts]) for key in parts[0]})
            at_s += float(matrix.step_s_T[t])
    return first, first + count - 1


def _events(matrix: OperationMatrix, kind: Spans, rank_R: Integers, t: int, at_s: float) -> dict[str, Array]:
    present = np.flatnonzero(np.isfinite(kind.start_nT[:, t]))
    node = kind.operation_n[present]
    return {
        "rank": rank_R[matrix.rank_N[node]],
        "op": np.full(len(node), kind.name),
        "start_s": at_s + kind.start_nT[present, t],
        "end_s": at_s + kind.end_nT[present, t],
        "operation": np.array(matrix.ops)[matrix.op_N[node]],
        "iteration": np.full(len(node), matrix.iteration_T[t]),
    }
