"""The timing estimator: what one rank infers about waits, slack and its uncontended baseline from its own clock.

The simulator (compiled by the engine) and a live rank (plain Python on the same arrays) share it. A rank sees only
itself. It stamps the start of the iteration and the entry and exit of the job's payload collective. Where the job ends
its step with a separate barrier, it also measures the time spent in that. The exit of the step's last collective is a
common clock tick, so step time is the same on every rank without communication.

State is two arrays: ``rank[F, r]`` of float32 (one column for each rank) and ``tick[K]`` of float64 (what all ranks of
a job see alike). Every function works on all columns at once, one short loop per quantity, so that the compiler can use
vector registers. A live rank calls the same functions with one column, and with lists in place of arrays: the same
numbers, several times as fast.

Values that a loop keeps are computed in float32, with constants of that type, so that interpreted and compiled code
round alike. The rules compute in float64. Conversions use ``np.float64`` and not ``float``, because a compiled
``float`` leaves a float32 as it is.

*Wait* is measured in the last collective of the step: its duration minus the time that it takes when all ranks are
there. That time is 0 for a barrier, and the rank's own low-quantile baseline for a payload collective. *Slack* is the
wait plus the rank's own delay in that step: how much later than its natural start it could have begun. Low quantiles
need few numbers and no sorting:

- the recent low is the minimum over the newest iteration and the last closed pair;
- a baseline, of the step and of the rank's collective, falls at once to the third smallest value of the running block
  of ``BLOCK_ITERATIONS`` and rises at its end by ``BASELINE_RISE`` of the gap to it. It remembers an uncontended
  duration for hundreds of iterations; otherwise a job that starts contended would never react. Not the smallest: a
  few lucky iterations of a noisy host would be remembered as long, and everything after them would look contended.

Means and spreads are exponential, over about ``1 / SMOOTHING`` iterations.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceenv.core import slots, switchback
from paceenv.core.limits import refilled
from paceenv.core.pacing import (
    DEFER,
    MEAN_SLACK,
    PAPER,
    PHASE_SHIFT,
    SLACK,
    STAGGER,
    THRESHOLD,
    WINDOW,
    defer_hold_s,
    paper_delay_s,
    phase_shift_delay_s,
    slack_delay_s,
    stagger_delay_s,
)

Tick = switchback.Tick
Rank = NDArray[np.float32] | list[list[np.float32]]
"""The state of the ranks by field: an array, or lists in a live job. A list does not round what it is given, so what is
computed in float64 is stored as ``np.float32``."""
Row = NDArray[np.float32] | list[np.float32]
Settings = NDArray[np.float64] | list[list[list[float]]]
"""(threshold, window) of each mechanism on each rank, ratios, ``(M, 2, R)``."""
DELAY_S, DEFER_S, BUDGET_S, STEP_BASELINE_S = slots.DELAY_S, slots.DEFER_S, slots.BUDGET_S, slots.STEP_BASELINE_S
COMM_S, SLACK_S, RANK_FIELDS, TICK_FIELDS = slots.COMM_S, slots.SLACK_S, slots.RANK_FIELDS, slots.TICK_FIELDS
"""Of the state those that others read; :mod:`paceenv.core.slots` has them all."""
BARRIER_BYTES = 4096
"""A collective of at most this size only synchronises."""
BLOCK_ITERATIONS = 32
"""Block whose third smallest value, about the 8 % quantile, is what a baseline follows."""
MIN_DELAY_S, MIN_DELAY_SHARE = 1e-4, 0.002
"""A delay that is shorter, in seconds or as a share of the baseline step, is left out. A sleep ends late by a good part
of a millisecond, whatever its length: a fading delay would go on costing that after it is too short to be of use."""
BASELINE_RISE = 1.0 / 16.0
"""Share of the gap by which a baseline rises at the end of a block."""
RECENT_ITERATIONS = 2
"""Iterations of a pair of the recent lows."""
SMOOTHING = np.float32(0.1)
"""Weight of the newest iteration in the exponential means."""
TINY = np.float32(1e-30)
"""Added to the input of an exponential mean, so that the mean cannot decay into subnormal numbers. It would stay there
for ever, and every operation would cost a hundred. Beside any number that is not zero it disappears in rounding."""
CHANGE_MARGIN = np.float64(2.0)
"""Mean absolute changes from step to step that are taken off a recent low; 2 are 2.3 standard deviations. With its type
the difference is computed in float64, interpreted and compiled."""
_ZERO, _ONE, _NONE_YET = np.float32(0.0), np.float32(1.0), np.float32(math.inf)
_ROUNDED_DOWN = 1.0 - 2.0**-23


def reset_rank(rank: NDArray[np.float32], r: int) -> None:
    """Forget everything about column ``r``."""
    for field in range(RANK_FIELDS):
        rank[field, r] = 0.0
    rank[slots.COMM_BASELINE_S, r] = rank[slots.COMM_PAIR_LOW_S, r] = rank[slots.SLACK_PAIR_LOW_S, r] = math.inf
    rank[slots.COMM_FIRST_S, r] = rank[slots.COMM_SECOND_S, r] = rank[slots.COMM_THIRD_S, r] = rank[BUDGET_S, r] = (
        math.inf
    )


def reset_tick(tick: Tick) -> None:
    """Forget everything the ranks see alike."""
    for field in range(TICK_FIELDS):
        tick[field] = 0.0
    tick[slots.STEP_FIRST_S] = tick[slots.STEP_SECOND_S] = tick[slots.STEP_THIRD_S] = tick[STEP_BASELINE_S] = math.inf
    switchback.reset(tick)


def new_state(ranks: int = 1) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Fresh ``(rank[F, ranks], tick[K])``; a live rank keeps one column."""
    rank, tick = np.empty((RANK_FIELDS, ranks), np.float32), np.empty(TICK_FIELDS)
    for r in range(ranks):
        reset_rank(rank, r)
    reset_tick(tick)
    return rank, tick


def observe_step(tick: Tick, step_s: float) -> None:
    """Take in one step time (exit of the last collective to exit of the last collective), before the ranks' own."""
    tick[slots.ITERATIONS] += 1.0
    first_s, second_s, third_s = tick[slots.STEP_FIRST_S], tick[slots.STEP_SECOND_S], tick[slots.STEP_THIRD_S]
    larger_s = step_s if step_s > first_s else first_s
    tick[slots.STEP_FIRST_S] = step_s if step_s < first_s else first_s
    largest_s = larger_s if larger_s > second_s else second_s
    tick[slots.STEP_SECOND_S] = larger_s if larger_s < second_s else second_s
    tick[slots.STEP_THIRD_S] = third_s = largest_s if largest_s < third_s else third_s
    if tick[slots.ITERATIONS] <= BLOCK_ITERATIONS:
        tick[STEP_BASELINE_S] = tick[smallest(tick, slots.STEP_FIRST_S)]
    elif third_s < tick[STEP_BASELINE_S]:
        tick[STEP_BASELINE_S] = third_s
    if block_ends(tick):
        tick[STEP_BASELINE_S] += BASELINE_RISE * (tick[slots.STEP_THIRD_S] - tick[STEP_BASELINE_S])
        tick[slots.STEP_FIRST_S] = tick[slots.STEP_SECOND_S] = tick[slots.STEP_THIRD_S] = math.inf
    tick[slots.SUM_STEPS] += 1.0
    tick[slots.SUM_STEP_S] += step_s
    tick[slots.SUM_STEP_S2] += step_s * step_s
    switchback.watch_stagger(tick, step_s, tick[STEP_BASELINE_S])
    switchback.watch_slack(tick, step_s, tick[STEP_BASELINE_S])
    switchback.watch_defer(tick, step_s)


def smallest(tick: Tick, first: int) -> int:
    """Which of the three smallest values from field ``first`` on a first block's baseline is: the third, if it exists.

    So a baseline is finite from the first iteration on, and what is lucky in it is forgotten with the third.
    """
    return first + min(int(tick[slots.ITERATIONS]), 3) - 1


def block_ends(tick: Tick) -> bool:
    """Whether this iteration closes a block of the baselines."""
    return int(tick[slots.ITERATIONS]) % BLOCK_ITERATIONS == 0


def observe_ranks(
    rank: Rank,
    tick: Tick,
    comm_R: Row,
    wait_R: Row,
    has_barrier: bool,
) -> None:
    """Take in one iteration of every rank, after :func:`observe_step`.

    Args:
        rank: estimator of the ranks, ``(RANK_FIELDS, R or more)``, updated. ``rank[DELAY_S]`` holds the delays that
            this iteration started with.
        tick: what all ranks see alike, ``(TICK_FIELDS,)``.
        wait_R: time in the barrier, seconds; without a barrier overwritten with the wait in the collective.
    """
    ranks, alpha = len(comm_R), _ONE if tick[slots.ITERATIONS] == 1.0 else SMOOTHING
    beta = alpha if tick[slots.SLACK_EDGE] == 0.0 else _ZERO  # what a pause changes is no noise
    baseline_R, comm_low_R, slack_low_R = (
        rank[slots.COMM_BASELINE_S],
        rank[slots.COMM_PAIR_LOW_S],
        rank[slots.SLACK_PAIR_LOW_S],
    )
    last_comm_R, comm_change_R, comm_mean_R = rank[slots.COMM_S], rank[slots.COMM_CHANGE_S], rank[slots.COMM_MEAN_S]
    slack_R, slack_change_R, delay_R = rank[slots.SLACK_S], rank[slots.SLACK_CHANGE_S], rank[DELAY_S]
    mean_R, variance_R = rank[slots.WAIT_MEAN_S], rank[slots.WAIT_VARIANCE_S2]
    follow_comm(rank, tick, comm_R)
    if not has_barrier:
        for r in range(ranks):
            wait_R[r] = comm_R[r] - baseline_R[r]  # a little below 0 where it is luckier than the baseline
    if int(tick[slots.ITERATIONS]) % RECENT_ITERATIONS == 0:
        for r in range(ranks):
            comm_low_R[r] = comm_R[r] if comm_R[r] < last_comm_R[r] else last_comm_R[r]
        for r in range(ranks):
            slack_s = wait_R[r] + delay_R[r]
            slack_low_R[r] = slack_s if slack_s < slack_R[r] else slack_R[r]
    for r in range(ranks):
        comm_change_R[r] += beta * ((abs(comm_R[r] - last_comm_R[r]) + TINY) - comm_change_R[r])
        comm_mean_R[r] += alpha * ((comm_R[r] + TINY) - comm_mean_R[r])
        last_comm_R[r] = comm_R[r]
    for r in range(ranks):
        slack_s = wait_R[r] + delay_R[r]
        slack_change_R[r] += beta * ((abs(slack_s - slack_R[r]) + TINY) - slack_change_R[r])
        slack_R[r] = slack_s
    for r in range(ranks):
        off_s = (wait_R[r] + TINY) - mean_R[r]
        mean_R[r] += alpha * off_s
        variance_R[r] = (_ONE - alpha) * (variance_R[r] + alpha * (off_s * off_s)) + TINY


def follow_comm(rank: Rank, tick: Tick, comm_R: Row) -> None:
    """Every rank's baseline of its payload collective takes in an iteration, as that of the step does."""
    ranks, baseline_R = len(comm_R), rank[slots.COMM_BASELINE_S]
    first_R, second_R, third_R = rank[slots.COMM_FIRST_S], rank[slots.COMM_SECOND_S], rank[slots.COMM_THIRD_S]
    for r in range(ranks):
        larger_s = comm_R[r] if comm_R[r] > first_R[r] else first_R[r]
        first_R[r] = comm_R[r] if comm_R[r] < first_R[r] else first_R[r]
        largest_s = larger_s if larger_s > second_R[r] else second_R[r]
        second_R[r] = larger_s if larger_s < second_R[r] else second_R[r]
        third_R[r] = largest_s if largest_s < third_R[r] else third_R[r]
    if tick[slots.ITERATIONS] <= BLOCK_ITERATIONS:
        so_far_R = rank[smallest(tick, slots.COMM_FIRST_S)]
        for r in range(ranks):
            baseline_R[r] = so_far_R[r]
    else:
        for r in range(ranks):
            baseline_R[r] = third_R[r] if third_R[r] < baseline_R[r] else baseline_R[r]
    if block_ends(tick):
        rise = np.float32(BASELINE_RISE)
        for r in range(ranks):
            baseline_R[r] += rise * (third_R[r] - baseline_R[r])
            first_R[r] = second_R[r] = third_R[r] = _NONE_YET


def spread_s(mean_s: float, square_s2: float) -> float:
    """Standard deviation from the means of a value and of its square, seconds."""
    return math.sqrt(max(square_s2 - mean_s * mean_s, 0.0))


def slack_low_s(rank: Rank, r: int) -> float:
    """Slack that rank ``r`` can count on, seconds: the recent low less a margin for its step-to-step changes, or 0.

    Without the margin, independent jitter would look like slack. Among many ranks each single one is not last for
    dozens of iterations, so the recent low alone is positive everywhere. Every rank would take its delay from it, and
    the step would grow by a multiple of it, because the delay of each rank is slack of the others. The margin uses
    changes from one step to the next; the start of a persistent episode would widen the spread as well. Zero until a
    first pair is complete.
    """
    now_s, before_s = rank[slots.SLACK_S][r], rank[slots.SLACK_PAIR_LOW_S][r]
    low_s = now_s if now_s < before_s else before_s
    safe_s = low_s - CHANGE_MARGIN * rank[slots.SLACK_CHANGE_S][r]
    return safe_s if before_s < math.inf and safe_s > 0.0 else 0.0


def comm_low_s(rank: Rank, r: int) -> float:
    """Time in the collective that rank ``r`` must count on, seconds: the recent low less the same margin.

    It is never below the rank's baseline; the rest is what contention adds to every iteration. The low rises only when
    contention persists and falls at once when a shift has worked, so a job stops shifting where it stops colliding. A
    mean would not. Without the margin, waits for late peers would count as contention and feed on each other's delays.
    """
    now_s, before_s = rank[slots.COMM_S][r], rank[slots.COMM_PAIR_LOW_S][r]
    low_s = now_s if now_s < before_s else before_s
    safe_s = low_s - CHANGE_MARGIN * rank[slots.COMM_CHANGE_S][r]
    baseline_s = np.float64(rank[slots.COMM_BASELINE_S][r])
    return safe_s if before_s < math.inf and safe_s > baseline_s else baseline_s


def window_s(window: float, step_s: float, cap_s: float) -> float:
    """The delay window of a mechanism in seconds: its share of the baseline step, at most the cap.

    The result is a hair smaller, so that a delay that is cut to it stays within it when stored as float32.
    """
    share_s = window * step_s
    return (cap_s if cap_s < share_s else share_s) * _ROUNDED_DOWN


def decide(
    rank: Rank,
    tick: Tick,
    settings_M2R: Settings,
    on_M: NDArray[np.bool_] | list[bool],
    cap_s: float,
    first_member: int = 0,
    members: int = 1,
) -> None:
    """Set the delays ``rank[DELAY_S]`` with which ranks start their next iteration, seconds.

    Where several mechanisms ask for a delay, the largest counts. The sum would count the same lost time more than once.

    Args:
        rank: estimator of the ranks, ``(RANK_FIELDS, R or more)``; delays are written.
        tick: what all ranks see alike, ``(TICK_FIELDS,)``.
        settings_M2R: (threshold, window) of each mechanism on each rank, ratios; the baseline step is their scale.
        on_M: the mechanisms that are on for any of these ranks, as settings from :func:`paceenv.core.pacing.by_rank`.
        first_member: place of column 0 in its process group; column ``r`` is member ``(first_member + r) % members``,
            which is its place in a stagger.
    """
    ranks, pauses = len(settings_M2R[0][0]), switchback.slack_pauses(tick)
    delay_R, hold_R, step_s = rank[DELAY_S], rank[DEFER_S], tick[STEP_BASELINE_S]
    paper, mean_slack = bool(on_M[PAPER]), bool(on_M[MEAN_SLACK]) and not pauses
    if paper or mean_slack:
        follow_waits(rank, tick, settings_M2R, cap_s, paper, mean_slack)
    else:
        clear(delay_R, ranks)
    if on_M[SLACK]:
        use_slack(rank, tick, settings_M2R, cap_s, pauses)
    else:
        clear(rank[slots.SLACK_DELAY_S], ranks)
    if on_M[PHASE_SHIFT]:
        shift_phase(rank, tick, settings_M2R, cap_s)
    if on_M[STAGGER]:
        take_places(rank, tick, settings_M2R, cap_s, first_member, members)
    least_s = np.float32(max(MIN_DELAY_S, MIN_DELAY_SHARE * step_s))
    for r in range(ranks):
        delay_R[r] = delay_R[r] if delay_R[r] >= least_s else _ZERO
    if on_M[DEFER]:
        hold_transfers(hold_R, tick, settings_M2R[DEFER], cap_s)
    else:
        clear(hold_R, ranks)


def clear(values_R: Row, ranks: int) -> None:
    """Set to 0."""
    for r in range(ranks):
        values_R[r] = _ZERO


def follow_waits(
    rank: Rank,
    tick: Tick,
    settings_M2R: Settings,
    cap_s: float,
    paper: bool,
    mean_slack: bool,
) -> None:
    """Delay ranks by the rule of the paper or by mean_slack, of those that act the one with the wider window."""
    step_s, delay_R, now_R = tick[STEP_BASELINE_S], rank[DELAY_S], rank[slots.SLACK_S]
    mean_R, variance_R = rank[slots.WAIT_MEAN_S], rank[slots.WAIT_VARIANCE_S2]
    for r in range(len(settings_M2R[0][0])):
        paper_s = window_s(settings_M2R[PAPER][WINDOW][r], step_s, cap_s) if paper else 0.0
        mean_slack_s = window_s(settings_M2R[MEAN_SLACK][WINDOW][r], step_s, cap_s) if mean_slack else 0.0
        threshold = settings_M2R[MEAN_SLACK if mean_slack_s > paper_s else PAPER][THRESHOLD][r]
        wait_s = np.float64(now_R[r]) - np.float64(delay_R[r])  # less the delay that this iteration started with
        mean_s, sd_s = np.float64(mean_R[r]), math.sqrt(np.float64(variance_R[r]))
        asked_s = paper_delay_s(wait_s, mean_s, sd_s, step_s, threshold, max(paper_s, mean_slack_s))
        delay_R[r] = np.float32(asked_s)


def use_slack(rank: Rank, tick: Tick, settings_M2R: Settings, cap_s: float, pauses: bool) -> None:
    """Delay ranks by what their slack allows, but in pauses of the rule; what it asks for is kept over a pause."""
    step_s, delay_R, slack_delay_R = tick[STEP_BASELINE_S], rank[DELAY_S], rank[slots.SLACK_DELAY_S]
    closed = tick[slots.SLACK_CLOSED] > 0.0
    for r in range(len(settings_M2R[0][0])):
        most_s = window_s(settings_M2R[SLACK][WINDOW][r], step_s, cap_s)
        threshold, before_s = settings_M2R[SLACK][THRESHOLD][r], np.float64(slack_delay_R[r])
        asked_s = before_s if pauses else slack_delay_s(slack_low_s(rank, r), before_s, step_s, threshold, most_s)
        slack_delay_R[r] = np.float32(0.0 if closed or most_s == 0.0 else asked_s)
    if not pauses:
        for r in range(len(settings_M2R[0][0])):
            delay_R[r] = max(delay_R[r], slack_delay_R[r])


def shift_phase(rank: Rank, tick: Tick, settings_M2R: Settings, cap_s: float) -> None:
    """Delay ranks by what contention adds to their collective."""
    step_s, delay_R, baseline_R = tick[STEP_BASELINE_S], rank[DELAY_S], rank[slots.COMM_BASELINE_S]
    for r in range(len(settings_M2R[0][0])):
        threshold, most_s = settings_M2R[PHASE_SHIFT][THRESHOLD][r], settings_M2R[PHASE_SHIFT][WINDOW][r]
        most_s = window_s(most_s, step_s, cap_s)
        asked_s = phase_shift_delay_s(comm_low_s(rank, r), np.float64(baseline_R[r]), threshold, most_s)
        delay_R[r] = np.float32(max(np.float64(delay_R[r]), asked_s))


def take_places(
    rank: Rank,
    tick: Tick,
    settings_M2R: Settings,
    cap_s: float,
    first_member: int,
    members: int,
) -> None:
    """Delay ranks by their place in the stagger of their process group, while the job holds one."""
    step_s, delay_R = tick[STEP_BASELINE_S], rank[DELAY_S]
    inflation, holds = tick[slots.STAGGER_FREE_S] / step_s - 1.0, tick[slots.STAGGER_LEFT] > 0.0
    is_trial, member = tick[slots.STAGGER_TRIAL] > 0.0, first_member % members
    for r in range(len(settings_M2R[0][0])):
        threshold, most_s = settings_M2R[STAGGER][THRESHOLD][r], settings_M2R[STAGGER][WINDOW][r]
        if holds or threshold == 0.0:
            place = float(member) / max(members - 1, 1)
            asked_s = stagger_delay_s(inflation, place, 0.0 if is_trial else threshold, window_s(most_s, step_s, cap_s))
            delay_R[r] = np.float32(max(np.float64(delay_R[r]), asked_s))
        member = 0 if member + 1 == members else member + 1


def hold_transfers(hold_R: Row, tick: Tick, settings_2R: NDArray[np.float64] | list[list[float]], cap_s: float) -> None:
    """Set how long ranks hold back each transfer that can wait in their next iteration, seconds."""
    gain = switchback.defer_gain(tick)
    for r in range(len(settings_2R[WINDOW])):
        most_s = window_s(settings_2R[WINDOW][r], tick[STEP_BASELINE_S], cap_s)
        hold_s = defer_hold_s(gain, settings_2R[THRESHOLD][r], most_s)
        hold_R[r] = np.float32(hold_s)
        if hold_s > 0.0:
            tick[slots.DEFER_NOW] = 1.0


def spend(
    left_R: NDArray[np.float32], delay_R: NDArray[np.float32], ranks: int, elapsed_s: float, burst_s: float, fill: float
) -> None:
    """Cut the delays of ranks to what is left of their budgets, and take them from it."""
    gain_s, full_s, none_s = np.float32(fill * elapsed_s), np.float32(burst_s), np.float32(0.0)
    for r in range(ranks):
        left_s = refilled(left_R[r], gain_s, full_s)  # type: ignore[arg-type]  # all float32, to be vectors
        allowed_s = left_s if left_s > none_s else none_s
        delay_R[r] = delay_R[r] if delay_R[r] < allowed_s else allowed_s
        left_R[r] = left_s - delay_R[r]
