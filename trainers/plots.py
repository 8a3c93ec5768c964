"""The pictures of a run: scaling curve, step-time distributions, learning curve, Pareto of throughput and CV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceenv.calibration.scaling import Comparison as Published
from trainers.evaluate import Comparison
from trainers.report import label

matplotlib.use("Agg")
COLOURS = {
    "passive": "#555555",
    "paper": "#c44e52",
    "adaptive": "#dd8452",
    "learned": "#4c72b0",
    "clairvoyant": "#8172b3",
}
STATIC_COLOUR = "#55a868"
_SIZE = (7.0, 4.2)


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def colour(policy: str) -> str:
    """A policy's colour, the same in every picture."""
    return COLOURS.get(policy, STATIC_COLOUR if policy.startswith("static") else "#4c72b0")


def short(policy: str) -> str:
    """A policy's name as a legend has room for."""
    return "best static" if policy.startswith("static:") else label(policy)


def scaling_curve(rows: Sequence[Published], path: Path) -> None:
    """Throughput by number of nodes, published beside simulated, without and with coordination."""
    figure, axes = _axes("When Scaling Fails, Table 1: published and simulated", "nodes", "throughput, samples/s")
    nodes = sorted({row.nodes for row in rows})
    table = {(row.nodes, row.quantity): row for row in rows}
    first = table[nodes[0], "baseline throughput"].expected
    axes.plot(nodes, [first * n / nodes[0] for n in nodes], ":", color="#999999", label="linear")
    for column, shade in (("baseline", "#555555"), ("coordination", STATIC_COLOUR)):
        found = [table[n, f"{column} throughput"] for n in nodes]
        axes.plot(nodes, [r.simulated for r in found], "-", color=shade, label=f"{column}, simulated")
        for r in found:
            label = f"{column}, published" if r is found[0] else None
            axes.plot(r.nodes, r.expected, "o", color=shade, fillstyle="full" if r.fit else "none", label=label)
    axes.set(xscale="log", yscale="log", xticks=nodes, xticklabels=[str(n) for n in nodes])
    axes.minorticks_off()
    axes.set_yticks(ticks := [1000, 2000, 4000, 8000, 16000], [str(t) for t in ticks])
    axes.legend(fontsize=8, title="filled: seen by the fit, open: predicted", title_fontsize=8)
    figure.savefig(path)


def step_distributions(comparison: Comparison, cluster: str, path: Path) -> None:
    """Cumulative distribution of step times over the ideal step on one cluster, a curve a policy."""
    figure, axes = _axes(f"Step time on {cluster}", "step time / ideal step time", "share of steps below")
    for policy in comparison.policies:
        rollout = comparison.rollouts[policy, cluster]
        ratio = np.sort((rollout.step_ET / rollout.ideal_step_E[:, None]).ravel())
        ratio = ratio[:: max(1, len(ratio) // 2000)]
        axes.plot(ratio, np.linspace(0, 1, len(ratio)), color=colour(policy), label=short(policy))
    axes.legend(fontsize=8)
    figure.savefig(path)


def learning_curve(curve: Sequence[Mapping[str, float]], path: Path, *, paired: bool) -> None:
    """Mean reward by decisions taken: each rollout, and a running mean; ``paired`` says what the reward is."""
    reward = "mean reward less that of the same\nepisodes without pacing" if paired else "mean reward"
    figure, axes = _axes("Learning curve", "decisions, thousands", reward)
    x = np.array([row["timesteps"] for row in curve]) / 1000.0
    y = np.array([row["reward"] for row in curve])
    axes.plot(x, y, color=colour("learned"), alpha=0.3, linewidth=0.8)
    width = max(1, len(y) // 20)
    if len(y) > width:
        axes.plot(x[width - 1 :], np.convolve(y, np.ones(width) / width, "valid"), color=colour("learned"))
    figure.savefig(path)


def pareto(comparison: Comparison, path: Path) -> None:
    """Throughput gain against CV over the whole suite, a point a policy, with the gain's interval."""
    figure, axes = _axes(
        f"Suite {comparison.suite.name}", "mean coefficient of variation of step time", "throughput against passive, %"
    )
    for policy in comparison.policies:
        score = comparison.total(policy)
        below, above = 100 * (score.gain - score.gain_ci95[0]), 100 * (score.gain_ci95[1] - score.gain)
        axes.errorbar(
            score.cv, 100 * score.gain, [[max(below, 0.0)], [max(above, 0.0)]], fmt="o", color=colour(policy), capsize=3
        )
        axes.annotate(short(policy), (score.cv, 100 * score.gain), (6, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0.0, color="#999999", linewidth=0.8)
    axes.margins(x=0.2)
    figure.savefig(path)
