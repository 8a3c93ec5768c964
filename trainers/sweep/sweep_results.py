"""The results of a sweep, read from its config and from the JSON and text that Tune writes: no pickle, no Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.ui import config_files

CONFIG, TUNE = "config.yaml", "tune/all"
"""Files of a sweep: its config, and the folder of Tune's experiment."""
SCORE, DECISIONS = "score", "decisions"
MODES: Mapping[str, str] = {"throughput": "max", "cv": "min", SCORE: "max"}
"""Ray's name for which end of an objective is good."""
COLUMNS: Mapping[str, str] = {
    "throughput": "throughput against passive",
    "cv": "CV of step time",
    SCORE: "validation score",
    DECISIONS: "decisions",
}

Row = dict[str, Any]
"""The last result of a trial, as Tune wrote it: metrics and ``config``; beside them ``trial``, its number, and
``candidate``, how it is spelled: a policy's name, or hyperparameters."""


@dataclass(frozen=True)
class Results:
    """A sweep's candidates, and the trials that failed with their errors; the first of ``objectives`` leads."""

    config: SweepConfig
    objectives: Sequence[str]
    candidates: Sequence[Row]
    failed: Sequence[Row]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """What a folder holds, also while the sweep runs. Raises InputError where it is none of a sweep."""
        path = folder / CONFIG
        if not path.is_file():
            raise InputError(f"{folder}: holds no sweep; allowed: the folder of one")
        config = config_files.load(SweepConfig, "sweeps", path)
        candidates, failed = list[Row](), list[Row]()
        for place in sorted((folder / TUNE).glob("[0-9]*")):
            result, trial = last_result(place / "result.json"), int(place.name)
            error = result.get("error") if result.get("done") else last_line(place / "error.txt")
            if error:
                failed.append({"trial": trial, "error": error})
            elif result:
                candidates.append({**result, "trial": trial, "candidate": _spelled(result)})
        objectives = (SCORE,) if config.static is None else tuple(config.static.objectives)
        return cls(config, objectives, candidates, failed)

    @property
    def asked(self) -> int:
        """Trials of a whole sweep."""
        return (self.config.static or self.config.training).num_samples  # type: ignore[union-attr]

    @property
    def is_finished(self) -> bool:
        """Whether all trials have ended."""
        return sum(bool(row.get("done")) for row in self.candidates) + len(self.failed) >= self.asked

    def best(self) -> Row | None:
        """The winner: best in the first objective, then in the others, then with the fewest parameters."""
        return min(self.candidates, key=self._place, default=None)

    def front(self) -> list[Row]:
        """Candidates that no other one equals in all objectives and beats in one, best first; one of equal ones."""
        kept = list[Row]()
        for row in sorted(self.candidates, key=self._place):
            mine = self.goodness(row)
            if not any(all(a >= b for a, b in zip(self.goodness(k), mine, strict=True)) for k in kept):
                kept.append(row)
        return kept

    def _place(self, row: Row) -> tuple[float, ...]:
        return *(-value for value in self.goodness(row)), row["candidate"].count("=")

    def goodness(self, row: Row) -> tuple[float, ...]:
        """A candidate's objectives, each so that more is better."""
        return tuple((1.0 if MODES[name] == "max" else -1.0) * row[name] for name in self.objectives)

    def cells(self, row: Row) -> tuple[str, ...]:
        """A row of a table: candidate, trial, and objectives."""
        shown = (f"{row[name]:+z.2%}" if name == "throughput" else f"{row[name]:.4f}" for name in self.objectives)
        return row["candidate"], str(row["trial"]), *shown


def as_json(row: Row) -> Row:
    """A candidate with the quantities that it has, whether they are objectives or not."""
    return {name: row[name] for name in ("trial", "candidate", *COLUMNS) if name in row}


def last_result(path: Path) -> Row:
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


def _spelled(result: Row) -> str:
    if "policy" in result:
        return str(result["policy"])
    given = {key.rpartition(".")[2]: value for key, value in result["config"].items()}
    return ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in given.items())
