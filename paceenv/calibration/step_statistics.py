"""Mean step and variation of a job, in its trace and in simulation. Axes: E runs, T iterations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Simulator, episode_keys

GOOD_MEAN, GOOD_CV = 0.05, 0.03
"""How far a good fit may be off: of the mean step relative to it, of its coefficient of variation."""
_EPISODES = 32
_BLOCKS = 8
"""Blocks of consecutive steps, whose means give the error of the mean."""

Array = NDArray[np.float64]


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
    blocks = np.array([block.mean() for block in np.array_split(step_T, _BLOCKS)])
    mean_s = float(step_T.mean())
    se = float(blocks.std(ddof=1)) / math.sqrt(_BLOCKS)
    return Steps(mean_s, float(step_T.std(ddof=1)) / mean_s, se)


def simulate(cluster: Cluster, iterations: int) -> Steps:
    """Statistics of runs of a cluster without pacing, each ``iterations`` long."""
    keys_E = episode_keys(list(range(_EPISODES)))
    simulator = Simulator(derive(cluster, keys_E), keys_E)
    step_ET = simulator.run(simulator.off(), iterations)
    mean_E = step_ET.mean(axis=1)
    cv_E = step_ET.std(axis=1, ddof=1) / mean_E
    return Steps(float(mean_E.mean()), float(cv_E.mean()), float(mean_E.std()), float(cv_E.std()))
