"""Running a policy on simulated clusters: every rank on its own view, many seeds side by side. Talks to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy
from paceenv.policies.clairvoyant import Clairvoyant
from paceenv.policies.ranges import Outside
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import Outcome, Simulator


@dataclass(frozen=True)
class Rollout:
    """The result of a rollout, one row a seed, seconds: delays over all ranks, totals after the quiet start."""

    step_ET: NDArray[np.float64]
    mean_delay_E: NDArray[np.float64]
    ideal_step_E: NDArray[np.float64]
    outcome: Outcome
    outside: Outside | None = None

    @property
    def useful_step_E(self) -> NDArray[np.float64]:
        """Time for each iteration that counts, seconds: the mean step, more where failures undid iterations."""
        return useful_step_s(self.step_ET, self.outcome)


def useful_step_s(step_ET: NDArray[np.float64], outcome: Outcome) -> NDArray[np.float64]:
    """Time for each iteration of a run that no failure has undone, ``(E,)``, seconds.

    A run that failures left without any counts as one iteration.
    """
    useful_E = np.maximum(step_ET.shape[1] - outcome.rerun_iterations, 1.0)
    return np.asarray(step_ET.mean(axis=1) * (step_ET.shape[1] / useful_E))


def run(
    policy: Policy | Clairvoyant,
    simulator: Simulator,
    iterations: int,
    *,
    interval_iterations: int | None = None,
    on_interval: Callable[[int], None] = lambda done: None,
    on_recording: Callable[[Recording], None] | None = None,
) -> Rollout:
    """Run a policy that decides anew every control interval.

    As in a live job the quiet start comes first, and the first interval after it is without pacing, too. Step times,
    delays and totals are those after the quiet start.

    Args:
        interval_iterations: iterations of a control interval; None: the policy's own, 20 for ``clairvoyant``.
        on_recording: called with every interval's time stamps; None records nothing, which is faster.
    """
    if interval_iterations is None:
        interval_iterations = policy.interval_iterations if isinstance(policy, Policy) else INTERVAL_ITERATIONS
    E = len(simulator.batch)
    step_ET, delay_E = np.empty((E, iterations)), np.zeros(E)
    if isinstance(policy, Policy):
        policy.reset(E * simulator.batch.ranks)
    settings = simulator.off()
    simulator.quiet_start()
    before = simulator.outcome()
    for t in range(0, iterations, interval_iterations):
        n = min(interval_iterations, iterations - t)
        if t:
            if isinstance(policy, Clairvoyant):
                settings = policy.plan(simulator, interval_iterations)
            else:
                settings = decided(policy, simulator)
        if on_recording is None:
            step_ET[:, t : t + n] = simulator.run(settings, n)
        else:
            recording = simulator.record(settings, n)
            step_ET[:, t : t + n] = recording.step_ET
            on_recording(recording)
        delay_E += simulator.mean_delay_s() * n
        on_interval(t + n)
    ideal_step_E = simulator.batch.jobs["ideal_step_s"].copy()
    outside = policy.outside() if isinstance(policy, Policy) else None
    return Rollout(step_ET, delay_E / iterations, ideal_step_E, simulator.outcome().since(before), outside)


def decided(policy: Policy, simulator: Simulator) -> NDArray[np.float64]:
    """What a policy asks for in the next interval, on every rank's own view: ``(E, 1 or R, M, 2)``."""
    E, R, fixed = len(simulator.batch), simulator.batch.ranks, policy.constant()
    if fixed is not None:
        return np.broadcast_to(fixed, (E, 1, *fixed.shape))
    view = simulator.observe(every_rank=True)
    return policy.act(view.reshape(E * R, -1)).reshape(E, R, len(pacing.MECHANISMS), 2)
