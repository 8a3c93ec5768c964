"""The measures of a run: step-time statistics and paired bootstrap intervals. numpy only; times in seconds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceenv.core.intervals import Interval


def step_statistics(step_s: NDArray[np.float64]) -> dict[str, float]:
    """Mean, standard deviation, coefficient of variation and percentiles of step times of any shape, pooled."""
    flat = np.ravel(step_s)
    mean, sd = float(flat.mean()), float(flat.std())
    p50, p95, p99 = (float(p) for p in np.percentile(flat, [50, 95, 99]))
    return {"mean": mean, "sd": sd, "cv": sd / mean, "p50": p50, "p95": p95, "p99": p99}


def reward(step_mean_s: float, step_sd_s: float, reference_s: float, cv_weight: float) -> float:
    """Throughput against step-time variation, both relative to a fixed reference step time of the cluster.

    ``reference/mean - cv_weight * sd/reference``. The variation is not relative to the policy's own mean, so slowing
    every step down lowers the reward although it lowers the CV.

    Args:
        step_mean_s: mean step time of the interval, seconds; this and the rest may be arrays of one shape.
        step_sd_s: standard deviation of the step time, seconds.
        reference_s: ideal step time of the cluster, seconds.
        cv_weight: weight of the variation, at least 0.
    """
    return reference_s / step_mean_s - cv_weight * step_sd_s / reference_s


def bootstrap_interval(
    samples_N: NDArray[np.float64], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """The mean of a sample with its percentile bootstrap interval.

    Args:
        samples_N: one value of each independent unit (seed).
        level: share of the resamples within the interval, 0 to 1.
        resamples: number of resamples.
        seed: of the resampling.

    Returns:
        The mean with its interval; without an interval for fewer than two units.
    """
    units, mean = len(samples_N), float(samples_N.mean())
    if units < 2:
        return Interval(mean)
    picks = np.random.default_rng(seed).integers(0, units, (resamples, units))
    low, high = np.percentile(samples_N[picks].mean(axis=-1), [50 * (1 - level), 50 * (1 + level)])
    return Interval(mean, float(low), float(high))


def hypervolume(gain_N: NDArray[np.float64], cv_N: NDArray[np.float64], worst_cv: float) -> float:
    """Area that points dominate between them and the corner (gain 0, ``worst_cv``).

    A higher gain and a lower CV are better. Points beyond the corner in either count for nothing.

    Args:
        gain_N: gains, ``(N,)``.
        cv_N: coefficients of variation of the same points, ``(N,)``.
        worst_cv: the corner's CV.
    """
    area, lowest_cv = 0.0, worst_cv
    for gain, cv in sorted(zip(gain_N.tolist(), cv_N.tolist(), strict=True), key=lambda p: (-p[0], p[1])):
        if gain > 0.0 and cv < lowest_cv:
            area += gain * (lowest_cv - cv)
            lowest_cv = cv
    return float(area)
