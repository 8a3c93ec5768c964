"""Static settings from Optuna: several objectives, one study for all clusters or one for each.

Optuna is asked for batches and gets their results in one fixed order, whatever the order in which trials end. Batch n
is asked for when the results of all batches up to n - ``open`` are in, and none of a later one. A resumed sweep asks
again from the start, which takes milliseconds and leads to the same state. Nothing of Optuna's is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.trainers.sweep.searches import Result, Trial, settings_of, spread_out, values
from paceenv.trainers.sweep.static_search import Setting
from paceenv.trainers.sweep.sweep_config import MAX_STATIC_THRESHOLD, SIGNIFICANT, Optuna, Static

_RANGE = optuna.distributions.FloatDistribution(-1.0, 1.0)


class OptunaSearch:
    """Batches of settings from Optuna, in the normalised actions that a learned policy also has.

    Trial ``n * U + u`` is the ``n``-th batch of study ``u`` of ``U``: one for all clusters, or one for each.

    Args:
        static: mechanisms, objectives, scope, settings per trial.
    """

    def __init__(
        self, static: Static, search: Optuna, clusters: Sequence[str], weight_C: NDArray[np.float64], seed: int
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        each = static.scope == "each"
        parts = [[c] for c in range(len(clusters))] if each else [list(range(len(clusters)))]
        self._studies = [
            _Study(static, search, [clusters[c] for c in part], weight_C[part], seed + u)
            for u, part in enumerate(parts)
        ]
        self.total = len(parts) * self._studies[0].batches

    def ready(self) -> list[Trial]:
        found = [
            Trial(n * len(self._studies) + u, work) for u, study in enumerate(self._studies) for n, work in study.ask()
        ]
        return sorted(found, key=lambda trial: trial.number)

    def tell(self, trial: Trial, result: Result | None) -> None:
        n, u = divmod(trial.number, len(self._studies))
        self._studies[u].found[n] = result


class _Study:
    """One study of Optuna's and its batches."""

    def __init__(
        self, static: Static, search: Optuna, clusters: Sequence[str], weight_C: NDArray[np.float64], seed: int
    ) -> None:
        self._static, self._search, self._clusters, self._weight_C = static, search, clusters, weight_C
        self._study = optuna.create_study(
            directions=["maximize"] * len(static.objectives), sampler=_sampler(search, static, seed)
        )
        self._keys = [f"{m}.{what}" for m in static.mechanisms for what in ("threshold", "window")]
        self._study.enqueue_trial(dict.fromkeys(self._keys, _RANGE.low))  # all off: no winner is worse than that
        self._open: list[tuple[list[optuna.Trial], dict[str, Any]]] = []
        self.found: dict[int, Result | None] = {}
        self._told = 0
        self.batches = -(-search.candidates // static.candidates_per_trial)

    def ask(self) -> list[tuple[int, dict[str, Any]]]:
        """The batches that can be asked for now, with their numbers."""
        asked: list[tuple[int, dict[str, Any]]] = []
        while len(self._open) < self.batches:
            while self._told <= len(self._open) - self._search.open:
                if self._told not in self.found:
                    return asked
                self._tell(self._told)
                self._told += 1
            asked.append((len(self._open), self._ask()))
        return asked

    def _ask(self) -> dict[str, Any]:
        per_trial = self._static.candidates_per_trial
        count = min(per_trial, self._search.candidates - len(self._open) * per_trial)
        trials = [self._study.ask(dict.fromkeys(self._keys, _RANGE)) for _ in range(count)]
        (work,) = spread_out([self._setting(t.params) for t in trials], self._clusters, per_trial)
        self._open.append((trials, dict(work)))
        return dict(work)

    def _setting(self, params: dict[str, float]) -> Setting:
        action = np.array([[params[key] for key in self._keys]])
        decoded = pacing.decode_action(action, self._static.mechanisms)[0]
        found = []
        for mechanism in self._static.mechanisms:
            threshold, window = (_rounded(value) for value in decoded[pacing.MECHANISMS.index(mechanism)])
            if window > 0.0:
                found.append((mechanism, min(threshold, MAX_STATIC_THRESHOLD), window))
        return tuple(found)

    def _tell(self, n: int) -> None:
        (trials, work), result = self._open[n], self.found[n]
        if result is None:
            for trial in trials:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        assert len(settings_of(work)) == len(trials)
        value_OS = [values(result, objective, self._weight_C) for objective in self._static.objectives]
        for trial, value_O in zip(trials, zip(*value_OS, strict=True), strict=True):
            self._study.tell(trial, [float(value) for value in value_O])


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT}g}")


def _sampler(search: Optuna, static: Static, seed: int) -> optuna.samplers.BaseSampler:
    if search.sampler == "nsga2":
        population = max(search.first_random, 2)
        return optuna.samplers.NSGAIISampler(population_size=population, seed=seed)
    return optuna.samplers.TPESampler(n_startup_trials=search.first_random, multivariate=True, seed=seed)
