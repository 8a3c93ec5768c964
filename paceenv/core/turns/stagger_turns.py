"""When ranks hold their places in a stagger, from the common step time alone: hold, probe, back off.

The fields belong to the array ``tick[K]`` of ``paceenv.core.timing``. The simulator compiles these functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COLLAPSE_RATIO = 1.25
"""A step this many times the baseline step has collapsed, as it does when a sender waits for a retransmission."""
COLLAPSE_SMOOTHING = 0.25
COLLAPSE_SHARE = 0.4
"""Share of recent steps, so weighted, from which on it is a state and not an accident: two in a row."""
MIN_HOLD_ITERATIONS, MAX_HOLD_ITERATIONS, MAX_BACKOFF_ITERATIONS = 16, 512, 2048
RELAPSE_ITERATIONS = 8
"""A collapse so soon after a hold is the same one again: the next hold is twice as long."""

TRIAL_ITERATIONS, FIRST_TRIAL_ITERATIONS, MAX_TRIAL_DISTANCE = 4, 24, 4096
"""Length of a trial without a collapse, iterations watched before the first one, and at most."""
SHORTEST_TRIAL_ITERATIONS = 2
"""A trial whose steps are longer up to here ends: most jobs do not collapse, and a trial is all that the rule costs."""
TRIAL_GROWTH = 8.0
"""Factor of the time to the next trial after one that did not help."""
TRIAL_GAIN = 0.02
"""Least by which steps of a trial must be shorter, a share: few are compared."""

MEAN_ITERATIONS, MEAN_MEMORY_ITERATIONS = 16, 512
"""Held and free iterations from which on their means are compared, and over how many a mean runs. No hold begins before
so many free ones: the slow steps that lead to a hold are slower than steps without it are on the whole."""
COST_BACKOFF = 8.0
"""Growth of the pause after a hold when held steps are longer on the whole."""

LEFT, HOLD, BACKOFF, SUM_S, FREE_S, COLLAPSED, WATCHED, TRIAL, TRIAL_AFTER = 9, 10, 11, 12, 13, 14, 15, 16, 17
FREE_MEAN_S, FREE_COUNT, HELD_MEAN_S, HELD_COUNT = 18, 19, 20, 21
"""``TRIAL``: 1 in a trial and in the hold that follows one that helped. ``TRIAL_AFTER``: iterations to watch before the
next one."""


def reset(tick: NDArray[np.float64]) -> None:
    """Set what does not begin at 0."""
    tick[HOLD] = tick[BACKOFF] = MIN_HOLD_ITERATIONS
    tick[TRIAL_AFTER] = FIRST_TRIAL_ITERATIONS


def watch(tick: NDArray[np.float64], step_s: float, baseline_s: float) -> None:
    """When the ranks of a job take their places in a stagger, from the common step time alone: hold, probe, back off.

    While ``LEFT`` is positive, ranks whose settings ask for it hold their places. Then they stop and watch. A
    collapse within a few iterations is a relapse and doubles the hold. If the mean step of a hold was no shorter than
    before, or held steps are longer than free ones on the whole, the hold did not help. The ranks then back off
    (``LEFT`` negative), longer each time, and only then try a short hold again.

    Where every step collapses, none stands out. So where none has collapsed for long, places are tried for a few
    iterations, whatever the threshold of a rank; after a trial that does not help the next one comes much later.
    """
    left = tick[LEFT]
    mean, count = (HELD_MEAN_S, HELD_COUNT) if left > 0.0 else (FREE_MEAN_S, FREE_COUNT)
    tick[count] = min(tick[count] + 1.0, MEAN_MEMORY_ITERATIONS)
    tick[mean] += (step_s - tick[mean]) / tick[count]
    if left > 0.0:
        tick[SUM_S] += step_s
        tick[LEFT] = left - 1.0
        if trial_costs(tick):
            tick[SUM_S] += tick[SUM_S] / SHORTEST_TRIAL_ITERATIONS * tick[LEFT]
            tick[LEFT] = 0.0
        if tick[LEFT] == 0.0:
            judge_hold(tick)
    elif left < 0.0:
        tick[LEFT] = left + 1.0
    else:
        weight = 1.0 if tick[FREE_S] == 0.0 else COLLAPSE_SMOOTHING
        tick[FREE_S] += weight * (step_s - tick[FREE_S])
        collapsed = 1.0 if step_s > COLLAPSE_RATIO * baseline_s else 0.0
        tick[COLLAPSED] += COLLAPSE_SMOOTHING * (collapsed - tick[COLLAPSED])
        tick[WATCHED] += 1.0
        if tick[COLLAPSED] > COLLAPSE_SHARE and tick[FREE_COUNT] >= MEAN_ITERATIONS:
            helped = tick[BACKOFF] == MIN_HOLD_ITERATIONS
            relapsed = helped and tick[WATCHED] <= RELAPSE_ITERATIONS
            longer = 2.0 * tick[HOLD] if relapsed else MIN_HOLD_ITERATIONS
            tick[HOLD] = min(longer, MAX_HOLD_ITERATIONS)
            hold(tick)
        elif tick[WATCHED] >= tick[TRIAL_AFTER] and tick[BACKOFF] == MIN_HOLD_ITERATIONS:
            tick[HOLD], tick[TRIAL] = TRIAL_ITERATIONS, 1.0
            hold(tick)


def trial_costs(tick: NDArray[np.float64]) -> bool:
    """Whether the first steps of a trial were longer than those without."""
    is_trial = tick[TRIAL] > 0.0 and tick[HOLD] == TRIAL_ITERATIONS
    held = tick[HOLD] - tick[LEFT]
    return bool(is_trial and held == SHORTEST_TRIAL_ITERATIONS and tick[SUM_S] > held * tick[FREE_S])


def holds_cost(tick: NDArray[np.float64]) -> bool:
    """Whether held steps were longer than free ones on the whole.

    A hold is judged against the slow steps that led to it, and slow steps are followed by faster ones of themselves
    where they are chance. All held against all free steps show that.
    """
    known = min(tick[HELD_COUNT], tick[FREE_COUNT]) >= MEAN_ITERATIONS
    return bool(known and tick[HELD_MEAN_S] > tick[FREE_MEAN_S])


def hold(tick: NDArray[np.float64]) -> None:
    """Begin to hold places, for ``HOLD`` iterations."""
    tick[LEFT] = tick[HOLD]
    tick[SUM_S] = tick[COLLAPSED] = tick[WATCHED] = 0.0


def judge_hold(tick: NDArray[np.float64]) -> None:
    """Go on to a hold after a trial that helped; back off after a hold that did not shorten the mean step."""
    was_trial, tick[TRIAL] = tick[TRIAL] * (tick[HOLD] == TRIAL_ITERATIONS), 0.0
    if was_trial > 0.0:
        helped = tick[SUM_S] < (1.0 - TRIAL_GAIN) * tick[FREE_S] * tick[HOLD]
        tick[HOLD] = MIN_HOLD_ITERATIONS
        if helped:
            tick[TRIAL], tick[TRIAL_AFTER] = 1.0, FIRST_TRIAL_ITERATIONS
            hold(tick)
        else:
            tick[TRIAL_AFTER] = min(TRIAL_GROWTH * tick[TRIAL_AFTER], MAX_TRIAL_DISTANCE)
    elif tick[SUM_S] < tick[FREE_S] * tick[HOLD] and not holds_cost(tick):
        tick[BACKOFF] = MIN_HOLD_ITERATIONS
    else:
        growth = COST_BACKOFF if holds_cost(tick) else 2.0
        tick[LEFT] = -tick[BACKOFF]
        tick[BACKOFF] = min(growth * tick[BACKOFF], MAX_BACKOFF_ITERATIONS)
