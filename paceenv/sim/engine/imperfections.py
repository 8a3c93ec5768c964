"""What a live rank does and measures imperfectly: it wakes up late, its stamps are noisy, some steps go unmeasured.

Where all three are 0 the kernel calls nothing of this. Draws are hashes of (episode, iteration, rank), so two policies
meet the same ones. Legend: R ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import timing
from paceenv.sim.engine.draws import LATE_WAKE, MISSING, STAMPS, bits32, key_of, quantile

FIRST_MISSING = timing.BLOCK_ITERATIONS
"""A live agent learns the shape of a step first and takes nothing in; before this iteration all steps are measured."""


def is_missing(job: Any, key: np.uint64, t: int, r: int) -> bool:
    """Whether rank ``r`` could not measure iteration ``t``.

    Args:
        job: record of the job.
        key: of the episode.
        t: number of the iteration.
        r: number of the rank.
    """
    share = job["missing_share"]
    return bool(t >= FIRST_MISSING and share > 0.0 and bits32(key_of(key, MISSING, t), r) < share * 2.0**32)


def real_delay_s(job: Any, key: np.uint64, t: int, r: int, asked_s: float) -> float:
    """How long rank ``r`` is delayed at the start of iteration ``t``, seconds.

    A sleep is over late by an exponential time. After a step that it could not measure, a rank does not delay itself.

    Args:
        job: record of the job.
        key: of the episode.
        t: number of the iteration.
        r: number of the rank.
        asked_s: the delay that the policy asks for, seconds.
    """
    if is_missing(job, key, t - 1, r):
        return 0.0
    if asked_s > 0.0 and job["late_wake_s"] > 0.0:
        u = (float(bits32(key_of(key, LATE_WAKE, t), r)) + 0.5) * 2.0**-32
        return float(asked_s - job["late_wake_s"] * math.log(u))
    return asked_s


def delay_imperfectly(job: Any, key: np.uint64, t: int, delay_R: NDArray[np.float32]) -> None:
    """Replace the delays that the ranks decided on by the real ones, which they will also measure.

    Args:
        job: record of ``JOB``.
        key: of the episode.
        t: number of the iteration that starts.
        delay_R: seconds; updated.
    """
    for r in range(delay_R.shape[0]):
        delay_R[r] = real_delay_s(job, key, t, r, np.float64(delay_R[r]))


def blur(
    job: Any,
    key: np.uint64,
    t: int,
    normal: NDArray[np.float64],
    comm_R: NDArray[np.float32],
    wait_R: NDArray[np.float32],
) -> None:
    """Add the noise of stamps to what the ranks measured; no duration is below 0.

    Args:
        job: record of ``JOB``.
        key: of the episode.
        t: number of the iteration.
        normal: quantile table of the normal, ``(TABLE_SIZE,)``.
        comm_R: time in the payload collective, seconds; updated.
        wait_R: time in the barrier, seconds; updated.
    """
    comm_key, wait_key = key_of(key, STAMPS, 2 * t), key_of(key, STAMPS, 2 * t + 1)
    for r in range(comm_R.shape[0]):
        comm_R[r] = max(comm_R[r] + job["stamp_noise_s"] * quantile(normal, bits32(comm_key, r)), 0.0)
        wait_R[r] = max(wait_R[r] + job["stamp_noise_s"] * quantile(normal, bits32(wait_key, r)), 0.0)


def keep_missing(job: Any, key: np.uint64, t: int, source: NDArray[np.float32], target: NDArray[np.float32]) -> None:
    """Copy the estimators of the ranks that cannot measure an iteration: aside before all take it in, back after it.

    Args:
        job: record of ``JOB``.
        key: of the episode.
        t: number of the iteration.
        source: ``(timing.RANK_FIELDS, R or more)``.
        target: as ``source``; written to.
    """
    for r in range(min(source.shape[1], target.shape[1])):
        if is_missing(job, key, t, r):
            for field in range(timing.RANK_FIELDS):
                target[field, r] = source[field, r]
