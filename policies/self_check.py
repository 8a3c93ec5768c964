"""A policy that checks itself: now and then it measures what its pacing does to step time, and stops where that costs.

A network knows kinds of clusters, and a cluster may be of none of them. The step time is the one thing that tells.
Every switch between pacing and none is a measurement: the mean level of a few intervals before it against a few after.

Only what all ranks see alike enters: the trend and the variation of step time. So all ranks switch together without
communication, and one rank's rest is not another rank's unexplained change. Legend: B rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

OPEN, REST, CLOSED, TRIAL = range(4)
"""Pacing goes on; it is interrupted to measure; it has cost and is off for a while; it is tried again."""


class SelfCheck:
    """When the rows of a batch may pace, from the course of their step times.

    Levels are sums of the trends of step time, logarithms relative to the first interval. That interval is without
    pacing, so the first comparison is with it. Where pacing is clearly ahead of the last time without, or steps vary
    too much to measure anything, no rest is taken. A rest that shows no harm makes the next one later.
    """

    FIRST, LONGEST, DOUBTFUL = 6, 96, 4
    """Intervals before the first rest; at most; and after a rest that showed a loss that may be chance."""
    REST_INTERVALS, TRIAL_INTERVALS = 1, 3
    CLOSED_FIRST, CLOSED_LONGEST, CLOSED_GROWTH = 8, 128, 2
    GROWTH, SURE_GROWTH = 3, 4
    """Factors of the time to the next rest."""
    WINDOW = 3
    """Intervals, at most, whose mean level counts on either side of a switch."""
    FORGET = 0.8
    """Weight of all measurements before the newest one."""
    LOSS_ERRORS, SURE_ERRORS, AHEAD_ERRORS, HARM_ERRORS = 2.5, 3.0, 1.0, 3.0
    """Standard errors from which on a loss closes, a gain is sure, pacing is ahead, and a rest is brought forward."""
    LEAST = 0.005
    """Change of step time, a ratio, below which pacing is neither ahead nor brings a rest forward."""
    RESTLESS = 0.5
    """Coefficient of variation of steps within intervals above which nothing is measured, as while collectives
    collapse."""
    WHITE, CONTRAST, TRENDS = 0.42, 1.2, 2.0
    """Variance of the mean of two levels less that of three, in squared trends of white noise; the sum of 1/n that it
    stands for is 1/CONTRAST of one; and the weight of trends in it, as so many contrasts."""
    FEW = 2.0
    """How much larger an error is taken while no change within a phase has been seen, in errors."""
    REMEMBER, STEPS_A_LEVEL = 0.97, 20.0
    """Weight of older changes; and steps of an interval, whose mean varies at least as if they were independent."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, rows: int) -> None:
        """Forget everything and prepare for ``rows``."""
        self._seen = 0
        self._phase_B = np.full(rows, OPEN)
        self._age_B = np.zeros(rows, np.int64)
        self._left_B, self._every_B = np.full((2, rows), self.FIRST)
        self._closed_B = np.full(rows, self.CLOSED_FIRST)
        self._level_5B = np.zeros((5, rows))
        self._before_B, self._off_B = np.zeros((2, rows))
        self._before_n_B = np.ones(rows)
        self._gain_B, self._weight_B = np.zeros((2, rows))
        self._trends_2B, self._contrasts_2B = np.zeros((2, 2, rows))
        self._square_cv_B = np.zeros(rows)

    def allowed(self, trend_B: NDArray[np.float64], cv_B: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which rows may pace in the coming interval; call once for each. Another number of rows starts anew.

        Args:
            trend_B: logarithm of the mean step of the interval over that of the one before.
            cv_B: coefficient of variation of its steps.
        """
        if len(trend_B) != len(self._phase_B):
            self.reset(len(trend_B))
        trend_B, cv_B = np.nan_to_num(trend_B), np.nan_to_num(cv_B)
        self._seen += 1
        self._square_cv_B += (cv_B**2 - self._square_cv_B) / min(self._seen, 20)
        if self._seen > 1:
            self._take_in(trend_B)
            now_B, n_B = self._now()
            error_B = self._error_B()
            due_B = self._left_B <= 0
            harms_B = self._beyond(now_B - self._off_B, error_B, self.HARM_ERRORS)
            due_B |= np.isin(self._phase_B, (OPEN, TRIAL)) & (self._age_B > 1) & harms_B
            if due_B.any():
                self._switch(due_B, now_B, n_B, error_B)
        return np.isin(self._phase_B, (OPEN, TRIAL))

    def _take_in(self, trend_B: NDArray[np.float64]) -> None:
        """Clocks, levels, and the noise of a measurement as seen within phases."""
        self._age_B += 1
        self._left_B -= 1
        self._level_5B = np.concatenate([self._level_5B[:1] + trend_B, self._level_5B[:-1]])
        self._trends_2B += (self._age_B > 2) * np.stack([trend_B**2, np.ones_like(trend_B)])
        contrast_B = self._level_5B[:2].mean(axis=0) - self._level_5B[2:].mean(axis=0)
        inner_B = self._age_B >= 6
        kept_2B = self.REMEMBER * self._contrasts_2B + np.stack([contrast_B**2, np.ones_like(trend_B)])
        self._contrasts_2B = np.where(inner_B, kept_2B, self._contrasts_2B)

    def _now(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Mean of the newest levels of the present phase, and of how many."""
        n_B = np.minimum(self._age_B, self.WINDOW)
        sums_3B = self._level_5B[: self.WINDOW].cumsum(axis=0)
        return sums_3B[np.maximum(n_B, 1) - 1, np.arange(len(n_B))] / np.maximum(n_B, 1), n_B

    def _error_B(self) -> NDArray[np.float64]:
        """Standard error of a measurement, a ratio of step time."""
        trends_B = self.WHITE * self._trends_2B[0] / np.maximum(self._trends_2B[1], 1.0)
        square_B = (self.TRENDS * trends_B + self._contrasts_2B[0]) / (self.TRENDS + self._contrasts_2B[1])
        floor_B = self._square_cv_B / self.STEPS_A_LEVEL
        few_B = 1.0 + self.FEW / (1.0 + self._contrasts_2B[1])
        return np.asarray(few_B * np.sqrt(np.maximum(square_B, floor_B) + 1e-9))

    def _beyond(self, rise_B: NDArray[np.float64], error_B: NDArray[np.float64], errors: float) -> NDArray[np.bool_]:
        return np.asarray(rise_B > np.maximum(self.LEAST, errors * error_B))

    def _switch(
        self,
        due_B: NDArray[np.bool_],
        now_B: NDArray[np.float64],
        n_B: NDArray[np.int64],
        error_B: NDArray[np.float64],
    ) -> None:
        """End the phase of the rows that are due, and start their next one."""
        was_B = np.where(due_B, self._phase_B, -1)
        open_B, rest_B, closed_B, trial_B = (was_B == phase for phase in (OPEN, REST, CLOSED, TRIAL))
        short_B = open_B & (self._age_B <= 2 * self.WINDOW)
        self._measure(rest_B, now_B - self._before_B, n_B)
        self._measure(short_B | trial_B, self._before_B - now_B, n_B)
        mean_B = self._gain_B / np.maximum(self._weight_B, 1e-9)
        of_mean_B = error_B / np.sqrt(np.maximum(self._weight_B, 1e-9))
        bad_B, sure_B = mean_B < -self.LOSS_ERRORS * of_mean_B, mean_B > self.SURE_ERRORS * of_mean_B

        ahead_B = self._beyond(self._off_B - now_B, error_B, self.AHEAD_ERRORS)
        stays_B = open_B & (ahead_B | (self._square_cv_B > self.RESTLESS**2))
        shuts_B, opens_B = (rest_B | trial_B) & bad_B, (rest_B | trial_B) & ~bad_B
        self._off_B = np.where(rest_B | closed_B, now_B, self._off_B)
        longer_B = np.minimum(self._every_B * np.where(sure_B, self.SURE_GROWTH, self.GROWTH), self.LONGEST)
        after_rest_B = np.where(mean_B < 0.0, self.DOUBTFUL, longer_B)
        self._every_B = np.where(rest_B & opens_B, after_rest_B, np.where(trial_B & opens_B, self.FIRST, self._every_B))
        self._left_B = np.where(stays_B | opens_B, self._every_B, self._left_B)
        self._every_B = np.where(stays_B, np.minimum(self._every_B * self.GROWTH, self.LONGEST), self._every_B)
        self._left_B = np.where(open_B & ~stays_B, self.REST_INTERVALS, self._left_B)
        self._left_B = np.where(shuts_B, self._closed_B, np.where(closed_B, self.TRIAL_INTERVALS, self._left_B))
        longer_B = np.minimum(self._closed_B * self.CLOSED_GROWTH, self.CLOSED_LONGEST)
        self._closed_B = np.where(shuts_B, longer_B, self._closed_B)

        next_B = np.where(open_B & ~stays_B, REST, np.where(shuts_B, CLOSED, np.where(closed_B, TRIAL, OPEN)))
        next_B = np.where(due_B, next_B, self._phase_B)
        paced_B, paces_B = (np.isin(phase_B, (OPEN, TRIAL)) for phase_B in (self._phase_B, next_B))
        changes_B = paced_B != paces_B
        self._before_B, self._before_n_B = np.where(changes_B, [now_B, n_B], [self._before_B, self._before_n_B])
        self._age_B = np.where(changes_B, 0, self._age_B)
        self._phase_B = next_B

    def _measure(self, rows_B: NDArray[np.bool_], gain_B: NDArray[np.float64], n_B: NDArray[np.int64]) -> None:
        """Add what pacing gains as seen at a switch, in the rows where it was seen."""
        weight_B = 1.0 / (self.CONTRAST * (1.0 / self._before_n_B + 1.0 / np.maximum(n_B, 1)))
        self._gain_B = np.where(rows_B, self.FORGET * self._gain_B + weight_B * gain_B, self._gain_B)
        self._weight_B = np.where(rows_B, self.FORGET * self._weight_B + weight_B, self._weight_B)
