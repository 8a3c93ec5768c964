"""The pictures of a run: ranks over time, policies side by side, learning curve."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from paceenv.core.limits import LIMITS, Limits
from paceenv.envs.frames import SHOWN_RANKS, draw_ranks
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.rollout import run
from paceenv.policies.select import select_policy
from paceenv.report.section import Section, page
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import Simulator
from paceenv.trainers.evaluation.evaluate import SuiteResult
from paceenv.trainers.evaluation.score_table import label
from paceenv.ui import figures
from paceenv.ui.figures import colour

SHOWN_STEPS = 3


def short(policy: str) -> str:
    """A policy's name as a legend has room for."""
    if policy == "passive":
        return "without pacing"
    return "best static" if policy.startswith("static:") else label(policy)


def ranks_over_time(
    cluster: Cluster, policies: Sequence[str], *, seed: int = 0, iterations: int = 1000, limits: Limits = LIMITS
) -> Figure:
    """What ranks do in the same :data:`SHOWN_STEPS` steps, policy under policy on the same noise.

    Shown are the steps at the end of that control interval in which every policy is closest to its mean over the run.
    """

    def start_run() -> Simulator:
        return start(cluster, np.array([seed]), limits=limits)

    step_PT = [run(select_policy(policy, cluster), start_run(), iterations).step_ET[0] for policy in policies]
    ends = range(INTERVAL_ITERATIONS, iterations + 1, INTERVAL_ITERATIONS)
    off_PE = [[abs(step_T[end - SHOWN_STEPS : end].mean() / step_T.mean() - 1.0) for end in ends] for step_T in step_PT]
    end = ends[int(np.sum(off_PE, axis=0).argmin())]
    figure, panels = figures.stack([0.22 * min(cluster.ranks, SHOWN_RANKS) + 0.4] * len(policies))
    phase_of: dict[str, Patch] = {}
    for panel, policy, of_run_T in zip(panels, policies, step_PT, strict=True):
        recordings, simulator = deque[Recording](maxlen=1), start_run()
        run(select_policy(policy, cluster), simulator, end, on_recording=recordings.append)
        phase_of |= draw_ranks(panel, recordings[0], simulator.batch, SHOWN_STEPS)
        panel.set_title(f"{short(policy)}: mean step {1e3 * of_run_T.mean():.0f} ms", loc="left")
        panel.grid(visible=False)
    longest_s = max(panel.get_xlim()[1] for panel in panels)
    for panel in panels:
        panel.set_xlim(0.0, longest_s)
    panels[-1].set_xlabel("seconds; a line ends each step")
    figure.legend(handles=list(phase_of.values()), ncols=len(phase_of), loc="outside lower center", frameon=False)
    return figure


def side_by_side_page(result: SuiteResult, on_drawn: Callable[[float], None] = lambda clusters: None) -> str:
    """A page: for every cluster the ranks under each policy, on the seed whose gains are nearest to the means."""
    suite, sections = result.suite, list[Section]()
    for case in suite.cases:
        gain_PE = np.array([result.gain_E(one, case) for one in result.policies[1:]])
        mean_P = gain_PE.mean(axis=1)
        seed = suite.first_seed + int(np.abs(gain_PE - mean_P[:, None]).sum(axis=0).argmin())
        drawn = ranks_over_time(
            case.load(), result.policies, seed=seed, iterations=suite.iterations, limits=suite.limits
        )
        gains = [f"{short(one)} {gain:+z.1%}" for one, gain in zip(result.policies[1:], mean_P, strict=True)]
        caption = f"Throughput against no pacing, mean of {suite.seeds} seeds: {', '.join(gains)}."
        title = f"{case.name}{' (null: pacing cannot help)' if case.null_case else ''}"
        sections.append(Section(title, [caption], svg=figures.svg(drawn, f"{case.name}: ranks over time")))
        on_drawn(len(sections))
    note = (
        f"{SHOWN_STEPS} steps of {suite.iterations}, as close to every policy's mean as any. "
        "All policies meet the same noise: that of the seed on which their gains are nearest to the mean gains. "
        "A shift of phase lasts: its delays may lie before these steps."
    )
    return page(f"Policies side by side on {suite.name}", note, sections)


def learning_curve(curve: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw mean reward over decisions; beside it gap closed and cost on null clusters, where known.

    ``gap_closed`` is on validation clusters, ``null_cost`` on the null clusters of a distillation.
    """

    def of(key: str) -> NDArray[np.float64]:
        """Decisions, thousands, and values."""
        return np.array([(row["timesteps"] / 1000.0, row[key]) for row in curve if key in row]).T

    x, y = of("reward")
    scored, costly = (any(key in row for row in curve) for key in ("gap_closed", "null_cost"))
    figure, panels = figures.figure(1 + scored + costly)
    shade = colour("learned")
    panels[0].plot(x, y, color=shade, alpha=0.25, linewidth=0.8, label="each update")
    width = max(1, len(y) // 20)
    if len(y) > width:
        panels[0].plot(
            x[width - 1 :], np.convolve(y, np.ones(width) / width, "valid"), color=shade, label="running mean"
        )
    panels[0].legend(fontsize=8)
    panels[0].set(ylabel="mean reward less that of the same\nepisodes without pacing", title="training")
    if scored:
        x, closed = of("gap_closed")
        panels[1].plot(x, 100 * closed, "o-", ms=3, color=shade)
        panels[1].set(ylabel="gap to the best known closed, %", title="validation clusters", ylim=(None, 100))
    if costly:
        x, cost = of("null_cost")
        panels[-1].plot(x, 100 * cost, color=shade, linewidth=0.8)
        panels[-1].axhline(0.5, color="#999999", linestyle=":", linewidth=0.8)
        panels[-1].set(ylabel="mean step time on nulls\nagainst no pacing, %", title="constraint (dotted: limit)")
    for panel in panels:
        panel.set_xlabel("decisions, thousands")
    figures.save(figure, path)
