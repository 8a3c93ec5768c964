"""Pictures of a report: how steps vary, and where the time goes; each with the numbers in it.

Axes: V steps, or logged values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from paceenv.core.operation_matrix import Array, Integers
from paceenv.core.wording import duration
from paceenv.diagnosis.verdict import Diagnosis
from paceenv.report.section import Section
from paceenv.ui import figures

MAX_POINTS: Final = 1500
"""Steps that are drawn one by one; of more, the mean and the range of bins."""
REST: Final = "everything else"
LINE, BAND, MARK = "#333333", "#aebfd8", "#d55e00"
_STEP, _GAINED = "#8c96a8", "#0072b2"
_TYPICAL_TOP: Final = 0.995


def drawn(title: str, caption: str, figure: Figure, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    return Section(title, [caption], columns, rows, svg=figures.svg(figure, title))


def in_time(axis: Axis) -> None:
    """Ticks of seconds with a unit that suits them."""
    axis.set_major_formatter(EngFormatter("s"))


# --- step times -------------------------------------------------------------------------------------------------------
def _top_of(step_s_V: Array) -> float:
    """Where a picture of times ends: above all of them, or where few are very long, above all but those."""
    longest, middle = float(step_s_V.max()), float(np.median(step_s_V))
    typical = float(np.quantile(step_s_V, _TYPICAL_TOP)) - middle
    return longest if longest <= middle + 4.0 * typical else middle + 2.5 * typical


def course(step_s_V: Array, step_V: Integers) -> Section:
    """Step times in order; of many the mean and the range of bins."""
    said = ["Step times in their order."]
    width = -(-len(step_V) // MAX_POINTS)
    starts = np.arange(0, len(step_V), width)
    mean = np.add.reduceat(step_s_V, starts) / np.diff(np.append(starts, len(step_V)))
    figure, (panel,) = figures.stack([3.0])
    if width > 1:
        low, high = np.minimum.reduceat(step_s_V, starts), np.maximum.reduceat(step_s_V, starts)
        panel.fill_between(starts, low, high, color=BAND, lw=0, step="mid")
        said.append(f"The line is the mean and the band the range of {width} values at a time.")
    panel.plot(starts, mean, ".-" if len(step_V) <= 200 else "-", color=LINE, lw=0.9, ms=4)
    top, low_end = _top_of(step_s_V), float(step_s_V.min())
    if beyond := int((step_s_V > top).sum()):
        said.append(f"{beyond} are longer than the picture shows.")
    panel.set(xlabel="step", ylabel="step time")
    in_time(panel.yaxis)
    room = max(0.06 * (top - low_end), 0.01 * low_end)
    panel.set_ylim(low_end - room, top + room)
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ticks = [int(t) for t in panel.get_xticks() if 0 <= t < len(step_V)]
    panel.set_xticks(ticks, [str(step_V[t]) for t in ticks])
    panel.margins(x=0.01)
    rows = [(str(s), f"{t:.6g}") for s, t in zip(step_V, step_s_V, strict=True)]
    return drawn("Step time, step by step", " ".join(said), figure, ("step", "step time, s"), rows)


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


def waterfall(diagnosis: Diagnosis) -> Section | None:
    """From the step without any cause to the measured one; None where causes are not determined."""
    bars = parts(diagnosis)
    if not bars:
        return None
    names = [*(name for name, _ in bars), "measured mean step"]
    end = np.cumsum([value for _, value in bars])
    begin = np.concatenate([[0.0], end[:-1], [0.0]])
    length = np.concatenate([np.diff(end, prepend=0.0), [diagnosis.step_time_s]])
    figure, (panel,) = figures.stack([0.9 + 0.34 * len(names)])
    shades = [_STEP, *(MARK if x >= 0.0 else _GAINED for x in length[1:-1]), _STEP]
    panel.barh(range(len(names)), length, left=begin, color=shades, height=0.66)
    for i, (left, width) in enumerate(zip(begin, length, strict=True)):
        share = "" if i in (0, len(names) - 1) else f" ({width / length[-1]:+z.1%})"
        at = max(left, left + width), i
        panel.annotate(f"{duration(width)}{share}", at, (5, 0), textcoords="offset points", va="center", fontsize=9)
    for i, edge in enumerate(end):
        panel.plot([edge, edge], [i - 0.33, i + 1.33], color="#999999", lw=0.7)
    panel.set_yticks(range(len(names)), names)
    panel.set(ylim=(len(names) - 0.4, -0.6), xlim=(0.0, 1.22 * float(max(length[-1], end.max()))))
    panel.set_xlabel("time of a mean step")
    in_time(panel.xaxis)
    panel.grid(visible=False, axis="y")
    caption = (
        "Each bar is what a cause adds to a mean step, from replaying the steps with and without it, on average over "
        "all orders of taking causes out (Shapley shares, so they add up). Everything else: causes too small to be "
        "named, and time that no operation explains."
    )
    rows = [(name, f"{value:.6g}", f"{value / diagnosis.step_time_s:.4f}") for name, value in bars]
    rows.append(("measured mean step", f"{diagnosis.step_time_s:.6g}", "1"))
    columns = ("part", "seconds", "share of the step")
    return drawn("Where the time goes", caption, figure, columns, rows)
