"""The answer to a what-if question: today's job, each changed one beside it, what the numbers rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceenv.core.intervals import Interval
from paceenv.policies.ranges import Outside
from paceenv.whatif.change import Change
from paceenv.whatif.estimate import as_json


@dataclass(frozen=True)
class Case:
    """A job: mean step in seconds, throughput in the answer's unit a second, CV of the step, energy in J a sample."""

    nodes: int
    ranks: int
    policy: str
    step_s: Interval
    throughput: Interval
    cv: Interval
    energy_j: Interval | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "ranks": self.ranks,
            "policy": self.policy,
            "step_time_s": as_json(self.step_s),
            "throughput_per_s": as_json(self.throughput),
            "cv": as_json(self.cv),
            "energy_j_per_sample": as_json(self.energy_j),
        }


@dataclass(frozen=True)
class Differences:
    """Differences between two jobs, run by run; relative, except for the CV."""

    step: Interval
    throughput: Interval
    cv: Interval
    energy: Interval | None = None

    def as_dict(self) -> dict[str, Any]:
        found = {"step_time": self.step, "throughput": self.throughput, "cv": self.cv, "energy": self.energy}
        return {name: as_json(value) for name, value in found.items()}


@dataclass(frozen=True)
class Row:
    """A changed job, its difference from today's and, if it is paced, from the same job without pacing."""

    change: Change
    case: Case
    against_today: Differences
    against_unpaced: Differences | None = None
    outside: Outside | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.change.label,
            "change": self.change.as_dict(),
            **self.case.as_dict(),
            "against_today": self.against_today.as_dict(),
            "against_unpaced": None if self.against_unpaced is None else self.against_unpaced.as_dict(),
            "outside_calibrated_range": None if self.outside is None else asdict(self.outside),
        }


@dataclass(frozen=True)
class Prediction:
    """The answer to a what-if question.

    Attributes:
        left_open: what the intervals hold besides: between which ends, and which measurement would identify it.
    """

    source: str  # name of the config or trace
    method: str  # how it was made, in words
    unit: str  # what throughput counts
    today: Case  # the job as it is
    changed: Sequence[Row]  # the changed jobs
    assumes: Sequence[str]  # what the numbers take for granted
    cannot_tell: Sequence[str]  # what they leave open outside of the intervals
    left_open: Sequence[str] = ()
    measured_step_s: Interval | None = None  # mean step of the trace
    measured_cv: Interval | None = None  # coefficient of variation of the trace's steps

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``paceenv whatif --json`` prints it."""
        return {
            "source": self.source,
            "method": self.method,
            "throughput_unit": self.unit,
            "measured": {"step_time_s": as_json(self.measured_step_s), "cv": as_json(self.measured_cv)},
            "today": self.today.as_dict(),
            "changed": [row.as_dict() for row in self.changed],
            "assumes": list(self.assumes),
            "left_open": list(self.left_open),
            "cannot_tell": list(self.cannot_tell),
        }
