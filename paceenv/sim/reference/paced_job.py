"""What ranks do at the end of every step in the reference engine, and that engine's face for one environment.

They take in their timing and set the delays of the next step by the same estimator and the same rules as in the fast
engine. The draws of noise are that engine's, too, so that both see the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceenv.core import limits as delay_limits
from paceenv.core import pacing, signals, standing, timing
from paceenv.core.limits import Limits
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine import draws, layout, noise
from paceenv.sim.engine.kernel import observer_rank
from paceenv.sim.engine.layout import Recording, View
from paceenv.sim.engine.measuring import blur, is_missing, real_delay_s
from paceenv.sim.engine.simulator import JobBatch, Outcome
from paceenv.sim.reference.network import Network


class PacedJob:
    """One job on a network; a subclass makes its steps.

    Args:
        keys_E: the key of its one episode, ``(1,)``.
    """

    def __init__(self, cluster: Cluster, keys_E: NDArray[np.uint64], limits: Limits) -> None:
        self.limits = limits
        self.batch: JobBatch = derive(cluster, keys_E)
        self.network = Network()
        self._ranks, self._groups = self.batch.ranks, self.batch.groups
        self._has_barrier = bool(self.batch.jobs[0]["has_barrier"])
        self._barrier_s = 0.0
        self._rank, self._tick = timing.new_state(self._ranks)
        self._start_noise(keys_E[0])
        self._settings_SM2 = pacing.off(1)
        self._end_T: list[float] = []
        self._mean_delay_s = self._energy_j = 0.0

    # as paceenv.sim.engine.simulator.Simulator, for one environment

    def off(self) -> NDArray[np.float64]:
        """Settings with every mechanism off."""
        return pacing.off(1, 1)

    def run(self, settings_ESM2: NDArray[np.float64], iterations: int) -> NDArray[np.float64]:
        """Step times ``(1, T)``, seconds.

        Args:
            settings_ESM2: (threshold, window) of each mechanism, ``(1, 1 or R, M, 2)``; ratios.
        """
        return self.record(settings_ESM2, iterations).step_ET

    def quiet_start(self) -> None:
        """Run the first iterations of the job, in which its limits allow no delay; pacing begins after them."""
        if self.limits.quiet_first:
            self.run(self.off(), self.limits.quiet_first)
        self._tick = standing.when_pacing_begins(self._tick)

    def record(self, settings_ESM2: NDArray[np.float64], iterations: int) -> Recording:
        """Run ``iterations`` with pacing ``settings`` ``(1, 1 or R, M, 2)``; stamps from the end of the step before."""
        self._settings_SM2 = settings_ESM2[0]
        signals.start_interval(self._tick)
        first = len(self._end_T)
        self.network.run_until(lambda: len(self._end_T) >= first + iterations)
        out = self._recording(first, np.array([0.0, *self._end_T])[first : first + iterations + 1])
        self._mean_delay_s = float(out.delay_ETR.mean())
        return out

    def _recording(self, first: int, end_T1: NDArray[np.float64]) -> Recording:
        """The stamps of the steps from ``first`` on; ``end_T1``: the end of the one before it, and of each."""
        raise NotImplementedError

    def mean_delay_s(self) -> NDArray[np.float64]:
        """Mean delay over ranks and iterations of the last run, ``(1,)``, seconds."""
        return np.array([self._mean_delay_s])

    def observe(self, *, every_rank: bool = False) -> NDArray[np.float32]:
        """Observations of the last run: ``(1, O)`` of the observer rank, or ``(1, R, O)`` of every rank."""
        out_RO = np.empty((self._ranks, signals.SIGNALS), np.float32)
        for r in range(self._ranks):
            signals.write_signals(self._rank, r, self._tick, out_RO[r])
        with np.errstate(over="ignore"):
            observer = observer_rank(self._view.clock["key"], self._ranks)
        return out_RO[None] if every_rank else out_RO[None, observer]

    def outcome(self) -> Outcome:
        """What the episode came to so far; nothing fails here."""
        iterations, none = np.array([float(len(self._end_T))]), np.zeros(1)
        time_s = np.array([self._end_T[-1] if self._end_T else 0.0])
        return Outcome(time_s, np.array([self._energy_j]), none.astype(np.int64), none, iterations, np.zeros((1, 0)))

    # the ends of a step

    def _real_delay_s(self, t: int, r: int) -> float:
        """How long rank ``r`` is delayed at the start of iteration ``t``, which it will also measure; seconds."""
        with np.errstate(over="ignore"):
            asked_s = float(self._rank[timing.DELAY_S, r])
            self._rank[timing.DELAY_S, r] = real_delay_s(self._view.job, self._view.clock["key"], t, r, asked_s)
        return float(self._rank[timing.DELAY_S, r])

    def _decide(self, t: int, step_s: float, comm_R: NDArray[np.float32], wait_R: NDArray[np.float32]) -> None:
        """Every rank takes in iteration ``t`` and sets its next delay."""
        job, key, ranks = self._view.job, self._view.clock["key"], self._ranks
        with np.errstate(over="ignore"):
            if job["stamp_noise_s"] > 0.0:
                blur(job, key, t, self._view.normal, comm_R, wait_R)
            missing = [r for r in range(ranks) if is_missing(job, key, t, r)]
        aside = self._rank[:, missing]
        timing.observe_step(self._tick, step_s)
        timing.observe_ranks(self._rank, self._tick, comm_R, wait_R, self._has_barrier)
        settings, allowed, members = self._settings_SM2, self.limits, ranks // self._groups
        cap_s = delay_limits.capped_s(allowed.cap_s, allowed.cap_share, self._tick[timing.STEP_BASELINE_S])
        if len(settings) == 1:
            timing.decide(self._rank, self._tick, 0, ranks, settings[0], cap_s, 0, members)
        else:
            for r in range(ranks):
                timing.decide(self._rank, self._tick, r, r + 1, settings[r], cap_s, 0, members)
        budget_R, delay_R = self._rank[timing.BUDGET_S], self._rank[timing.DELAY_S]
        timing.spend(budget_R, delay_R, ranks, step_s, allowed.burst_s, allowed.fill)
        self._rank[:, missing] = aside

    def _spend(self, compute_s: float, delay_s: float, step_s: float) -> None:
        """Energy of a step: a rank that neither computes nor is delayed spins."""
        job, waited_s = self._view.job, self._ranks * step_s - compute_s - delay_s
        self._energy_j += float(job["compute_w"] * compute_s + job["wait_w"] * waited_s + job["delay_w"] * delay_s)

    # draws, the fast engine's own

    def _start_noise(self, key: np.uint64) -> None:
        R, G = self._ranks, self._groups
        self._view = view = View(
            job=self.batch.jobs[0],  # noise and post-collective work are drawn from it, as in the fast engine
            clock=np.zeros(1, layout.CLOCK)[0],
            tenants=self.batch.tenants_EK[0],
            normal=draws.normal_table(),
            imbalance=draws.gamma_table(float(self.batch.skewness_E[0])),
            noise=np.empty((layout.NOISE_FIELDS, R), np.float32),
            heat=np.zeros((layout.HEAT_FIELDS, 0), np.float32),
            start_R=np.zeros(0, np.float32),
            group=np.empty((layout.GROUP_FIELDS, G)),
            tenant=np.zeros((layout.TENANT_FIELDS, 0)),
            rank=self._rank,
            tick=self._tick,
        )
        view.clock["key"] = key
        with np.errstate(over="ignore"):
            noise.reset_noise(view.job, view.clock, view.noise, view.group, view.normal)

    def _draw_compute(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Compute time of every rank in this iteration, and of a program what it stands still before; seconds."""
        scratch = layout.new_scratch(self._ranks, self._groups)
        noise.draw_compute(self._view, scratch)
        return scratch.compute_R, scratch.spare_R
