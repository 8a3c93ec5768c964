"""Scores of static settings: many side by side in one batch of the engine, on common random numbers.

Legend: S settings, C cases, E episodes (seeds), M mechanisms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.limits import LIMITS, Limits
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.rollout import start, useful_step_s
from paceenv.sim.cluster import Cluster

Array = NDArray[np.float64]
SETTINGS_AT_ONCE = 32
"""Settings in one batch of the engine: with their seeds some hundred rows, which is as fast as it gets."""

Setting = tuple[tuple[str, float, float], ...]
"""(mechanism, threshold, window) of each mechanism that is on."""


def spelled(setting: Setting) -> str:
    """The static policy's name with this setting, as command lines spell it; without any mechanism passive."""
    options = ",".join(f"{m}={threshold:g}/{window:g}" for m, threshold, window in setting)
    return f"static:{options}" if options else "passive"


def encoded(mechanism: str, threshold: float, window: float) -> tuple[float, float]:
    """The two normalised actions in [-1, 1] that ``pacing.decode_action`` turns into this threshold and window.

    Args:
        mechanism: name of the mechanism.
        threshold: 0 to its largest.
        window: share of the baseline step, 0 to ``pacing.MAX_WINDOW``.
    """
    most = pacing.MAX_THRESHOLD[pacing.MECHANISMS.index(mechanism)]
    share = math.sqrt(window / pacing.MAX_WINDOW)
    return 2.0 * math.sqrt(threshold / most) - 1.0, pacing.OFF_BELOW + (1.0 - pacing.OFF_BELOW) * share


@dataclass(frozen=True)
class Scores:
    """Results of settings, each ``(S, C, E)``: throughput gain over passive, CV, energy over passive's.

    Energy is that of a useful iteration, as a ratio; not-a-number on clusters without power figures.
    """

    gain_SCE: Array
    cv_SCE: Array
    energy_SCE: Array


@dataclass(frozen=True)
class Problem:
    """Clusters and seeds on which settings are tried, and the same episodes without pacing."""

    clusters: tuple[Cluster, ...]
    seeds_E: NDArray[np.int64]
    iterations: int
    passive: tuple[Array, ...]
    """For each cluster mean step in seconds, CV and energy in joules an iteration, ``(3, 1, E)``."""
    limits: Limits = LIMITS

    @classmethod
    def of(
        cls,
        clusters: Sequence[Cluster],
        seeds_E: NDArray[np.int64],
        iterations: int,
        *,
        threads: int = 1,
        limits: Limits = LIMITS,
    ) -> Problem:
        """Simulate every cluster without pacing.

        Args:
            clusters: the clusters.
            seeds_E: seeds of each.
            iterations: length of a run.
            threads: threads of the engine; results do not depend on it.
            limits: of every delay, as those under which a winner is judged.
        """
        passive = tuple(_run([()], cluster, seeds_E, iterations, threads, limits) for cluster in clusters)
        return cls(tuple(clusters), seeds_E, iterations, passive, limits)

    def score(
        self,
        settings: Sequence[Setting],
        clusters: Sequence[int] | None = None,
        *,
        threads: int = 1,
        on_share: Callable[[float], None] = lambda share: None,
    ) -> Scores:
        """Simulate settings on clusters; no setting's result depends on another's.

        Args:
            settings: the settings, S of them.
            clusters: positions of the clusters, in this order; None for all.
            threads: threads of the engine; results do not depend on it.
            on_share: called with the share that is done.
        """
        chosen = range(len(self.clusters)) if clusters is None else clusters
        found = np.empty((3, len(settings), len(chosen), len(self.seeds_E)))
        for place, c in enumerate(chosen):
            step_1E, _, energy_1E = self.passive[c]
            for first in range(0, len(settings), SETTINGS_AT_ONCE):
                some = slice(first, first + SETTINGS_AT_ONCE)
                step_SE, cv_SE, energy_SE = _run(
                    settings[some], self.clusters[c], self.seeds_E, self.iterations, threads, self.limits
                )
                found[:, some, place] = step_1E / step_SE - 1.0, cv_SE, energy_SE / energy_1E
            on_share((place + 1) / len(chosen))
        return Scores(*found)


def _run(
    settings: Sequence[Setting],
    cluster: Cluster,
    seeds_E: NDArray[np.int64],
    iterations: int,
    threads: int,
    limits: Limits,
) -> Array:
    """Mean steps in seconds, CVs, joules an iteration ``(3, S, E)``; the first interval unpaced, as in a rollout."""
    simulator = start(cluster, np.tile(seeds_E, len(settings)), threads, limits)
    given = np.stack([sum((pacing.one_mechanism(*part) for part in setting), pacing.off()) for setting in settings])
    simulator.quiet_start()
    before = simulator.outcome()
    step_ET = np.concatenate(
        [
            simulator.run(simulator.off(), INTERVAL_ITERATIONS),
            simulator.run(np.repeat(given, len(seeds_E), axis=0)[:, None], iterations - INTERVAL_ITERATIONS),
        ],
        axis=1,
    )
    mean_E, sd_E, outcome = step_ET.mean(axis=1), step_ET.std(axis=1), simulator.outcome().since(before)
    energy_E = np.where(outcome.energy_j > 0.0, outcome.energy_j, np.nan) / outcome.useful_iterations
    return np.stack([useful_step_s(step_ET, outcome), sd_E / mean_E, energy_E]).reshape(3, len(settings), -1)
