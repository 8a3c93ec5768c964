"""Several seeds of one cluster, one after the other, with the fast engine's face for a batch of environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import JobBatch, Outcome
from paceenv.sim.reference.message_job import Reference
from paceenv.sim.reference.setup import Setup

MAX_WORK = 5 * 10**9
"""Messages times ranks that a run may take: every event looks at all that is under way, about 0.5 us for each."""


def check_size(setup: Setup, iterations: int, seeds: int) -> None:
    """Refuse what would take hours. Raises InputError."""
    if setup.messages * setup.ranks * iterations * seeds > MAX_WORK:
        raise InputError(
            f"{setup.name}: messages x ranks x iterations x seeds = {setup.messages} x {setup.ranks} x {iterations} "
            f"x {seeds}; allowed in the reference engine: at most {MAX_WORK:.0e}"
        )


class References:
    """One :class:`Reference` for each of E seeds; arrays are as those of ``paceenv.sim.engine.simulator.Simulator``."""

    def __init__(self, cluster: Cluster, seeds: Sequence[int]) -> None:
        self._each = [Reference(cluster, int(seed)) for seed in seeds]
        batches = [one.batch for one in self._each]
        self.batch = JobBatch(
            np.concatenate([b.jobs for b in batches]),
            np.concatenate([b.tenants_EK for b in batches]),
            cluster.ranks,
            cluster.groups,
            np.concatenate([b.skewness_E for b in batches]),
        )

    def off(self) -> NDArray[np.float64]:
        """Settings for the batch with every mechanism off."""
        return pacing.off(len(self._each), 1)

    def run(self, settings_ESM2: NDArray[np.float64], iterations: int) -> NDArray[np.float64]:
        """Step times ``(E, T)``, seconds."""
        return np.concatenate([one.run(settings_ESM2[e, None], iterations) for e, one in enumerate(self._each)])

    def record(self, settings_ESM2: NDArray[np.float64], iterations: int) -> Recording:
        """As :meth:`run`, with every stamp."""
        parts = [one.record(settings_ESM2[e, None], iterations) for e, one in enumerate(self._each)]
        return Recording(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def observe(self, *, every_rank: bool = False) -> NDArray[np.float32]:
        """Observations of the last run: ``(E, O)`` of the observer ranks, or ``(E, R, O)`` of every rank."""
        return np.concatenate([one.observe(every_rank=every_rank) for one in self._each])

    def mean_delay_s(self) -> NDArray[np.float64]:
        """Mean delay over ranks and iterations of the last run, ``(E,)``, seconds."""
        return np.concatenate([one.mean_delay_s() for one in self._each])

    def outcome(self) -> Outcome:
        """What the episodes came to so far."""
        parts = [one.outcome() for one in self._each]
        return Outcome(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Outcome)))
