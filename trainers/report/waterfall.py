"""Pictures of a diagnosis: the time of a mean step cause by cause; slowdown by rank, stage and operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from paceenv.diagnosis.diagnose import Diagnosis
from paceenv.trainers.report.picture import Numbers, Picture, Unit, drawn
from paceenv.ui import figures

REST: Final = "everything else"
_STEP, _LOST, _GAINED = "#8c96a8", "#d55e00", "#0072b2"
_MAX_BARS = 12


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
    shades = [_STEP, *(_LOST if x >= 0.0 else _GAINED for x in length[1:-1]), _STEP]
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


def slowdowns(diagnosis: Diagnosis) -> Picture | None:
    """Slowdowns with only one rank's, one stage's, one kind of operation's own durations; None where none are known."""
    a = diagnosis.attribution
    if a is None:
        return None
    named: list[tuple[str, Mapping[Any, float]]] = [
        ("data-parallel rank", a.rank), ("stage", a.stage), ("operation", a.operation),
    ]  # fmt: skip
    shown = [(what, values) for what, values in named if len(values) > 1]
    if not shown:
        return None
    figure, panels = figures.figure(len(shown))
    figure.set_size_inches(11.2, 0.9 + 0.27 * min(max(len(values) for _, values in shown), _MAX_BARS))
    rows, left_out = [], False
    most = 100.0 * (max(max(values.values()) for _, values in shown) - 1.0)
    for panel, (what, values) in zip(panels, shown, strict=True):
        worst = sorted(values.items(), key=lambda item: -item[1])
        rows += [(what, str(key), f"{value:.4f}") for key, value in worst]
        left_out |= len(worst) > _MAX_BARS
        worst = worst[:_MAX_BARS]
        excess = [100.0 * (value - 1.0) for _, value in worst]
        panel.barh(range(len(worst)), excess, color=_LOST, height=0.7)
        panel.set_yticks(range(len(worst)), [figures.literal(str(key), 26) for key, _ in worst], fontsize=9)
        panel.set(ylim=(_MAX_BARS - 0.4 if len(worst) == _MAX_BARS else len(worst) - 0.4, -0.6))
        panel.set(xlabel="longer than ideal, %", xlim=(1.1 * min(0.0, *excess), max(1.0, 1.1 * most)))
        panel.set_title(f"by {what}", loc="left", fontsize=10)
        panel.grid(visible=False, axis="y")
    caption = (
        "How much longer than ideal a step is when only this one has its own durations, and all else is ideal."
        + (f" The {_MAX_BARS} largest of each." if left_out else "")
    )
    columns = ("what", "which", "slowdown")
    return drawn("Slowdown by rank, stage and operation", caption, figure, Numbers("attribution", columns, rows))
