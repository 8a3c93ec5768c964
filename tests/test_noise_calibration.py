"""Noise calibration: closed forms, recovery of known parameters, and the numbers of the published traces."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from traced_jobs import STRAGGLER_DIR, job_of, needs_traces

from paceenv.calibration.noise_fit import (
    TOLERANCE,
    WIDTHS,
    Estimate,
    NoiseFit,
    NoiseMeasurements,
    WorkerDistribution,
    fit_noise,
    measure_stage,
    stage_times,
    subset_max,
    widths,
)
from paceenv.calibration.two_state_fit import Episodes, find_episodes
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.importers.straggler import import_straggler
from paceenv.ui import config_files

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


def fit(compute_s_TR: Array) -> NoiseFit:
    return fit_noise(measure_stage(compute_s_TR), "synthetic")


def worker_of(fitted: NoiseFit) -> WorkerDistribution:
    noise = fitted.to_config()["noise"]
    return WorkerDistribution(
        noise["persistent_cv"], max(noise["imbalance_cv"], noise["jitter_cv"]), noise["imbalance_skew"]
    )


def half_errors(times_TR: Array) -> float:
    """Of E[max]/mean, where each half of the steps predicts the other, both ways averaged; the largest of all."""
    halves = [measure_stage(times_TR[first::2]) for first in (0, 1)]
    tested = widths(times_TR.shape[1] - len(halves[0].slow_workers))
    predicted = np.mean([worker_of(fit_noise(half, "half")).expected_max(tested) for half in halves], axis=0)
    measured = np.mean([half.all.max_over_mean for half in halves], axis=0)
    return float(np.abs(predicted / measured - 1.0).max())


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_subset_max_is_the_mean_over_all_subsets(width: int) -> None:
    values_TR = np.random.default_rng(1).normal(size=(3, 7))
    brute_T = np.mean([values_TR[:, list(subset)].max(axis=1) for subset in combinations(range(7), width)], axis=0)
    np.testing.assert_allclose(subset_max(values_TR, width), brute_T, rtol=1e-12)


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
    assert len(fitted.slow_workers) == ("slow_factor" in truth)
    for name in PARAMETERS:
        estimate: Estimate | None = getattr(fitted, name)
        if estimate is None:
            assert name not in truth
            continue
        assert estimate.lo <= truth.get(name, 0.0) <= estimate.hi, name
        # error bars that say something: a tenth of the value, except for what 16 workers cannot tell
        assert estimate.se < {"persistent_cv": 0.01, "common_cv": 0.01, "imbalance_skew": 0.2}.get(
            name, 0.1 * estimate.value
        )
    assert half_errors(times_TR) < TOLERANCE
    # 16 workers are a small sample of the persistent part
    assert fitted.distance < (0.08 if "persistent_cv" in truth else 0.03)


def test_a_slow_worker_is_taken_out_before_the_rest_is_fitted() -> None:
    times_TR = compute_times(60, 4, jitter_cv=0.004, common_cv=0.008)
    slowed_TR = times_TR * np.array([1.0, 1.0, 2.35, 1.0])
    fitted, healthy = fit(slowed_TR), fit(times_TR[:, [0, 1, 3]])
    assert fitted.slow_workers == (2,)
    assert fitted.slow_factor is not None
    assert fitted.slow_factor.value == pytest.approx(2.35, rel=2e-3)
    for name in ("mean_compute_s", "common_cv", "jitter_cv", "persistent_cv"):
        assert getattr(fitted, name) == getattr(healthy, name)
    assert fitted.to_config()["noise"]["slow_ranks"] == 1


def test_noise_free_and_two_worker_jobs_can_be_fitted() -> None:
    quiet = fit(np.full((20, 4), 0.5)).to_config()
    assert quiet["mean_compute_s"] == 0.5
    assert max(quiet["noise"][name] for name in ("jitter_cv", "common_cv", "persistent_cv", "imbalance_cv")) < 1e-6
    pair = fit(compute_times(100, 2, jitter_cv=0.05))
    assert pair.jitter_cv is not None
    assert pair.jitter_cv.lo < 0.05 < pair.jitter_cv.hi
    assert not pair.slow_workers


def test_one_of_two_workers_that_is_much_slower_is_a_slow_one() -> None:
    """Not a pair whose factors vary by more than they are; its noise is relative to itself."""
    late = fit(compute_times(100, 2, jitter_cv=0.05) * np.array([1.0, 15.0]))
    assert late.slow_workers == (1,)
    assert late.slow_factor is not None
    assert late.slow_factor.lo < 15.0 < late.slow_factor.hi
    assert late.jitter_cv is not None
    assert late.jitter_cv.lo < 0.05 < late.jitter_cv.hi
    assert late.persistent_cv.value == 0.0


def test_few_workers_that_are_alike_do_not_make_a_mean_certain() -> None:
    """Three may be so by chance, 63 hardly: workers usually differ by a per cent or two."""
    few, many = (fit(compute_times(400, workers, jitter_cv=0.02, slow_factor=1.5)) for workers in (4, 64))
    for fitted, least, most in ((few, 0.004, 0.02), (many, 0.0, 0.001)):
        assert least < fitted.mean_compute_s.se / fitted.mean_compute_s.value < most
    assert few.slow_factor is not None
    assert 0.01 < few.slow_factor.hi / few.slow_factor.value - 1.0 < 0.06


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
        measure_stage(times_TR)


# Reference values: "Understanding Stragglers in Large Model Training Using What-if Analysis", sample traces SE and AR.
MAX_OVER_MEAN_SE = {0: (1.076, 1.155, 1.230, 1.304, 1.382), 1: (1.052, 1.105, 1.157, 1.208, 1.261)}


def packaged(name: str) -> tuple[NoiseMeasurements, list[NoiseFit]]:
    measured = config_files.load(NoiseMeasurements, "measurements", f"straggler-{name.lower()}")
    return measured, [fit_noise(one, measured.source) for one in measured.stages]


def test_packaged_se_has_the_published_numbers_and_its_fit_gives_them() -> None:
    measured, fits = packaged("SE")
    for stage, fitted in zip(measured.stages, fits, strict=True):
        # the reference divides by the mean of the subset, which matters at small widths, by 0.2 %
        published = np.array(MAX_OVER_MEAN_SE[stage.stage])
        assert stage.all.max_over_mean == pytest.approx(published, rel=2.1e-3)
        assert fitted.jitter_cv is None
        assert worker_of(fitted).expected_max(WIDTHS[:5]) == pytest.approx(published, rel=0.005)


def test_packaged_ar_has_one_slow_worker_and_quiet_peers() -> None:
    _, fits = packaged("AR")
    assert [fitted.slow_workers for fitted in fits] == [(0,), (), (), ()]
    assert fits[0].slow_factor is not None
    assert fits[0].slow_factor.value == pytest.approx(2.35, abs=0.01)
    for fitted in fits:
        idiosyncratic = fitted.jitter_cv or fitted.imbalance_cv
        assert idiosyncratic is not None
        assert 0.003 < idiosyncratic.value < 0.005
        assert 0.006 < fitted.common_cv.value < 0.026


@needs_traces
@pytest.mark.parametrize("name", ["SE", "AR"])
def test_packaged_summaries_are_those_of_the_traces(name: str) -> None:
    times = stage_times(import_straggler(STRAGGLER_DIR / f"trace-{name}.parquet"))
    for theirs in packaged(name)[0].stages:
        ours = measure_stage(times[theirs.stage])
        assert ours.slow_workers == theirs.slow_workers
        mine, known = (one.all.model_dump() for one in (ours, theirs))
        assert mine.pop("max_over_mean") == pytest.approx(known.pop("max_over_mean"), rel=1e-5)
        assert mine == pytest.approx(known, rel=1e-4)
        assert name == "AR" or half_errors(times[theirs.stage]) < TOLERANCE


TRACES, ITERATIONS, SERIES = 600, 300, 4


def drawn_episodes(share: float, mean_iterations: float, seed: int) -> list[Episodes]:
    """Episodes of series that turn on and off at constant rates; of the traces in which any happens."""
    rng = np.random.default_rng(seed)
    off, on = 1.0 / mean_iterations, share / (1.0 - share) / mean_iterations
    state_BN = rng.random((TRACES, SERIES)) < share
    states: list[NDArray[np.bool_]] = []
    for u_BN in rng.random((ITERATIONS, TRACES, SERIES)):
        state_BN = np.where(state_BN, u_BN > off, u_BN < on)
        states.append(state_BN)
    return [one for one in map(find_episodes, np.stack(states, axis=1)) if one is not None]


@pytest.mark.parametrize(("share", "mean_iterations"), [(0.05, 60.0), (0.1, 40.0), (0.2, 20.0)])
def test_intervals_of_share_and_length_hold_the_truth(share: float, mean_iterations: float) -> None:
    episodes = drawn_episodes(share, mean_iterations, seed=1)
    shares = np.array([share in one.share for one in episodes])
    lengths = np.array([mean_iterations in one.mean_iterations for one in episodes])
    for inside in (shares, lengths):
        assert 0.92 <= np.mean(inside) <= 0.995


def test_one_short_episode_bounds_next_to_nothing() -> None:
    """It may have been the shortest of many: of such traces a tenth would have the truth far outside otherwise."""
    on_TN = np.zeros((200, 4), np.bool_)
    on_TN[50:55, 2] = True
    one = find_episodes(on_TN)
    assert one is not None
    assert one.share.value == pytest.approx(5 / 800)
    assert one.share.low > 0.05 * one.share.value
    assert 20.0 * one.share.value < one.share.high < 0.99
    assert one.mean_iterations.high > 30.0 * one.mean_iterations.value
