"""The results of a sweep, read from its config and from the JSON and text that Tune writes: no pickle, no Ray."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.ui import config_files

CONFIG, TUNE = "config.yaml", "tune"
"""Files of a sweep: its config, and the folder of Tune's experiments."""
SCORE, DECISIONS = "score", "decisions"
MODES: Mapping[str, str] = {"throughput": "max", "cv": "min", SCORE: "max"}
"""Ray's name for which end of an objective is good."""
COLUMNS: Mapping[str, str] = {
    "throughput": "throughput against passive",
    "cv": "CV of step time",
    SCORE: "validation score",
    DECISIONS: "decisions",
}


@dataclass(frozen=True)
class Candidate:
    """A trial with Tune's folder of it and its last result: metrics, and its ``config``.

    ``label`` is how it is spelled: a policy's name, or hyperparameters.
    """

    trial: int
    label: str
    result: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Results:
    """A sweep's candidates, and what failed; the first of ``objectives`` leads."""

    config: SweepConfig
    objectives: Sequence[str]
    candidates: Sequence[Candidate]
    failed: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """What a folder holds, also while the sweep runs. Raises InputError where it is none of a sweep."""
        path = folder / CONFIG
        if not path.is_file():
            raise InputError(f"{folder}: holds no sweep; allowed: the folder of one")
        config = config_files.load(SweepConfig, "sweeps", path)
        candidates, failed = [], []
        for place in sorted((folder / TUNE).glob("all/[0-9]*")):
            result = last_result(place / "result.json")
            error = result.get("error") if result.get("done") else last_line(place / "error.txt")
            if error:
                failed.append({"trial": int(place.name), "error": error})
            elif result:
                candidates.append(Candidate(int(place.name), _label(result), result, place))
        objectives = (SCORE,) if config.static is None else tuple(config.static.objectives)
        return cls(config, objectives, candidates, failed)

    @property
    def asked(self) -> int:
        """Trials of a whole sweep."""
        return (self.config.static or self.config.training).num_samples  # type: ignore[union-attr]

    @property
    def is_finished(self) -> bool:
        """Whether all trials have ended."""
        ended = sum(bool(candidate.result.get("done")) for candidate in self.candidates)
        return ended + len(self.failed) >= self.asked

    def best(self) -> Candidate | None:
        """The winner: best in the first objective, then in the others, then with the fewest parameters."""
        return min(self.candidates, key=self._place, default=None)

    def front(self) -> list[Candidate]:
        """Candidates that no other one equals in all objectives and beats in one, best first; one of equal ones."""
        kept: list[Candidate] = []
        for one in sorted(self.candidates, key=self._place):
            mine = self.goodness(one)
            if not any(all(a >= b for a, b in zip(self.goodness(k), mine, strict=True)) for k in kept):
                kept.append(one)
        return kept

    def _place(self, candidate: Candidate) -> tuple[float, ...]:
        return *(-value for value in self.goodness(candidate)), candidate.label.count("=")

    def goodness(self, candidate: Candidate) -> tuple[float, ...]:
        """A candidate's objectives, each so that more is better."""
        return tuple((1.0 if MODES[name] == "max" else -1.0) * candidate.result[name] for name in self.objectives)

    def as_json(self, candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
        """Candidates as plain data."""
        return [{"trial": c.trial, "candidate": c.label, **values_of(c)} for c in candidates]


def values_of(candidate: Candidate) -> dict[str, float]:
    """The quantities that a candidate has, whether they are objectives or not."""
    return {name: candidate.result[name] for name in COLUMNS if name in candidate.result}


def last_result(path: Path) -> dict[str, Any]:
    """The last whole line of Tune's ``result.json``; empty where there is none."""
    for line in reversed(path.read_text().splitlines() if path.is_file() else []):
        try:
            return dict(json.loads(line))
        except ValueError:
            continue  # cut short by a kill
    return {}


def last_line(path: Path) -> str:
    """The last line of Tune's ``error.txt``, which is the error itself; empty where there is none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _label(result: Mapping[str, Any]) -> str:
    if "policy" in result:
        return str(result["policy"])
    given = {key.rpartition(".")[2]: value for key, value in result["config"].items()}
    return ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in given.items())


def columns(results: Results) -> list[str]:
    """The head of a table of candidates."""
    return ["candidate", "trial", *(COLUMNS[name] for name in results.objectives)]


def cells(candidate: Candidate, objectives: Sequence[str]) -> tuple[str, ...]:
    """A row of a table: candidate, trial, and objectives."""
    values = ((name, candidate.result[name]) for name in objectives)
    shown = (f"{value:+z.2%}" if name == "throughput" else f"{value:.4f}" for name, value in values)
    return candidate.label, str(candidate.trial), *shown
