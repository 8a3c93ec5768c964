"""What a search is: it hands out trials and takes their results. Also what searches share, and the grid.

Which trials a search hands out, and under which number, depends on its config and on results alone: not on when or
where a trial ran, nor on which came back first. So a sweep is the same on any machines, and a search is brought back to
where it was by giving it the ledger's results again. Every draw of a hyperparameter depends on seed and place alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceenv.trainers.sweep.score import Setting
from paceenv.trainers.sweep.sweep_config import Grid, GridOf, Objective, Pbt, Range, Static
from paceenv.ui.config_files import Mechanism

Work = Mapping[str, Any]
"""The work of a trial, as plain JSON data."""
Result = Mapping[str, Any]
Values = dict[str, Any]
"""A value by hyperparameter."""
QUANTITIES: Mapping[Objective, str] = {"throughput": "gain", "cv": "cv", "energy": "energy"}
"""Name of an objective's averages over seeds ``(S, C)`` in a trial's result."""
SIGN: Mapping[Objective, float] = {"throughput": 1.0, "cv": -1.0, "energy": -1.0}


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
        """Take the result of a trial that was handed out; None where it failed.

        Args:
            trial: what was tried.
            result: its objectives.
        """


def spread_out(settings: Sequence[Setting], clusters: Sequence[str], at_once: int) -> list[Work]:
    """Settings as the work of trials.

    Args:
        settings: the settings.
        clusters: names of the clusters that each is tried on.
        at_once: settings in one trial.
    """
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

    Args:
        result: of a trial.
        objective: its name.
        weight_C: weights of the trial's clusters.
    """
    value_SC = np.array(result[QUANTITIES[objective]], dtype=np.float64)
    share_SC = np.where(np.isnan(value_SC), 0.0, weight_C)
    return np.asarray(SIGN[objective] * (share_SC * np.nan_to_num(value_SC)).sum(axis=1) / share_SC.sum(axis=1))


def draw(ranges: Mapping[str, Range], random: np.random.Generator) -> Values:
    """A value for every hyperparameter, in their order.

    Args:
        ranges: by the name of the hyperparameter.
        random: source of random numbers.
    """
    return {key: _draw(one, random) for key, one in ranges.items()}


def _draw(one: Range, random: np.random.Generator) -> Any:
    if one.choice is not None:
        return one.choice[int(random.integers(len(one.choice)))]
    if one.loguniform is not None:
        low, high = one.loguniform
        return float(f"{math.exp(random.uniform(math.log(low), math.log(high))):.4g}")
    assert one.uniform is not None
    return float(f"{random.uniform(*one.uniform):.4g}")


def changed(values: Values, ranges: Mapping[str, Range], pbt: Pbt, random: np.random.Generator) -> Values:
    """Another member's hyperparameters, each changed a little within its range, or drawn anew (Jaderberg et al. 2017).

    Args:
        values: of the other member.
        ranges: where hyperparameters are drawn from.
        pbt: probability of a new draw, factors of change.
        random: source of the draws.
    """
    found = {}
    for key, one in ranges.items():
        if random.random() < pbt.resample:
            found[key] = _draw(one, random)
        elif one.choice is not None:
            at = one.choice.index(values[key]) + int(random.choice([-1, 1]))
            found[key] = one.choice[min(max(at, 0), len(one.choice) - 1)]
        else:
            low, high = one.uniform or one.loguniform or (0.0, 0.0)
            found[key] = float(f"{min(max(values[key] * float(random.choice(pbt.factors)), low), high):.4g}")
    return found


def singles(mechanisms: Sequence[Mechanism], grid: Callable[[Mechanism], GridOf]) -> list[Setting]:
    """One mechanism at a time.

    Args:
        mechanisms: their names.
        grid: gives the values of one mechanism.
    """
    return [((m, t, w),) for m in mechanisms for t, w in itertools.product(grid(m).threshold, grid(m).window)]


def joint(settings: Sequence[Setting], value_S: NDArray[np.float64], combine: int) -> list[Setting]:
    """The best settings of each mechanism together with those of other mechanisms.

    Args:
        settings: settings of one mechanism each.
        value_S: their values; more is better.
        combine: how many of each mechanism are taken.
    """
    order = np.argsort(-value_S, kind="stable")
    mechanisms = dict.fromkeys(setting[0][0] for setting in settings)
    top = [[settings[s] for s in order if settings[s][0][0] == m][:combine] for m in mechanisms]
    return [
        tuple(part for choice in chosen for part in choice)
        for chosen in itertools.product(*([(), *choices] for choices in top))
        if sum(map(len, chosen)) > 1
    ]


class GridSearch:
    """Every mechanism alone on its grid; then the best settings of each together with the others'.

    Args:
        static: mechanisms, objectives, settings per trial.
        grid: thresholds and windows.
        clusters: names of the clusters.
        weight_C: their weights.
    """

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
