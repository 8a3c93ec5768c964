"""The answer to a what-if question: today's job, each changed one beside it, what the numbers rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceenv.core.intervals import Interval
from paceenv.policies.ranges import Outside
from paceenv.whatif.change import Change


@dataclass(frozen=True)
class Numbers:
    """Of a job: mean step, s; throughput in the answer's unit a second; CV of the step; energy, J a sample.

    Between two jobs, run by run: relative differences, of the CV the difference itself.
    """

    step: Interval
    throughput: Interval
    cv: Interval
    energy: Interval | None


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
