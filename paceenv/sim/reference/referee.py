"""The referee's face: arrays as those of the engine's ``Simulator``, for E seeds one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.limits import LIMITS, Limits
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import Outcome, episode_keys
from paceenv.sim.reference.coupled_steps import Job


class Reference:
    """A job in simulation, an episode for each of E seeds."""

    def __init__(self, cluster: Cluster, seeds: Sequence[int], limits: Limits = LIMITS) -> None:
        self.limits, keys_E = limits, episode_keys(list(seeds))
        self.batch = derive(cluster, keys_E)
        self._mean_delay_E = np.zeros(len(keys_E))
        with np.errstate(over="ignore"):  # the hashes want integers that wrap
            self.jobs = [Job(cluster, key, limits) for key in keys_E]

    def off(self) -> NDArray[np.float64]:
        """Settings with every mechanism off."""
        return pacing.off(len(self.jobs), 1)

    def run(self, settings_ESM2: NDArray[np.float64], iterations: int) -> NDArray[np.float64]:
        """Step times ``(E, T)``, seconds."""
        return self.record(settings_ESM2, iterations).step_ET

    def record(self, settings_ESM2: NDArray[np.float64], iterations: int) -> Recording:
        """As :meth:`run`, with every stamp."""
        with np.errstate(over="ignore"):
            runs = [job.steps(one, iterations) for job, one in zip(self.jobs, settings_ESM2, strict=True)]
        by_field = zip(*([*zip(*steps, strict=True)] for steps in runs), strict=True)
        out = Recording(*(np.array(field, np.float64) for field in by_field))
        self._mean_delay_E = out.delay_ETR.mean(axis=(1, 2))
        return out

    def quiet_start(self) -> None:
        """Run the first iterations, in which the limits allow no delay; pacing begins after them."""
        if self.limits.quiet_first:
            self.run(self.off(), self.limits.quiet_first)
        for job in self.jobs:
            job.begin_pacing()

    def observe(self, *, every_rank: bool = False) -> NDArray[np.float32]:
        """Observations of the last run: ``(E, O)`` of the observer ranks, or ``(E, R, O)`` of every rank."""
        with np.errstate(over="ignore"):
            views = [job.views() for job in self.jobs]
        return np.array([view_RO if every_rank else view_RO[observer] for view_RO, observer in views])

    def mean_delay_s(self) -> NDArray[np.float64]:
        """Mean delay over ranks and iterations of the last run, ``(E,)``, seconds."""
        return self._mean_delay_E

    def outcome(self) -> Outcome:
        """What the episodes came to so far."""
        return Outcome(*(np.array(total) for total in zip(*(job.totals() for job in self.jobs), strict=True)))
