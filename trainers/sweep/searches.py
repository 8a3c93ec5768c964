"""How a sweep chooses its next trials: what a search is, the grid, ASHA and populations; Optuna's is beside this file.

Which trials a search hands out, and under which number, depends on its config and on results alone: not on when or
where a trial ran, nor on which came back first. So a sweep is the same on any machines, and a search is brought back to
where it was by giving it the ledger's results again. Every draw of a hyperparameter depends on seed and place alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceenv.trainers.sweep.static_search import Setting, joint, singles
from paceenv.trainers.sweep.sweep_config import Asha, Grid, Objective, Pbt, Range, Static

Work = Mapping[str, Any]
"""The work of a trial, as plain JSON data."""
Result = Mapping[str, Any]
Values = dict[str, Any]
"""A value by hyperparameter."""
QUANTITIES: Mapping[Objective, str] = {"throughput": "gain", "cv": "cv", "energy": "energy"}
"""Name of an objective's averages over seeds ``(S, C)`` in a trial's result."""
SIGN: Mapping[Objective, float] = {"throughput": 1.0, "cv": -1.0, "energy": -1.0}
QUANTILE, RESAMPLE, FACTORS = 0.25, 0.25, (0.8, 1.25)
"""Of populations: the share that is replaced by as many best, the probability that a hyperparameter is drawn anew, and
by what it is multiplied otherwise."""


@dataclass(frozen=True)
class Trial:
    """One piece of work with the number that it keeps."""

    number: int
    work: Work


class Search(Protocol):
    """Decides which trials there are."""

    total: int
    """The expected number of trials."""

    def ready(self) -> list[Trial]:
        """Trials that can begin and were not handed out before."""

    def tell(self, trial: Trial, result: Result | None) -> None:
        """Take the result of a trial that was handed out; None where it failed."""


def spread_out(settings: Sequence[Setting], clusters: Sequence[str], at_once: int) -> list[Work]:
    """Settings as the work of trials."""
    return [
        {
            "kind": "static",
            "clusters": list(clusters),
            "settings": [[list(part) for part in setting] for setting in settings[first : first + at_once]],
        }
        for first in range(0, len(settings), at_once)
    ]


def settings_of(work: Work) -> list[Setting]:
    """The settings that a trial tries."""
    return [tuple((str(m), float(t), float(w)) for m, t, w in setting) for setting in work["settings"]]


def values(result: Result, objective: Objective, weight_C: NDArray[np.float64]) -> NDArray[np.float64]:
    """An objective by setting ``(S,)``: the weighted mean over clusters; more is better.

    Energy leaves out clusters without power figures.
    """
    value_SC = np.array(result[QUANTITIES[objective]], dtype=np.float64)
    share_SC = np.where(np.isnan(value_SC), 0.0, weight_C)
    return np.asarray(SIGN[objective] * (share_SC * np.nan_to_num(value_SC)).sum(axis=1) / share_SC.sum(axis=1))


def draw(ranges: Mapping[str, Range], random: np.random.Generator) -> Values:
    """A value for every hyperparameter, in their order."""
    return {key: _draw(one, random) for key, one in ranges.items()}


def _draw(one: Range, random: np.random.Generator) -> Any:
    if one.choice is not None:
        return one.choice[int(random.integers(len(one.choice)))]
    if one.loguniform is not None:
        low, high = one.loguniform
        return float(f"{math.exp(random.uniform(math.log(low), math.log(high))):.4g}")
    assert one.uniform is not None
    return float(f"{random.uniform(*one.uniform):.4g}")


def changed(values: Values, ranges: Mapping[str, Range], random: np.random.Generator) -> Values:
    """Another member's hyperparameters, each changed a little within its range, or drawn anew."""
    found = {}
    for key, one in ranges.items():
        if random.random() < RESAMPLE:
            found[key] = _draw(one, random)
        elif one.choice is not None:
            at = one.choice.index(values[key]) + int(random.choice([-1, 1]))
            found[key] = one.choice[min(max(at, 0), len(one.choice) - 1)]
        else:
            low, high = one.uniform or one.loguniform or (0.0, 0.0)
            found[key] = float(f"{min(max(values[key] * float(random.choice(FACTORS)), low), high):.4g}")
    return found


class GridSearch:
    """Every mechanism alone on its grid; then the best settings of each together with the others'."""

    def __init__(self, static: Static, grid: Grid, clusters: Sequence[str], weight_C: NDArray[np.float64]) -> None:
        self._static, self._grid, self._clusters, self._weight_C = static, grid, clusters, weight_C
        self._alone = singles(static.mechanisms, grid.of)
        self._found: dict[int, Result | None] = {}
        self._handed_out, self._first_joint = 0, -1
        most = [min(grid.combine, len(grid.of(m).threshold) * len(grid.of(m).window)) + 1 for m in static.mechanisms]
        together = int(np.prod(most)) - sum(most) + len(most) - 1
        per_trial = static.candidates_per_trial
        self.total = -(-len(self._alone) // per_trial) + -(-together // per_trial)

    def ready(self) -> list[Trial]:
        if not self._handed_out:
            return self._hand_out(self._alone)
        if self._first_joint < 0 and len(self._found) == self._handed_out:
            self._first_joint = self._handed_out
            return self._hand_out(joint(self._alone, self._values(), self._grid.combine))
        return []

    def tell(self, trial: Trial, result: Result | None) -> None:
        self._found[trial.number] = result

    def _hand_out(self, settings: Sequence[Setting]) -> list[Trial]:
        works = spread_out(settings, self._clusters, self._static.candidates_per_trial)
        trials = [Trial(self._handed_out + i, work) for i, work in enumerate(works)]
        self._handed_out += len(trials)
        return trials

    def _values(self) -> NDArray[np.float64]:
        """Values of every mechanism alone, by the first objective; failed settings come last."""
        per_trial, found = self._static.candidates_per_trial, []
        for number in range(self._handed_out):
            result, count = self._found[number], len(self._alone[number * per_trial : (number + 1) * per_trial])
            failed = np.full(count, -np.inf)
            found.append(values(result, self._static.objectives[0], self._weight_C) if result else failed)
        return np.concatenate(found)


class AshaSearch:
    """Asynchronous successive halving (Li et al. 2020, algorithm 2) on a clock of its own.

    Trials are of one rung each; the trial of the next rung goes on from the checkpoint of the one before.

    In the original the result depends on which worker was faster. Here the clock is that of ``workers`` workers that
    take one second for each decision of the training run, and what is decided depends on what is known by that clock.
    So a sweep gives the same result on any number of machines, and after a kill.
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
            "kind": "training",
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


class PbtSearch:
    """Population-based training (Jaderberg et al. 2017) in step: a round is over when every member has finished it.

    The worst members then go on from the checkpoints of the best, with their hyperparameters changed a little. In step,
    because otherwise the fastest member would decide which one is copied. Members are ranked by their latest
    evaluation, as in the paper: the best score since the first round is also that of the parent, however badly a child
    does. A trial is a member's round: number ``round * population + member``.
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
            parents = self._succeed([-np.inf if r is None else r["latest"] for r in results])
        self._round += 1
        until = -(-self._decisions * (self._round + 1) // self._pbt.rounds)
        return [
            Trial(
                self._round * P + m,
                {
                    "kind": "training",
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
        copied = max(1, int(P * QUANTILE))
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
            self._values[m] = changed(before[parent], self._ranges, random)
        return parents
