"""When ranks use their slack, from the common step time alone: pace, pause, compare, and stop where that costs.

The slack of each rank is real, but the slack of all ranks together may not be. Senders of a gather queue at the
receiver's port, groups meet on a shared uplink, and a rank takes the queue for slack. The delays then lengthen the
step, and the longer step looks like more slack. No rank can see that in its own waits, but all of them see the step.

So ranks pause for a few iterations at the same places of the common clock. They compare the steps of the pause with
those before and after it. A rank keeps what its rule asked for over a pause. The first pause comes within
``TURN_ITERATIONS``, later ones are rarer. Whether a rank has slack or uses it does not matter for that, so that all
ranks act alike: none knows who else does. After a loss that is no chance the rule is off for a while, longer each time.
Rule mean_slack keeps the same pauses.

The fields belong to the array ``tick[K]`` of ``paceenv.core.timing``. The simulator compiles these functions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

TURN_ITERATIONS, MAX_TURN_ITERATIONS = 16, 512
"""Distance of the pauses at first and at most; it doubles."""
UNSURE_TURN_ITERATIONS = 64
"""The same at most while it is not sure that the rule helps. After a single comparison that looks like a loss the next
pause comes as soon as the first."""
PAUSE_ITERATIONS, SETTLED_ITERATIONS = 4, 8
"""Iterations of a pause, and of pacing that must come before it: delays are approached slowly."""
CLOSED_ITERATIONS, MAX_CLOSED_ITERATIONS = 64, 2048
"""Iterations without the rule after a first loss, and at most."""
CLOSED_GROWTH = 4.0
FORGET = 0.8
"""Weight of all earlier comparisons before the newest one."""
ERRORS = 2.5
"""Standard errors from which on a mean difference is no chance."""
LEAST_LOSS = 0.001
"""Loss, a share of the baseline step, below which the rule goes on."""
OUTLIER = 6.0
"""Mean changes from step to step by which a step counts at most: one stall or checkpoint must not decide."""
LEAST_CHANGE = 0.001
"""The least that the mean change counts as, a share of the baseline step."""
CHANGE_SMOOTHING, STEP_SMOOTHING = 0.05, 0.25
"""Weight of the newest iteration in the mean change, and in the mean step before a pause."""
NOISE = math.sqrt(1.25 / PAUSE_ITERATIONS + 1.0 / 28.0) * math.sqrt(math.pi) / 2.0
"""Standard error of a comparison, in mean changes of white noise. The pause and the steps after it are means of
``PAUSE_ITERATIONS``; the mean before it is worth 7. Those around it weigh one half each."""

TURN, CLOSED, CLOSED_NEXT, PACED, EDGE = 30, 31, 32, 33, 34
BEFORE_S, PAUSE_S, AFTER_S, GAINS_S, SQUARES_S2, WEIGHT = 35, 36, 37, 38, 39, 40
STEP_S, CHANGE_S, CLOCK = 41, 42, 43
END = 44
"""``CLOSED``: iterations to go without the rule.
``PACED``: iterations in which it was allowed. ``EDGE``: the last iteration lay in a pause or followed one.
``CLOCK``: iterations so far; it stands still with the rest while pacing is not allowed, as the baselines' clock does
not."""


def reset(tick: NDArray[np.float64]) -> None:
    """Set what does not begin at 0."""
    tick[TURN], tick[CLOSED_NEXT] = TURN_ITERATIONS, CLOSED_ITERATIONS


def watch(tick: NDArray[np.float64], step_s: float, baseline_s: float) -> None:
    """Take in one step time."""
    step_s = without_outlier_s(tick, step_s, baseline_s)
    was_paused = tick[PAUSE_S] > 0.0 and tick[AFTER_S] == 0.0
    paused = pauses(tick)
    tick[CLOCK] += 1.0
    tick[EDGE] = 1.0 if paused or was_paused else 0.0
    if tick[CLOSED] > 0.0:
        tick[CLOSED] -= 1.0
    elif paused:
        tick[PAUSE_S] += step_s / PAUSE_ITERATIONS
    elif tick[PAUSE_S] > 0.0:
        tick[AFTER_S] += step_s / PAUSE_ITERATIONS
        if int(tick[CLOCK]) % int(tick[TURN]) == PAUSE_ITERATIONS:
            compare(tick, baseline_s)
            tick[PAUSE_S] = tick[AFTER_S] = 0.0
    else:
        tick[PACED] += 1.0
        tick[BEFORE_S] += max(STEP_SMOOTHING, 1.0 / tick[PACED]) * (step_s - tick[BEFORE_S])


def without_outlier_s(tick: NDArray[np.float64], step_s: float, baseline_s: float) -> float:
    """A step as it counts in a comparison, seconds; the mean change from step to step takes it in."""
    most_s = OUTLIER * max(tick[CHANGE_S], LEAST_CHANGE * baseline_s)
    change_s = min(abs(step_s - tick[STEP_S]), most_s) if tick[STEP_S] > 0.0 else 0.0
    tick[CHANGE_S] += CHANGE_SMOOTHING * (change_s - tick[CHANGE_S])
    tick[STEP_S] = step_s
    if tick[PACED] == 0.0:
        return step_s
    return float(min(max(step_s, tick[BEFORE_S] - most_s), tick[BEFORE_S] + most_s))


def pauses(tick: NDArray[np.float64]) -> bool:
    """Whether no rank uses its slack in the iteration that follows: a pause, or the rule is off.

    A pause is begun at its first iteration or not at all.
    """
    if tick[CLOSED] > 0.0:
        return True
    turn = int(tick[TURN])
    place = int(tick[CLOCK]) % turn - (turn - PAUSE_ITERATIONS)
    if place == 0:
        return bool(tick[PACED] >= SETTLED_ITERATIONS and tick[PAUSE_S] == 0.0)
    return bool(place > 0 and tick[PAUSE_S] > 0.0)


def compare(tick: NDArray[np.float64], baseline_s: float) -> None:
    """Judge the rule after a pause: steps without it against those before and after, with earlier comparisons."""
    gain_s = tick[PAUSE_S] - 0.5 * (tick[BEFORE_S] + tick[AFTER_S])
    tick[WEIGHT] = FORGET * tick[WEIGHT] + 1.0
    tick[GAINS_S] = FORGET * tick[GAINS_S] + gain_s
    tick[SQUARES_S2] = FORGET * tick[SQUARES_S2] + gain_s * gain_s
    mean_s = tick[GAINS_S] / tick[WEIGHT]
    spread_s = math.sqrt(max(tick[SQUARES_S2] / tick[WEIGHT] - mean_s * mean_s, 0.0))
    error_s = max(NOISE * tick[CHANGE_S], spread_s) / math.sqrt(tick[WEIGHT])
    if mean_s < -max(ERRORS * error_s, LEAST_LOSS * baseline_s):
        tick[CLOSED], tick[TURN], tick[PACED] = tick[CLOSED_NEXT], TURN_ITERATIONS, 0.0
        tick[CLOSED_NEXT] = min(CLOSED_GROWTH * tick[CLOSED_NEXT], MAX_CLOSED_ITERATIONS)
    elif gain_s < -ERRORS * NOISE * tick[CHANGE_S]:
        tick[TURN] = TURN_ITERATIONS
    elif mean_s > ERRORS * error_s:
        tick[TURN], tick[CLOSED_NEXT] = min(2.0 * tick[TURN], MAX_TURN_ITERATIONS), CLOSED_ITERATIONS
    else:
        tick[TURN] = min(2.0 * tick[TURN] if mean_s >= 0.0 else tick[TURN], UNSURE_TURN_ITERATIONS)
