"""The measures of a run: step-time statistics, rewards, intervals of means. numpy only; times in seconds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceenv.core.differences import Mean
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
    """
    return reference_s / step_mean_s - cv_weight * step_sd_s / reference_s


def mean_interval(samples_N: NDArray[np.float64]) -> Interval:
    """The mean of independent values, such as paired gains by seed, with Student's interval; unbounded for one."""
    return Mean(samples_N.tolist()).interval(0.05)


def correlation_length(values: NDArray[np.float64]) -> float:
    """Values after which a series has forgotten, at least 1: so many of them tell as much as one independent value.

    One plus twice its autocorrelations, up to the first that may be chance.
    """
    centred = values - values.mean()
    variance = float((centred**2).mean())
    if not variance > 1e-24 * float(values.mean()) ** 2:
        return 1.0
    total, n = 1.0, len(values)
    for lag in range(1, min(n // 4, 200)):
        r = float((centred[lag:] * centred[:-lag]).mean()) / variance
        if r < 2.0 / math.sqrt(n):
            break
        total += 2.0 * r
    return total
