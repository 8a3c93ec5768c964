"""A rollout with everything kept: what ranks saw, what was decided, what they spent their time on. Talks to the engine.

Legend: T iterations, I decisions (control intervals after the first), R ranks, M mechanisms, O signals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy
from paceenv.policies.clairvoyant import Clairvoyant
from paceenv.policies.ranges import Outside
from paceenv.policies.rollout import run, start
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine import phases
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.phases import Phase
from paceenv.sim.engine.simulator import JobBatch


@dataclass(frozen=True)
class Watched:
    """One job under one policy, one seed; seconds.

    ``views_IRO`` is what each decision was made on, ``settings_IRM2`` what was decided; a policy that does not look
    (a constant, the clairvoyant bound) could have seen the same. ``outside`` is of the rollout.
    """

    policy: str
    batch: JobBatch
    recording: Recording
    views_IRO: NDArray[np.float32]
    settings_IRM2: NDArray[np.float64]
    outside: Outside | None

    @property
    def step_T(self) -> NDArray[np.float64]:
        """Step times."""
        return np.asarray(self.recording.step_ET[0])

    @property
    def delay_TR(self) -> NDArray[np.float64]:
        """Each rank's delay at the start of its iteration."""
        return np.asarray(self.recording.delay_ETR[0])

    @cached_property
    def phases(self) -> list[Phase]:
        """What the ranks spent their time on."""
        return phases.phases(self.recording, self.batch)

    @property
    def views_BO(self) -> NDArray[np.float32]:
        """Every view of every rank."""
        return self.views_IRO.reshape(-1, signals.SIGNALS)

    def on_share(self) -> dict[str, float]:
        """Share of the ranks' decisions with which each mechanism was on, by its name."""
        on_M = (self.settings_IRM2[..., pacing.WINDOW] > 0.0).mean(axis=(0, 1))
        return dict(zip(pacing.MECHANISMS, on_M.tolist(), strict=True))

    def wait_s_R(self, shown: slice) -> NDArray[np.float64]:
        """Each rank's mean wait in these steps: for peers, in the barrier, its own delay. The critical wait least."""
        waits = [p.length_TR[shown] for p in self.phases if p.name in {"delay", "wait for peers", "barrier wait"}]
        return np.asarray(np.sum(waits, axis=0).mean(axis=0))


def watch(
    policy: Policy | Clairvoyant,
    cluster: Cluster,
    seed: int,
    iterations: int,
    *,
    name: str | None = None,
    on_interval: Callable[[int], None] = lambda done: None,
) -> Watched:
    """Run a policy with one seed's noise and keep everything, 24 bytes a rank and iteration.

    Args:
        policy: the policy.
        cluster: the cluster to simulate.
        seed: seed of cluster and noise.
        iterations: more than one control interval of the policy, as the first one is without pacing.
        name: name of the rollout; None for the policy's.
        on_interval: called with the iterations done so far.

    Raises:
        ValueError: for too few iterations.
    """
    interval = policy.interval_iterations if isinstance(policy, Policy) else INTERVAL_ITERATIONS
    if iterations <= interval:
        raise ValueError(f"{iterations} iterations; a first decision needs more than {interval}")
    simulator = start(cluster, np.array([seed]))
    views: list[NDArray[np.float32]] = []
    settings: list[NDArray[np.float64]] = []
    recordings: list[Recording] = []

    def keep(settings_ESM2: NDArray[np.float64]) -> None:
        views.append(simulator.observe(every_rank=True)[0])
        one_SM2 = settings_ESM2[0]
        settings.append(np.broadcast_to(one_SM2, (simulator.batch.ranks, *one_SM2.shape[1:])).copy())

    done = run(policy, simulator, iterations, on_interval=on_interval, on_recording=recordings.append, on_settings=keep)
    recording = phases.joined(recordings)
    return Watched(name or policy.name, simulator.batch, recording, np.stack(views), np.stack(settings), done.outside)
