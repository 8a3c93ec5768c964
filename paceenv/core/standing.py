"""Blocks without pacing: what an estimator keeps of them, and what is as before when pacing goes on.

While pacing is not allowed, the averages of waits, slack and delays follow the job without it. A policy that then read
them would see its own absence as a change of the job. So when pacing goes on, everything that a policy or a rule rests
on is what it was at the end of the last paced iteration, the delay included. The policy sees one unbroken paced
history, whatever the length of the blocks. Only the baselines keep what they learned: they describe the job without
contention, and that is where it is seen best.

Works on the arrays of ``paceenv.core.timing``, with any axes before theirs: one rank, or a batch of episodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core import slots, timing

RANK_BASELINES = (
    slots.COMM_BASELINE_S,
    slots.COMM_FIRST_S,
    slots.COMM_SECOND_S,
    slots.COMM_THIRD_S,
    slots.BUDGET_S,
)
"""Fields of ``rank[..., F, R]`` that go on while pacing stands: the baseline learns, the budget of delays fills."""
TICK_BASELINES = (
    slots.ITERATIONS,
    slots.STEP_FIRST_S,
    slots.STEP_SECOND_S,
    slots.STEP_THIRD_S,
    slots.STEP_BASELINE_S,
)
"""The same of ``tick[..., K]``: the baseline step, and the clock of its blocks."""


class Left(NamedTuple):
    """An estimator as it was when pacing was interrupted."""

    rank: NDArray[np.float32]
    tick: NDArray[np.float64]


def leave(rank: NDArray[np.float32], tick: NDArray[np.float64]) -> Left:
    """Pacing is interrupted: remember the estimator ``(rank[..., F, R], tick[..., K])``."""
    return Left(rank.copy(), tick.copy())


def begin(rank: NDArray[np.float32], tick: NDArray[np.float64]) -> Left:
    """The estimator with which a policy acts for the first time: the job as observed so far, with no sum begun."""
    return Left(rank.copy(), when_pacing_begins(tick))


def when_pacing_begins(tick: NDArray[np.float64]) -> NDArray[np.float64]:
    """What all ranks see alike when pacing begins: nothing but the baselines ``tick[..., K]`` is known."""
    fresh = np.empty(timing.TICK_FIELDS)
    timing.reset_tick(fresh)
    begun = np.broadcast_to(fresh, tick.shape).copy()
    begun[..., TICK_BASELINES] = tick[..., TICK_BASELINES]
    return begun


def resume(rank: NDArray[np.float32], tick: NDArray[np.float64], left: Left) -> None:
    """Pacing goes on: the estimator, in place, is as it was ``left``, but for the baselines."""
    baselines, clock = rank[..., RANK_BASELINES, :].copy(), tick[..., TICK_BASELINES].copy()
    rank[...], tick[...] = left
    rank[..., RANK_BASELINES, :], tick[..., TICK_BASELINES] = baselines, clock
