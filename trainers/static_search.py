"""The bar to beat: the best static setting by sweep, for a whole suite and for each of its clusters."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv import pacing
from paceenv.cluster import Cluster
from policies.rollout import INTERVAL_ITERATIONS, start
from trainers.suites import Case, Mechanism, Suite

GRID: Mapping[Mechanism, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "slack": ((0.0, 0.02, 0.05, 0.1), (0.05, 0.1, 0.3, 0.6)),
    "slide": ((0.05, 0.1, 0.15, 0.2, 0.3, 0.5), (0.02, 0.05, 0.1, 0.3)),
    "stagger": ((0.0, 0.25, 0.5), (0.1, 0.2, 0.3, 0.4, 0.5)),
}
"""Thresholds and windows that are tried, by mechanism."""
COMBINED = 3
"""How many of each mechanism's best settings are tried together with the others'."""
SEEDS_SHARE = 4
_SETTINGS_AT_ONCE = 32

Setting = tuple[tuple[str, float, float], ...]
"""(mechanism, threshold, window) of each mechanism that is on."""


def spelled(setting: Setting) -> str:
    """The static policy's name with this setting, as command lines spell it."""
    return "static:" + ",".join(f"{m}={threshold:g}/{window:g}" for m, threshold, window in setting)


@dataclass(frozen=True)
class StaticSearch:
    """What every setting came to on every case: throughput gain over passive and CV, ``(settings, cases, seeds)``."""

    cases: Sequence[Case]
    settings: Sequence[Setting]
    gain_SCE: NDArray[np.float64]
    cv_SCE: NDArray[np.float64]

    def best(self) -> str:
        """The single setting with the highest mean gain over all cases, by their weights."""
        weights = np.array([case.weight for case in self.cases])
        return spelled(self.settings[int((self.gain_SCE.mean(axis=2) @ weights).argmax())])

    def best_for(self, name: str) -> str:
        """The setting with the highest gain on the case of that name."""
        c = [case.name for case in self.cases].index(name)
        return spelled(self.settings[int(self.gain_SCE[:, c].mean(axis=1).argmax())])


def search_static(
    suite: Suite,
    clusters: Mapping[str, Cluster] | None = None,
    on_done: Callable[[float], None] = lambda done: None,
) -> StaticSearch:
    """Try every mechanism of the suite alone on :data:`GRID`, then the best of them together.

    On other seeds than the suite's own, so that a setting's score there is not its own selection, and on fewer:
    settings are compared on common random numbers. ``clusters`` replaces configs by the name of their case;
    ``on_done`` is told the share that is done.
    """
    loaded = [(clusters or {}).get(case.name) or case.load() for case in suite.cases]
    seeds = np.arange(max(suite.seeds // SEEDS_SHARE, 2)) + suite.first_seed + 10 * suite.seeds
    weights = np.array([case.weight for case in suite.cases])
    single: list[Setting] = [((m, t, w),) for m in suite.mechanisms for t, w in itertools.product(*GRID[m])]
    found = _outcomes(single, loaded, seeds, suite.iterations, lambda share: on_done(0.5 * share))
    settings = single
    if len(suite.mechanisms) > 1:
        order = np.argsort(-(found[0].mean(axis=2) @ weights), kind="stable")
        top = [[single[s] for s in order if single[s][0][0] == m][:COMBINED] for m in suite.mechanisms]
        joint: list[Setting] = [
            tuple(part for choice in chosen for part in choice)
            for chosen in itertools.product(*([(), *choices] for choices in top))
            if sum(map(len, chosen)) > 1
        ]
        more = _outcomes(joint, loaded, seeds, suite.iterations, lambda share: on_done(0.5 + 0.5 * share))
        settings, found = [*single, *joint], np.concatenate([found, more], axis=1)
    on_done(1.0)
    return StaticSearch(suite.cases, settings, found[0], found[1])


def _outcomes(
    settings: Sequence[Setting],
    clusters: Sequence[Cluster],
    seeds: NDArray[np.int64],
    iterations: int,
    on_share: Callable[[float], None],
) -> NDArray[np.float64]:
    """Gains and CVs ``(2, settings, cases, seeds)``; many settings run side by side, all on the same seeds."""
    found = np.empty((2, len(settings), len(clusters), len(seeds)))
    for c, cluster in enumerate(clusters):
        passive_E = _run([()], cluster, seeds, iterations)[0][0]
        for first in range(0, len(settings), _SETTINGS_AT_ONCE):
            some = slice(first, first + _SETTINGS_AT_ONCE)
            mean_SE, cv_SE = _run(settings[some], cluster, seeds, iterations)
            found[0, some, c], found[1, some, c] = passive_E / mean_SE - 1.0, cv_SE
        on_share((c + 1) / len(clusters))
    return found


def _run(
    settings: Sequence[Setting], cluster: Cluster, seeds: NDArray[np.int64], iterations: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean step times in seconds and CVs, ``(settings, seeds)``; the first interval without pacing, as in a rollout."""
    simulator = start(cluster, np.tile(seeds, len(settings)), threads=os.cpu_count() or 1)
    given = np.stack([sum((pacing.one_mechanism(*part) for part in setting), pacing.off()) for setting in settings])
    step_ET = np.concatenate(
        [
            simulator.run(simulator.off(), INTERVAL_ITERATIONS),
            simulator.run(np.repeat(given, len(seeds), axis=0)[:, None], iterations - INTERVAL_ITERATIONS),
        ],
        axis=1,
    )
    mean_E, sd_E = step_ET.mean(axis=1), step_ET.std(axis=1)
    return mean_E.reshape(len(settings), -1), (sd_E / mean_E).reshape(len(settings), -1)
