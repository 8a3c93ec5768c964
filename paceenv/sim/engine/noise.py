"""Noise, typed by cause: when each rank arrives at its collective, and which groups have work after it.

Scalar loops that the kernel compiles. Compute time of rank r in iteration t is

    compute_s * factor[r] * (1 + common[t]) * max(0, 1 + jitter[r, t] + imbalance[r, t] + drift[r, t])
        * fail_slow[r, t] + stall[r, t]

Rare events (fail-slow onsets and recoveries, stalls, post-collective work episodes) are found by geometric skips over
the flattened index ``iteration * width + position``, so an iteration without one costs nothing. Nothing here depends on
time or on pacing: two policies see the same noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine import draws
from paceenv.sim.engine.draws import bits32, bits_of_ranks, geometric, key_of, quantile, quantiles, uniform
from paceenv.sim.engine.layout import (
    DRIFT_X,
    FACTOR,
    FIXED_POST_WORK_S,
    POST_WORK_NOW_S,
    POST_WORK_UNTIL,
    Scratch,
    View,
)

_START = 1 << 62
"""Iteration number of draws made once, at the start of an episode."""
_UNIT_VARIANCE = math.sqrt(12.0)
_MIN_FACTOR = 1e-6
"""The sign of a factor shows whether the rank is in a fail-slow episode, so a factor must not reach 0."""


def onset_rate(share: float, mean_iterations: float) -> float:
    """Probability per iteration that an episode starts, for a stationary share of time spent in episodes.

    Episodes last D iterations on average and the gaps between them (1 - p) / p, where a gap may be empty: ``share = D /
    (D + (1 - p) / p)``.
    """
    return share / (share + (1.0 - share) * mean_iterations)


def running_share(share: float, mean_iterations: float) -> float:
    """Share of positions whose episode runs on from before; with the first iteration's onsets it gives ``share``."""
    return share * (1.0 - 1.0 / mean_iterations)


def reset_noise(job: Any, clock: Any, noise: NDArray[np.float32], group: NDArray[np.float64], normal: Any) -> None:
    """Draw what lasts: persistent factors, the stationary states of drift and episodes, and the first rare events."""
    ranks, groups, key = noise.shape[1], group.shape[1], clock["key"]
    persistent_key, drift_key = key_of(key, draws.PERSISTENT, _START), key_of(key, draws.DRIFT, _START)
    first_slow = int(uniform(key, draws.SLOW_RANK, _START) * ranks)
    fail_key = key_of(key, draws.FAIL_SLOW, _START)
    share = running_share(job["fail_slow_share"], job["fail_slow_mean_iterations"])
    for r in range(ranks):
        factor = 1.0 + job["persistent_cv"] * quantile(normal, bits32(persistent_key, r))
        is_slow = (r - first_slow) % ranks < job["slow_ranks"]
        factor = max(factor, _MIN_FACTOR) * (job["slow_factor"] if is_slow else 1.0)
        noise[FACTOR, r] = -factor if uniform(fail_key, draws.FAIL_SLOW, r) < share else factor
        noise[DRIFT_X, r] = job["drift_cv"] * quantile(normal, bits32(drift_key, r))
    clock["stall_next"] = geometric(uniform(key, draws.STALL, 0), job["stall_rate"]) - 1
    onset = onset_rate(job["fail_slow_share"], job["fail_slow_mean_iterations"])
    clock["fail_slow_next"] = geometric(uniform(key, draws.FAIL_SLOW, 0), onset) - 1
    recovery = 1.0 / job["fail_slow_mean_iterations"]
    clock["recovery_next"] = ranks + geometric(uniform(key, draws.RECOVERY, 0), recovery) - 1
    reset_post_work(job, clock, group)
    clock["iteration"], clock["stall_count"], clock["fail_slow_count"], clock["post_work_count"] = 0, 0, 0, 0
    clock["recovery_count"] = 0
    clock["link_s"] = 0.0
    for g in range(groups):
        group[FIXED_POST_WORK_S, g] = 0.0
    first_post_work = int(uniform(key, draws.POST_WORK, _START) * groups)
    for i in range(min(job["post_work_groups"], groups)):
        group[FIXED_POST_WORK_S, (first_post_work + i) % groups] = job["post_work_s"]


def reset_post_work(job: Any, clock: Any, group: NDArray[np.float64]) -> None:
    """Draw which groups start inside an episode of post-collective work, and when the next one begins."""
    key, groups = clock["key"], group.shape[1]
    share = running_share(job["post_work_share"], job["post_work_mean_iterations"])
    start_key = key_of(key, draws.POST_WORK, _START)
    for g in range(groups):
        u = uniform(start_key, draws.POST_WORK, g)
        active = u < share
        length = geometric(max(u / share, 1e-300), 1.0 / job["post_work_mean_iterations"]) if active else 0
        group[POST_WORK_UNTIL, g] = float(length)
        group[POST_WORK_NOW_S, g] = episode_s(job, uniform(start_key, draws.COMMON, g))
    onset = onset_rate(job["post_work_share"], job["post_work_mean_iterations"])
    clock["post_work_next"] = geometric(uniform(key, draws.POST_WORK, 0), onset) - 1


def episode_s(job: Any, u: float) -> float:
    """Post-collective work of one episode from a uniform ``u``: uniform around its mean, seconds."""
    return float(job["post_work_episode_s"] * (1.0 + job["post_work_spread"] * (2.0 * u - 1.0)))


def start_post_work(view: View) -> None:
    """Start the post-collective work episodes that begin in this iteration; a group already in one keeps it."""
    job, clock, group = view.job, view.clock, view.group
    groups, t = group.shape[1], clock["iteration"]
    onset = onset_rate(job["post_work_share"], job["post_work_mean_iterations"])
    while clock["post_work_next"] < (t + 1) * groups:
        g = clock["post_work_next"] - t * groups
        n = clock["post_work_count"] + 1
        clock["post_work_count"] = n
        episode_key = key_of(clock["key"], draws.POST_WORK, n)
        if group[POST_WORK_UNTIL, g] <= t:
            length = geometric(uniform(episode_key, draws.POST_WORK, 1), 1.0 / job["post_work_mean_iterations"])
            group[POST_WORK_UNTIL, g] = float(t + length)
            group[POST_WORK_NOW_S, g] = episode_s(job, uniform(episode_key, draws.POST_WORK, 2))
        clock["post_work_next"] += geometric(uniform(episode_key, draws.POST_WORK, 3), onset)


def change_fail_slow(job: Any, clock: Any, factor_R: NDArray[np.float32]) -> None:
    """End and start the fail-slow episodes that do so in this iteration.

    Lengths are geometric, so an episode needs no memory of its end: recoveries come at a constant rate to every rank. A
    recovery of a healthy rank changes nothing.
    """
    ranks, t = factor_R.shape[0], clock["iteration"]
    recovery = 1.0 / job["fail_slow_mean_iterations"]
    while clock["recovery_next"] < (t + 1) * ranks:
        r = clock["recovery_next"] - t * ranks
        clock["recovery_count"] += 1
        factor_R[r] = abs(factor_R[r])
        clock["recovery_next"] += geometric(uniform(clock["key"], draws.RECOVERY, clock["recovery_count"]), recovery)
    onset = onset_rate(job["fail_slow_share"], job["fail_slow_mean_iterations"])
    while clock["fail_slow_next"] < (t + 1) * ranks:
        r = clock["fail_slow_next"] - t * ranks
        clock["fail_slow_count"] += 1
        factor_R[r] = -abs(factor_R[r])
        clock["fail_slow_next"] += geometric(uniform(clock["key"], draws.FAIL_SLOW, clock["fail_slow_count"]), onset)


def add_stalls(job: Any, clock: Any, compute_R: NDArray[np.float64]) -> None:
    """Add this iteration's runtime or control-plane stalls (exponential) to the ranks they hit."""
    ranks, t = compute_R.shape[0], clock["iteration"]
    while clock["stall_next"] < (t + 1) * ranks:
        n = clock["stall_count"] + 1
        clock["stall_count"] = n
        stall_key = key_of(clock["key"], draws.STALL, n)
        compute_R[clock["stall_next"] - t * ranks] -= job["stall_mean_s"] * math.log(uniform(stall_key, draws.STALL, 1))
        clock["stall_next"] += geometric(uniform(stall_key, draws.STALL, 2), job["stall_rate"])


def draw_compute(view: View, scratch: Scratch, has_program: bool) -> None:
    """Write every rank's compute time of this iteration, seconds, into ``scratch.compute_R``.

    Where the step is a program, its stalls are kept apart, in ``scratch.spare_R``.
    """
    job, clock, noise, normal = view.job, view.clock, view.noise, view.normal
    compute_R, spare_R, bits_R = scratch.compute_R, scratch.spare_R, scratch.bits_R
    ranks, key, t = compute_R.shape[0], clock["key"], clock["iteration"]
    jitter_cv, imbalance_cv = job["jitter_cv"], job["imbalance_cv"]
    if jitter_cv > 0.0:
        quantiles(key_of(key, draws.JITTER, t), normal, bits_R, compute_R)
        for r in range(ranks):
            compute_R[r] = 1.0 + jitter_cv * compute_R[r]
    else:
        for r in range(ranks):
            compute_R[r] = 1.0
    if imbalance_cv > 0.0:
        quantiles(key_of(key, draws.IMBALANCE, t), view.imbalance, bits_R, spare_R)
        for r in range(ranks):
            compute_R[r] += imbalance_cv * spare_R[r]
    if job["drift_cv"] > 0.0:
        # Ornstein-Uhlenbeck, one step an iteration; uniform innovations are normal after a few of many steps
        drift_key, keep = key_of(key, draws.DRIFT, t), math.exp(-1.0 / job["drift_iterations"])
        innovation = job["drift_cv"] * math.sqrt(1.0 - keep * keep) * _UNIT_VARIANCE
        drift_R = noise[DRIFT_X]
        bits_of_ranks(drift_key, bits_R)
        for r in range(ranks):
            u = float(bits_R[r]) * 2.0**-32 - 0.5
            x = keep * np.float64(drift_R[r]) + innovation * u
            drift_R[r] = x
            compute_R[r] += x
    common = 1.0
    if job["common_cv"] > 0.0:
        common += job["common_cv"] * quantile(normal, np.uint32(key_of(key, draws.COMMON, t) >> np.uint64(32)))
    scale_s = job["compute_s"] * max(common, 0.0)
    factor_R, slow = noise[FACTOR], 1.0
    if job["fail_slow_share"] > 0.0:
        change_fail_slow(job, clock, factor_R)
        slow = job["fail_slow_factor"]
    for r in range(ranks):
        relative = compute_R[r] if compute_R[r] > 0.0 else 0.0
        factor = np.float64(factor_R[r])
        compute_R[r] = scale_s * (factor if factor > 0.0 else -slow * factor) * relative
    if has_program:  # a stall is at the start of its step and not spread over it
        for r in range(ranks):
            spare_R[r] = 0.0
    if job["stall_rate"] > 0.0:
        add_stalls(job, clock, spare_R if has_program else compute_R)
