"""Noise of a program's compute: of whole steps, and of single phases beyond it.

Axes: T steps, R ranks, J phases of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.fits.noise_fit import NoiseFit, fit_noise
from paceenv.calibration.measurements import MIN_STEPS, NoiseMeasurements, measure_stage
from paceenv.calibration.parameters import Parameter, estimated

NOISE: Final = ("jitter_cv", "common_cv", "persistent_cv", "imbalance_cv", "imbalance_skew")
MIN_CV: Final = 0.005
"""Smaller variations are left out."""

Array = NDArray[np.float64]


def fit_ratios(
    name: str, source: str, iteration_T: NDArray[np.int64], step_T: Array, ratio_TR: Array
) -> NoiseFit | None:
    """The noise of what ranks compute in a step; None where steps or ranks are too few.

    Args:
        name: of the job.
        source: of its trace.
        iteration_T: numbers of the steps.
        step_T: step times, seconds.
        ratio_TR: a rank's compute in a step over a mean.
    """
    steps, ranks = ratio_TR.shape
    if steps < MIN_STEPS or ranks < 2 or not (ratio_TR > 0.0).all():
        return None
    stage = measure_stage(ratio_TR, step_T=iteration_T)
    if stage.workers - len(stage.slow_workers) < 2:
        return None
    mean_s = float(step_T.mean())
    cv = float(step_T.std(ddof=1)) / mean_s
    return fit_noise(NoiseMeasurements(f"{name} ({source})", steps, mean_s, cv, (stage,)))


def noise_of_compute(
    noise: NoiseFit, names: Sequence[int], *, by_rank: bool, keys: Sequence[str] = NOISE
) -> tuple[dict[str, Any], list[Parameter]]:
    """Section ``noise`` of a cluster config, and its parameters with their evidence.

    Args:
        noise: the fit.
        names: the trace's numbers of the ranks.
        by_rank: whether phases of their own have the lasting differences of ranks.
        keys: parameters to name.
    """
    values = noise.to_config()["noise"]
    if by_rank:
        values |= {"persistent_cv": 0.0, "slow_ranks": 0, "slow_factor": 1.0}
    found = []
    for key in keys:
        estimate = getattr(noise, key)
        if estimate is not None and not (by_rank and key == "persistent_cv"):
            said = "variance components of a rank's compute in a step, jackknife over steps"
            found.append(estimated(f"noise.{key}", estimate, said))
    if noise.slow_factor is not None and not by_rank:
        slow, count = ", ".join(f"rank {names[r]}" for r in noise.slow_workers), float(len(noise.slow_workers))
        said = f"persistently slower than their peers: {slow}"
        found.append(Parameter("noise.slow_ranks", count, 0.0, count, count, said))
        found.append(estimated("noise.slow_factor", noise.slow_factor, said))
    return values, found


def length_cv(relative: Sequence[Array]) -> float:
    """How much single phases vary by themselves: their variance less their covariance with other phases, as a CV.

    Args:
        relative: of each rank ``(T, J)``, each phase over its mean.
    """
    own, shared = list[float](), list[float]()
    for one in relative:
        if one.shape[1] < 2 or len(one) < MIN_STEPS:
            continue
        covariance = np.cov(one.T)
        own.append(float(np.diag(covariance).mean()))
        shared.append(float(covariance[~np.eye(len(covariance), dtype=bool)].mean()))
    if not own:
        return 0.0
    found = max(float(np.mean(own) - np.mean(shared)), 0.0) ** 0.5
    return float(min(found, 1.0)) if found > MIN_CV else 0.0
