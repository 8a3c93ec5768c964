"""Noise calibration: closed forms, recovery of known parameters, the numbers of the published traces; and which steps
at the beginning of a trace are warm-up, with what a calibration makes of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from traced_jobs import STRAGGLER_DIR, job_of, needs_traces

from paceenv.calibration.fit_trace import fit_trace
from paceenv.calibration.noise_fit import fit_noise, stage_times
from paceenv.calibration.two_state_fit import find_episodes
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.trace import PACE_OP, Trace
from paceenv.core.warm_up import LATE, MIN_ITERATIONS, without_warm_up
from paceenv.importers.straggler import import_straggler

PARAMETERS = ("persistent_cv", "common_cv", "jitter_cv", "imbalance_cv", "imbalance_skew", "slow_factor")

Array = NDArray[np.float64]


def compute_times(steps: int, ranks: int, seed: int = 0, **noise: float) -> Array:
    """Compute times ``(T, R)``, seconds, with a mean of 4 s, drawn from the model; the first worker may be slow."""
    rng = np.random.default_rng(seed)
    residual = 1.0 + noise.get("jitter_cv", 0.0) * rng.standard_normal((steps, ranks))
    if "imbalance_cv" in noise:
        shape = 4.0 / noise["imbalance_skew"] ** 2
        residual += noise["imbalance_cv"] * (rng.gamma(shape, size=(steps, ranks)) - shape) / np.sqrt(shape)
    persistent = 1.0 + noise.get("persistent_cv", 0.0) * rng.standard_normal(ranks)
    persistent[0] *= noise.get("slow_factor", 1.0)
    common = 1.0 + noise.get("common_cv", 0.0) * rng.standard_normal((steps, 1))
    times: Array = 4.0 * persistent * common * residual
    return times


class Estimate(NamedTuple):
    value: float
    se: float
    lo: float
    hi: float


def fit(compute_s_TR: Array) -> dict[str, Estimate]:
    """The parameters by the last part of their keys."""
    found, _ = fit_noise(compute_s_TR)
    return {p.key.rpartition(".")[2]: Estimate(*(float(x or 0.0) for x in (p.value, p.se, p.lo, p.hi))) for p in found}


@pytest.mark.parametrize(
    "truth",
    [
        {"imbalance_cv": 0.14, "imbalance_skew": 1.08, "common_cv": 0.012},
        {"imbalance_cv": 0.12, "imbalance_skew": 1.0, "common_cv": 0.02, "persistent_cv": 0.02},
        {"jitter_cv": 0.02, "common_cv": 0.01, "persistent_cv": 0.03},
        {"jitter_cv": 0.005, "common_cv": 0.01, "slow_factor": 2.35},
    ],
)
def test_known_parameters_are_inside_their_intervals(truth: dict[str, float]) -> None:
    times_TR = compute_times(150, 16, **truth)
    fitted = fit(times_TR)
    assert ("slow_ranks" in fitted) == ("slow_factor" in truth)
    for name in PARAMETERS:
        estimate = fitted.get(name)
        if estimate is None:
            assert name not in truth
            continue
        assert estimate.lo <= truth.get(name, 0.0) <= estimate.hi, name
        # error bars that say something: a tenth of the value, except for what 16 workers cannot tell
        assert estimate.se < {"persistent_cv": 0.01, "common_cv": 0.01, "imbalance_skew": 0.2}.get(
            name, 0.1 * estimate.value
        )


def test_a_slow_worker_is_taken_out_before_the_rest_is_fitted() -> None:
    times_TR = compute_times(60, 4, jitter_cv=0.004, common_cv=0.008)
    slowed_TR = times_TR * np.array([1.0, 1.0, 2.35, 1.0])
    assert fit_noise(slowed_TR)[1] == [2]
    fitted, healthy = fit(slowed_TR), fit(times_TR[:, [0, 1, 3]])
    assert fitted["slow_factor"].value == pytest.approx(2.35, rel=2e-3)
    for name in ("compute_s", "common_cv", "jitter_cv", "persistent_cv"):
        assert fitted[name] == healthy[name]
    assert fitted["slow_ranks"].value == 1


def test_noise_free_and_two_worker_jobs_can_be_fitted() -> None:
    quiet = fit(np.full((20, 4), 0.5))
    assert quiet.pop("compute_s").value == 0.5
    assert max(one.value for one in quiet.values()) < 1e-6
    pair = fit(compute_times(100, 2, jitter_cv=0.05))
    assert pair["jitter_cv"].lo < 0.05 < pair["jitter_cv"].hi
    assert "slow_ranks" not in pair


def test_one_of_two_workers_that_is_much_slower_is_a_slow_one() -> None:
    """Not a pair whose factors vary by more than they are; its noise is relative to itself."""
    times_TR = compute_times(100, 2, jitter_cv=0.05) * np.array([1.0, 15.0])
    assert fit_noise(times_TR)[1] == [1]
    late = fit(times_TR)
    assert late["slow_factor"].lo < 15.0 < late["slow_factor"].hi
    assert late["jitter_cv"].lo < 0.05 < late["jitter_cv"].hi
    assert late["persistent_cv"].value == 0.0


def test_few_workers_that_are_alike_do_not_make_a_mean_certain() -> None:
    """Three may be so by chance, 63 hardly: workers usually differ by a per cent or two."""
    few, many = (fit(compute_times(400, workers, jitter_cv=0.02, slow_factor=1.5)) for workers in (4, 64))
    for fitted, least, most in ((few, 0.004, 0.02), (many, 0.0, 0.001)):
        assert least < fitted["compute_s"].se / fitted["compute_s"].value < most
    assert 0.01 < few["slow_factor"].hi / few["slow_factor"].value - 1.0 < 0.06


def test_steps_that_a_worker_missed_are_left_out() -> None:
    trace = job_of(compute_times(30, 4, jitter_cv=0.1))
    missed = (trace.column("iteration") == 7) & (trace.column("rank") == 2)
    cut = Trace(trace.table.filter(~missed), trace.metadata)
    assert len(stage_times(cut)[0]) == 29


@pytest.mark.parametrize(
    ("times_TR", "message"),
    [
        (np.ones((7, 4)), "7 complete steps, ranks: 4; needed: 8 steps, 2 ranks"),
        (np.ones((20, 1)), "20 complete steps, ranks: 1"),
        (np.zeros((20, 4)), r"0\.0 s; allowed: positive"),
    ],
)
def test_too_little_to_measure(times_TR: Array, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_noise(times_TR)


# "Understanding Stragglers in Large Model Training Using What-if Analysis", sample traces SE and AR; of SE's two stages
# the published maxima of 2, 4, 8, 16 and 32 workers over the mean.
MAX_OVER_MEAN_SE = ((1.076, 1.155, 1.230, 1.304, 1.382), (1.052, 1.105, 1.157, 1.208, 1.261))


@needs_traces
def test_the_imbalance_of_a_production_trace_has_the_published_maxima() -> None:
    times = stage_times(import_straggler(STRAGGLER_DIR / "trace-SE.parquet"))
    for stage, published in enumerate(MAX_OVER_MEAN_SE):
        noise = {name: one.value for name, one in fit(times[stage]).items() if name in PARAMETERS}
        drawn_TR = compute_times(20_000, 32, **noise | {"common_cv": 0.0}) / 4.0
        maxima = [drawn_TR.reshape(-1, width).max(axis=1).mean() for width in (2, 4, 8, 16, 32)]
        assert maxima == pytest.approx(published, rel=0.01)


@needs_traces
def test_a_production_trace_has_one_slow_worker_and_quiet_peers() -> None:
    times = stage_times(import_straggler(STRAGGLER_DIR / "trace-AR.parquet"))
    assert [fit_noise(of_stage)[1] for of_stage in times.values()] == [[0], [], [], []]
    fits = [fit(of_stage) for of_stage in times.values()]
    assert fits[0]["slow_factor"].value == pytest.approx(2.35, abs=0.01)
    for fitted in fits:
        idiosyncratic = fitted.get("jitter_cv") or fitted["imbalance_cv"]
        assert 0.003 < idiosyncratic.value < 0.005
        assert 0.006 < fitted["common_cv"].value < 0.026


@pytest.mark.parametrize(("share", "mean_iterations"), [(0.05, 60.0), (0.1, 40.0), (0.2, 20.0)])
def test_intervals_of_share_and_length_hold_the_truth(share: float, mean_iterations: float) -> None:
    """Of four series in each of 600 traces, which turn on and off at constant rates; of traces in which any does."""
    rng, states = np.random.default_rng(1), list[NDArray[np.bool_]]()
    off, on = 1.0 / mean_iterations, share / (1.0 - share) / mean_iterations
    state_BN = rng.random((600, 4)) < share
    for u_BN in rng.random((300, 600, 4)):
        state_BN = np.where(state_BN, u_BN > off, u_BN < on)
        states.append(state_BN)
    episodes = [one for one in map(find_episodes, np.stack(states, axis=1)) if one is not None]
    assert 0.92 <= np.mean([share in one.share for one in episodes]) <= 0.995
    assert 0.92 <= np.mean([mean_iterations in one.mean_iterations for one in episodes]) <= 0.995


JITTER = 0.05


def compute_TR(*stops: int, iterations: int = 120) -> Array:
    """Compute of four ranks, with three seconds more in some iterations."""
    work_TR = 1.0 + JITTER * np.random.default_rng(3).standard_normal((iterations, 4))
    work_TR[list(stops)] += 3.0
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
        *(((), 120, 0), ((1,), 120, 2), ((3,), 120, 4), ((2, 8), 120, 9), ((8,), 60, 9), ((12,), 120, 0)),
        *(((60,), 120, 0), ((1,), MIN_ITERATIONS + LATE, 0)),
    ],
)
def test_what_is_left_out(at: tuple[int, ...], iterations: int, left_out: int) -> None:
    trace = job_of(compute_TR(*at, iterations=iterations))
    kept, count = without_warm_up(read_matrix(trace))
    assert count == left_out
    assert kept.iteration_T[0] == left_out


@pytest.mark.parametrize("at", [1, 3, 9])
def test_one_long_iteration_of_the_beginning_is_no_noise(at: int) -> None:
    """On an H100 a stop of 60 ms in the fourth of 117 steps of a job doubled the noise that was fitted."""
    found = fit_trace(job_of(compute_TR(at)))
    assert found.notes == (f"the first {at + 1} iterations are left out as warm-up",)
    assert found.cluster.noise.jitter_cv == pytest.approx(JITTER, rel=0.15)
    assert found.cluster.noise.common_cv == pytest.approx(0.0, abs=0.02)


def test_iterations_before_pacing_began_are_no_warm_up() -> None:
    """A job is slower until then, by as much as pacing gains."""
    work_TR = compute_TR(iterations=200)
    work_TR[:50] += 1.0
    assert without_warm_up(read_matrix(with_rows(job_of(work_TR), PACE_OP, np.arange(200) >= 50)))[1] == 0
    work_TR[4] += 3.0
    assert without_warm_up(read_matrix(with_rows(job_of(work_TR), PACE_OP, np.arange(200) >= 50)))[1] == 5


@pytest.mark.parametrize("op", ["checkpoint", "evaluation", "gc"])
def test_what_interrupts_an_iteration_now_and_then_is_no_warm_up(op: str) -> None:
    trace = job_of(compute_TR(*range(7, 120, 8)))
    assert without_warm_up(read_matrix(with_rows(trace, op, np.arange(120) % 8 == 7)))[1] == 0
