"""The results of a sweep, from the ledger alone: its candidates, the Pareto front, the winner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceenv.trainers.sweep.searches import QUANTITIES, SIGN, settings_of, values
from paceenv.trainers.sweep.static_search import spelled
from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.trainers.sweep.sweep_run import Ledger
from paceenv.trainers.sweep.trial import Row
from paceenv.ui import config_files

SCORE, UNTIL = "score", "decisions"
MORE_IS_BETTER: Mapping[str, bool] = {**{name: sign > 0 for name, sign in SIGN.items()}, SCORE: True}
COLUMNS: Mapping[str, str] = {
    "throughput": "throughput against passive",
    "cv": "CV of step time",
    "energy": "energy against passive",
    SCORE: "validation score",
    UNTIL: "decisions",
}


@dataclass(frozen=True)
class Candidate:
    """A setting, or a trial of training.

    Attributes:
        trial: its number in the ledger.
        label: how it is spelled: a policy's name, or hyperparameters.
        cluster: the one it was tried on; empty for all of them.
        parameters: how many numbers it consists of.
        values: results by quantity, whether it is an objective or not; for training, score and decisions.
    """

    trial: int
    label: str
    cluster: str
    parameters: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Results:
    """A sweep's candidates in the order of their trials, and what failed; the first of ``objectives`` leads."""

    config: SweepConfig
    objectives: Sequence[str]
    candidates: Sequence[Candidate]
    failed: Sequence[Row]

    @classmethod
    def of(cls, ledger: Ledger) -> Results:
        """What a ledger holds."""
        config = config_files.parse(SweepConfig, ledger.header["config"], str(ledger.path))
        rows = [ledger.rows[number] for number in sorted(ledger.rows)]
        done = [row for row in rows if row["status"] == "done"]
        failed = [row for row in rows if row["status"] != "done"]
        if config.static is None:
            return cls(config, (SCORE,), [_trained(row) for row in done], failed)
        weights = {case["name"]: case["weight"] for case in ledger.header["inputs"]["cases"]}
        each = config.static.scope == "each"
        found = [one for row in done for one in _tried(row, weights, each=each)]
        return cls(config, tuple(config.static.objectives), found, failed)

    @property
    def clusters(self) -> list[str]:
        """Those with a winner of their own, nothing where one stands for all."""
        return list(dict.fromkeys(candidate.cluster for candidate in self.candidates))

    def best(self, cluster: str = "") -> Candidate | None:
        """The winner: best in the first objective, then in the others, then with the fewest parameters.

        Of training, among those that got farthest.
        """
        found = [candidate for candidate in self.candidates if candidate.cluster == cluster]
        if found and UNTIL in found[0].values:
            farthest = max(one.values[UNTIL] for one in found)
            found = [one for one in found if one.values[UNTIL] == farthest]
        return min(found, key=self._place, default=None)

    def front(self, cluster: str = "") -> list[Candidate]:
        """Candidates that no other one equals in all objectives and beats in one, best first; one of equal ones."""
        found = [candidate for candidate in self.candidates if candidate.cluster == cluster]
        kept: list[Candidate] = []
        for one in sorted(found, key=self._place):
            mine = self.goodness(one)
            if not any(all(a >= b for a, b in zip(self.goodness(k), mine, strict=True)) for k in kept):
                kept.append(one)
        return kept

    def _place(self, candidate: Candidate) -> tuple[float, ...]:
        return *(-value for value in self.goodness(candidate)), candidate.parameters

    def goodness(self, candidate: Candidate) -> tuple[float, ...]:
        """A candidate's objectives, each so that more is better."""
        return tuple(
            candidate.values[name] if MORE_IS_BETTER[name] else -candidate.values[name] for name in self.objectives
        )

    def as_json(self, candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
        """Candidates as plain data."""
        return [
            {"trial": c.trial, "candidate": c.label, **({"cluster": c.cluster} if c.cluster else {}), **c.values}
            for c in candidates
        ]


def columns(results: Results) -> list[str]:
    """The head of a table of candidates."""
    where = ["cluster"] if any(results.clusters) else []
    return ["candidate", "trial", *where, *(COLUMNS[name] for name in results.objectives)]


def cells(candidate: Candidate, objectives: Sequence[str]) -> tuple[str, ...]:
    """A row of a table: candidate, trial, cluster, and objectives."""
    text = [_cell(name, candidate.values[name]) for name in objectives]
    return (candidate.label, str(candidate.trial), *([candidate.cluster] if candidate.cluster else []), *text)


def _cell(name: str, value: float) -> str:
    if name == "energy":
        return f"{value - 1.0:+.2%}"
    return f"{value:+.2%}" if name == "throughput" else f"{value:.4f}"


def _tried(row: Row, weights: Mapping[str, float], *, each: bool) -> list[Candidate]:
    settings, clusters, result = settings_of(row["work"]), row["work"]["clusters"], row["result"]
    groups = [[c] for c in range(len(clusters))] if each else [list(range(len(clusters)))]
    found = []
    for group in groups:
        names = [clusters[c] for c in group]
        part = {name: [[of_one[c] for c in group] for of_one in result[name]] for name in QUANTITIES.values()}
        weight_C = np.array([weights[name] for name in names])
        known = [o for o, name in QUANTITIES.items() if any(v is not None for v in part[name][0])]
        value_OS = {o: SIGN[o] * values(part, o, weight_C) for o in known}
        for s, setting in enumerate(settings):
            came_to: dict[str, float] = {name: float(value_S[s]) for name, value_S in value_OS.items()}
            found.append(Candidate(row["trial"], spelled(setting), names[0] if each else "", 2 * len(setting), came_to))
    return found


def _trained(row: Row) -> Candidate:
    given, result = row["work"]["hyperparameters"], row["result"]
    label = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in given.items())
    numbers = sum(isinstance(value, (int, float)) for value in given.values())
    return Candidate(row["trial"], label, "", numbers, {SCORE: result["score"], UNTIL: float(row["work"]["until"])})
