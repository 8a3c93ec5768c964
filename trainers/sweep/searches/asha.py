"""Asynchronous successive halving (Li et al. 2020, algorithm 2) on a clock of its own.

In the original a free worker decides by what is known at that time, so no worker waits, and the result depends on
which worker was faster. Here the clock is that of ``workers`` workers that take one second for each decision of the
training run. Decisions are made in the order of that clock, with what is known at that time, and trials run wherever
there is room. So a sweep gives the same result on any number of machines, and after a kill.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from paceenv.trainers.sweep.searches.search import Result, Trial, Values, draw
from paceenv.trainers.sweep.sweep_config import Asha, Range


class AshaSearch:
    """Trials of one rung each; the trial of the next rung goes on from the checkpoint of the one before.

    Args:
        asha: configs, rungs, workers.
        ranges: where hyperparameters are drawn from.
        decisions: length of a training run that reaches the last rung.
        seed: of the draws.
    """

    def __init__(self, asha: Asha, ranges: Mapping[str, Range], decisions: int, seed: int) -> None:
        self._asha = asha
        self._ends = [max(1, decisions // asha.reduction ** (asha.rungs - 1 - k)) for k in range(asha.rungs)]
        self._configs: list[Values] = [
            draw(ranges, np.random.default_rng((seed, config))) for config in range(asha.configs)
        ]
        self._begun = 0
        self._reached: list[dict[int, float]] = [{} for _ in range(asha.rungs)]
        """By rung: the score of every config that finished it."""
        self._promoted: list[set[int]] = [set() for _ in range(asha.rungs)]
        self._last_trial: dict[int, int] = {}
        self._clock: list[tuple[float, int, int, int]] = []
        """(end, trial, config, rung) of what the workers are at."""
        self._now, self._number = 0.0, 0
        self._found: dict[int, Result | None] = {}
        self.total = sum(asha.configs // asha.reduction**k for k in range(asha.rungs))

    def ready(self) -> list[Trial]:
        handed_out: list[Trial] = []
        while True:
            while len(self._clock) < self._asha.workers and (job := self._next_job()):
                handed_out.append(self._begin(*job))
            if not self._clock or self._clock[0][1] not in self._found:
                return handed_out
            self._now, number, config, rung = heapq.heappop(self._clock)
            result = self._found[number]
            if result is not None:
                self._reached[rung][config] = result["score"]

    def tell(self, trial: Trial, result: Result | None) -> None:
        self._found[trial.number] = result

    def _next_job(self) -> tuple[int, int] | None:
        """(config, rung) of what a free worker does: a config that may go on, from the highest rung, or a new one."""
        for rung in reversed(range(self._asha.rungs - 1)):
            for config in _best(self._reached[rung], len(self._reached[rung]) // self._asha.reduction):
                if config not in self._promoted[rung]:
                    self._promoted[rung].add(config)
                    return config, rung + 1
        if self._begun < self._asha.configs:
            self._begun += 1
            return self._begun - 1, 0
        return None

    def _begin(self, config: int, rung: int) -> Trial:
        until, since = self._ends[rung], self._ends[rung - 1] if rung else 0
        work = {
            "kind": "ppo",
            "config": config,
            "rung": rung,
            "hyperparameters": self._configs[config],
            "from": self._last_trial.get(config),
            "until": until,
        }
        trial = Trial(self._number, work)
        heapq.heappush(self._clock, (self._now + until - since, trial.number, config, rung))
        self._last_trial[config], self._number = trial.number, trial.number + 1
        return trial


def _best(scores: Mapping[int, float], count: int) -> Sequence[int]:
    return sorted(scores, key=lambda config: (-scores[config], config))[:count]
