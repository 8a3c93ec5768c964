"""Noise of what ranks compute in a step, with fail-slow episodes, and of single phases of a step.

Axes: T steps, R ranks, J phases of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import ClusterBuilder
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.noise_fit import MIN_STEPS, fit_noise, stage_times
from paceenv.calibration.parameters import FROM_BASE, Parameter, bounded, identified, not_identifiable
from paceenv.calibration.two_state_fit import find_episodes, fit_two_states
from paceenv.core.trace import Trace
from paceenv.sim.cluster import Cluster
from paceenv.ui import config_files

NO_NOISE: Final = {
    **dict.fromkeys(("jitter_cv", "common_cv", "persistent_cv", "imbalance_cv", "imbalance_skew"), 0.0),
    **{"slow_ranks": 0, "slow_factor": 1.0},
}
LASTING: Final = ("noise.persistent_cv", "noise.slow_ranks", "noise.slow_factor")
MIN_CV: Final = 0.005
"""Smaller variations are left out."""
MAX_CV: Final = 1.0
"""Larger ones are cut off: a normal factor would often be negative."""
MAX_MICRO_BATCHES: Final = 4096
MIN_FAIL_SLOW: Final = 0.1
"""An episode makes a rank slower by at least this share."""

Array = NDArray[np.float64]


def add_noise(builder: ClusterBuilder[Any]) -> None:
    """Take the noise of what ranks compute into the cluster; where steps or ranks are too few, a program has none."""
    compute, stamps, data = builder.compute, builder.stamps, builder.data
    steps, ranks = compute.value_TR.shape
    is_ratio = not isinstance(stamps, JobStamps)
    if is_ratio and (steps < MIN_STEPS or ranks < 2 or not (compute.value_TR > 0.0).all()):
        source = f"{FROM_BASE if 'noise' in data else 'none'}; {MIN_STEPS} steps of two ranks settle it"
        builder.add(not_identifiable("noise.jitter_cv", 0.0, f"{steps} steps of {ranks} ranks", source))
        data.setdefault("noise", {})
        return
    healthy_TR, episodes = _without_episodes(compute.value_TR, stamps.names)
    data["noise"] = dict(NO_NOISE)
    (mean, *noise), slow_ranks = fit_noise(healthy_TR)
    if not is_ratio:
        builder.put(replace(mean, evidence="mean of what precedes the payload, healthy ranks"))
    elif not compute.by_rank:  # phases have the mean over all ranks
        assert mean.value is not None
        for phase in compute_phases(builder):
            phase["seconds"] = float(f"{mean.value * phase['seconds']:.6g}")
    builder.slow = [] if compute.by_rank else [stamps.names[r] for r in slow_ranks]
    slow = ", ".join(f"rank {name}" for name in builder.slow)
    for one in noise:
        if compute.by_rank and one.key in LASTING:
            continue  # phases say how ranks differ lastingly
        if "slow" in one.key:
            one = replace(one, evidence=f"persistently slower than their peers: {slow}")
        builder.put(_within_bounds(one))
    builder.put(*episodes)


def _within_bounds(one: Parameter) -> Parameter:
    if one.value is None or one.value <= MAX_CV or not one.key.endswith("_cv"):
        return one
    said = f"{one.evidence}; they give {one.value:.2g}, and the simulator knows at most {MAX_CV:.0f}"
    return replace(one, value=MAX_CV, evidence=said)


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


def fit_stage(trace: Trace, base: Cluster, name: str) -> tuple[Cluster, str]:
    """``base`` with the compute time and noise of a pipeline's first stage, one node a rank; and what is left out."""
    stages = stage_times(trace)
    first = min(stages)
    (parameters, _), data = fit_noise(stages[first]), base.model_dump()
    source = f"derived statistics of {trace.job_name(None)} ({trace.metadata.source}), stage {first}"
    data |= {"name": name, "description": f"Noise of compute fitted to {source}."}
    data["job"] |= {"nodes": stages[first].shape[1]}
    data["noise"] |= NO_NOISE
    for one in map(_within_bounds, parameters):
        section, _, key = one.key.partition(".")
        data[section][key] = one.value
    data["calibration"] = {"source": source, "fitted": {one.key: one.to_record() for one in parameters}}
    said = f"only the noise of compute of stage {first} is fitted; sends and receives between stages are not"
    return config_files.parse(Cluster, data, f"calibration of {source}"), f"a pipeline of {len(stages)} stages: {said}"


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


def compute_phases(builder: ClusterBuilder[Any]) -> list[dict[str, Any]]:
    """The phases of the step in which ranks compute."""
    return [one["compute"] for one in builder.data["program"]["step"] if "compute" in one]


def put_lengths(builder: ClusterBuilder[Any]) -> None:
    """Let each phase vary by itself, where phases do; what that adds to whole steps is no jitter of steps."""
    length, works = length_cv(builder.compute.relative_R), compute_phases(builder)
    if not length or len(works) > MAX_MICRO_BATCHES:
        return
    count = sum(len(one) for one in builder.compute.relative_R)
    said = "variation of single phases beyond that of whole steps"
    builder.put(identified("program.length_cv", length, length / (2.0 * count) ** 0.5, said))
    builder.drop(["noise.jitter_cv"])
    for number, one in enumerate(works):
        one.setdefault("micro_batch", number)
    seconds = np.array([one["seconds"] for one in works])
    share = seconds / max(float(seconds.sum()), 1e-300)
    left = builder.data["noise"].get("jitter_cv", 0.0) ** 2 - length**2 * float((share**2).sum())
    builder.data["noise"] |= {"jitter_cv": max(left, 0.0) ** 0.5}
