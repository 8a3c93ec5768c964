"""The answer to a what-if question: today's job, each changed one beside it, what the numbers rest on; 95 % intervals.

Axes: D drawn clusters, S runs of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.intervals import Interval
from paceenv.core.student_t import student_t_quantile
from paceenv.policies.ranges import Outside
from paceenv.ui import output
from paceenv.whatif.change import Change

LEVEL: Final = 0.95

Array = NDArray[np.float64]
Ends = tuple[float, float]
"""How far the two ends of an open quantity move a number."""


@dataclass(frozen=True)
class Numbers:
    """Of a job: mean step, s; throughput in the answer's unit a second; CV of the step; energy, J a sample.

    Between two jobs, run by run: relative differences, of the CV the difference itself.
    """

    step: Interval
    throughput: Interval
    cv: Interval
    energy: Interval | None

    def cells(self, digits: str, cv_digits: str) -> list[str]:
        """In words; energy only where there is one."""
        energy = [] if self.energy is None else [format(self.energy, digits)]
        return [format(self.step, digits), format(self.throughput, digits), format(self.cv, cv_digits), *energy]


@dataclass(frozen=True)
class Row:
    """A job, and its difference from today's."""

    change: Change
    nodes: int
    ranks: int
    job: Numbers
    against_today: Numbers | None = None
    outside: Outside | None = None


@dataclass(frozen=True)
class Prediction:
    """The answer to a what-if question."""

    source: str  # name of the config or trace
    method: str  # how it was made, in words
    unit: str  # what throughput counts
    today: Row  # the job as it is
    changed: Sequence[Row]  # the changed jobs
    assumes: Sequence[str]  # what the numbers take for granted
    cannot_tell: Sequence[str]  # what they leave open outside of the intervals
    left_open: Sequence[str] = ()  # what they hold besides: between which ends, and what would identify it
    measured_step_s: Interval | None = None  # mean step of the trace
    measured_cv: Interval | None = None  # coefficient of variation of the trace's steps


def one_more(value_N: Array) -> Interval:
    """The mean of a sample, and between which ends one more value would lie."""
    return of_runs(value_N[:, None], by_factors=False)


def of_runs(value_DS: Array, *, by_factors: bool = True) -> Interval:
    """The same for one more run of one more drawn cluster; numbers that are all positive vary by factors."""
    value, (draws, runs) = float(value_DS.mean()), value_DS.shape
    by_factors = by_factors and bool((value_DS > 0.0).all())
    if value_DS.size < 2:
        return Interval(value)
    x_DS = np.log(value_DS) if by_factors else value_DS
    within = float(x_DS.var(axis=1, ddof=1).mean()) if runs > 1 else 0.0  # between runs of one cluster
    between = max(float(x_DS.mean(axis=1).var(ddof=1)) - within / runs, 0.0) if draws > 1 else 0.0
    count = draws if draws > 1 else x_DS.size
    half = student_t_quantile(0.5 * (1.0 - LEVEL), count - 1) * math.sqrt((between + within) * (1.0 + 1.0 / count))
    low, high = float(x_DS.mean()) - half, float(x_DS.mean()) + half
    if by_factors:
        low, high = math.exp(low), math.exp(high)
    return Interval(value, min(low, value), max(high, value))


def widened(interval: Interval, ends: Ends, *, by_factors: bool) -> Interval:
    """An interval that also holds what one size leaves open: the ends are not errors, the truth may be at either."""
    if ends == (0.0, 0.0) or not interval.is_bounded:
        return interval
    low, high = (math.log(x) if by_factors else x for x in interval[1:])
    low, high = low + min(0.0, *ends), high + max(0.0, *ends)
    return Interval(interval.value, *((math.exp(low), math.exp(high)) if by_factors else (low, high)))


def print_prediction(answer: Prediction) -> None:
    """The jobs and their differences as tables, and what they rest on as lines on the error stream."""
    rows = answer.changed
    jobs = [("today", answer.today), *((row.change.label, row) for row in rows)]
    columns = ["", "nodes", "step, s", f"{answer.unit}/s", "CV", "J/sample"]
    cells = [[label, str(row.nodes), *row.job.cells(".4g", ".3f")] for label, row in jobs]
    output.print_table(f"What if: {answer.source}", columns[: len(cells[0])], cells, answer.method)
    columns, note = ["", "step", "throughput", "CV", "energy a sample"], "differences run by run, on the same noise"
    cells = [[row.change.label, *row.against_today.cells("+z.1%", "+z.3f")] for row in rows if row.against_today]
    output.print_table("Against today", columns[: len(cells[0])], cells, f"{note}; intervals of 95 %")
    if answer.measured_step_s is not None and answer.measured_cv is not None:
        output.say(f"measured: step {answer.measured_step_s:.4g} s, CV {answer.measured_cv:.3f}")
    remarks = {"open, inside the intervals": answer.left_open, "assumed": answer.assumes}
    for what, lines in (remarks | {"not identified": answer.cannot_tell}).items():
        for line in lines:
            output.say(f"{what}: {line}")
