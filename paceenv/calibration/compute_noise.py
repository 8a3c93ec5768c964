"""Noise of a job's compute: of one collective a step with fail-slow episodes, of a program, and of its phases.

Axes: T steps, R ranks, J phases of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.measurements import MIN_STEPS, NoiseMeasurements, measure_stage
from paceenv.calibration.noise_fit import NoiseFit, fit_noise
from paceenv.calibration.parameters import Parameter, estimated, exact
from paceenv.calibration.two_state_fit import Episodes, find_episodes, fit_two_states

NOISE: Final = ("jitter_cv", "common_cv", "persistent_cv", "imbalance_cv", "imbalance_skew")
MIN_CV: Final = 0.005
"""Smaller variations are left out."""
MIN_FAIL_SLOW: Final = 0.1
"""An episode makes a rank slower by at least this share."""

Array = NDArray[np.float64]


def fit_ratios(
    name: str, source: str, iteration_T: NDArray[np.int64], step_T: Array, ratio_TR: Array
) -> NoiseFit | None:
    """The noise of what ranks compute in a step; None where steps or ranks are too few."""
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
    """Section ``noise`` of a cluster config, and its parameters with their evidence."""
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
        found.append(exact("noise.slow_ranks", count, said))
        found.append(estimated("noise.slow_factor", noise.slow_factor, said))
    return values, found


def length_cv(relative: Sequence[Array]) -> float:
    """How much single phases vary by themselves: their variance less their covariance with other phases, as a CV."""
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


@dataclass(frozen=True)
class ComputeFit:
    """``noise`` of what is left when ``episodes`` are divided by ``factor``; None and 1 where no rank had any."""

    noise: NoiseFit
    episodes: Episodes | None
    factor: float
    factor_se: float


def fit_compute(stamps: JobStamps) -> ComputeFit:
    """Fit the compute of a job."""
    compute_s_TR = stamps.compute_TR
    on_TR = np.stack([fit_two_states(x, MIN_FAIL_SLOW * float(np.median(x))) for x in compute_s_TR.T], axis=1)
    episodes, factor, factor_se = find_episodes(on_TR), 1.0, 0.0
    if episodes is not None:
        compute_s_TR = compute_s_TR.copy()
        ratios = []
        for r in np.flatnonzero(on_TR.any(axis=0)):
            slow, healthy = compute_s_TR[on_TR[:, r], r], compute_s_TR[~on_TR[:, r], r]
            ratios.append((float(slow.mean() / healthy.mean()), slow.std() / slow.mean() / math.sqrt(len(slow))))
            compute_s_TR[on_TR[:, r], r] /= ratios[-1][0]
        factor = float(np.mean([ratio for ratio, _ in ratios]))
        between = np.std([r for r, _ in ratios], ddof=1) if len(ratios) > 1 else 0.0
        factor_se = float(np.hypot(between, factor * max(se for _, se in ratios)) / math.sqrt(len(ratios)))
    stage = measure_stage(compute_s_TR, step_T=stamps.iteration_T)
    mean_s = float(stamps.step_T.mean())
    source = f"{stamps.name} ({stamps.source})"
    cv = float(stamps.step_T.std(ddof=1)) / mean_s
    measured = NoiseMeasurements(source, len(compute_s_TR), mean_s, cv, (stage,))
    return ComputeFit(fit_noise(measured), episodes, factor, factor_se)
