"""Predicts the effect of pacing on a real job by simulating the cluster that was calibrated from its trace.

There are two predictions for each policy: **always on** is the effect once pacing stays on, **in blocks** is the
reading of the canary. They differ where an effect outlasts its block: two jobs that have been shifted apart stay apart
for a while. Blocks follow the agent's schedule. In blocks without pacing the state of the policy stands still, as in
``paceenv.live.decide.pacer``.

Clusters are drawn from the calibration's errors (:mod:`paceenv.calibration.posterior`), and each is simulated over
several seeds. The interval of always on holds the mean effect of 95 % of such clusters; that in blocks holds the
reading of 95 % of single canaries.

Legend: D drawn clusters, E episodes (seeds), N values, T iterations, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core import standing, timing
from paceenv.core.differences import Array
from paceenv.live.decide.blocks import BLOCK_ITERATIONS, Plan
from paceenv.live.testbed.testbed_scenario import LoopPlan
from paceenv.policies.base import Policy
from paceenv.policies.rollout import decided
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.simulator import Simulator
from paceenv.trainers.closed_loop.paired_blocks import Candidate, Found, log_ratios, paired_blocks
from paceenv.whatif.predictions import one_more


class Predictor:
    """Simulates drawn clusters under policies, all on the same noise, in the time of one policy's blocks.

    Args:
        clusters: drawn from a calibration (``drawn_clusters``).
        first_seed: of the noise; cluster ``d`` takes the ``d``-th ``seeds`` from there.
    """

    def __init__(
        self, clusters: Sequence[Cluster], plan: LoopPlan, seeds: int, first_seed: int, iterations: int
    ) -> None:
        self._clusters, self._plan = clusters, plan
        self._seeds = first_seed + np.arange(len(clusters) * seeds).reshape(len(clusters), seeds)
        self._always_T = np.arange(iterations) >= plan.quiet_first
        self._from = plan.quiet_first + (plan.block_iterations or BLOCK_ITERATIONS)
        self._passive = [self._run("passive", d, np.zeros(iterations, np.bool_))[0] for d in range(len(clusters))]

    @property
    def passive(self) -> Found:
        """The job without pacing: mean step in seconds with its 95 % interval over single runs, and CV."""
        step_s_NT = np.concatenate(self._passive)[:, self._from :]
        mean_s_N = step_s_NT.mean(axis=1)
        return {"step_s": one_more(mean_s_N), "cv": float((step_s_NT.std(axis=1) / mean_s_N).mean())}

    def predict(self, policy: str, schedule: Plan) -> Candidate:
        """One policy, by name or file, always on and in the blocks of the first candidate of ``schedule``."""
        on_T, pairs = paired_blocks(schedule, len(self._always_T))
        always_D, blocks_D, cv_D, delay_D = [], [], [], []
        for d, passive_s_ET in enumerate(self._passive):
            step_s_ET, delay_s = self._run(policy, d, self._always_T)
            paced, plain = step_s_ET[:, self._from :], passive_s_ET[:, self._from :]
            always_D.append(np.log(paced.mean(axis=1) / plain.mean(axis=1)).mean())
            cv_D.append((paced.std(axis=1) / paced.mean(axis=1)).mean())
            delay_D.append(delay_s)
            blocks_D.append(log_ratios(self._run(policy, d, on_T)[0], pairs).mean(axis=1))
        effects = np.ravel(always_D), np.ravel(blocks_D)
        return Candidate(policy, *effects, cv=float(np.mean(cv_D)), mean_delay_s=float(np.mean(delay_D)))

    def _run(self, policy: str, d: int, on_T: NDArray[np.bool_]) -> tuple[Array, float]:
        """Step times ``(E, T)`` of a policy that may act where ``on_T``, and the mean delay of a rank in the end."""
        cluster = self._clusters[d]
        simulator = start(cluster, self._seeds[d], limits=self._plan.limits)
        chosen = select_policy(policy, cluster)
        assert isinstance(chosen, Policy)  # as a job refuses one that looks ahead
        return run_in_blocks(chosen, simulator, on_T, self._plan.quiet_first)


def run_in_blocks(
    policy: Policy, simulator: Simulator, on_T: NDArray[np.bool_], quiet_first: int
) -> tuple[Array, float]:
    """Run a policy that may act in some iterations only.

    While it may not, delays are 0. When it may again, it goes on as if it had never been interrupted, except that the
    baselines have learned meanwhile (``paceenv.core.standing``). Where it may act changes at ``quiet_first`` and at
    whole intervals of the policy after it only. Returns step times ``(E, T)`` and the mean delay when it last acted.
    """
    iterations, E = len(on_T), len(simulator.batch)
    step_s_ET, mean_delay_s = np.empty((E, iterations)), 0.0
    policy.reset(E * simulator.batch.ranks)
    settings, acted = simulator.off(), False
    left: standing.Left | None = None
    begins = [0, *range(quiet_first, iterations, policy.interval_iterations)]
    for t, until in zip(begins, [*begins[1:], iterations], strict=True):
        rank, tick = simulator.state.rank_EFR, simulator.state.tick_EK
        if on_T[t]:
            if not acted:
                standing.resume(rank, tick, left or standing.begin(rank, tick))
            step_s_ET[:, t:until] = simulator.run(settings, until - t)
            mean_delay_s = float(simulator.mean_delay_s().mean())
            settings = decided(policy, simulator)
        else:
            if acted:
                left = standing.leave(rank, tick)
            rank[:, timing.DELAY_S] = 0.0
            step_s_ET[:, t:until] = simulator.run(simulator.off(), until - t)
        acted = bool(on_T[t])
    return step_s_ET, mean_delay_s
