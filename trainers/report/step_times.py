"""Step times: in order, as a distribution, and their autocorrelation. Axes: T steps."""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from paceenv.core import metrics
from paceenv.diagnosis.operation_matrix import Array, Integers, OperationMatrix
from paceenv.trainers.report.picture import Numbers, Picture, Unit, drawn
from paceenv.ui import figures

MAX_POINTS: Final = 1500
"""Steps that are drawn one by one; of more, bins."""
MAX_LAG: Final = 60
MIN_PAIRS: Final = 20
"""Pairs of steps so far apart, of which fewer tell nothing."""
_NORMAL_95 = 1.96
_MANY = 500
"""Steps from which on a histogram ends before the very longest."""
_LINE, _BAND, _MARK = "#333333", "#aebfd8", "#d55e00"


def course(matrix: OperationMatrix) -> Picture:
    """Step times in order; of many the mean and the range of bins."""
    unit, step_s_T = Unit.of(float(np.median(matrix.step_s_T))), matrix.step_s_T
    width = -(-matrix.steps // MAX_POINTS)
    starts = np.arange(0, matrix.steps, width)
    low, high = (unit.per_s * f.reduceat(step_s_T, starts) for f in (np.minimum, np.maximum))
    mean = unit.per_s * np.add.reduceat(step_s_T, starts) / np.diff(np.append(starts, matrix.steps))
    iteration = matrix.iteration_T[starts]
    figure, (panel,) = figures.stack([1.9])
    gaps = np.diff(iteration) > width
    line = np.insert(mean, np.flatnonzero(gaps) + 1, np.nan)
    at = np.insert(iteration.astype(np.float64), np.flatnonzero(gaps) + 1, np.nan)
    panel.plot(at, line, ".-" if matrix.steps <= 200 else "-", color=_LINE, lw=0.9, ms=4)
    if width > 1:
        panel.fill_between(iteration, low, high, color=_BAND, lw=0, step="mid")
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
    """Distribution and autocorrelation of step times."""
    unit = Unit.of(float(np.median(matrix.step_s_T)))
    figure, (left, right) = figures.figure(2)
    figure.set_size_inches(11.2, 3.6)
    distribution = _distribution(left, unit.per_s * matrix.step_s_T, unit)
    lag, value, pairs = autocorrelation(matrix.iteration_T, matrix.step_s_T)
    _correlogram(right, lag, value, pairs)
    caption = (
        "Left: how often a step takes how long. Right: whether a long step tells that a later one will be long, too; "
        "within the band it does not (95 %)."
    )
    columns = ("lag, steps", "autocorrelation", "pairs")
    rows = [(str(k), f"{v:.4f}", str(n)) for k, v, n in zip(lag, value, pairs, strict=True)]
    return drawn(
        "Step times: spread and memory", caption, figure, distribution, Numbers("autocorrelation", columns, rows)
    )


def _distribution(panel: Axes, step_T: Array, unit: Unit) -> Numbers:
    """A histogram with mean and percentiles."""
    low, high = float(step_T.min()), float(np.percentile(step_T, 99.8) if len(step_T) > _MANY else step_T.max())
    if high - low <= 1e-9 * high:
        low, high = 0.98 * low, 1.02 * high + 1e-12
    edges = np.linspace(low, high, int(np.clip(np.sqrt(len(step_T)) * 2, 8, 60)) + 1)
    counts, _ = np.histogram(np.minimum(step_T, high), edges)
    share = 100.0 * counts / len(step_T)
    panel.stairs(share, edges, fill=True, color=_BAND)
    s = metrics.step_statistics(step_T)
    for key, style in (("mean", "-"), ("p50", "--"), ("p95", "-."), ("p99", ":")):
        panel.axvline(min(s[key], high), color=_MARK, ls=style, lw=1.2, label=f"{key} {s[key]:.4g} {unit.name}")
    panel.legend(fontsize=8, frameon=False, title=f"CV {s['cv']:.3f}", title_fontsize=8)
    cut = int((step_T > high).sum())
    more = f"; {cut} longer ones in the last bar" if cut else ""
    panel.set(xlabel=f"step time, {unit.name}{more}", ylabel="steps, %")
    rows = [(f"{a:.6g}", f"{b:.6g}", str(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]
    return Numbers("distribution", (f"from, {unit.name}", f"to, {unit.name}", "steps"), rows)


def autocorrelation(iteration_T: Integers, step_s_T: Array) -> tuple[Integers, Array, Integers]:
    """Lags in iterations, the autocorrelation at them, and the number of pairs; lags with too few pairs are left out.

    Lags are true distances, also where a trace leaves out steps.

    Args:
        iteration_T: numbers of the iterations, rising.
        step_s_T: their step times, seconds.
    """
    centred_T = step_s_T - step_s_T.mean()
    variance = float((centred_T**2).mean())
    lags, values, counts = [], [], []
    for lag in range(1, MAX_LAG + 1):
        at = np.searchsorted(iteration_T, iteration_T + lag)
        at = np.minimum(at, len(iteration_T) - 1)
        pair_T = iteration_T[at] == iteration_T + lag
        if int(pair_T.sum()) >= MIN_PAIRS and variance > 1e-18 * float(step_s_T.mean()) ** 2:
            lags.append(lag)
            values.append(float((centred_T[pair_T] * centred_T[at[pair_T]]).mean()) / variance)
            counts.append(int(pair_T.sum()))
    return np.array(lags, np.int64), np.array(values), np.array(counts, np.int64)


def _correlogram(panel: Axes, lag: Integers, value: Array, pairs: Integers) -> None:
    panel.set(xlabel="lag, steps", ylabel="autocorrelation of step time")
    if not len(lag):
        panel.text(
            0.5, 0.5, "too few steps in a row, or steps that do not vary", ha="center", va="center",
            transform=panel.transAxes,
        )  # fmt: skip
        panel.set(xticks=[], yticks=[])
        return
    band = _NORMAL_95 / np.sqrt(pairs)
    panel.fill_between(lag, -band, band, color=_BAND, alpha=0.6, lw=0)
    panel.vlines(lag, 0.0, value, color=_LINE, lw=1.2)
    panel.plot(lag, value, "o", color=_LINE, ms=3)
    panel.axhline(0.0, color=_LINE, lw=0.7)
    panel.set(ylim=(min(-0.3, 1.1 * float(value.min())), max(1.0, 1.1 * float(value.max()))))
