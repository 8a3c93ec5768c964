"""Which steps at the beginning of a trace are warm-up, and what a calibration makes of a job that has one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from traced_jobs import job_of

from paceenv.calibration.fit_trace import fit_trace
from paceenv.core.trace import PACE_OP, Trace
from paceenv.core.warm_up import LATE, MIN_ITERATIONS, without_warm_up

JITTER = 0.05


def compute_TR(iterations: int = 120, ranks: int = 4) -> NDArray[np.float64]:
    return 1.0 + JITTER * np.random.default_rng(3).standard_normal((iterations, ranks))


def with_stops(*at: int, iterations: int = 120) -> NDArray[np.float64]:
    """Compute with three seconds more in the iterations ``at``."""
    work_TR = compute_TR(iterations)
    work_TR[list(at)] += 3.0
    return work_TR


def with_rows(trace: Trace, op: str, iterations: NDArray[np.bool_]) -> Trace:
    """The trace with an operation in those iterations, as long as their compute."""
    rows = trace.table.filter(pa.array(trace.isin("op", "compute") & iterations[trace.column("iteration")]))
    for name, value in (("op", op), ("seq", 2)):
        field = rows.schema.field(name)
        rows = rows.set_column(rows.schema.get_field_index(name), field, pa.array([value] * len(rows)).cast(field.type))
    return Trace(pa.concat_tables([trace.table, rows]).unify_dictionaries(), trace.metadata)


@pytest.mark.parametrize(
    ("at", "iterations", "left_out"),
    [
        ((), 120, 0),
        ((1,), 120, 2),
        ((3,), 120, 4),
        ((2, 8), 120, 9),
        ((8,), 60, 9),
        ((12,), 120, 0),
        ((60,), 120, 0),
        ((1,), MIN_ITERATIONS + LATE, 0),
    ],
)
def test_what_is_left_out(at: tuple[int, ...], iterations: int, left_out: int) -> None:
    trace = job_of(with_stops(*at, iterations=iterations))
    kept, count = without_warm_up(trace)
    assert count == left_out
    assert kept.column("iteration").min() == left_out


@pytest.mark.parametrize("at", [1, 3, 9])
def test_one_long_iteration_of_the_beginning_is_no_noise(at: int) -> None:
    """On an H100 a stop of 60 ms in the fourth of 117 steps of a job doubled the noise that was fitted."""
    found = fit_trace(job_of(with_stops(at)))
    assert found.notes == (f"the first {at + 1} iterations are left out as warm-up",)
    assert found.cluster.noise.jitter_cv == pytest.approx(JITTER, rel=0.15)
    assert found.cluster.noise.common_cv == pytest.approx(0.0, abs=0.02)


def test_iterations_before_pacing_began_are_no_warm_up() -> None:
    """A job is slower until then, by as much as pacing gains."""
    work_TR = compute_TR(200)
    work_TR[:50] += 1.0
    assert without_warm_up(with_rows(job_of(work_TR), PACE_OP, np.arange(200) >= 50))[1] == 0
    work_TR[4] += 3.0
    assert without_warm_up(with_rows(job_of(work_TR), PACE_OP, np.arange(200) >= 50))[1] == 5


@pytest.mark.parametrize("op", ["checkpoint", "evaluation", "gc"])
def test_what_interrupts_an_iteration_now_and_then_is_no_warm_up(op: str) -> None:
    trace = job_of(with_stops(*range(7, 120, 8)))
    assert without_warm_up(with_rows(trace, op, np.arange(120) % 8 == 7))[1] == 0


def test_other_jobs_keep_their_rows() -> None:
    mine, other = job_of(with_stops(5), name="mine"), job_of(with_stops(5), name="other")
    both = Trace(pa.concat_tables([mine.table, other.table]).unify_dictionaries(), mine.metadata)
    kept, count = without_warm_up(both, "mine")
    assert count == 6
    assert int(kept.isin("job", "other").sum()) == len(other.table)
    assert int(kept.column("iteration")[kept.isin("job", "mine")].min()) == 6
