"""The distilled policy at run time: a small network estimates what each of some settings would gain; the best is set.

It was fitted to a teacher that knows the future (``paceenv.trainers.training.distill``). A network knows
kinds of clusters, and a cluster may be of none of them: so the policy also measures now and then what its pacing does
to step time (:class:`SelfCheck`), and stops it where that costs. Numpy only. Legend: B rows, C candidates,
M mechanisms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.differences import Gains, Levels
from paceenv.core.errors import out_of_range
from paceenv.core.pacing import Candidate
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.learned import Learned

MAX_CANDIDATES = 256
SURE_GAIN = 1e6
"""What a constant's network says that it gains, % of the step: more than any hysteresis or margin."""
CHECKED = ("phase_shift",)
"""Mechanisms that a policy that checks itself may stop. The rules slack and stagger judge themselves, sooner and at
less cost: in single iterations, by every step."""


class Distilled(Learned):
    """Sets the candidate with the highest estimated gain over no pacing, as long as that gain is worth it.

    A candidate counts with its gain less ``margin``, no pacing counts with 0, and what is set already counts with
    ``hysteresis`` more, so that a rank does not flap between settings that are about as good.

    With a preference the network says of each candidate two things: what it gains in throughput, and how much less it
    makes step times vary. The gain is then the first plus preference times the second, so that one network serves all
    preferences.

    Args:
        layers: as in :class:`Learned`; the last layer gives the gain of each candidate, in % of the step, and with a
            preference after them the less of variation of each.
        hysteresis: gain by which another setting must be better than the present one, % of the step.
        preference: weight of variation against throughput, as in ``paceenv.core.metrics.reward``; None: only
            throughput counts, and the network gives nothing else.
        preference_range: lowest and highest weight that it may follow; None: this one only.
        always: settings that hold whatever it chooses, no pacing included, of mechanisms that no candidate names: such
            as defer, which judges itself and does nothing where no transfer can wait.
        checks_itself: whether it measures what its phase_shift rule does to step time, and stops it where that costs
            (:class:`SelfCheck`). The rules slack and stagger judge themselves.

    Raises:
        InputError: for candidates, margin, hysteresis or a network that do not fit.
    """

    def __init__(
        self,
        layers: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
        candidates: Sequence[Candidate],
        *,
        margin: float,
        hysteresis: float,
        name: str = "distilled",
        preference: float | None = None,
        preference_range: tuple[float, float] | None = None,
        calibrated_range: Mapping[str, tuple[float, float]] | None = None,
        memory_intervals: int | Sequence[int] = 0,
        change_intervals: int = 0,
        interval_iterations: int = INTERVAL_ITERATIONS,
        always: Candidate = MappingProxyType({}),
        checks_itself: bool = False,
    ) -> None:
        where = f"policy {name}"
        self.candidates, self.always = [plain(one) for one in candidates], plain(always)
        for candidate in self.candidates:
            if not candidate:
                raise out_of_range("candidate", "{}", "at least one mechanism", where)
            if both := self.always.keys() & candidate:
                raise out_of_range("always", ", ".join(sorted(both)), "mechanisms that no candidate names", where)
        settings = [_settings({**one, **self.always}, where) for one in ({}, *self.candidates)]
        if not 1 <= len(self.candidates) <= MAX_CANDIDATES:
            raise out_of_range("candidates", len(self.candidates), f"1 to {MAX_CANDIDATES} settings", where)
        each = 1 if preference is None else 2
        if len(layers[-1][1]) != each * len(self.candidates):
            allowed = f"{each * len(self.candidates)}, {each} a candidate"
            raise out_of_range("outputs", len(layers[-1][1]), allowed, where)
        for key, value in (("margin", margin), ("hysteresis", hysteresis)):
            if not 0.0 <= value < math.inf:
                raise out_of_range(key, value, "at least 0 (% of the step)", where)
        self._settings_CM2 = np.stack(settings)
        self.margin, self.hysteresis = float(margin), float(hysteresis)
        used = [m for m in pacing.MECHANISMS if any(m in one for one in (self.always, *self.candidates))]
        super().__init__(
            layers,
            used,
            name,
            preference,
            preference_range=preference_range,
            calibrated_range=calibrated_range,
            memory_intervals=memory_intervals,
            change_intervals=change_intervals,
            interval_iterations=interval_iterations,
        )
        self._choice_B = np.zeros(0, np.int64)
        self.checks_itself, self._check = checks_itself, SelfCheck()
        self._checked_C = np.array([any(m in CHECKED for m in one) for one in [{}, *self.candidates]])

    PREFERENCE_IS_INPUT = False

    def reset(self, rows: int) -> None:
        super().reset(rows)
        self._choice_B = np.zeros(rows, np.int64)
        self._check.reset(rows)

    def rest(self, rows_B: NDArray[np.bool_]) -> None:
        self._choice_B[rows_B] = 0

    def choose(self, output_BX: NDArray[np.float32]) -> NDArray[np.int64]:
        """Which setting each row takes from now on, ``(B,)``: 0 is no pacing, then the candidates."""
        gain_BC = output_BX
        if self.preference is not None:
            C = len(self.candidates)
            gain_BC = output_BX[:, :C] + np.float32(self.preference) * output_BX[:, C:]
        if len(gain_BC) != len(self._choice_B):
            self._choice_B = np.zeros(len(gain_BC), np.int64)
        worth_BC = np.zeros((len(gain_BC), 1 + len(self.candidates)), np.float32)
        np.subtract(gain_BC, np.float32(self.margin), out=worth_BC[:, 1:])
        worth_BC[np.arange(len(gain_BC)), self._choice_B] += np.float32(self.hysteresis)
        # not-a-number wins every comparison: such a row takes no pacing
        self._choice_B = np.where(np.isfinite(worth_BC).all(axis=1), worth_BC.argmax(axis=1), 0)
        return self._choice_B

    def action(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float32]:
        """Not supported: a distilled policy chooses among settings, its network gives no action."""
        raise NotImplementedError("a distilled policy has no action; use decide() or outputs()")

    def decide(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float64]:
        choice_B = self.choose(self.outputs(inputs_BI))
        if self.checks_itself:
            trend_B, cv_B = (
                signals.unsquash(name, inputs_BI[:, signals.NAMES.index(name)]) for name in ("step_trend", "step_cv")
            )
            rests_B = self._checked_C[choice_B] & ~self._check.allowed(trend_B, cv_B)
            choice_B = np.where(rests_B, 0, choice_B)  # what it would choose stays, for when it may again
        return self._settings_CM2[choice_B]


def constant_policy(
    candidate: Candidate, name: str = "static", interval_iterations: int = INTERVAL_ITERATIONS
) -> Distilled:
    """A constant setting as a policy that a file can hold: a network that says the same of every view."""
    layers = [(np.zeros((1, signals.SIGNALS), np.float32), np.full(1, SURE_GAIN, np.float32))]
    return Distilled(
        layers, [candidate], margin=0.0, hysteresis=0.0, name=name, interval_iterations=interval_iterations
    )


def plain(candidate: Candidate) -> dict[str, tuple[float, float]]:
    """A candidate of its own, with floats."""
    return {m: (float(t), float(w)) for m, (t, w) in candidate.items()}


def _settings(candidate: Candidate, where: str) -> NDArray[np.float64]:
    """A candidate as settings ``(M, 2)``."""
    for mechanism, (threshold, window) in candidate.items():
        if mechanism not in pacing.MECHANISMS:
            raise out_of_range("candidate", mechanism, f"mechanisms of {', '.join(pacing.MECHANISMS)}", where)
        m = pacing.MECHANISMS.index(mechanism)
        for key, value, most in (
            ("threshold", threshold, pacing.MAX_THRESHOLD[m]),
            ("window", window, pacing.MAX_WINDOW),
        ):
            if not 0.0 <= value <= most:
                raise out_of_range(f"{key} of {mechanism}", value, f"0 to {most:g}", where)
    return pacing.settings(candidate)


OPEN, REST, CLOSED, TRIAL = range(4)
"""Pacing goes on; it is interrupted to measure; it has cost and is off for a while; it is tried again."""


class SelfCheck:
    """When the rows of a batch may pace, from the course of their step times.

    Every switch between pacing and none is a measurement: the mean level of a few intervals before it against a few
    after. Only what all ranks see alike enters: the trend and the variation of step time. So all ranks switch together
    without communication, and one rank's rest is not another rank's unexplained change.

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
        self._levels = Levels(5, rows)
        self._before_B, self._off_B = np.zeros((2, rows))
        self._before_n_B = np.ones(rows)
        self._gains_B = Gains(self.FORGET, rows)
        self._trends_2B, self._contrasts_2B = np.zeros((2, 2, rows))
        self._square_cv_B = np.zeros(rows)

    def allowed(self, trend_B: NDArray[np.float64], cv_B: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which rows may pace in the coming interval; call once for each. Another number of rows starts anew.

        Args:
            trend_B: logarithm of the mean step of the interval over that of the one before.
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
        self._levels.add(trend_B)
        self._trends_2B += (self._age_B > 2) * np.stack([trend_B**2, np.ones_like(trend_B)])
        newest_5B = self._levels.newest_KB
        contrast_B = newest_5B[:2].mean(axis=0) - newest_5B[2:].mean(axis=0)
        inner_B = self._age_B >= 6
        kept_2B = self.REMEMBER * self._contrasts_2B + np.stack([contrast_B**2, np.ones_like(trend_B)])
        self._contrasts_2B = np.where(inner_B, kept_2B, self._contrasts_2B)

    def _now(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Mean of the newest levels of the present phase, and of how many."""
        n_B = np.minimum(self._age_B, self.WINDOW)
        return self._levels.mean_B(n_B), n_B

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
        mean_B, of_mean_B = self._gains_B.mean, error_B / np.sqrt(np.maximum(self._gains_B.weight, 1e-9))
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
        self._gains_B.add(rows_B, gain_B[rows_B], weight_B[rows_B])
