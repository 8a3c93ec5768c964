"""Which steps at the beginning of a run are warm-up, and what a calibration makes of a job that has one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from traced_jobs import job_of

from paceenv.calibration.fit_trace import fit_trace
from paceenv.core.trace import PACE_OP, Trace
from paceenv.core.warm_up import MIN_ITERATIONS, warm_up_values, without_warm_up

JITTER = 0.05


def compute_TR(iterations: int = 120, ranks: int = 4) -> NDArray[np.float64]:
    return 1.0 + JITTER * np.random.default_rng(3).standard_normal((iterations, ranks))


@pytest.mark.parametrize(
    ("long", "late", "expected"),
    [((), 0, 0), ((0, 1), 0, 2), ((3,), 0, 0), ((3,), 10, 4), ((0, 7), 10, 8), ((11,), 10, 0), ((60,), 10, 0)],
)
def test_unlike_values_at_the_beginning(long: tuple[int, ...], late: int, expected: int) -> None:
    step_s_V = compute_TR().max(axis=1)
    step_s_V[list(long)] += 2.0
    assert warm_up_values(step_s_V, late) == expected


@pytest.mark.parametrize("at", [0, 3, 9])
def test_one_long_iteration_of_the_beginning_is_no_noise(at: int) -> None:
    """On an H100 a stop of 60 ms in the fourth of 117 steps of a job doubled the noise that was fitted."""
    disturbed_TR = compute_TR()
    disturbed_TR[at] += 3.0
    found = fit_trace(job_of(disturbed_TR), check=False)
    assert found.notes == (f"the first {at + 1} iterations are left out as warm-up",) if at else found.notes == ()
    assert found.fit.cluster.noise.jitter_cv == pytest.approx(JITTER, rel=0.15)
    assert found.fit.cluster.noise.common_cv == pytest.approx(0.0, abs=0.02)


def test_one_in_the_middle_is_the_jobs_own() -> None:
    disturbed_TR = compute_TR()
    disturbed_TR[60] += 3.0
    assert without_warm_up(job_of(disturbed_TR))[1] == 0


def test_the_iterations_before_pacing_began_are_no_warm_up() -> None:
    """A job is slower until then, by as much as pacing gains."""
    work_TR = compute_TR(200)
    work_TR[:50] += 1.0
    trace = job_of(work_TR)
    assert without_warm_up(trace)[1] > 0
    paced = trace.isin("op", "compute") & (trace.column("iteration") >= 50)
    rows = trace.table.filter(pa.array(paced))
    for name, value in (("op", PACE_OP), ("seq", 2)):
        field = rows.schema.field(name)
        rows = rows.set_column(rows.schema.get_field_index(name), field, pa.array([value] * len(rows)).cast(field.type))
    assert without_warm_up(Trace(pa.concat_tables([trace.table, rows]), trace.metadata))[1] == 0


def test_a_short_trace_has_no_warm_up() -> None:
    work_TR = compute_TR(MIN_ITERATIONS)
    work_TR[1] += 3.0
    assert without_warm_up(job_of(work_TR))[1] == 0


def test_other_jobs_keep_their_rows() -> None:
    work_TR = compute_TR()
    work_TR[5] += 3.0
    mine, other = job_of(work_TR, name="mine"), job_of(work_TR, name="other")
    both = Trace(pa.concat_tables([mine.table, other.table]).unify_dictionaries(), mine.metadata)
    kept, warm_up = without_warm_up(both, "mine")
    assert warm_up == 6
    assert int(kept.isin("job", "other").sum()) == len(other.table)
    assert int(kept.column("iteration")[kept.isin("job", "mine")].min()) == 5
