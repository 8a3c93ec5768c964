"""The steps of a job, measured and simulated: what all stamps of a trace have, and how long steps are.

Axes: T steps, R ranks, E simulated runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Simulator, episode_keys

MIN_UNPACED: Final = 16
"""Steps without pacing from which on only those count as what the job does by itself."""
GOOD_MEAN, GOOD_CV = 0.05, 0.03
"""How far a good fit may be off: of the mean step relative to it, of its coefficient of variation."""
_EPISODES = 32
_BLOCKS = 8
"""Blocks of consecutive steps, whose means give the error of the mean."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepStamps:
    """What the stamps of a job have, however its step is described.

    ``names`` are the trace's numbers of the ranks, in the order of axis R. ``begin_T`` is when an iteration began on
    the trace's clock, seconds, ``iteration_T`` its number, ``step_T`` how long it took. ``dropped`` counts the
    iterations left out: incomplete, unlike the usual ones, or with a checkpoint.
    """

    name: str
    source: str
    names: tuple[int, ...]
    iteration_T: NDArray[np.int64]
    begin_T: Array
    step_T: Array
    dropped: int

    @property
    def ranks(self) -> int:
        return len(self.names)

    @property
    def unpaced_T(self) -> NDArray[np.bool_]:
        """Iterations without any delay."""
        return np.ones(len(self.step_T), np.bool_)

    @property
    def steady_T(self) -> NDArray[np.bool_]:
        """Iterations that show the job by itself: those without pacing, or all where too few are without."""
        unpaced_T = self.unpaced_T
        return unpaced_T if unpaced_T.sum() >= MIN_UNPACED else np.ones_like(unpaced_T)

    @property
    def described(self) -> str:
        """The job and its trace, in words."""
        return f"{self.name} ({self.source})"

    def part(self, use_T: NDArray[np.bool_]) -> Self:
        """The stamps of some iterations: of every field whose first axis is T."""
        names = [one.name for one in fields(self) if one.name.rpartition("_")[2].startswith("T")]
        parts: dict[str, Any] = {name: getattr(self, name)[use_T] for name in names}
        return replace(self, **parts)


@dataclass(frozen=True)
class Steps:
    """Mean step of a job in seconds, and its coefficient of variation.

    For simulated runs, as long as the trace, these are means over runs, and ``_sd`` is the standard deviation between
    runs: a job that locks into a tenant's phase differs from run to run. For a trace ``mean_sd`` comes from blocks.
    """

    mean_s: float
    cv: float
    mean_sd: float = 0.0
    cv_sd: float = 0.0


def of_trace(step_T: Array) -> Steps:
    """Statistics of a trace's steps ``(T,)``, seconds; blocks give the error of the mean, as near steps are alike."""
    blocks = np.array([block.mean() for block in np.array_split(step_T, min(_BLOCKS, len(step_T)))])
    mean_s = float(step_T.mean())
    se = float(blocks.std(ddof=1)) / math.sqrt(len(blocks))
    return Steps(mean_s, float(step_T.std(ddof=1)) / mean_s, se)


def simulator_of(cluster: Cluster, runs: int = 1, first: int = 0) -> Simulator:
    """Runs of a cluster with seeds from ``first`` on."""
    keys_E = episode_keys(list(range(first, first + runs)))
    return Simulator(derive(cluster, keys_E), keys_E)


def simulate(cluster: Cluster, iterations: int) -> Steps:
    """Statistics of runs of a cluster without pacing, each ``iterations`` long."""
    simulator = simulator_of(cluster, _EPISODES)
    step_ET = simulator.run(simulator.off(), iterations)
    mean_E = step_ET.mean(axis=1)
    cv_E = step_ET.std(axis=1, ddof=1) / mean_E
    return Steps(float(mean_E.mean()), float(cv_E.mean()), float(mean_E.std()), float(cv_E.std()))
