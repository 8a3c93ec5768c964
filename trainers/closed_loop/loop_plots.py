"""The pictures of a closed loop: effects predicted and measured, and the steps of the contest with paced blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from paceenv.core.differences import Array
from paceenv.live.decide.blocks import Plan
from paceenv.trainers.closed_loop.paired_blocks import Effect, PairedBlocks, job_steps
from paceenv.trainers.evaluation import score_table
from paceenv.ui import figures

_SHADES = {"predicted, always on": "#b0b0b0", "predicted, in blocks": "#4c72b0", "measured": "#c44e52"}


def effects(found: Mapping[str, Any], path: Path) -> None:
    """Each policy's effect on mean step time: predicted always on and in blocks, and measured in the contest."""
    rows, measured = found["policies"], {row["policy"]: row["measured"] for row in found["contest"]["candidates"]}
    figure, panel = figures.axes(f"{found['scenario']}: effect on mean step time", "change of mean step time, %", "")
    for i, row in enumerate(rows):
        three = (row["always"], row["blocks"], measured.get(row["policy"]))
        for offset, (what, shade), data in zip((-0.22, 0.0, 0.22), _SHADES.items(), three, strict=True):
            if data is not None:
                _bar(panel, Effect.of(data), i + offset, shade, what if what not in _labels(panel) else None)
    panel.axvline(0.0, color="#999999", lw=0.8)
    panel.set_yticks(range(len(rows)), [label(row["policy"]) for row in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    figure.legend(loc="outside lower center", ncols=len(_SHADES), fontsize=8, frameon=False)
    figure.savefig(path)


def _labels(panel: Axes) -> list[str]:
    return panel.get_legend_handles_labels()[1]


def _bar(panel: Axes, effect: Effect, y: float, shade: str, label: str | None) -> None:
    below, above = (
        max(x, 0.0) if np.isfinite(x) else 0.0 for x in (effect.change - effect.low, effect.high - effect.change)
    )
    panel.errorbar(
        100 * effect.change, y, xerr=[[100 * below], [100 * above]], fmt="o", ms=4, capsize=3, color=shade, label=label
    )


def label(policy: str) -> str:
    """A policy as people read it: a file by its name, a static one by mechanism, threshold and window."""
    name, _, settings = policy.partition(":")
    if name != "static" or not settings:
        return score_table.label(policy)
    pairs = [setting.split("=") for setting in settings.split(",")]
    given = dict(pair for pair in pairs if len(pair) == 2)
    if len(given) < len(pairs):  # a cluster, whose setting it is
        return score_table.label(policy)
    if "mechanism" not in given:
        return ", ".join(f"{mechanism} {setting.replace('/', ' / ')}" for mechanism, setting in given.items())
    shown = (f"{float(given[key]):g}" if key in given else "default" for key in ("threshold", "window"))
    return f"{given['mechanism']} {' / '.join(shown)}"


def steps(steps_s_TR: Array, contest: Plan, names: Sequence[str], path: Path) -> None:
    """Step time over the contest's run, a panel for each candidate, with its paced blocks shaded.

    Args:
        steps_s_TR: ends of the job's steps ``(T, R)``, seconds.
    """
    end_s_T, step_s_T = job_steps(steps_s_TR)
    at_s_T, step_ms_T = end_s_T[1:] - end_s_T[0], 1e3 * step_s_T
    low, high = np.percentile(step_ms_T, [0.5, 99.0])
    figure, panels = figures.figure(len(names))
    for k, (panel, name) in enumerate(zip(panels, names, strict=True)):
        blocks = PairedBlocks.of(contest, len(step_s_T), k)
        panel.plot(at_s_T, step_ms_T, ".", color="#999999", ms=2, alpha=0.6)
        edges = np.flatnonzero(np.diff(np.r_[0, blocks.on_T.astype(int), 0]))
        for begin, until in zip(edges[::2], edges[1::2], strict=True):
            panel.axvspan(end_s_T[begin] - end_s_T[0], end_s_T[until] - end_s_T[0], color="#4c72b0", alpha=0.15, lw=0)
        for pair in blocks.counted():
            for counted, shade in zip(pair, ("#555555", "#c44e52"), strict=True):
                mean_ms = float(step_ms_T[counted].mean())
                panel.plot([at_s_T[counted[0]], at_s_T[counted[-1]]], [mean_ms, mean_ms], color=shade, lw=2)
        panel.set(
            title=name, xlabel="time, s", ylabel="step, ms", ylim=(low - 0.1 * (high - low), high + 0.2 * (high - low))
        )
    panels[0].plot([], [], color="#c44e52", label="mean with pacing (shaded)")
    panels[0].plot([], [], color="#555555", label="mean without")
    panels[0].legend(fontsize=8)
    figure.savefig(path)
