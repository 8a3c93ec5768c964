"""Noise of what ranks compute in a step, with fail-slow episodes, and of single phases of a step.

Axes: T steps, R ranks, J phases of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import ClusterBuilder
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.noise_fit import MIN_STEPS, NoiseFit, fit_noise, measure_stage
from paceenv.calibration.parameters import Parameter, bounded, estimated, exact, identified, not_identifiable
from paceenv.calibration.two_state_fit import find_episodes, fit_two_states
from paceenv.sim.cluster import Cluster
from paceenv.ui import config_files

NOISE: Final = ("jitter_cv", "common_cv", "persistent_cv", "imbalance_cv", "imbalance_skew")
MIN_CV: Final = 0.005
"""Smaller variations are left out."""
MAX_CV: Final = 1.0
"""Larger ones are cut off: a normal factor would often be negative."""
MIN_FAIL_SLOW: Final = 0.1
"""An episode makes a rank slower by at least this share."""

Array = NDArray[np.float64]


def add_noise(builder: ClusterBuilder[Any]) -> None:
    """Take the noise of what ranks compute into the cluster; where steps or ranks are too few, a program has none."""
    compute, stamps, data = builder.compute, builder.stamps, builder.data
    steps, ranks = compute.value_TR.shape
    is_ratio = not isinstance(stamps, JobStamps)
    if is_ratio and (steps < MIN_STEPS or ranks < 2 or not (compute.value_TR > 0.0).all()):
        source = f"{'from base' if 'noise' in data else 'none'}; {MIN_STEPS} steps of two ranks settle it"
        builder.add(not_identifiable("noise.jitter_cv", 0.0, f"{steps} steps of {ranks} ranks", source))
        data.setdefault("noise", {})
        return
    healthy_TR, episodes = _without_episodes(compute.value_TR, stamps.names)
    fit = fit_noise(measure_stage(healthy_TR), stamps.described)
    if not is_ratio:
        said = "mean of what precedes the payload, healthy ranks"
        builder.put(estimated("job.compute_s", fit.mean_compute_s, said))
    elif not compute.by_rank:
        builder.healthy = fit.mean_compute_s.value
    _put_noise(builder, fit)
    builder.put(*episodes)


def _put_noise(builder: ClusterBuilder[Any], noise_fit: NoiseFit) -> None:
    """Variance components and slow ranks; lasting differences only where phases do not say them."""
    names, by_rank = builder.stamps.names, builder.compute.by_rank
    noise = noise_fit.to_config()["noise"]
    if by_rank:
        noise |= {"persistent_cv": 0.0, "slow_ranks": 0, "slow_factor": 1.0}
    builder.data["noise"] = noise
    for key in NOISE:
        estimate = getattr(noise_fit, key)
        if estimate is not None and not (by_rank and key == "persistent_cv"):
            said = "variance components of a rank's compute in a step, jackknife over steps"
            if key.endswith("_cv") and estimate.value > MAX_CV:
                said += f"; they give {estimate.value:.2g}, and the simulator knows at most {MAX_CV:.0f}"
                estimate = replace(estimate, value=MAX_CV)
            builder.put(estimated(f"noise.{key}", estimate, said))
    if noise_fit.slow_factor is not None and not by_rank:
        slow = ", ".join(f"rank {names[r]}" for r in noise_fit.slow_workers)
        said = f"persistently slower than their peers: {slow}"
        builder.put(exact("noise.slow_ranks", len(noise_fit.slow_workers), said))
        builder.put(estimated("noise.slow_factor", noise_fit.slow_factor, said))


def _without_episodes(compute_TR: Array, names: Sequence[int]) -> tuple[Array, list[Parameter]]:
    """What ranks would compute without their fail-slow episodes, and what those are; nothing where no rank had any."""
    on_TR = np.stack([fit_two_states(x, MIN_FAIL_SLOW * float(np.median(x))) for x in compute_TR.T], axis=1)
    episodes = find_episodes(on_TR)
    if episodes is None:
        return compute_TR, []
    compute_TR, ratios = compute_TR.copy(), list[tuple[float, float]]()
    slowed = np.flatnonzero(on_TR.any(axis=0)).tolist()
    for r in slowed:
        slow, healthy = compute_TR[on_TR[:, r], r], compute_TR[~on_TR[:, r], r]
        ratios.append((float(slow.mean() / healthy.mean()), slow.std() / slow.mean() / math.sqrt(len(slow))))
        compute_TR[on_TR[:, r], r] /= ratios[-1][0]
    factor = max(float(np.mean([ratio for ratio, _ in ratios])), 1.0)
    between = np.std([r for r, _ in ratios], ddof=1) if len(ratios) > 1 else 0.0
    factor_se = float(np.hypot(between, factor * max(se for _, se in ratios)) / math.sqrt(len(ratios)))
    said = f"{episodes.count} episodes on {', '.join(f'rank {names[r]}' for r in slowed)}"
    return compute_TR, [
        bounded("noise.fail_slow_share", episodes.share, said),
        bounded("noise.fail_slow_mean_iterations", episodes.mean_iterations, said),
        identified("noise.fail_slow_factor", factor, factor_se, said),
    ]


def noise_cluster(fit: NoiseFit, base: Cluster, name: str) -> Cluster:
    """``base`` with the measured compute time and noise, one node per measured worker."""
    config, data = fit.to_config(), base.model_dump()
    data["name"], data["description"] = name, f"Noise of compute fitted to {fit.source}, stage {fit.stage}."
    data["job"] |= {"nodes": fit.workers, "compute_s": config["mean_compute_s"]}
    data["noise"] |= config["noise"]
    data["calibration"] = config["calibration"]
    return config_files.parse(Cluster, data, f"calibration of {fit.source}")


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
    own_cv = max(float(np.mean(own) - np.mean(shared)), 0.0) ** 0.5
    return float(f"{min(own_cv, 1.0):.4g}") if own_cv > MIN_CV else 0.0


def put_lengths(builder: ClusterBuilder[Any], length: float) -> None:
    """Let each phase vary by itself; what that adds to whole steps is no jitter of steps."""
    count = sum(len(one) for one in builder.compute.relative_R)
    said = "variation of single phases beyond that of whole steps"
    builder.put(identified("program.length_cv", length, length / (2.0 * count) ** 0.5, said))
    builder.drop(["noise.jitter_cv"])
    step = builder.data["program"]["step"] = deepcopy([*builder.compute.phases])
    works = [one["compute"] for one in step if "compute" in one]
    for number, one in enumerate(works):
        one.setdefault("micro_batch", number)
    seconds = np.array([one["seconds"] for one in works])
    share = seconds / max(float(seconds.sum()), 1e-300)
    left = builder.data["noise"].get("jitter_cv", 0.0) ** 2 - length**2 * float((share**2).sum())
    builder.data["noise"] |= {"jitter_cv": max(left, 0.0) ** 0.5}
