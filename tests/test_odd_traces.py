"""Traces of odd shape: calibration says what it can, or refuses them in one line; nothing else, and no warning."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from traced_jobs import phases_of

from paceenv.calibration.fit_trace import fit_stamps, fit_trace
from paceenv.calibration.heldout import check_fit
from paceenv.calibration.job_stamps import read_job
from paceenv.calibration.noise_fit import fit_noise, stage_times
from paceenv.calibration.step_stamps import read_rows
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace

Array = NDArray[np.float64]


def trace_of(compute_s_TR: Array, payload_s_T: Array, groups: int = 1, op: str = "all_reduce") -> Trace:
    """A trace whose ranks compute and then meet in a payload, group by group; with several groups a barrier follows."""
    payload = compute_s_TR, op, np.repeat(np.arange(groups), compute_s_TR.shape[1] // groups), payload_s_T[:, None]
    return phases_of(payload, *([(None, "barrier", -1, 1e-3)] if groups > 1 else []))


@st.composite
def odd_traces(draw: st.DrawFn) -> Trace:
    groups = draw(st.sampled_from([1, 1, 2]))
    T, R = draw(st.sampled_from([1, 3, 8, 17, 18, 30])), groups * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    scale_s, spread = draw(st.sampled_from([0.0, 1e-9, 0.1, 1e6])), draw(st.sampled_from([0.0, 1e-12, 0.05, 2.0]))
    payload_s = draw(st.sampled_from([0.0, 1e-7, 0.02, 30.0]))
    compute_s_TR = scale_s * np.exp(spread * rng.standard_normal((T, R)))
    if draw(st.booleans()):
        compute_s_TR[:, 0] *= draw(st.sampled_from([0.0, 3.0]))
    payload_s_T = payload_s * (1.0 + draw(st.sampled_from([0.0, 0.3])) * rng.random(T))
    return trace_of(compute_s_TR, payload_s_T, groups, draw(st.sampled_from(["all_reduce", "gather", "all_to_all"])))


@given(odd_traces())
@settings(derandomize=True)
def test_no_shape_of_a_trace_crashes_calibration(trace: Trace) -> None:
    """Any other error than a refusal, and any warning, fails."""
    with contextlib.suppress(InputError):
        fit = fit_trace(trace, program=False)
        assert np.isfinite([fit.simulated.mean_s, fit.simulated.cv]).all()
    with contextlib.suppress(InputError):
        (mean, *_), _ = fit_noise(stage_times(trace)[0])
        assert np.isfinite([mean.value, mean.se]).all()


def test_stamps_that_never_vary_agree_with_themselves() -> None:
    stamps = read_job(read_rows(trace_of(np.full((60, 4), 0.1), np.full(60, 0.02))))
    assert check_fit(stamps, lambda part: fit_stamps(part).cluster)["good"]
