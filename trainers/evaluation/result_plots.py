"""Pictures of policies: ranks over time, policies side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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


def side_by_side_page(result: SuiteResult) -> str:
    """A page of one file: for every cluster the ranks under each policy, on the noise of the suite's first seed."""
    suite, sections = result.suite, []
    for case in suite.cases:
        drawn = ranks_over_time(
            case.load(), result.policies, seed=suite.first_seed, iterations=suite.iterations, limits=suite.limits
        )
        gains = [f"{short(one)} {result.gain_E(one, case).mean():+z.1%}" for one in result.policies[1:]]
        caption = f"Throughput against no pacing, mean of {suite.seeds} seeds: {', '.join(gains)}."
        title = f"{case.name}{' (null: pacing cannot help)' if case.null_case else ''}"
        sections.append(Section(title, [caption], svg=figures.svg(drawn, f"{case.name}: ranks over time")))
    note = f"{SHOWN_STEPS} steps of {suite.iterations}, close to every policy's mean. All policies meet the same noise."
    return page(f"Policies side by side on {suite.name}", note, sections)
