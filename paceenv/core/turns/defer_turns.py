"""When ranks hold back transfers that can wait, from the common step time alone: hold, stop, compare, and back off.

The fields belong to the array ``tick[K]`` of ``paceenv.core.timing``. The simulator compiles these functions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

FREE_ITERATIONS, TRIAL_ITERATIONS = 4, 12
"""Iterations without holding back between two holds, and of a hold that is tried."""
MAX_HOLD_ITERATIONS, MAX_FREE_ITERATIONS = 256, 512
"""The longest hold, and the longest pause after holds that gained nothing."""
HURT_ITERATIONS, HURT_RATIO, HURT_SPREADS, HURT_BACKOFF = 3, 1.02, 3.0, 4.0
"""A trial ends after so many iterations if their mean step is this many times the one without holding back, and further
from it by so many of the mean distances between such steps, over the root of their number. Its pause grows by the last
factor more than that of a trial that only gained nothing."""
SMOOTHING = 0.25
"""Weight of a newer iteration in the mean step without holding back."""

LEFT, LENGTH, BACKOFF, SUM_S, FREE_S, HELD_S, NOW, SPREAD_S = 22, 23, 24, 25, 26, 27, 28, 29
"""``NOW``: whether a rank holds transfers back in the iteration that runs. ``SPREAD_S``: mean distance of a step
without holding back from the mean of such steps."""


def reset(tick: NDArray[np.float64]) -> None:
    """Set what does not begin at 0."""
    tick[LENGTH], tick[BACKOFF], tick[LEFT] = TRIAL_ITERATIONS, FREE_ITERATIONS, -FREE_ITERATIONS


def watch(tick: NDArray[np.float64], step_s: float) -> None:
    """When ranks hold transfers back, from the common step time alone: hold, stop, compare, and back off.

    While ``LEFT`` is positive, ranks whose settings ask for it hold back. Then they stop for a few iterations, so
    that the mean step without it stays known. A hold whose mean step was shorter makes the next one twice as long. One
    that was no shorter makes the next pause twice as long. So pacing cannot fool its own signal, and a job in which
    nothing is to be gained is tried in one of forty iterations. A trial whose first steps are clearly longer ends at
    once, and the pause after it is longer still. All ranks see the same steps and act alike. Only steps in which
    something was really held count as a hold; a trial waits until the settings ask for it.
    """
    held, left = tick[NOW] > 0.0, tick[LEFT]
    tick[NOW] = 0.0
    if not held:
        is_first = tick[FREE_S] == 0.0
        apart_s = 0.0 if is_first else abs(step_s - tick[FREE_S])
        tick[SPREAD_S] += SMOOTHING * (apart_s - tick[SPREAD_S])
        tick[FREE_S] += (1.0 if is_first else SMOOTHING) * (step_s - tick[FREE_S])
    if left <= 0.0:
        tick[LEFT] = left + 1.0
        if left == -1.0:
            tick[LEFT], tick[SUM_S] = tick[LENGTH], 0.0
    elif held:
        tick[SUM_S] += step_s
        tick[LEFT] = left - 1.0
        if left == 1.0:
            tick[HELD_S] = tick[SUM_S] / tick[LENGTH]
            end_hold(tick, tick[HELD_S] < tick[FREE_S])
        elif clearly_hurts(tick):
            tick[BACKOFF] = min(HURT_BACKOFF * tick[BACKOFF], MAX_FREE_ITERATIONS)
            end_hold(tick, False)
    elif tick[LENGTH] > TRIAL_ITERATIONS:
        end_hold(tick, False)


def clearly_hurts(tick: NDArray[np.float64]) -> bool:
    """Whether the first steps of a trial are so much longer than those without holding that it may end."""
    seen = tick[LENGTH] - tick[LEFT]
    is_trial = tick[LENGTH] == TRIAL_ITERATIONS and seen >= HURT_ITERATIONS
    noise_s = HURT_SPREADS * tick[SPREAD_S] * math.sqrt(max(seen, 0.0))
    return bool(is_trial and tick[SUM_S] > HURT_RATIO * tick[FREE_S] * seen + noise_s)


def end_hold(tick: NDArray[np.float64], helped: bool) -> None:
    """Stop holding back; the next hold is longer if this one helped, the pause before it is if it did not."""
    if helped:
        tick[BACKOFF] = FREE_ITERATIONS
        tick[LENGTH] = min(2.0 * tick[LENGTH], MAX_HOLD_ITERATIONS)
    else:
        tick[BACKOFF] = min(4.0 * tick[BACKOFF], MAX_FREE_ITERATIONS)
        tick[LENGTH] = TRIAL_ITERATIONS
    tick[LEFT] = -tick[BACKOFF]


def gain(tick: NDArray[np.float64]) -> float:
    """Mean step without holding back over the mean step with it, less 1; 0 while unknown, endless in a first hold."""
    if tick[LEFT] <= 0.0:
        return 0.0
    if tick[LENGTH] == TRIAL_ITERATIONS:
        return math.inf
    return float(tick[FREE_S] / tick[HELD_S] - 1.0)
