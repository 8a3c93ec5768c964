"""What every rank measures of an iteration and decides from it, and how imperfectly a live one does both.

A live rank wakes up late, its stamps are noisy, some steps go unmeasured. Draws are hashes of (episode, iteration,
rank), so two policies meet the same ones. Legend: R ranks, M mechanisms, S ranks with settings of their own (1: one
setting for all, or R).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import limits, timing
from paceenv.sim.engine.draws import LATE_WAKE, MISSING, STAMPS, bits32, key_of, quantile
from paceenv.sim.engine.layout import Scratch, View

FIRST_MISSING = timing.BLOCK_ITERATIONS
"""A live agent learns the shape of a step first and takes nothing in; before this iteration all steps are measured."""


def is_missing(job: Any, key: np.uint64, t: int, r: int) -> bool:
    """Whether rank ``r`` could not measure iteration ``t``."""
    share = job["missing_share"]
    return bool(t >= FIRST_MISSING and share > 0.0 and bits32(key_of(key, MISSING, t), r) < share * 2.0**32)


def delay_imperfectly(job: Any, key: np.uint64, t: int, delay_R: NDArray[np.float32]) -> None:
    """Replace the delays that the ranks decided on by the real ones, which they will also measure; seconds.

    A sleep is over late by an exponential time. After a step that it could not measure, a rank does not delay itself.
    """
    for r in range(delay_R.shape[0]):
        asked_s = np.float64(delay_R[r])
        if is_missing(job, key, t - 1, r):
            delay_R[r] = 0.0
        elif asked_s > 0.0 and job["late_wake_s"] > 0.0:
            u = (float(bits32(key_of(key, LATE_WAKE, t), r)) + 0.5) * 2.0**-32
            delay_R[r] = asked_s - job["late_wake_s"] * math.log(u)


def blur(
    job: Any,
    key: np.uint64,
    t: int,
    normal: NDArray[np.float64],
    comm_R: NDArray[np.float32],
    wait_R: NDArray[np.float32],
) -> None:
    """Add the noise of stamps to what the ranks measured; no duration is below 0."""
    comm_key, wait_key = key_of(key, STAMPS, 2 * t), key_of(key, STAMPS, 2 * t + 1)
    for r in range(comm_R.shape[0]):
        comm_R[r] = max(comm_R[r] + job["stamp_noise_s"] * quantile(normal, bits32(comm_key, r)), 0.0)
        wait_R[r] = max(wait_R[r] + job["stamp_noise_s"] * quantile(normal, bits32(wait_key, r)), 0.0)


def keep_missing(job: Any, key: np.uint64, t: int, source: NDArray[np.float32], target: NDArray[np.float32]) -> None:
    """Copy the estimators of the ranks that cannot measure an iteration: aside before all take it in, back after it."""
    for r in range(min(source.shape[1], target.shape[1])):
        if is_missing(job, key, t, r):
            for field in range(timing.RANK_FIELDS):
                target[field, r] = source[field, r]


def take_in(
    view: View,
    scratch: Scratch,
    limits_4: NDArray[np.float64],
    step_s: float,
    extra_s: float,
    per_group: int,
) -> None:
    """Every rank takes in its own timing and sets the delay of its next iteration."""
    job, rank, tick, comm_R, wait_R = view.job, view.rank, view.tick, scratch.comm_R, scratch.wait_R
    ranks = comm_R.shape[0]
    delay_R = rank[timing.DELAY_S]
    if job["stamp_noise_s"] > 0.0:
        blur(job, view.clock["key"], view.clock["iteration"], view.normal, comm_R, wait_R)
    timing.observe_step(tick, step_s + extra_s)
    timing.observe_ranks(rank, tick, comm_R, wait_R, job["has_barrier"])
    cap_s = limits.capped_s(limits_4[limits.CAP_S], limits_4[limits.CAP_SHARE], tick[timing.STEP_BASELINE_S])
    timing.decide(rank, tick, scratch.settings_M2R, scratch.on_M, cap_s, 0, per_group)
    elapsed_s, burst_s, fill = step_s + extra_s, limits_4[limits.BURST_S], limits_4[limits.FILL]
    timing.spend(rank[timing.BUDGET_S], delay_R, ranks, elapsed_s, burst_s, fill)


def total(value_R: Any, ranks: int) -> float:
    """Sum over ranks, in any order: only reported, never fed back, so it may be re-associated into vector registers."""
    result = 0.0
    for r in range(ranks):
        result += value_R[r]
    return result
