"""The pictures of ``paceenv explain``: slices through a policy's settings, and the timeline of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, NullLocator
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.policies.explain.slices import HOLD_INTERVALS, Box, Slice, positions
from paceenv.policies.explain.watched_rollout import Watched
from paceenv.ui import figures

_OFF, _SHOWN = "#d9d9d9", "#ffcc00"
_DOTS = 1200
_THRESHOLD_OF = {
    "slack": "slack over the step, %",
    "phase_shift": "inflation of the collective, %",
    "paper": "spread of waits over the step, %",
    "stagger": "inflation of the step, %",
    "defer": "gain of holding back, %",
    "mean_slack": "spread of waits over the step, %",
}
assert set(_THRESHOLD_OF) == set(pacing.MECHANISMS)
_RATIOS = (1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)


def draw_slices(
    found: Slice, mechanisms: Sequence[str], view_BO: NDArray[np.float32], box: Box | None, title: str, path: Path
) -> None:
    """Draw the slice: one row per mechanism, its window and its threshold over imbalance and contention.

    Args:
        found: the slice of the policy.
        mechanisms: mechanisms to draw, in this order.
        view_BO: the rollout's views, drawn as dots.
        box: calibrated range, drawn as a dashed line; None for a policy without one.
        title: first line of the title.
        path: the file; its suffix says which kind.
    """
    figure, panels = figures.grid(len(mechanisms), 2)
    for row, name in zip(panels, mechanisms, strict=True):
        settings_YX2 = found.settings_YXM2[:, :, pacing.MECHANISMS.index(name)]
        off_YX = settings_YX2[..., pacing.WINDOW] == 0.0
        for panel, which, colours in zip(row, (pacing.WINDOW, pacing.THRESHOLD), ("viridis", "cividis"), strict=True):
            value_YX = np.ma.masked_array(100.0 * settings_YX2[..., which], off_YX)
            _heat(panel, found, value_YX, colours)
            unit = "% of the baseline step" if which == pacing.WINDOW else _THRESHOLD_OF[name]
            said = " (off everywhere)" if off_YX.all() else _constant(value_YX)
            panel.set_title(f"{name}: {'window' if which == pacing.WINDOW else 'threshold'}, {unit}{said}", fontsize=9)
            _views(panel, found, view_BO, box)
    held = f"each point held for {HOLD_INTERVALS} control intervals, its last decision shown" if found.remembers else ""
    note = "other signals at the rollout's median"
    figure.suptitle(f"{title}\n{'; '.join(x for x in (note, held) if x)}", fontsize=10)
    figure.legend(handles=_keys(box), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figures.save(figure, path)


def _constant(value_YX: np.ma.MaskedArray) -> str:
    least, most = float(value_YX.min()), float(value_YX.max())
    return f" (always {least:.3g})" if least == most and not value_YX.mask.any() else ""


def _heat(panel: Axes, found: Slice, value_YX: np.ma.MaskedArray, colours: str) -> None:
    panel.set_facecolor(_OFF)
    most = 0.0 if value_YX.mask.all() else float(value_YX.max())
    image = panel.pcolormesh(
        100.0 * found.slack_X,
        found.inflation_Y,
        value_YX,
        cmap=colormaps[colours],
        vmin=0.0,
        vmax=most if most > 0.0 else 1.0,
        shading="nearest",
        rasterized=True,
    )
    if most > 0.0:
        panel.figure.colorbar(image, ax=panel, pad=0.02)
    ticks = _ticks(float(found.inflation_Y[-1]))
    panel.set(yscale="log", xlabel="slack, % of the step", ylabel="time in the collective / baseline")
    panel.yaxis.set_major_locator(FixedLocator(ticks))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_yticks(ticks, [f"{x:g}" for x in ticks])


def _ticks(most: float) -> list[float]:
    """Round ratios up to ``most``, as many as a logarithmic axis has room for."""
    chosen = [1.0]
    for ratio in _RATIOS:
        if ratio <= most and np.log(ratio / chosen[-1]) >= 0.09 * np.log(most):
            chosen.append(ratio)
    return chosen


def _views(panel: Axes, found: Slice, view_BO: NDArray[np.float32], box: Box | None) -> None:
    """Dots and calibrated range, cut off at the ends of the slice."""
    limits = panel.get_xlim(), panel.get_ylim()
    slack_B, inflation_B = positions(view_BO[:: max(1, len(view_BO) // _DOTS)])
    panel.plot(100.0 * slack_B, inflation_B, "o", ms=2.2, mfc="white", mec="black", mew=0.4, alpha=0.7)
    if box is not None:
        (left, right), (low, high) = box.slack, box.inflation
        corner, width, height = (100.0 * left, low), 100.0 * (right - left), high - low
        panel.add_patch(Rectangle(corner, width, height, fill=False, ec="#e8000b", ls="--", lw=1.4))
    panel.set(xlim=limits[0], ylim=limits[1])


def _keys(box: Box | None) -> list[Patch | Line2D]:
    seen = Line2D([], [], ls="", marker="o", ms=4, mfc="white", mec="black", label="where the rollout's views lay")
    keys: list[Patch | Line2D] = [Patch(fc=_OFF, ec="#999999", label="off (window 0)"), seen]
    if box is not None:
        keys.append(Line2D([], [], color="#e8000b", ls="--", label="calibrated range; beyond it: extrapolation"))
    return keys


def draw_timeline(
    paced: Watched, passive: Watched, ranks_N: NDArray[np.int64], first: int, count: int, title: str, path: Path
) -> None:
    """Draw some iterations of two rollouts on the same noise, and both whole rollouts below.

    Args:
        paced: the rollout under the policy.
        passive: the rollout without pacing.
        ranks_N: ranks to draw, from the top.
        first: the first iteration drawn.
        count: how many iterations are drawn.
        title: title of the figure.
        path: the file; its suffix says which kind.
    """
    height = 0.45 + 0.17 * len(ranks_N)
    figure, (above, below, steps, delays) = figures.stack([height, height, 1.7, 1.3])
    figure.suptitle(title, fontsize=10)
    both = [(above, paced), (below, passive)]
    unit = _Unit("s", 1.0) if passive.step_T.mean() > 10.0 else _Unit("ms", 1e3)
    end_s = 1.02 * max(float(one.step_T[first : first + count].sum()) for _, one in both)
    drawn: list[str] = []
    for panel, one in both:
        drawn += _bars(panel, one, ranks_N, slice(first, first + count), unit)
        panel.set(xlim=(0.0, unit.per_s * end_s), ylabel="rank")
    below.set_xlabel(f"time, {unit.name}, from the start of iteration {first}")
    handles = [Patch(fc=shade, label=name) for name, shade in figures.PHASE_COLOURS.items() if name in drawn]
    handles.append(Patch(fc=_SHOWN, label="the iterations drawn"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    _whole(steps, delays, paced, passive, unit)
    for panel in (steps, delays):
        panel.axvspan(first, first + count, color=_SHOWN, alpha=0.6, lw=0)
    figures.save(figure, path)


@dataclass(frozen=True)
class _Unit:
    name: str
    per_s: float


def _bars(panel: Axes, one: Watched, ranks_N: NDArray[np.int64], shown: slice, unit: _Unit) -> list[str]:
    """Every phase of every drawn rank as bars, a line where a step ends; the names of phases that took time.

    Of ranks that run ahead so many iterations more, which begin before the last one shown ends.
    """
    ahead = int(one.batch.jobs[0]["staleness"])
    drawn = slice(shown.start, shown.stop + ahead)
    end_T = unit.per_s * np.cumsum(one.step_T[drawn])
    begin_T1 = np.concatenate([[0.0], end_T[:-1]])[:, None]
    row_TN = np.broadcast_to(np.arange(len(ranks_N)), (len(end_T), len(ranks_N)))
    found = []
    for phase in one.phases:
        start_TN, length_TN = (unit.per_s * x[drawn][:, ranks_N] for x in (phase.start_TR, phase.length_TR))
        if length_TN.max() > 0.0:
            left, shade = (begin_T1 + start_TN).ravel(), figures.PHASE_COLOURS[phase.name]
            panel.barh(row_TN.ravel(), length_TN.ravel(), left=left, height=0.82, color=shade, lw=0)
            found.append(phase.name)
    if ahead:
        start_TN = begin_T1 + unit.per_s * one.phases[0].start_TR[drawn][:, ranks_N]
        panel.vlines(start_TN.ravel(), row_TN.ravel() - 0.41, row_TN.ravel() + 0.41, color="white", lw=1.0)
    for end in end_T[: shown.stop - shown.start]:
        panel.axvline(end, color="black", lw=0.7)
    members = one.batch.ranks // one.batch.groups
    names = [f"{r} (group {r // members})" if one.batch.groups > 1 else f"{r}" for r in ranks_N]
    panel.set_yticks(range(len(ranks_N)), names, fontsize=7)
    panel.set_ylim(len(ranks_N) - 0.5, -0.5)
    panel.grid(visible=False)
    mean = unit.per_s * float(one.step_T[shown].mean())
    panel.set_title(f"{one.policy}: {mean:.4g} {unit.name} a step here", fontsize=9, loc="left")
    return found


def _whole(steps: Axes, delays: Axes, paced: Watched, passive: Watched, unit: _Unit) -> None:
    """Step time and mean delay over the whole rollout: single iterations pale, their running mean on top."""
    iterations = len(paced.step_T)
    width = max(1, iterations // 50)
    for one, shade in ((passive, figures.COLOURS["passive"]), (paced, figures.colour(paced.policy))):
        for panel, value_T in ((steps, one.step_T), (delays, one.delay_TR.mean(axis=1))):
            panel.plot(unit.per_s * value_T, color=shade, alpha=0.25, lw=0.5)
            smooth_T = unit.per_s * np.convolve(value_T, np.ones(width) / width, "valid")
            panel.plot(np.arange(len(smooth_T)) + width // 2, smooth_T, color=shade, lw=1.4, label=one.policy)
        if passive.policy == paced.policy:
            break
    low, high = unit.per_s * np.percentile(np.concatenate([passive.step_T, paced.step_T]), [0.2, 99.8])
    room = 0.1 * (high - low) + 1e-3 * high
    steps.set(ylabel=f"step, {unit.name}", xlim=(0, iterations), ylim=(low - room, high + room))
    steps.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, borderaxespad=0.1)
    most = None if paced.delay_TR.any() else 1.0
    delays.set(ylabel=f"mean delay, {unit.name}", xlabel="iteration", xlim=(0, iterations), ylim=(0, most))
