"""How rules find out on the job whether they pay: steps with a rule against steps without it, in turns.

No rank sees in its own waits whether the delays of all ranks lengthen the step, but all of them see the step. So each
rule is off now and then, at the same places of the common clock, and all ranks judge alike. A rule that gains goes on
longer; one that does not is tried again later, and later each time. So pacing cannot fool its own signal.

The state is in ``tick[K]`` (``paceenv.core.slots``). The simulator compiles these functions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceenv.core import slots

Tick = NDArray[np.float64] | list[float]

FREE_SMOOTHING = 0.25
"""Weight of a newer iteration in the mean step without a rule."""


def follow(tick: Tick, slot: int, step_s: float) -> None:
    """A running mean of steps takes in one; the first as it is."""
    tick[slot] += (1.0 if tick[slot] == 0.0 else FREE_SMOOTHING) * (step_s - tick[slot])


def reset(tick: Tick) -> None:
    """Set what does not begin at 0."""
    tick[slots.STAGGER_HOLD] = tick[slots.STAGGER_BACKOFF] = STAGGER_MIN_HOLD
    tick[slots.STAGGER_TRIAL_AFTER] = STAGGER_FIRST_TRIAL
    tick[slots.DEFER_LENGTH], tick[slots.DEFER_BACKOFF] = DEFER_TRIAL, DEFER_FREE
    tick[slots.DEFER_LEFT] = -DEFER_FREE
    tick[slots.SLACK_TURN], tick[slots.SLACK_CLOSED_NEXT] = SLACK_FIRST_TURN, SLACK_FIRST_CLOSED


# ------------------------------------------------------------------------------------------------------- rule stagger

COLLAPSE_RATIO, COLLAPSE_SMOOTHING = 1.25, 0.25
"""A step this many times the baseline step has collapsed, as it does when a sender waits for a retransmission."""
COLLAPSE_SHARE = 0.4
"""Share of recent steps, so weighted, from which on it is a state and not an accident: two in a row."""
STAGGER_MIN_HOLD, STAGGER_MAX_HOLD, STAGGER_MAX_BACKOFF = 16, 512, 2048
RELAPSE_ITERATIONS = 8
"""A collapse so soon after a hold is the same one again: the next hold is twice as long."""
STAGGER_TRIAL, STAGGER_FIRST_TRIAL, STAGGER_MAX_TRIAL_DISTANCE = 4, 24, 4096
"""Length of a trial without a collapse, iterations watched before the first one, and at most."""
STAGGER_SHORTEST_TRIAL = 2
"""A trial whose steps are longer up to here ends: most jobs do not collapse, and a trial is all that the rule costs."""
STAGGER_TRIAL_GROWTH, STAGGER_TRIAL_GAIN = 8.0, 0.02
"""Factor of the time to the next trial after one that did not help; and the least share by which steps of a trial must
be shorter: few are compared."""
MEAN_ITERATIONS, MEAN_MEMORY_ITERATIONS = 16, 512
"""Held and free iterations from which on their means are compared, and over how many a mean runs. No hold begins before
so many free ones: the slow steps that lead to a hold are slower than steps without it are on the whole."""
COST_BACKOFF = 8.0
"""Growth of the pause after a hold when held steps are longer on the whole."""


def watch_stagger(tick: Tick, step_s: float, baseline_s: float) -> None:
    """When ranks whose settings ask for it hold their places in a stagger: while ``STAGGER_LEFT`` is positive.

    Then they stop and watch. A collapse within a few iterations is a relapse and doubles the hold. If the mean step of
    a hold was no shorter than before, or held steps are longer than free ones on the whole, the ranks back off
    (``STAGGER_LEFT`` negative), longer each time, and only then try a short hold again.

    Where every step collapses, none stands out. So where none has collapsed for long, places are tried for a few
    iterations, whatever the threshold of a rank; after a trial that does not help the next one comes much later.
    """
    left = tick[slots.STAGGER_LEFT]
    mean, count = slots.STAGGER_FREE_MEAN_S, slots.STAGGER_FREE_COUNT
    if left > 0.0:
        mean, count = slots.STAGGER_HELD_MEAN_S, slots.STAGGER_HELD_COUNT
    tick[count] = min(tick[count] + 1.0, MEAN_MEMORY_ITERATIONS)
    tick[mean] += (step_s - tick[mean]) / tick[count]
    if left > 0.0:
        tick[slots.STAGGER_SUM_S] += step_s
        tick[slots.STAGGER_LEFT] = left - 1.0
        if trial_costs(tick):
            tick[slots.STAGGER_SUM_S] += tick[slots.STAGGER_SUM_S] / STAGGER_SHORTEST_TRIAL * tick[slots.STAGGER_LEFT]
            tick[slots.STAGGER_LEFT] = 0.0
        if tick[slots.STAGGER_LEFT] == 0.0:
            judge_hold(tick)
    elif left < 0.0:
        tick[slots.STAGGER_LEFT] = left + 1.0
    else:
        follow(tick, slots.STAGGER_FREE_S, step_s)
        collapsed = 1.0 if step_s > COLLAPSE_RATIO * baseline_s else 0.0
        tick[slots.STAGGER_COLLAPSED] += COLLAPSE_SMOOTHING * (collapsed - tick[slots.STAGGER_COLLAPSED])
        tick[slots.STAGGER_WATCHED] += 1.0
        helped = tick[slots.STAGGER_BACKOFF] == STAGGER_MIN_HOLD
        if tick[slots.STAGGER_COLLAPSED] > COLLAPSE_SHARE and tick[slots.STAGGER_FREE_COUNT] >= MEAN_ITERATIONS:
            relapsed = helped and tick[slots.STAGGER_WATCHED] <= RELAPSE_ITERATIONS
            longer = 2.0 * tick[slots.STAGGER_HOLD] if relapsed else STAGGER_MIN_HOLD
            hold_places(tick, min(longer, STAGGER_MAX_HOLD))
        elif tick[slots.STAGGER_WATCHED] >= tick[slots.STAGGER_TRIAL_AFTER] and helped:
            tick[slots.STAGGER_TRIAL] = 1.0
            hold_places(tick, STAGGER_TRIAL)


def trial_costs(tick: Tick) -> bool:
    """Whether the first steps of a trial were longer than those without."""
    is_trial = tick[slots.STAGGER_TRIAL] > 0.0 and tick[slots.STAGGER_HOLD] == STAGGER_TRIAL
    held = tick[slots.STAGGER_HOLD] - tick[slots.STAGGER_LEFT]
    longer = tick[slots.STAGGER_SUM_S] > held * tick[slots.STAGGER_FREE_S]
    return bool(is_trial and held == STAGGER_SHORTEST_TRIAL and longer)


def holds_cost(tick: Tick) -> bool:
    """Whether held steps were longer than free ones on the whole.

    A hold is judged against the slow steps that led to it, and slow steps are followed by faster ones of themselves
    where they are chance. All held against all free steps show that.
    """
    known = min(tick[slots.STAGGER_HELD_COUNT], tick[slots.STAGGER_FREE_COUNT]) >= MEAN_ITERATIONS
    return bool(known and tick[slots.STAGGER_HELD_MEAN_S] > tick[slots.STAGGER_FREE_MEAN_S])


def hold_places(tick: Tick, iterations: float) -> None:
    """Begin to hold places, for so many iterations."""
    tick[slots.STAGGER_HOLD] = tick[slots.STAGGER_LEFT] = iterations
    tick[slots.STAGGER_SUM_S] = tick[slots.STAGGER_COLLAPSED] = tick[slots.STAGGER_WATCHED] = 0.0


def judge_hold(tick: Tick) -> None:
    """Go on to a hold after a trial that helped; back off after a hold that did not shorten the mean step."""
    held_s, free_s = tick[slots.STAGGER_SUM_S], tick[slots.STAGGER_FREE_S]
    hold, was_trial = tick[slots.STAGGER_HOLD], tick[slots.STAGGER_TRIAL] > 0.0
    tick[slots.STAGGER_TRIAL] = 0.0
    if was_trial and hold == STAGGER_TRIAL:
        tick[slots.STAGGER_HOLD] = STAGGER_MIN_HOLD
        if held_s < (1.0 - STAGGER_TRIAL_GAIN) * free_s * hold:
            tick[slots.STAGGER_TRIAL], tick[slots.STAGGER_TRIAL_AFTER] = 1.0, STAGGER_FIRST_TRIAL
            hold_places(tick, STAGGER_MIN_HOLD)
        else:
            later = STAGGER_TRIAL_GROWTH * tick[slots.STAGGER_TRIAL_AFTER]
            tick[slots.STAGGER_TRIAL_AFTER] = min(later, STAGGER_MAX_TRIAL_DISTANCE)
    elif held_s < free_s * hold and not holds_cost(tick):
        tick[slots.STAGGER_BACKOFF] = STAGGER_MIN_HOLD
    else:
        tick[slots.STAGGER_LEFT] = -tick[slots.STAGGER_BACKOFF]
        longer = (COST_BACKOFF if holds_cost(tick) else 2.0) * tick[slots.STAGGER_BACKOFF]
        tick[slots.STAGGER_BACKOFF] = min(longer, STAGGER_MAX_BACKOFF)


# --------------------------------------------------------------------------------------------------------- rule defer

DEFER_FREE, DEFER_TRIAL = 4, 12
"""Iterations without holding back between two holds, and of a hold that is tried."""
DEFER_MAX_HOLD, DEFER_MAX_FREE = 256, 512
"""The longest hold, and the longest pause after holds that gained nothing."""
HURT_ITERATIONS, HURT_RATIO, HURT_SPREADS, HURT_BACKOFF = 3, 1.02, 3.0, 4.0
"""A trial ends after so many iterations if their mean step is this many times the one without holding back, and further
from it by so many of the mean distances between such steps, over the root of their number. Its pause grows by the last
factor more than that of a trial that only gained nothing."""


def watch_defer(tick: Tick, step_s: float) -> None:
    """When ranks whose settings ask for it hold transfers back: while ``DEFER_LEFT`` is positive.

    Then they stop for a few iterations, so that the mean step without it stays known. A hold whose mean step was
    shorter makes the next one twice as long. One that was no shorter makes the next pause longer; a job in which
    nothing is to be gained is tried in one of forty iterations. A trial whose first steps are clearly longer ends at
    once. Only steps in which something was really held count as a hold; a trial waits until the settings ask for it.
    """
    held, left = tick[slots.DEFER_NOW] > 0.0, tick[slots.DEFER_LEFT]
    tick[slots.DEFER_NOW] = 0.0
    if not held:
        apart_s = 0.0 if tick[slots.DEFER_FREE_S] == 0.0 else abs(step_s - tick[slots.DEFER_FREE_S])
        tick[slots.DEFER_SPREAD_S] += FREE_SMOOTHING * (apart_s - tick[slots.DEFER_SPREAD_S])
        follow(tick, slots.DEFER_FREE_S, step_s)
    if left <= 0.0:
        tick[slots.DEFER_LEFT] = left + 1.0
        if left == -1.0:
            tick[slots.DEFER_LEFT], tick[slots.DEFER_SUM_S] = tick[slots.DEFER_LENGTH], 0.0
    elif held:
        tick[slots.DEFER_SUM_S] += step_s
        tick[slots.DEFER_LEFT] = left - 1.0
        if left == 1.0:
            tick[slots.DEFER_HELD_S] = tick[slots.DEFER_SUM_S] / tick[slots.DEFER_LENGTH]
            end_hold(tick, tick[slots.DEFER_HELD_S] < tick[slots.DEFER_FREE_S])
        elif clearly_hurts(tick):
            tick[slots.DEFER_BACKOFF] = min(HURT_BACKOFF * tick[slots.DEFER_BACKOFF], DEFER_MAX_FREE)
            end_hold(tick, False)
    elif tick[slots.DEFER_LENGTH] > DEFER_TRIAL:
        end_hold(tick, False)


def clearly_hurts(tick: Tick) -> bool:
    """Whether the first steps of a trial are so much longer than those without holding that it may end."""
    seen = tick[slots.DEFER_LENGTH] - tick[slots.DEFER_LEFT]
    is_trial = tick[slots.DEFER_LENGTH] == DEFER_TRIAL and seen >= HURT_ITERATIONS
    noise_s = HURT_SPREADS * tick[slots.DEFER_SPREAD_S] * math.sqrt(max(seen, 0.0))
    return bool(is_trial and tick[slots.DEFER_SUM_S] > HURT_RATIO * tick[slots.DEFER_FREE_S] * seen + noise_s)


def end_hold(tick: Tick, helped: bool) -> None:
    """Stop holding back; the next hold is longer if this one helped, the pause before it is if it did not."""
    tick[slots.DEFER_BACKOFF] = DEFER_FREE if helped else min(4.0 * tick[slots.DEFER_BACKOFF], DEFER_MAX_FREE)
    tick[slots.DEFER_LENGTH] = min(2.0 * tick[slots.DEFER_LENGTH], DEFER_MAX_HOLD) if helped else DEFER_TRIAL
    tick[slots.DEFER_LEFT] = -tick[slots.DEFER_BACKOFF]


def defer_gain(tick: Tick) -> float:
    """Mean step without holding back over the mean step with it, less 1; 0 while unknown, endless in a first hold."""
    if tick[slots.DEFER_LEFT] <= 0.0:
        return 0.0
    if tick[slots.DEFER_LENGTH] == DEFER_TRIAL:
        return math.inf
    return float(tick[slots.DEFER_FREE_S] / tick[slots.DEFER_HELD_S] - 1.0)


# --------------------------------------------------------------------------------------------------------- rule slack

SLACK_FIRST_TURN, SLACK_MAX_TURN = 16, 512
"""Distance of the pauses at first and at most; it doubles. Powers of two: a division of integers is slow."""
SLACK_UNSURE_TURN = 64
"""The same at most while it is not sure that the rule helps. After a single comparison that looks like a loss the next
pause comes as soon as the first."""
SLACK_PAUSE, SLACK_SETTLED = 4, 8
"""Iterations of a pause, and of pacing that must come before it: delays are approached slowly."""
SLACK_FIRST_CLOSED, SLACK_MAX_CLOSED, SLACK_CLOSED_GROWTH = 64, 2048, 4.0
"""Iterations without the rule after a first loss, at most, and their growth from one to the next."""
SLACK_FORGET, SLACK_ERRORS = 0.8, 2.5
"""Weight of all earlier comparisons before the newest one; and standard errors from which on a difference counts."""
SLACK_LEAST_LOSS = 0.001
"""Loss, a share of the baseline step, below which the rule goes on."""
OUTLIER = 6.0
"""Mean changes from step to step by which a step counts at most: one stall or checkpoint must not decide."""
LEAST_CHANGE, CHANGE_SMOOTHING = 0.001, 0.05
"""The least that the mean change counts as, a share of the baseline step; and the weight of the newest one in it."""
SLACK_NOISE = math.sqrt(1.25 / SLACK_PAUSE + 1.0 / 28.0) * math.sqrt(math.pi) / 2.0
"""Standard error of a comparison, in mean changes of white noise. The pause and the steps after it are means of
``SLACK_PAUSE``; the mean before it is worth 7. Those around it weigh one half each."""


def watch_slack(tick: Tick, step_s: float, baseline_s: float) -> None:
    """When ranks use their slack: always, but in short pauses at places of the common clock, and after a loss.

    The slack of each rank is real, but that of all together may not be: senders of a gather queue at the receiver's
    port, groups meet on an uplink, and a rank takes the queue for slack. The delays then lengthen the step, and the
    longer step looks like more slack. So steps of a pause are compared with those before and after it. A rank keeps
    over a pause what its rule asked for. Whether it has slack does not matter for the pauses: none knows who else does.
    After a loss that is no chance the rule is off for a while. Rule mean_slack keeps the same pauses.
    """
    step_s = without_outlier_s(tick, step_s, baseline_s)
    was_paused = tick[slots.SLACK_PAUSE_S] > 0.0 and tick[slots.SLACK_AFTER_S] == 0.0
    paused = slack_pauses(tick)
    tick[slots.SLACK_CLOCK] += 1.0
    tick[slots.SLACK_EDGE] = 1.0 if paused or was_paused else 0.0
    if tick[slots.SLACK_CLOSED] > 0.0:
        tick[slots.SLACK_CLOSED] -= 1.0
    elif paused:
        tick[slots.SLACK_PAUSE_S] += step_s / SLACK_PAUSE
    elif tick[slots.SLACK_PAUSE_S] > 0.0:
        tick[slots.SLACK_AFTER_S] += step_s / SLACK_PAUSE
        if int(tick[slots.SLACK_CLOCK]) & (int(tick[slots.SLACK_TURN]) - 1) == SLACK_PAUSE:
            compare(tick, baseline_s)
            tick[slots.SLACK_PAUSE_S] = tick[slots.SLACK_AFTER_S] = 0.0
    else:
        tick[slots.SLACK_PACED] += 1.0
        weight = max(FREE_SMOOTHING, 1.0 / tick[slots.SLACK_PACED])
        tick[slots.SLACK_BEFORE_S] += weight * (step_s - tick[slots.SLACK_BEFORE_S])


def without_outlier_s(tick: Tick, step_s: float, baseline_s: float) -> float:
    """A step as it counts in a comparison, seconds; the mean change from step to step takes it in."""
    last_s, before_s = tick[slots.SLACK_STEP_S], tick[slots.SLACK_BEFORE_S]
    mean_s, least_s = tick[slots.SLACK_STEP_CHANGE_S], LEAST_CHANGE * baseline_s
    most_s, change_s = OUTLIER * (mean_s if mean_s > least_s else least_s), abs(step_s - last_s)
    change_s = (change_s if change_s < most_s else most_s) if last_s > 0.0 else 0.0
    tick[slots.SLACK_STEP_CHANGE_S] = mean_s + CHANGE_SMOOTHING * (change_s - mean_s)
    tick[slots.SLACK_STEP_S] = step_s
    return step_s if tick[slots.SLACK_PACED] == 0.0 else float(min(max(step_s, before_s - most_s), before_s + most_s))


def slack_pauses(tick: Tick) -> bool:
    """Whether no rank uses its slack in the iteration that follows: a pause, or the rule is off.

    A pause is begun at its first iteration or not at all.
    """
    if tick[slots.SLACK_CLOSED] > 0.0:
        return True
    turn = int(tick[slots.SLACK_TURN])
    place = (int(tick[slots.SLACK_CLOCK]) & (turn - 1)) - (turn - SLACK_PAUSE)
    if place == 0:
        return bool(tick[slots.SLACK_PACED] >= SLACK_SETTLED and tick[slots.SLACK_PAUSE_S] == 0.0)
    return bool(place > 0 and tick[slots.SLACK_PAUSE_S] > 0.0)


def compare(tick: Tick, baseline_s: float) -> None:
    """Judge the rule after a pause: steps without it against those before and after, with earlier comparisons."""
    gain_s = tick[slots.SLACK_PAUSE_S] - 0.5 * (tick[slots.SLACK_BEFORE_S] + tick[slots.SLACK_AFTER_S])
    tick[slots.SLACK_WEIGHT] = weight = SLACK_FORGET * tick[slots.SLACK_WEIGHT] + 1.0
    tick[slots.SLACK_GAINS_S] = SLACK_FORGET * tick[slots.SLACK_GAINS_S] + gain_s
    tick[slots.SLACK_SQUARES_S2] = SLACK_FORGET * tick[slots.SLACK_SQUARES_S2] + gain_s * gain_s
    mean_s, noise_s = tick[slots.SLACK_GAINS_S] / weight, SLACK_NOISE * tick[slots.SLACK_STEP_CHANGE_S]
    spread_s = math.sqrt(max(tick[slots.SLACK_SQUARES_S2] / weight - mean_s * mean_s, 0.0))
    error_s, turn = max(noise_s, spread_s) / math.sqrt(weight), tick[slots.SLACK_TURN]
    if mean_s < -max(SLACK_ERRORS * error_s, SLACK_LEAST_LOSS * baseline_s):
        tick[slots.SLACK_CLOSED], tick[slots.SLACK_PACED] = tick[slots.SLACK_CLOSED_NEXT], 0.0
        tick[slots.SLACK_TURN] = SLACK_FIRST_TURN
        longer = SLACK_CLOSED_GROWTH * tick[slots.SLACK_CLOSED_NEXT]
        tick[slots.SLACK_CLOSED_NEXT] = min(longer, SLACK_MAX_CLOSED)
    elif gain_s < -SLACK_ERRORS * SLACK_NOISE * tick[slots.SLACK_STEP_CHANGE_S]:
        tick[slots.SLACK_TURN] = SLACK_FIRST_TURN
    elif mean_s > SLACK_ERRORS * error_s:
        tick[slots.SLACK_TURN], tick[slots.SLACK_CLOSED_NEXT] = min(2.0 * turn, SLACK_MAX_TURN), SLACK_FIRST_CLOSED
    else:
        tick[slots.SLACK_TURN] = min(2.0 * turn if mean_s >= 0.0 else turn, SLACK_UNSURE_TURN)
