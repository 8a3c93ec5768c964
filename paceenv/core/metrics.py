"""The measures of a run: step-time statistics, rewards, intervals of means. numpy only; times in seconds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceenv.core.differences import Mean
from paceenv.core.intervals import Interval

BEST = 0.05
"""Share of durations that are as short as without other traffic."""
MIN_TENANT = 0.1
"""A tenant makes transfers take longer than the best by at least this share, now and then."""
MIN_PREDICTABILITY = 0.6
"""A tenant's transfers are predicted by their past at least this well."""
MIN_TENANT_STEPS = 32
MAX_LAGS = 12
"""Of the values that predict the next one."""
_ROUNDING = 1e-12
"""Share of its mean by which a constant series may vary."""


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


def predictability(x_T: NDArray[np.float64]) -> float:
    """Correlation of a series with the prediction from its last values, 0 to 1.

    The prediction is an autoregression by Yule and Walker. Its order is the one that Schwarz' criterion (1978) prefers,
    0 included. A tenant whose period is not ours returns every few steps: its autocorrelation is small at most lags,
    but several lags together predict it well.
    """
    steps, mean = len(x_T), float(x_T.mean())
    orders = np.arange(min(MAX_LAGS, steps // 8) + 1)
    away_T = x_T - mean
    covariance_L = np.array([away_T[lag:] @ away_T[: steps - lag] for lag in orders]) / max(steps, 1)
    whole = float(covariance_L[0])
    if whole <= (_ROUNDING * mean) ** 2:
        return 0.0
    left_L = np.full(len(orders), whole)
    for order in orders[1:]:
        past = covariance_L[np.abs(orders[:order, None] - orders[:order])]
        left_L[order] -= covariance_L[1 : order + 1] @ np.linalg.solve(past, covariance_L[1 : order + 1])
    left_L = np.maximum(left_L / whole, 1e-12)
    return float(np.sqrt(1.0 - left_L[np.argmin(steps * np.log(left_L) + orders * np.log(steps))]))


def other_job(lasts_T: NDArray[np.float64]) -> tuple[float, float, bool]:
    """How well their past predicts transfers, their mean over the best less 1, and whether both show another job."""
    lasts_T = np.maximum(lasts_T, 1e-12)
    best_s, much_s = np.quantile(lasts_T, (BEST, 1.0 - BEST))
    inflated = float(lasts_T.mean() / best_s) - 1.0
    predictable = predictability(np.log(lasts_T))  # of logarithms: a few outliers would hide what all others share
    returns = len(lasts_T) >= MIN_TENANT_STEPS and predictable >= MIN_PREDICTABILITY
    much = inflated >= 0.5 * MIN_TENANT and bool(much_s >= (1.0 + MIN_TENANT) * best_s)
    return predictable, inflated, returns and much
