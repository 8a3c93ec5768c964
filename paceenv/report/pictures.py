"""Pictures of a report: where the time goes, how steps vary, other sizes, and policies; each with the numbers in it.

Axes: T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from paceenv.core.intervals import Interval
from paceenv.diagnosis.operation_matrix import OperationMatrix
from paceenv.diagnosis.verdict import Diagnosis
from paceenv.ui import figures, html_page

if TYPE_CHECKING:  # the simulator, which the page of a log does not need
    from paceenv.whatif.predictions import Prediction

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_POINTS: Final = 1500
"""Steps that are drawn one by one; of more, the mean and the range of bins."""
REST: Final = "everything else"
LINE, BAND, MARK = "#333333", "#aebfd8", "#d55e00"
_STEP, _GAINED, _SIMULATED = "#8c96a8", "#0072b2", "#4c72b0"
_TYPICAL_TOP: Final = 0.995


@dataclass(frozen=True)
class Numbers:
    """A table behind a picture, all cells as text; ``name`` is that of the file to download."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A section of a page: title, caption, the drawing (``paceenv.ui.figures.svg``), and the numbers in it."""

    title: str
    caption: str
    svg: str
    numbers: Sequence[Numbers]

    def html(self) -> str:
        """The picture in a section of its own."""
        tables = [html_page.numbers(n.name, n.columns, n.rows) for n in self.numbers]
        return "\n".join([html_page.heading(self.title), html_page.picture(self.svg, self.caption), *tables])


def drawn(title: str, caption: str, figure: Figure, *numbers: Numbers) -> Picture:
    """A picture from a finished figure."""
    return Picture(title, caption, figures.svg(figure, title), numbers)


@dataclass(frozen=True)
class Unit:
    """A unit of time with readable numbers; ``per_s`` of it make a second."""

    name: str
    per_s: float

    @classmethod
    def of(cls, typical_s: float) -> Unit:
        """Seconds from one on, else milliseconds or microseconds."""
        if typical_s >= 1.0:
            return cls("s", 1.0)
        return cls("ms", 1e3) if typical_s >= 1e-3 else cls("us", 1e6)

    def text(self, value_s: float) -> str:
        """A time of so many seconds, for people."""
        return f"{self.per_s * value_s:.4g} {self.name}"


# --- step times: of a trace and of a log ------------------------------------------------------------------------------
def binned_steps(time_T: Array) -> tuple[Integers, Array, Array, Array]:
    """Where bins of steps begin, and the mean, least and most in each; at most MAX_POINTS bins."""
    starts = np.arange(0, len(time_T), -(-len(time_T) // MAX_POINTS))
    mean = np.add.reduceat(time_T, starts) / np.diff(np.append(starts, len(time_T)))
    return starts, mean, np.minimum.reduceat(time_T, starts), np.maximum.reduceat(time_T, starts)


def top_of(time_T: Array) -> float:
    """Where a picture of times ends: above all of them, or where few are very long, above all but those."""
    longest, middle = float(time_T.max()), float(np.median(time_T))
    typical = float(np.quantile(time_T, _TYPICAL_TOP)) - middle
    return longest if longest <= middle + 4.0 * typical else middle + 2.5 * typical


def histogram(panel: Axes, time_T: Array, unit: Unit, what: str) -> Numbers:
    """How often a step takes how long, with mean and percentiles."""
    low, high = float(time_T.min()), top_of(time_T)
    cut = int((time_T > high).sum())
    if high - low <= 1e-9 * high:
        low, high = 0.98 * low, 1.02 * high + 1e-12
    edges = np.linspace(low, high, int(np.clip(2 * np.sqrt(len(time_T)), 8, 60)) + 1)
    counts, _ = np.histogram(np.minimum(time_T, high), edges)
    panel.stairs(100.0 * counts / len(time_T), edges, fill=True, color=BAND)
    median, p95, p99 = np.quantile(time_T, [0.5, 0.95, 0.99])
    marks = (("mean", time_T.mean(), "-"), ("median", median, "--"), ("95 %", p95, "-."), ("99 %", p99, ":"))
    for name, value, style in marks:
        panel.axvline(min(value, high), color=MARK, ls=style, lw=1.2, label=f"{name} {value:.4g} {unit.name}")
    panel.legend(fontsize=8, frameon=False, title=f"CV {time_T.std() / time_T.mean():.3f}", title_fontsize=8)
    more = f"; {cut} longer ones in the last bar" if cut else ""
    panel.set(xlabel=f"step time, {unit.name}{more}", ylabel=f"{what}, %")
    rows = [(f"{a:.6g}", f"{b:.6g}", str(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]
    return Numbers("distribution", (f"from, {unit.name}", f"to, {unit.name}", what), rows)


def course(matrix: OperationMatrix) -> Picture:
    """Step times in order; of many the mean and the range of bins."""
    unit = Unit.of(float(np.median(matrix.step_s_T)))
    starts, mean, low, high = binned_steps(unit.per_s * matrix.step_s_T)
    width = -(-matrix.steps // MAX_POINTS)
    iteration = matrix.iteration_T[starts]
    figure, (panel,) = figures.stack([1.9])
    gaps = np.diff(iteration) > width
    line = np.insert(mean, np.flatnonzero(gaps) + 1, np.nan)
    at = np.insert(iteration.astype(np.float64), np.flatnonzero(gaps) + 1, np.nan)
    panel.plot(at, line, ".-" if matrix.steps <= 200 else "-", color=LINE, lw=0.9, ms=4)
    if width > 1:
        panel.fill_between(iteration, low, high, color=BAND, lw=0, step="mid")
    panel.set(xlabel="iteration", ylabel=f"step time, {unit.name}")
    panel.margins(x=0.01, y=0.1)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = "How long every step took" + (
        f": mean (line) and range (band) of {width} steps at a time." if width > 1 else "."
    )
    if gaps.any():
        caption += " The line is broken where the trace leaves out steps."
    rows = [(str(i), *(f"{x:.6g}" for x in v)) for i, *v in zip(iteration, mean, low, high, strict=True)]
    columns = ("from iteration", *(f"{what}, {unit.name}" for what in ("mean", "least", "most")))
    return drawn("Step time, step by step", caption, figure, Numbers("steps", columns, rows))


def spread(matrix: OperationMatrix) -> Picture:
    """Distribution of step times."""
    unit = Unit.of(float(np.median(matrix.step_s_T)))
    figure, (panel,) = figures.stack([3.2])
    distribution = histogram(panel, unit.per_s * matrix.step_s_T, unit, "steps")
    return drawn("Distribution of step times", "How often a step takes how long.", figure, distribution)


# --- a diagnosis ------------------------------------------------------------------------------------------------------
def parts(diagnosis: Diagnosis) -> list[tuple[str, float]]:
    """The parts of a mean step, seconds: the step without any cause, each cause, and the rest up to the measured step.

    Empty where causes are not determined.
    """
    if diagnosis.bare_step_s is None:
        return []
    causes = [(cause.cause, cause.lost_s) for cause in diagnosis.causes]
    rest_s = diagnosis.step_time_s - diagnosis.bare_step_s - sum(lost_s for _, lost_s in causes)
    return [("step without any of it", diagnosis.bare_step_s), *causes, (REST, rest_s)]


def waterfall(diagnosis: Diagnosis) -> Picture | None:
    """From the step without any cause to the measured one; None where causes are not determined."""
    found = parts(diagnosis)
    if not found:
        return None
    unit, ideal_s = Unit.of(diagnosis.step_time_s), diagnosis.ideal_step_time_s or 0.0
    names = [*(name for name, _ in found), "measured mean step"]
    end = np.cumsum([unit.per_s * value for _, value in found])
    begin = np.concatenate([[0.0], end[:-1], [0.0]])
    length = np.concatenate([np.diff(end, prepend=0.0), [unit.per_s * diagnosis.step_time_s]])
    figure, (panel,) = figures.stack([0.9 + 0.34 * len(names)])
    shades = [_STEP, *(MARK if x >= 0.0 else _GAINED for x in length[1:-1]), _STEP]
    panel.barh(range(len(names)), length, left=begin, color=shades, height=0.66)
    for i, (left, width) in enumerate(zip(begin, length, strict=True)):
        share = "" if i in (0, len(names) - 1) else f" ({width / length[-1]:+.1%})"
        panel.annotate(
            f"{width:.4g} {unit.name}{share}", (max(left, left + width), i), (5, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    for i, edge in enumerate(end):
        panel.plot([edge, edge], [i - 0.33, i + 1.33], color="#999999", lw=0.7)
    panel.set_yticks(range(len(names)), names)
    panel.set(ylim=(len(names) - 0.4, -0.6), xlim=(0.0, 1.22 * float(max(length[-1], end.max()))))
    panel.set_xlabel(f"time of a mean step, {unit.name}")
    panel.grid(visible=False, axis="y")
    caption = (
        "Each bar is what a cause adds to a mean step, from replaying the steps with and without it, on average over "
        "all orders of taking causes out (Shapley shares, so they add up). Everything else: causes too small to be "
        "named, and time that no operation explains. The slowdown above is measured against another ideal, in which "
        "all ranks are as fast as their mean "
        f"({unit.per_s * ideal_s:.4g} {unit.name}), as in the published study of stragglers."
    )
    rows = [(name, f"{value:.6g}", f"{value / diagnosis.step_time_s:.4f}") for name, value in found]
    rows.append(("measured mean step", f"{diagnosis.step_time_s:.6g}", "1"))
    columns = ("part", "seconds", "share of the step")
    return drawn("Where the time goes", caption, figure, Numbers("waterfall", columns, rows))


# --- predictions ------------------------------------------------------------------------------------------------------
def scaling(answer: Prediction) -> Picture:
    """Mean step and throughput over the number of nodes: the answer of ``paceenv whatif --nodes``."""
    now, same = answer.today, Interval(0.0, 0.0, 0.0)
    cases = [(now, same), *((row.case, row.against_today.throughput) for row in answer.changed)]
    cases.sort(key=lambda of: of[0].nodes)
    nodes = [case.nodes for case, _ in cases]
    measured_s = now.step_s.value if answer.measured_step_s is None else answer.measured_step_s.value
    unit = Unit.of(measured_s)
    step_n3 = unit.per_s * np.array([case.step_s for case, _ in cases])
    throughput_n3 = 1.0 + np.array([gain for _, gain in cases])
    figure, (left, right) = figures.figure(2)
    figure.set_size_inches(11.2, 3.8)
    for panel, values in ((left, step_n3), (right, throughput_n3)):
        value, low, high = values.T
        panel.fill_between(nodes, low, high, color=_SIMULATED, alpha=0.25, lw=0, label="95 % interval")
        panel.plot(nodes, value, "o-", color=_SIMULATED, ms=5, label="simulated")
        panel.set_xscale("log", base=2)
        panel.set_xticks(nodes, [str(n) for n in nodes])
        panel.minorticks_off()
        panel.set_xlabel("nodes (each rank of the trace is one)" if now.ranks == now.nodes else "nodes")
    left.plot([now.nodes], [unit.per_s * measured_s], "D", color=MARK, ms=8, label="measured", zorder=5)
    left.set(ylabel=f"mean step, {unit.name}", ylim=(0.0, 1.15 * max(unit.per_s * measured_s, *step_n3[:, 2])))
    right.plot(nodes, [n / now.nodes for n in nodes], "--", color="#999999", lw=1.0, label="linear")
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.set_ylabel("throughput, today's = 1")
    for panel in (left, right):
        panel.legend(fontsize=8, frameon=False)
    caption = (
        "The job on more or fewer nodes, without pacing, as paceenv whatif --nodes predicts it: where one run ends up "
        f"in 95 % of cases. Taken for granted: {'; '.join(answer.assumes)}."
    )
    if answer.left_open:
        caption += f" Open, and in the band: {'; '.join(answer.left_open)}."
    rows = [
        (str(case.nodes), *(f"{x:.4g}" for x in (*step_3, *throughput_3, *case.cv)))
        for (case, _), step_3, throughput_3 in zip(cases, step_n3, throughput_n3, strict=True)
    ]
    names = (f"step, {unit.name}", "throughput", "CV")
    columns = ("nodes", *(f"{name}{part}" for name in names for part in ("", " low", " high")))
    return drawn("At other sizes", caption, figure, Numbers("scaling", columns, rows))
