"""Scores a training run on the validation clusters while it runs; every rank decides for itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
        self._clusters: Mapping[str, Cluster] = {case.name: case.load() for case in suite.cases}
        self._passive = {name: self._step_s_E(passive(), name) for name in self._clusters}
        self._bound = {
            case.name: float((self._passive[case.name] / self._step_s_E(Clairvoyant(), case.name) - 1.0).mean())
            for case in suite.cases
            if not case.null_case
        }

    def _step_s_E(self, policy: Policy | Clairvoyant, name: str) -> NDArray[np.float64]:
        simulator = start(self._clusters[name], self._seeds, self._threads, self._limits)
        return run(policy, simulator, self._config.iterations).useful_step_E

    def evaluate(self, policy: Policy) -> dict[str, float]:
        """``gap_closed`` where there is a gap, ``null_loss`` (of the worst other) and the ``score`` they make.

        Where no cluster has a gap, none is closed.
        The score is the share of the gap that is closed, less :data:`NULL_PRICE` times what nulls lose on average
        beyond half of what they may.
        """
        gain = {
            name: float((self._passive[name] / self._step_s_E(policy, name) - 1.0).mean()) for name in self._clusters
        }
        shares = [gain[name] / bound for name, bound in self._bound.items() if bound > NULL_LIMIT]
        closed = float(np.mean(shares)) if shares else 0.0
        nothing_to_win = [name for name in self._clusters if self._bound.get(name, 0.0) <= NULL_LIMIT]
        losses = [max(-gain[name], 0.0) for name in nothing_to_win]
        beyond = [max(loss - 0.5 * NULL_LIMIT, 0.0) for loss in losses]
        price = NULL_PRICE * float(np.mean(beyond)) if beyond else 0.0
        return {"gap_closed": closed, "null_loss": max(losses, default=0.0), "score": closed - price}
