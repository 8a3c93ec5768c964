"""The state of the timing estimator: what each place of its two arrays holds.

``rank[F, r]`` of float32 has a column for each rank, ``tick[K]`` of float64 what all ranks of a job see alike. The
places are plain numbers: a live rank reads a hundred of them in a step, and members of an ``IntEnum`` take twice as
long. The compiled simulator and the live rank share them.
"""

from __future__ import annotations

RANK_FIELDS = 17
(
    DELAY_S,
    COMM_BASELINE_S,
    COMM_MEAN_S,
    COMM_S,
    COMM_CHANGE_S,
    COMM_PAIR_LOW_S,
    SLACK_S,
    SLACK_CHANGE_S,
    SLACK_PAIR_LOW_S,
    WAIT_MEAN_S,
    WAIT_VARIANCE_S2,
    SLACK_DELAY_S,
    COMM_FIRST_S,  # the smallest, second and third smallest of the running block
    COMM_SECOND_S,
    COMM_THIRD_S,
    BUDGET_S,  # what is left of the budget of delays; in a live job the guard keeps it by the clock
    DEFER_S,  # how long each transfer that can wait is held back in the next iteration
) = range(RANK_FIELDS)

TICK_FIELDS = 44
(
    ITERATIONS,
    STEP_FIRST_S,
    STEP_SECOND_S,
    STEP_THIRD_S,
    STEP_BASELINE_S,
    SUM_STEPS,
    SUM_STEP_S,
    SUM_STEP_S2,
    STEP_MEAN_BEFORE_S,
    # rule stagger
    STAGGER_LEFT,  # iterations of the hold to go; negative in the pause after one
    STAGGER_HOLD,
    STAGGER_BACKOFF,
    STAGGER_SUM_S,
    STAGGER_FREE_S,
    STAGGER_COLLAPSED,
    STAGGER_WATCHED,
    STAGGER_TRIAL,  # 1 in a trial and in the hold that follows one that helped
    STAGGER_TRIAL_AFTER,  # iterations to watch before the next one
    STAGGER_FREE_MEAN_S,
    STAGGER_FREE_COUNT,
    STAGGER_HELD_MEAN_S,
    STAGGER_HELD_COUNT,
    # rule defer
    DEFER_LEFT,
    DEFER_LENGTH,
    DEFER_BACKOFF,
    DEFER_SUM_S,
    DEFER_FREE_S,
    DEFER_HELD_S,
    DEFER_NOW,  # whether a rank holds transfers back in the iteration that runs
    DEFER_SPREAD_S,  # mean distance of a step without holding back from the mean of such steps
    # rules slack and mean_slack
    SLACK_TURN,
    SLACK_CLOSED,  # iterations to go without the rule
    SLACK_CLOSED_NEXT,
    SLACK_PACED,  # iterations in which it was allowed
    SLACK_EDGE,  # the last iteration lay in a pause or followed one
    SLACK_BEFORE_S,
    SLACK_PAUSE_S,
    SLACK_AFTER_S,
    SLACK_GAINS_S,
    SLACK_SQUARES_S2,
    SLACK_WEIGHT,
    SLACK_STEP_S,
    SLACK_STEP_CHANGE_S,
    SLACK_CLOCK,  # iterations so far; it stands still while pacing is not allowed, as the baselines' clock does not
) = range(TICK_FIELDS)
