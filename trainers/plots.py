"""The pictures of a run: scaling curve, step-time distributions, learning curve, Pareto of throughput and CV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paceenv.calibration.scaling import Comparison as Published
from paceenv.figures import STATIC_COLOUR, axes, colour
from trainers.evaluate import Comparison
from trainers.report import label


def short(policy: str) -> str:
    """A policy's name as a legend has room for."""
    return "best static" if policy.startswith("static:") else label(policy)


def scaling_curve(rows: Sequence[Published], path: Path) -> None:
    """Throughput by number of nodes, published beside simulated, without and with coordination."""
    figure, panel = axes("When Scaling Fails, Table 1: published and simulated", "nodes", "throughput, samples/s")
    nodes = sorted({row.nodes for row in rows})
    table = {(row.nodes, row.quantity): row for row in rows}
    first = table[nodes[0], "baseline throughput"].expected
    panel.plot(nodes, [first * n / nodes[0] for n in nodes], ":", color="#999999", label="linear")
    for column, shade in (("baseline", "#555555"), ("coordination", STATIC_COLOUR)):
        found = [table[n, f"{column} throughput"] for n in nodes]
        panel.plot(nodes, [r.simulated for r in found], "-", color=shade, label=f"{column}, simulated")
        for r in found:
            label = f"{column}, published" if r is found[0] else None
            panel.plot(r.nodes, r.expected, "o", color=shade, fillstyle="full" if r.fit else "none", label=label)
    panel.set(xscale="log", yscale="log", xticks=nodes, xticklabels=[str(n) for n in nodes])
    panel.minorticks_off()
    panel.set_yticks(ticks := [1000, 2000, 4000, 8000, 16000], [str(t) for t in ticks])
    panel.legend(fontsize=8, title="filled: seen by the fit, open: predicted", title_fontsize=8)
    figure.savefig(path)


def step_distributions(comparison: Comparison, cluster: str, path: Path) -> None:
    """Cumulative distribution of step times over the ideal step on one cluster, a curve a policy."""
    figure, panel = axes(f"Step time on {cluster}", "step time / ideal step time", "share of steps below")
    for policy in comparison.policies:
        rollout = comparison.rollouts[policy, cluster]
        ratio = np.sort((rollout.step_ET / rollout.ideal_step_E[:, None]).ravel())
        ratio = ratio[:: max(1, len(ratio) // 2000)]
        panel.plot(ratio, np.linspace(0, 1, len(ratio)), color=colour(policy), label=short(policy))
    panel.legend(fontsize=8)
    figure.savefig(path)


def learning_curve(curve: Sequence[Mapping[str, float]], path: Path, *, paired: bool) -> None:
    """Mean reward by decisions taken: each rollout, and a running mean; ``paired`` says what the reward is."""
    reward = "mean reward less that of the same\nepisodes without pacing" if paired else "mean reward"
    figure, panel = axes("Learning curve", "decisions, thousands", reward)
    x = np.array([row["timesteps"] for row in curve]) / 1000.0
    y = np.array([row["reward"] for row in curve])
    panel.plot(x, y, color=colour("learned"), alpha=0.3, linewidth=0.8)
    width = max(1, len(y) // 20)
    if len(y) > width:
        panel.plot(x[width - 1 :], np.convolve(y, np.ones(width) / width, "valid"), color=colour("learned"))
    figure.savefig(path)


def pareto(comparison: Comparison, path: Path) -> None:
    """Throughput gain against CV over the whole suite, a point a policy, with the gain's interval."""
    figure, panel = axes(
        f"Suite {comparison.suite.name}", "mean coefficient of variation of step time", "throughput against passive, %"
    )
    for policy in comparison.policies:
        score = comparison.total(policy)
        below, above = 100 * (score.gain - score.gain_ci95[0]), 100 * (score.gain_ci95[1] - score.gain)
        panel.errorbar(
            score.cv, 100 * score.gain, [[max(below, 0.0)], [max(above, 0.0)]], fmt="o", color=colour(policy), capsize=3
        )
        panel.annotate(short(policy), (score.cv, 100 * score.gain), (6, 4), textcoords="offset points", fontsize=8)
    panel.axhline(0.0, color="#999999", linewidth=0.8)
    panel.margins(x=0.2)
    figure.savefig(path)
