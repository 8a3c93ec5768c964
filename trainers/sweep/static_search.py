"""The best static setting by search, for a whole suite and for each of its clusters.

It takes the grid and the scores of a sweep (``paceenv.trainers.sweep``), in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.cluster import Cluster
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.trainers.sweep.score import Problem, Setting, spelled
from paceenv.trainers.sweep.searches.search import joint, singles
from paceenv.trainers.sweep.sweep_config import Grid

SEEDS_SHARE = 4


@dataclass(frozen=True)
class StaticSearch:
    """Results of every setting on every case: throughput gain over passive and CV, ``(settings, cases, seeds)``."""

    cases: Sequence[Case]
    settings: Sequence[Setting]
    gain_SCE: NDArray[np.float64]
    cv_SCE: NDArray[np.float64]

    def best(self) -> str:
        """The single setting with the highest mean gain over all cases, by their weights."""
        weights = np.array([case.weight for case in self.cases])
        return spelled(self.settings[int((self.gain_SCE.mean(axis=2) @ weights).argmax())])


def search_static(
    suite: Suite,
    clusters: Mapping[str, Cluster] | None = None,
    on_done: Callable[[float], None] = lambda done: None,
) -> StaticSearch:
    """Try every mechanism of the suite alone on the default grid of sweeps, then the best of them together.

    It takes other seeds than the suite's own, so a setting's score there is not its own selection. It takes fewer of
    them, as settings are compared on common random numbers.

    Args:
        suite: clusters, mechanisms, iterations.
        clusters: replaces configs by the name of their case.
        on_done: called with the share that is done.
    """
    loaded = [(clusters or {}).get(case.name) or case.load() for case in suite.cases]
    seeds = np.arange(max(suite.seeds // SEEDS_SHARE, 2)) + suite.first_seed + 10 * suite.seeds
    threads, grid = os.cpu_count() or 1, Grid()
    problem = Problem.of(loaded, seeds, suite.iterations, threads=threads, limits=suite.limits)
    weights = np.array([case.weight for case in suite.cases])
    settings = singles(suite.mechanisms, grid.of)
    alone = problem.score(settings, threads=threads, on_share=lambda share: on_done(0.5 * share))
    gain_SCE, cv_SCE = alone.gain_SCE, alone.cv_SCE
    together = joint(settings, gain_SCE.mean(axis=2) @ weights, grid.combine)
    if together:
        more = problem.score(together, threads=threads, on_share=lambda share: on_done(0.5 + 0.5 * share))
        settings = [*settings, *together]
        gain_SCE, cv_SCE = np.concatenate([gain_SCE, more.gain_SCE]), np.concatenate([cv_SCE, more.cv_SCE])
    on_done(1.0)
    return StaticSearch(suite.cases, settings, gain_SCE, cv_SCE)
