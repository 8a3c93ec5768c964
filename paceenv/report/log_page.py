"""The page of a text log: step times in order, their distribution, the ceiling, and what to record next.

Axes: V logged values.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.ticker import MaxNLocator

from paceenv.diagnosis.step_times.step_diagnosis import StepDiagnosis
from paceenv.report.pictures import (
    BAND,
    LINE,
    MARK,
    Numbers,
    Picture,
    Unit,
    binned_steps,
    drawn,
    histogram,
    top_of,
)  # fmt: skip
from paceenv.report.step_log_output import rows
from paceenv.ui import figures, html_page
from paceenv.ui.output import sentence

MAX_MARKS: Final = 400
"""Outliers that are marked."""
WHY_NO_CAUSE: Final = (
    "No cause is named here: step times alone do not say which ranks wait for each other, for what, or for how long; "
    "that needs a trace (paceenv live, or profiles of every rank)."
)
_LEVEL, _WARM = "#1f7a8c", "#999999"


def page(found: StepDiagnosis, notes: tuple[str, ...]) -> str:
    """The page; ``notes`` are those of reading the log."""
    log, top = found.log, found.ceiling
    read = (
        f"Read from {log.name} ({log.source}): {len(found.steady_s_V)} values of {log.quantity}, "
        f"steps {log.step_V.min()} to {log.step_V.max()}, {int(found.ordinary.warm_up_V.sum())} of warm-up left out"
    )
    facts = [
        ("mean step" if log.of == "step" else "mean speed", log.said(found.mean_s)),
        ("median", log.said(found.median_s)),
        ("99th percentile / median", f"{found.p99_over_median:.3f}"),
        ("coefficient of variation", f"{found.cv:.2%}"),
        ("to win at most", "unknown" if top is None else f"{top.value:.1%}"),
        ("steps a value averages over", f"{found.averaged:.0f}" if found.averaged else "unknown"),
    ]
    parts = [
        html_page.paragraph("; ".join([read, *notes, *log.notes]) + ".", "note"),
        html_page.paragraph(sentence(found.verdict), "verdict"),
        html_page.facts(facts),
        _course(found).html(),
        _distribution(found).html(),
        html_page.heading("What step times tell"),
        html_page.table(("what", "value", "meaning"), rows(found)),
        html_page.heading("What to record next"),
        html_page.paragraph(sentence(found.next_step)),
        html_page.paragraph(WHY_NO_CAUSE),
    ]
    return html_page.page(f"Step times of {log.name}", parts)


def _course(found: StepDiagnosis) -> Picture:
    """Step times over the log, with levels, warm-up, restarts and outliers."""
    log, unit = found.log, Unit.of(found.median_s)
    at_V, time_V = np.arange(len(log.step_V)), unit.per_s * log.step_s_V
    steady_V, outlier_V = found.ordinary.steady_V, found.ordinary.outlier_V
    starts, mean, low, high = binned_steps(time_V)
    width = -(-len(at_V) // len(starts))
    figure, (panel,) = figures.stack([3.0])
    if width > 1:
        panel.fill_between(starts, low, high, color=BAND, lw=0, step="mid")
    mean[np.logical_or.reduceat(~steady_V, starts)] = np.nan  # which would draw the picture's edge
    panel.plot(starts, mean, ".-" if len(at_V) <= 200 else "-", color=LINE, lw=0.9, ms=4, label=log.quantity)
    warm, top, low_end = np.flatnonzero(~steady_V), top_of(time_V[steady_V]), float(time_V[steady_V].min())
    if len(warm):
        panel.plot(warm, np.clip(time_V[warm], low_end, top), "x", color=_WARM, ms=5, label="warm-up, left out")
    marked = np.flatnonzero(outlier_V)
    chosen = marked[np.argsort(-time_V[marked], kind="stable")[:MAX_MARKS]]
    if len(chosen):
        panel.plot(chosen, np.minimum(time_V[chosen], top), "^", color=MARK, ms=4, label="outlier", alpha=0.8)
    steady = np.flatnonzero(steady_V)
    for i, level in enumerate(found.ordinary.levels):
        ends = steady[level.start], steady[level.end - 1]
        panel.plot(ends, [unit.per_s * level.level_s] * 2, color=_LEVEL, lw=2.0, label="" if i else "level")
    for restart in np.flatnonzero(np.diff(log.run_V)) + 1:
        panel.axvline(float(restart), color=_WARM, ls=":", lw=1.0)
    panel.set(xlabel="logged value, labelled with its step", ylabel=f"{log.quantity}, {unit.name}")
    room = max(0.06 * (top - low_end), 0.01 * low_end)
    panel.set_ylim(low_end - room, top + room)
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ticks = [int(t) for t in panel.get_xticks() if 0 <= t < len(at_V)]
    panel.set_xticks(ticks, [str(log.step_V[t]) for t in ticks])
    panel.margins(x=0.01)
    panel.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 1.13), ncols=5)
    beyond = int((time_V > top).sum())
    binned = f": mean and range of {width} values at a time" if width > 1 else ""
    said = [f"Step times in the order of the log{binned}."]
    said += [f"Longer ones than the picture shows are marked at its edge ({beyond})." if beyond else ""]
    if len(found.ordinary.levels) > 1:
        said.append(f"The level changes {len(found.ordinary.levels) - 1} times (thick lines).")
    if found.runs > 1:
        said.append(f"Dotted lines are restarts or further files ({found.runs - 1}).")
    if found.outlier_period is not None:
        said.append(f"Outliers come every {found.outlier_period.steps} steps.")
    classes = np.where(~steady_V, "warm-up", np.where(outlier_V, "outlier", ""))
    rows = [(str(s), f"{t:.6g}", str(c)) for s, t, c in zip(log.step_V, time_V, classes, strict=True)]
    numbers = Numbers("step-times", ("step", f"{log.quantity}, {unit.name}", "class"), rows[:200_000])
    return drawn("Step times", " ".join(filter(None, said)), figure, numbers)


def _distribution(found: StepDiagnosis) -> Picture:
    """How often a step takes how long."""
    unit = Unit.of(found.median_s)
    figure, (panel,) = figures.stack([2.6])
    spread = histogram(panel, unit.per_s * found.steady_s_V, unit, "values")
    panel.set_xlabel(panel.get_xlabel().replace("step time", found.log.quantity))
    return drawn("Distribution", f"How often which {found.log.quantity} occurs.", figure, spread)
