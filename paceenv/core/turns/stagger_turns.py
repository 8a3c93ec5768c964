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

LEFT, HOLD, BACKOFF, SUM_S, FREE_S, COLLAPSED, WATCHED = 9, 10, 11, 12, 13, 14, 15


def reset(tick: NDArray[np.float64]) -> None:
    """Set what does not begin at 0.

    Args:
        tick: what all ranks see alike, ``(K,)``; changed in place.
    """
    tick[HOLD] = tick[BACKOFF] = MIN_HOLD_ITERATIONS


def watch(tick: NDArray[np.float64], step_s: float, baseline_s: float) -> None:
    """When the ranks of a job take their places in a stagger, from the common step time alone: hold, probe, back off.

    While ``LEFT`` is positive, ranks whose settings ask for it hold their places. Then they stop and watch. A
    collapse within a few iterations is a relapse and doubles the hold. If the mean step of a hold was no shorter than
    before, the hold did not help. The ranks then back off (``LEFT`` negative), twice as long each time, and
    only then try a short hold again.

    Args:
        tick: what all ranks see alike, ``(K,)``; changed in place.
        step_s: the step time, seconds.
        baseline_s: the baseline step, seconds.
    """
    left = tick[LEFT]
    if left > 0.0:
        tick[SUM_S] += step_s
        tick[LEFT] = left - 1.0
        if left == 1.0:
            judge_hold(tick)
    elif left < 0.0:
        tick[LEFT] = left + 1.0
    else:
        weight = 1.0 if tick[FREE_S] == 0.0 else COLLAPSE_SMOOTHING
        tick[FREE_S] += weight * (step_s - tick[FREE_S])
        collapsed = 1.0 if step_s > COLLAPSE_RATIO * baseline_s else 0.0
        tick[COLLAPSED] += COLLAPSE_SMOOTHING * (collapsed - tick[COLLAPSED])
        tick[WATCHED] += 1.0
        if tick[COLLAPSED] > COLLAPSE_SHARE:
            helped = tick[BACKOFF] == MIN_HOLD_ITERATIONS
            relapsed = helped and tick[WATCHED] <= RELAPSE_ITERATIONS
            longer = 2.0 * tick[HOLD] if relapsed else MIN_HOLD_ITERATIONS
            tick[HOLD] = min(longer, MAX_HOLD_ITERATIONS)
            tick[LEFT] = tick[HOLD]
            tick[SUM_S] = tick[COLLAPSED] = tick[WATCHED] = 0.0


def judge_hold(tick: NDArray[np.float64]) -> None:
    """Back off after a hold that did not shorten the mean step.

    Args:
        tick: what all ranks see alike, ``(K,)``; changed in place.
    """
    if tick[SUM_S] < tick[FREE_S] * tick[HOLD]:
        tick[BACKOFF] = MIN_HOLD_ITERATIONS
    else:
        tick[LEFT] = -tick[BACKOFF]
        tick[BACKOFF] = min(2.0 * tick[BACKOFF], MAX_BACKOFF_ITERATIONS)
