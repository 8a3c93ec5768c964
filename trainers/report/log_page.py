"""The page of a text log: step times in order, their distribution and memory, the ceiling, and what to record next.

Axes: V logged values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from paceenv.diagnosis.step_times.step_diagnosis import WORTH, StepDiagnosis
from paceenv.diagnosis.step_times.step_model import WHY_NO_CLUSTER, ModelCheck, check_model
from paceenv.trainers.report.picture import Numbers, Picture, Unit, drawn
from paceenv.ui import figures, html_page

MAX_POINTS: Final = 1500
"""Values that are drawn one by one; of more, the mean and the range of bins."""
MAX_MARKS: Final = 400
"""Outliers that are marked."""
_TYPICAL_TOP: Final = 0.995
_LINE, _BAND, _MARK, _LEVEL, _WARM = "#333333", "#aebfd8", "#d55e00", "#1f7a8c", "#999999"

Array = NDArray[np.float64]


def page(
    found: StepDiagnosis, rows: list[tuple[str, str, str]], notes: tuple[str, ...], more: Sequence[str] = ()
) -> str:
    """The page.

    Args:
        found: the diagnosis.
        rows: name, value and meaning of its numbers, as ``paceenv diagnose`` prints them.
        notes: of reading, beside those of the log itself.
        more: further pieces of HTML, below.
    """
    log, top = found.log, found.ceiling
    unit = Unit.of(found.median_s)
    read = (
        f"Read from {log.name} ({log.source}): {len(found.steady_s_V)} step times, steps {log.step_V.min()} to "
        f"{log.step_V.max()}, {int(found.ordinary.warm_up_V.sum())} values of warm-up left out"
    )
    facts = [
        ("mean step", unit.text(found.mean_s)),
        ("median", unit.text(found.median_s)),
        ("99th percentile / median", f"{found.p99_over_median:.3f}"),
        ("coefficient of variation", f"{found.cv:.2%}"),
        ("to win at most", "unknown" if top is None else f"{top.gain.value:.1%}"),
        ("steps a value averages over", f"{found.averaged:.0f}" if found.averaged else "unknown"),
    ]
    parts = [
        html_page.paragraph("; ".join([read, *notes, *log.notes]) + ".", "note"),
        html_page.paragraph(f"{found.verdict[:1].upper()}{found.verdict[1:]}.", "verdict"),
        html_page.facts(facts),
        *(picture.html() for picture in pictures(found)),
        html_page.heading("What step times tell"),
        html_page.table(("what", "value", "meaning"), rows),
        html_page.heading("What to record next"),
        html_page.paragraph(f"{found.next_step[:1].upper()}{found.next_step[1:]}."),
        html_page.paragraph(f"No cause is named here: {WHY_NO_CLUSTER}."),
        *more,
    ]
    return html_page.page(f"Step times of {log.name}", parts)


def pictures(found: StepDiagnosis) -> list[Picture]:
    """All pictures of the page."""
    return [course(found), distribution(found)] + ([ceiling(found)] if found.ceiling is not None else [])


def course(found: StepDiagnosis) -> Picture:
    """Step times over the log, with levels, warm-up, restarts and outliers."""
    log, unit = found.log, Unit.of(found.median_s)
    at_V, time_V = np.arange(len(log.step_V)), unit.per_s * log.step_s_V
    steady_V, outlier_V = found.ordinary.steady_V, found.ordinary.outlier_V
    width = -(-len(at_V) // MAX_POINTS)
    starts = np.arange(0, len(at_V), width)
    low, high = (f.reduceat(time_V, starts) for f in (np.minimum, np.maximum))
    mean = np.add.reduceat(time_V, starts) / np.diff(np.append(starts, len(at_V)))
    figure, (panel,) = figures.stack([3.0])
    if width > 1:
        panel.fill_between(starts, low, high, color=_BAND, lw=0, step="mid")
    mean[np.logical_or.reduceat(~steady_V, starts)] = np.nan  # which would draw the picture's edge
    panel.plot(starts, mean, ".-" if len(at_V) <= 200 else "-", color=_LINE, lw=0.9, ms=4, label="step time")
    warm, top, low_end = np.flatnonzero(~steady_V), _top(time_V[steady_V]), float(time_V[steady_V].min())
    if len(warm):
        panel.plot(warm, np.clip(time_V[warm], low_end, top), "x", color=_WARM, ms=5, label="warm-up, left out")
    marked = np.flatnonzero(outlier_V)
    chosen = marked[np.argsort(-time_V[marked], kind="stable")[:MAX_MARKS]]
    if len(chosen):
        panel.plot(chosen, np.minimum(time_V[chosen], top), "^", color=_MARK, ms=4, label="outlier", alpha=0.8)
    steady = np.flatnonzero(steady_V)
    for i, regime in enumerate(found.regimes):
        ends = steady[regime.start], steady[regime.end - 1]
        panel.plot(ends, [unit.per_s * regime.level_s] * 2, color=_LEVEL, lw=2.0, label="" if i else "level")
    for restart in np.flatnonzero(np.diff(log.run_V)) + 1:
        panel.axvline(float(restart), color=_WARM, ls=":", lw=1.0)
    panel.set(xlabel="logged value, labelled with its step", ylabel=f"step time, {unit.name}")
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
    if len(found.regimes) > 1:
        said.append(f"The level changes {len(found.regimes) - 1} times (thick lines).")
    if found.runs > 1:
        said.append(f"Dotted lines are restarts or further files ({found.runs - 1}).")
    if found.outlier_period is not None:
        said.append(f"Outliers come every {found.outlier_period.steps} steps.")
    classes = np.where(~steady_V, "warm-up", np.where(outlier_V, "outlier", ""))
    rows = [(str(s), f"{t:.6g}", str(c)) for s, t, c in zip(log.step_V, time_V, classes, strict=True)]
    numbers = Numbers("step-times", ("step", f"step time, {unit.name}", "class"), rows[:200_000])
    return drawn("Step times", " ".join(filter(None, said)), figure, numbers)


def _top(time_v: Array) -> float:
    """Where the picture ends: above all values, or where few are very long, above all but those."""
    typical = float(np.quantile(time_v, _TYPICAL_TOP))
    middle = float(np.median(time_v))
    return (
        float(time_v.max()) if time_v.max() <= middle + 4.0 * (typical - middle) else middle + 2.5 * (typical - middle)
    )


def distribution(found: StepDiagnosis) -> Picture:
    """How often a step takes how long, and whether a long step tells of a long one after it."""
    unit = Unit.of(found.median_s)
    time_v = unit.per_s * found.steady_s_V
    figure, (left, right) = figures.figure(2)
    figure.set_size_inches(11.2, 3.6)
    low, high = float(time_v.min()), _top(time_v)
    if high - low <= 1e-9 * high:
        low, high = 0.98 * low, 1.02 * high + 1e-12
    edges = np.linspace(low, high, int(np.clip(2 * np.sqrt(len(time_v)), 8, 60)) + 1)
    counts, _ = np.histogram(np.minimum(time_v, high), edges)
    left.stairs(100.0 * counts / len(time_v), edges, fill=True, color=_BAND)
    first, middle, last = np.quantile(time_v, [0.01, 0.5, 0.99])
    marks = [("1st percentile", first, ":"), ("median", middle, "--"), ("mean", float(time_v.mean()), "-")]
    marks.append(("99th percentile", last, "-."))
    for name, value, style in marks:
        left.axvline(min(value, high), color=_MARK, ls=style, lw=1.2, label=f"{name} {value:.4g} {unit.name}")
    left.legend(fontsize=8, frameon=False)
    left.set(xlabel=f"step time, {unit.name}", ylabel="values, %")
    _memory(right, found)
    check = check_model(found.log)
    said = "Left: how often a step takes how long. Right: whether a long step tells of a later one; not in the band."
    if isinstance(check, ModelCheck):
        said += f" {check.model.text[:1].upper()}{check.model.text[1:]}: held out is {check.held_out}."
    rows = [(f"{a:.6g}", f"{b:.6g}", str(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]
    lags = [(str(k + 1), f"{r:.4f}") for k, r in enumerate(found.autocorrelation)]
    tables = [Numbers("distribution", (f"from, {unit.name}", f"to, {unit.name}", "values"), rows)]
    tables += [Numbers("autocorrelation", ("lag, values", "autocorrelation"), lags)] if lags else []
    return drawn("Distribution and memory", said, figure, *tables)


def _memory(panel: Axes, found: StepDiagnosis) -> None:
    panel.set(xlabel="lag, logged values", ylabel="autocorrelation")
    if not found.autocorrelation:
        panel.text(0.5, 0.5, "step times that do not vary", ha="center", va="center", transform=panel.transAxes)
        panel.set(xticks=[], yticks=[])
        return
    lag, value = np.arange(1, len(found.autocorrelation) + 1), np.array(found.autocorrelation)
    band = 1.96 / np.sqrt(len(found.steady_s_V))
    panel.axhspan(-band, band, color=_BAND, alpha=0.6, lw=0)
    panel.vlines(lag, 0.0, value, color=_LINE, lw=1.2)
    panel.plot(lag, value, "o", color=_LINE, ms=3)
    panel.axhline(0.0, color=_LINE, lw=0.7)
    panel.set(ylim=(min(-0.3, 1.1 * float(value.min())), max(1.0, 1.1 * float(value.max()))))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def ceiling(found: StepDiagnosis) -> Picture:
    """How much there is to win at most, and what of it comes from outliers or may be hidden."""
    top = found.ceiling
    assert top is not None
    figure, (panel,) = figures.stack([1.5])
    ordinary = max(top.gain.value - top.from_outliers, 0.0)
    bars: list[tuple[str, float, str]] = [("ordinary steps", ordinary, _LEVEL), ("outliers", top.from_outliers, _MARK)]
    left = 0.0
    for name, width, shade in bars:
        panel.barh([0], [100.0 * width], left=100.0 * left, color=shade, height=0.5, label=f"{name} {width:.2%}")
        left += width
    ends = [100.0 * x for x in (top.gain.low, top.gain.high)]
    panel.plot(ends, [0, 0], color="black", lw=1.5, marker="|", ms=12, label="95 % of the sum")
    edge = max(ends[1], 100.0 * WORTH)
    if top.hidden > top.gain.value:
        panel.plot([100.0 * top.hidden], [0], "D", color=_MARK, ms=7, label=f"if averaging hides: {top.hidden:.1%}")
        edge = max(edge, 100.0 * top.hidden)
    panel.axvline(100.0 * WORTH, color=_WARM, ls="--", lw=1.2, label=f"worth a second look from {WORTH:.0%}")
    panel.set(xlim=(0.0, 1.1 * edge), ylim=(-0.6, 0.6), yticks=[], xlabel="throughput that removing variation gains, %")
    panel.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 1.35), ncols=5)
    said = (
        "If every step took as long as the fastest hundredth: the most that anything which only removes variation can "
        "gain. Pacing gets a part of it, and does not remove outliers such as checkpoints."
    )
    if top.hidden > top.gain.value:
        said += f" A value averages {found.averaged:.0f} steps, which may hide the variation of single steps (diamond)."
    names = ("value", "low", "high")
    rows = [(name, f"{x:.5f}") for name, x in zip(names, top.gain, strict=True)]
    rows += [("from outliers", f"{top.from_outliers:.5f}"), ("if averaging hides", f"{top.hidden:.5f}")]
    return drawn("How much there is to win at most", said, figure, Numbers("ceiling", ("what", "gain"), rows))


def as_json(found: StepDiagnosis, notes: tuple[str, ...]) -> dict[str, Any]:
    """The numbers of the page as plain data.

    Args:
        found: diagnosis of the log.
        notes: a sentence each.
    """
    return found.to_json() | {"reading": list(notes)}
