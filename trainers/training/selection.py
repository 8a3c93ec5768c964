"""Scores a training run on the validation clusters while it runs; every rank decides for itself."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from paceenv.core.limits import LIMITS, Limits
from paceenv.policies.base import Policy
from paceenv.policies.clairvoyant import Clairvoyant
from paceenv.policies.rollout import run
from paceenv.policies.rules import passive
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.evaluation.evaluate import NULL_LIMIT
from paceenv.trainers.evaluation.suites import load_suites
from paceenv.trainers.training.train_config import Selection

FIRST_SEED = 2_000_000
"""Different from the seeds of training and of the score table."""
NULL_PRICE = 50.0
"""Price of a loss beyond half the limit, in units of the score: 1 % of mean step on every null costs half the gap."""

VALIDATION_METRICS = ("gap_closed", "null_loss", "score")
"""Keys of the result of :meth:`Validation.evaluate`."""


class Validation:
    """The validation clusters with their episodes without pacing and with the look-ahead plan, computed once.

    Args:
        threads: of the simulator; None: as many as this process may use.
    """

    def __init__(self, config: Selection, limits: Limits = LIMITS, threads: int | None = None) -> None:
        self._threads = threads or len(os.sched_getaffinity(0))
        suite = load_suites(config.suites, "validation").only(["validation"])
        self._config, self._limits, self._seeds = config, limits, np.arange(FIRST_SEED, FIRST_SEED + config.seeds)
        self._clusters = [case.load() for case in suite.cases]
        self._passive = [self._step_s_E(passive(), cluster) for cluster in self._clusters]
        self._bound_C = np.array(
            [0.0 if case.null_case else self._gain(Clairvoyant(), c) for c, case in enumerate(suite.cases)]
        )

    def _step_s_E(self, policy: Policy | Clairvoyant, cluster: Cluster) -> NDArray[np.float64]:
        simulator = start(cluster, self._seeds, self._threads, self._limits)
        return run(policy, simulator, self._config.iterations).useful_step_E

    def _gain(self, policy: Policy | Clairvoyant, c: int) -> float:
        """Mean gain over no pacing on a cluster."""
        return float((self._passive[c] / self._step_s_E(policy, self._clusters[c]) - 1.0).mean())

    def evaluate(self, policy: Policy) -> dict[str, float]:
        """``gap_closed`` where there is a gap, ``null_loss`` (of the worst other) and the ``score`` they make.

        Where no cluster has a gap, none is closed.
        The score is the share of the gap that is closed, less :data:`NULL_PRICE` times what nulls lose on average
        beyond half of what they may.
        """
        gain_C = np.array([self._gain(policy, c) for c in range(len(self._clusters))])
        worth_C = self._bound_C > NULL_LIMIT
        closed = float((gain_C[worth_C] / self._bound_C[worth_C]).mean()) if worth_C.any() else 0.0
        loss_N = np.maximum(-gain_C[~worth_C], 0.0)
        price = NULL_PRICE * float(np.maximum(loss_N - 0.5 * NULL_LIMIT, 0.0).mean()) if len(loss_N) else 0.0
        return {"gap_closed": closed, "null_loss": float(loss_N.max(initial=0.0)), "score": closed - price}
