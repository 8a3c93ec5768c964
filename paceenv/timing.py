"""The timing estimator: what one rank infers about waits, slack and its uncontended baseline from its own clock.

Shared by the simulator (compiled by the engine) and a live rank (plain Python on the same arrays), so there is one
estimator and never two. A rank sees only itself: it stamps the start of the iteration, entry and exit of the job's
payload collective, and, where the job ends its step with a separate barrier, the time spent in that. The exit of the
step's last collective is a common clock tick, so step time is the same on every rank without communication.

State is two arrays of float64: ``rank[F, r]`` (one column a rank) and ``tick[K]`` (what all ranks of a job see alike).
Every function works on all columns at once, one short loop per quantity, which is what lets the compiler use vector
registers; a live rank calls the same functions with one column.

*Wait* is measured in the step's last collective: its duration minus the time it takes when everybody is there, which
is nothing for a barrier and the rank's own low-quantile baseline for a payload collective. *Slack* is the wait plus
the rank's own delay in that step: how much later than its natural start it could have begun. Both low quantiles are
minima over blocks of iterations, which need two floats each and no sorting:

- the baseline falls at once to a new minimum and rises by ``BASELINE_RISE`` of the gap once a block, so it remembers
  an uncontended duration for hundreds of iterations (a job that starts contended would never trigger otherwise);
- the recent low is the minimum over the current and the previous window of ``RECENT_ITERATIONS``.

Means and spreads are exponential, over about ``1 / SMOOTHING`` iterations.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceenv.pacing import (
    PAPER,
    SLACK,
    SLIDE,
    THRESHOLD,
    WINDOW,
    paper_delay_s,
    slack_delay_s,
    slide_delay_s,
)

BASELINE_BLOCK_ITERATIONS = 32
BASELINE_RISE = 1.0 / 16.0
RECENT_ITERATIONS = 2
SMOOTHING = 0.1
"""Weight of the newest iteration in the exponential means."""
SLOW_SMOOTHING = 0.002
"""The same for the slow mean of the own delay: whether pacing has been on for long."""
TINY = 1e-100
"""Added to what an exponential mean takes in, so that it cannot decay into subnormal numbers, where it would stay for
ever and every operation costs a hundred; disappears in rounding beside anything that is not zero."""
CHANGE_MARGIN = 2.0
"""Mean absolute changes from step to step that are taken off a recent low; 2 are 2.3 standard deviations."""

# rank[F, r]
DELAY_S, COMM_LOW_S, COMM_BASELINE_S, COMM_MEAN_S, COMM_S, COMM_CHANGE_S = 0, 1, 2, 3, 4, 5
COMM_RECENT_S, COMM_RECENT_BEFORE_S, SLACK_RECENT_S, SLACK_RECENT_BEFORE_S = 6, 7, 8, 9
WAIT_S, WAIT_MEAN_S, WAIT_SQUARE_S2, SLACK_S, SLACK_CHANGE_S = 10, 11, 12, 13, 14
SLACK_DELAY_S, DELAY_MEAN_S, DELAY_SLOW_S = 15, 16, 17
RANK_FIELDS = 18

# tick[K]
ITERATIONS, STEP_LOW_S, STEP_BASELINE_S = 0, 1, 2
SUM_STEPS, SUM_STEP_S, SUM_STEP_S2, STEP_MEAN_BEFORE_S, INFLATION_SLOW = 3, 4, 5, 6, 7
TICK_FIELDS = 8


def reset_rank(rank: NDArray[np.float64], r: int) -> None:
    """Forget everything about column ``r``."""
    for field in range(RANK_FIELDS):
        rank[field, r] = 0.0
    rank[COMM_LOW_S, r] = rank[COMM_BASELINE_S, r] = math.inf
    rank[COMM_RECENT_S, r] = rank[COMM_RECENT_BEFORE_S, r] = math.inf
    rank[SLACK_RECENT_S, r] = rank[SLACK_RECENT_BEFORE_S, r] = math.inf


def reset_tick(tick: NDArray[np.float64]) -> None:
    """Forget everything the ranks see alike."""
    for field in range(TICK_FIELDS):
        tick[field] = 0.0
    tick[STEP_LOW_S] = math.inf
    tick[STEP_BASELINE_S] = math.inf


def new_state(ranks: int = 1) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fresh ``(rank[F, ranks], tick[K])``; a live rank keeps one column."""
    rank, tick = np.empty((RANK_FIELDS, ranks)), np.empty(TICK_FIELDS)
    for r in range(ranks):
        reset_rank(rank, r)
    reset_tick(tick)
    return rank, tick


def observe_step(tick: NDArray[np.float64], step_s: float) -> None:
    """Take in one step time (exit of the last collective to exit of the last collective), before the ranks' own."""
    tick[ITERATIONS] += 1.0
    tick[STEP_LOW_S] = min(tick[STEP_LOW_S], step_s)
    tick[STEP_BASELINE_S] = min(tick[STEP_BASELINE_S], step_s)
    if block_ends(tick):
        tick[STEP_BASELINE_S] += BASELINE_RISE * (tick[STEP_LOW_S] - tick[STEP_BASELINE_S])
        tick[STEP_LOW_S] = math.inf
    tick[SUM_STEPS] += 1.0
    tick[SUM_STEP_S] += step_s
    tick[SUM_STEP_S2] += step_s * step_s


def block_ends(tick: NDArray[np.float64]) -> bool:
    """Whether this iteration closes a block of the baselines."""
    return int(tick[ITERATIONS]) % BASELINE_BLOCK_ITERATIONS == 0


def window_ends(tick: NDArray[np.float64]) -> bool:
    """Whether this iteration closes a window of the recent slack."""
    return int(tick[ITERATIONS]) % RECENT_ITERATIONS == 0


def observe_ranks(
    rank: NDArray[np.float64],
    tick: NDArray[np.float64],
    comm_R: NDArray[np.float64],
    wait_R: NDArray[np.float64],
    has_barrier: bool,
) -> None:
    """Take in one iteration of every rank, after :func:`observe_step`.

    ``comm_R`` is the time in the payload collective, ``wait_R`` the time in the barrier, seconds; in a job without a
    barrier ``wait_R`` is overwritten with the wait in the collective. ``rank[DELAY_S]`` holds the delays that this
    iteration started with.
    """
    ranks, alpha = comm_R.shape[0], 1.0 if tick[ITERATIONS] == 1.0 else SMOOTHING
    block_end, window_end = block_ends(tick), window_ends(tick)
    baseline_R, comm_low_R = rank[COMM_BASELINE_S], rank[COMM_LOW_S]
    for r in range(ranks):
        baseline_R[r] = comm_R[r] if comm_R[r] < baseline_R[r] else baseline_R[r]
        comm_low_R[r] = comm_R[r] if comm_R[r] < comm_low_R[r] else comm_low_R[r]
    if not has_barrier:
        for r in range(ranks):
            wait_R[r] = comm_R[r] - baseline_R[r]
    if block_end:
        for r in range(ranks):
            baseline_R[r] += BASELINE_RISE * (comm_low_R[r] - baseline_R[r])
            comm_low_R[r] = math.inf
    comm_recent_R, slack_recent_R, delay_R = rank[COMM_RECENT_S], rank[SLACK_RECENT_S], rank[DELAY_S]
    slack_R = rank[SLACK_S]
    follow(rank[COMM_S], rank[COMM_CHANGE_S], comm_R, alpha)
    for r in range(ranks):
        wait_R[r] += delay_R[r]
    follow(slack_R, rank[SLACK_CHANGE_S], wait_R, alpha)
    for r in range(ranks):
        wait_R[r] -= delay_R[r]
        slack_s = slack_R[r]
        comm_recent_R[r] = comm_R[r] if comm_R[r] < comm_recent_R[r] else comm_recent_R[r]
        slack_recent_R[r] = slack_s if slack_s < slack_recent_R[r] else slack_recent_R[r]
    if window_end:
        start_window(comm_recent_R, rank[COMM_RECENT_BEFORE_S])
        start_window(slack_recent_R, rank[SLACK_RECENT_BEFORE_S])
    last_R, square_R = rank[WAIT_S], rank[WAIT_SQUARE_S2]
    for r in range(ranks):
        last_R[r] = wait_R[r]
        square_R[r] += alpha * (wait_R[r] * wait_R[r] - square_R[r])
    smooth(rank[COMM_MEAN_S], comm_R, alpha)
    smooth(rank[WAIT_MEAN_S], wait_R, alpha)
    smooth(rank[DELAY_MEAN_S], delay_R, alpha)
    smooth(rank[DELAY_SLOW_S], delay_R, SLOW_SMOOTHING)


def start_window(recent_R: NDArray[np.float64], before_R: NDArray[np.float64]) -> None:
    """Close a window of a recent low: it becomes the one before, and a new one starts."""
    for r in range(recent_R.shape[0]):
        before_R[r] = recent_R[r]
        recent_R[r] = math.inf


def smooth(mean_R: NDArray[np.float64], value_R: NDArray[np.float64], alpha: float) -> None:
    """Move exponential means towards the newest values."""
    for r in range(value_R.shape[0]):
        mean_R[r] += alpha * ((value_R[r] + TINY) - mean_R[r])


def follow(
    last_R: NDArray[np.float64], change_R: NDArray[np.float64], value_R: NDArray[np.float64], alpha: float
) -> None:
    """Move mean absolute changes from one iteration to the next towards the newest, and remember the values."""
    for r in range(value_R.shape[0]):
        change_R[r] += alpha * ((abs(value_R[r] - last_R[r]) + TINY) - change_R[r])
        last_R[r] = value_R[r]


def spread_s(mean_s: float, square_s2: float) -> float:
    """Standard deviation from the means of a value and of its square, seconds."""
    return math.sqrt(max(square_s2 - mean_s * mean_s, 0.0))


def slack_low_s(rank: NDArray[np.float64], r: int) -> float:
    """Slack that rank ``r`` can count on, seconds: the recent low less a margin for its step-to-step changes, or 0.

    The margin is what keeps independent jitter from looking like slack: among many ranks nobody is last for dozens of
    iterations, so the recent low alone is positive everywhere, every rank would take its delay from it, and the step
    would grow by a multiple of it because each rank's delay is another's slack. Changes from one step to the next and
    not the spread, which a persistent episode's start would widen as well. Zero until a first window is complete.
    """
    now_s, before_s = rank[SLACK_RECENT_S, r], rank[SLACK_RECENT_BEFORE_S, r]
    low_s = now_s if now_s < before_s else before_s
    safe_s = low_s - CHANGE_MARGIN * rank[SLACK_CHANGE_S, r]
    return float(safe_s) if before_s < math.inf and safe_s > 0.0 else 0.0


def comm_low_s(rank: NDArray[np.float64], r: int) -> float:
    """Time in the collective that rank ``r`` must count on, seconds: the recent low less the same margin.

    Never below its baseline; what it is above is what contention adds to every iteration. The low and not the mean: it
    rises only when contention persists and falls at once when a shift has worked, so that a job stops shifting where it
    stops colliding. Without the margin, waits for late peers would count as contention and feed on each other's delays.
    """
    now_s, before_s = rank[COMM_RECENT_S, r], rank[COMM_RECENT_BEFORE_S, r]
    low_s = now_s if now_s < before_s else before_s
    safe_s = low_s - CHANGE_MARGIN * rank[COMM_CHANGE_S, r]
    baseline_s = rank[COMM_BASELINE_S, r]
    return float(safe_s if before_s < math.inf and safe_s > baseline_s else baseline_s)


def window_s(settings_M2: NDArray[np.float64], mechanism: int, step_s: float, cap_s: float) -> float:
    """A mechanism's delay window in seconds: its share of the baseline step, never above the cap."""
    return float(min(settings_M2[mechanism, WINDOW] * step_s, cap_s))


def decide(
    rank: NDArray[np.float64],
    tick: NDArray[np.float64],
    low: int,
    high: int,
    settings_M2: NDArray[np.float64],
    cap_s: float,
) -> None:
    """Set the delays ``rank[DELAY_S]`` with which the columns ``low`` to ``high`` start their next iteration, seconds.

    ``settings_M2`` is one (threshold, window) per mechanism, the baseline step time their scale. Where several
    mechanisms ask for a delay the largest counts, not the sum: they measure the same lost time from different sides.
    """
    step_s, delay_R = tick[STEP_BASELINE_S], rank[DELAY_S]
    first, end = np.uint64(low), np.uint64(high)  # unsigned: no test for counting from the end at every access
    for r in range(first, end):
        delay_R[r] = 0.0
    slack_s, slack_delay_R = window_s(settings_M2, SLACK, step_s, cap_s), rank[SLACK_DELAY_S]
    if slack_s > 0.0:
        threshold = settings_M2[SLACK, THRESHOLD]
        for r in range(first, end):
            slack_delay_R[r] = slack_delay_s(slack_low_s(rank, r), slack_delay_R[r], step_s, threshold, slack_s)
            delay_R[r] = slack_delay_R[r]
    else:
        for r in range(first, end):
            slack_delay_R[r] = 0.0
    slide_s = window_s(settings_M2, SLIDE, step_s, cap_s)
    if slide_s > 0.0:
        threshold = settings_M2[SLIDE, THRESHOLD]
        for r in range(first, end):
            asked_s = slide_delay_s(comm_low_s(rank, r), rank[COMM_BASELINE_S, r], threshold, slide_s)
            delay_R[r] = max(delay_R[r], asked_s)
    paper_s = window_s(settings_M2, PAPER, step_s, cap_s)
    if paper_s > 0.0:
        threshold = settings_M2[PAPER, THRESHOLD]
        for r in range(first, end):
            mean_s = rank[WAIT_MEAN_S, r]
            sd_s = spread_s(mean_s, rank[WAIT_SQUARE_S2, r])
            delay_R[r] = max(delay_R[r], paper_delay_s(rank[WAIT_S, r], mean_s, sd_s, step_s, threshold, paper_s))
