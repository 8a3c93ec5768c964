"""Static settings: their scores, many side by side in one batch on common random numbers, and the best one by a grid.

Legend: S settings, C cases, E episodes (seeds), M mechanisms.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.limits import LIMITS, Limits
from paceenv.core.pacing import Candidate
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.names import spelled
from paceenv.policies.rollout import useful_step_s
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.ui import output
from paceenv.ui.config_files import Mechanism

Array = NDArray[np.float64]
GRID: Mapping[Mechanism, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "slack": ((0.0, 0.02, 0.05, 0.1), (0.05, 0.1, 0.3, 0.6)),
    "phase_shift": ((0.05, 0.1, 0.15, 0.2, 0.3, 0.5), (0.02, 0.05, 0.1, 0.3)),
    "stagger": ((0.0, 0.25, 0.5), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "defer": ((0.0, 0.01), (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)),
    "mean_slack": ((0.0, 0.02, 0.05), (0.05, 0.1, 0.2, 0.3)),
}
"""Thresholds and windows that are tried, by mechanism: finer than those of the look-ahead, which tries them often."""
SETTINGS_AT_ONCE = 32
"""Settings in one batch of the engine: with their seeds some hundred rows, which is as fast as it gets."""


class Problem:
    """Clusters and seeds on which settings are tried, and the same episodes without pacing."""

    def __init__(
        self,
        clusters: Sequence[Cluster],
        seeds_E: NDArray[np.int64],
        iterations: int,
        *,
        threads: int = 1,
        limits: Limits = LIMITS,
    ) -> None:
        self.clusters, self.limits = tuple(clusters), limits
        self._seeds_E, self._iterations, self._threads = seeds_E, iterations, threads
        self._passive_1E = [self._run([{}], cluster)[0] for cluster in clusters]

    def score(self, settings: Sequence[Candidate], on_share: Callable[[float], None] = lambda share: None) -> Array:
        """Simulate settings on all clusters; no setting's result depends on another's.

        Returns their gains in throughput over passive, and their CVs, ``(2, S, C, E)``.
        """
        found_2SCE = np.empty((2, len(settings), len(self.clusters), len(self._seeds_E)))
        gain_SCE, cv_SCE = found_2SCE
        for c, (cluster, passive_1E) in enumerate(zip(self.clusters, self._passive_1E, strict=True)):
            for first in range(0, len(settings), SETTINGS_AT_ONCE):
                some = slice(first, first + SETTINGS_AT_ONCE)
                step_SE, cv_SCE[some, c] = self._run(settings[some], cluster)
                gain_SCE[some, c] = passive_1E / step_SE - 1.0
            on_share((c + 1) / len(self.clusters))
        return found_2SCE

    def _run(self, settings: Sequence[Candidate], cluster: Cluster) -> Array:
        """Mean steps in seconds, and CVs, ``(2, S, E)``; the first interval unpaced as in a rollout."""
        seeds_E = self._seeds_E
        simulator = start(cluster, np.tile(seeds_E, len(settings)), self._threads, self.limits)
        given = np.stack([pacing.settings(setting) for setting in settings])
        simulator.quiet_start()
        before = simulator.outcome()
        step_ET = np.concatenate(
            [
                simulator.run(simulator.off(), INTERVAL_ITERATIONS),
                simulator.run(np.repeat(given, len(seeds_E), axis=0)[:, None], self._iterations - INTERVAL_ITERATIONS),
            ],
            axis=1,
        )
        useful_E = useful_step_s(step_ET, simulator.outcome().since(before))
        return np.stack([useful_E, step_ET.std(axis=1) / step_ET.mean(axis=1)]).reshape(2, len(settings), -1)


def joint(settings: Sequence[Candidate], value_S: NDArray[np.float64], combine: int) -> list[Candidate]:
    """The best settings of each mechanism together with those of other mechanisms."""
    order = np.argsort(-value_S, kind="stable")
    mechanisms = dict.fromkeys(itertools.chain(*settings))
    top = [[settings[s] for s in order if m in settings[s]][:combine] for m in mechanisms]
    combined = (
        {m: pair for one in chosen for m, pair in one.items()}
        for chosen in itertools.product(*([{}, *choices] for choices in top))
    )
    return [setting for setting in combined if len(setting) > 1]


SEEDS_SHARE, COMBINE = 4, 3
"""One seed in so many of a suite's; best settings of each mechanism that are tried together."""
LEAST_EPISODES = 96
"""Over all clusters of a suite: with 24 a setting was chosen that lost a third of the best one's gain."""


@dataclass(frozen=True)
class StaticSearch:
    """Throughput gain over passive of every setting on every case, ``(settings, cases, seeds)``."""

    cases: Sequence[Case]
    settings: Sequence[Candidate]
    gain_SCE: NDArray[np.float64]

    def best(self) -> str:
        """The single setting with the highest mean gain over all cases, by their weights."""
        weights = np.array([case.weight for case in self.cases])
        return spelled(self.settings[int((self.gain_SCE.mean(axis=2) @ weights).argmax())])

    def best_of_each(self) -> dict[str, str]:
        """By case, the setting with the highest mean gain there."""
        best_C = self.gain_SCE.mean(axis=2).argmax(axis=0)
        return {case.name: spelled(self.settings[s]) for case, s in zip(self.cases, best_C.tolist(), strict=True)}


def search_static(suite: Suite, title: str = "") -> StaticSearch:
    """Try every mechanism of the suite alone on the default grid of sweeps, then the best of them together.

    It takes other seeds than the suite's own, so a setting's score there is not its own selection. Of large suites it
    takes fewer of them, as settings are compared on common random numbers.

    Args:
        title: of the progress that is shown; without one there is none.
    """
    loaded = [case.load() for case in suite.cases]
    count = max(suite.seeds // SEEDS_SHARE, -(-LEAST_EPISODES // len(loaded)))
    seeds = np.arange(count) + suite.first_seed + 10 * suite.seeds
    weights = np.array([case.weight for case in suite.cases])
    settings: list[Candidate] = [{m: pair} for m in suite.mechanisms for pair in itertools.product(*GRID[m])]
    with output.progress(title, 1, shown=bool(title)) as done:
        problem = Problem(loaded, seeds, suite.iterations, threads=len(os.sched_getaffinity(0)), limits=suite.limits)
        gain_SCE = problem.score(settings, lambda share: done(0.5 * share))[0]
        if together := joint(settings, gain_SCE.mean(axis=2) @ weights, COMBINE):
            more = problem.score(together, lambda share: done(0.5 + 0.5 * share))[0]
            settings, gain_SCE = [*settings, *together], np.concatenate([gain_SCE, more])
    return StaticSearch(suite.cases, settings, gain_SCE)
