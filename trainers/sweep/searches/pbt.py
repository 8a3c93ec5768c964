"""Population-based training (Jaderberg et al. 2017) in step: a round is over when every member has finished it.

The worst members then go on from the checkpoints of the best, with their hyperparameters changed a little. In step,
because otherwise the fastest member would decide which one is copied. Members are ranked by their latest evaluation, as
in the paper: the best score since the first round is also that of the parent, however badly a child does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paceenv.trainers.sweep.searches.search import Result, Trial, Values, changed, draw
from paceenv.trainers.sweep.sweep_config import Pbt, Range


class PbtSearch:
    """A trial is a member's round: number ``round * population + member``.

    Args:
        pbt: population, rounds, how members change.
        ranges: where hyperparameters are drawn from.
        decisions: length of the training run that all rounds make together.
        seed: of draws and changes.
    """

    def __init__(self, pbt: Pbt, ranges: Mapping[str, Range], decisions: int, seed: int) -> None:
        self._pbt, self._ranges, self._decisions, self._seed = pbt, ranges, decisions, seed
        self._round = -1
        self._values: list[Values] = []
        self._found: dict[int, Result | None] = {}
        self.total = pbt.population * pbt.rounds

    def ready(self) -> list[Trial]:
        P = self._pbt.population
        if self._round < 0:
            parents: list[int | None] = [None] * P
            self._values = [draw(self._ranges, np.random.default_rng((self._seed, m))) for m in range(P)]
        else:
            results = [self._found.get(self._round * P + m) for m in range(P)]
            is_over = self._round + 1 == self._pbt.rounds or not any(results)
            if is_over or len(self._found) < (self._round + 1) * P:
                return []
            # older ledgers have no latest score: they were decided by the best one
            parents = self._succeed([-np.inf if r is None else r.get("latest", r["score"]) for r in results])
        self._round += 1
        until = -(-self._decisions * (self._round + 1) // self._pbt.rounds)
        return [
            Trial(
                self._round * P + m,
                {
                    "kind": "ppo",
                    "config": m,
                    "rung": self._round,
                    "hyperparameters": self._values[m],
                    "from": parents[m],
                    "until": until,
                },
            )
            for m in range(P)
        ]

    def tell(self, trial: Trial, result: Result | None) -> None:
        self._found[trial.number] = result

    def _succeed(self, scores: Sequence[float]) -> list[int | None]:
        """From which trial each member goes on; the values of those that copy another one are changed."""
        P, first, before = self._pbt.population, self._round * self._pbt.population, list(self._values)
        copied = max(1, int(P * self._pbt.quantile))
        order = sorted(range(P), key=lambda m: (-scores[m], m))
        best = [m for m in order[:copied] if np.isfinite(scores[m])]
        parents: list[int | None] = []
        for m in range(P):
            if m not in order[P - copied :] and np.isfinite(scores[m]):
                parents.append(first + m)
                continue
            random = np.random.default_rng((self._seed, self._round + 1, m))
            parent = int(random.choice(best))
            parents.append(first + parent)
            self._values[m] = changed(before[parent], self._ranges, self._pbt, random)
        return parents
