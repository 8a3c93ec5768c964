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
class Numbers:
    """Of a job: mean step, s; throughput in the answer's unit a second; CV of the step; energy, J a sample.

    Between two jobs, run by run: relative differences, of the CV the difference itself.
    """

    step: Interval
    throughput: Interval
    cv: Interval
    energy: Interval | None

    def as_dict(self, *names: str) -> dict[str, Any]:
        """Under these names, in the order of the fields."""
        return dict(zip(names, map(as_json, (self.step, self.throughput, self.cv, self.energy)), strict=True))


@dataclass(frozen=True)
class Row:
    """A job, its difference from today's and, if it is paced, from the same job without pacing."""

    change: Change
    nodes: int
    ranks: int
    job: Numbers
    against_today: Numbers | None = None
    against_unpaced: Numbers | None = None
    outside: Outside | None = None

    def as_dict(self) -> dict[str, Any]:
        job = self.job.as_dict("step_time_s", "throughput_per_s", "cv", "energy_j_per_sample")
        found = {"nodes": self.nodes, "ranks": self.ranks, "policy": self.change.pacing} | job
        if self.against_today is None:
            return found
        names, unpaced = ("step_time", "throughput", "cv", "energy"), self.against_unpaced
        return found | {
            "label": self.change.label,
            "change": self.change.as_dict(),
            "against_today": self.against_today.as_dict(*names),
            "against_unpaced": None if unpaced is None else unpaced.as_dict(*names),
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
    today: Row  # the job as it is
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
