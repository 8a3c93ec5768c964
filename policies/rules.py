"""The hand-written policies: passive, static threshold, the paper's rule, adaptive."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paceenv import pacing, signals
from paceenv.errors import out_of_range
from policies.base import Policy

PAPER_THRESHOLD, PAPER_WINDOW = 0.02, 0.1
"""The paper's rule has a threshold and a maximum delay but publishes no values; ours: 2 % and 10 % of the step."""


class Static(Policy):
    """Fixed settings, always on: (threshold, window) by mechanism, both ratios in [0, 1], the other mechanisms off.

    ``passive`` and ``paper`` are cases of it. Raises InputError for an unknown mechanism and values out of range.
    """

    def __init__(self, settings: Mapping[str, tuple[float, float]], name: str = "static") -> None:
        self.name = name
        self._settings = pacing.off()
        for mechanism, setting in settings.items():
            if mechanism not in pacing.MECHANISMS:
                raise out_of_range("mechanism", mechanism, f"one of {', '.join(pacing.MECHANISMS)}", f"policy {name}")
            for option, value in zip(("threshold", "window"), setting, strict=True):
                if not (math.isfinite(value) and 0.0 <= value <= 1.0):
                    raise out_of_range(option, value, "0 to 1", f"policy {name}")
            self._settings[pacing.MECHANISMS.index(mechanism)] = setting

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.broadcast_to(self._settings, (len(signals_BO), *self._settings.shape))

    def constant(self) -> NDArray[np.float64]:
        return self._settings


def passive() -> Static:
    """No pacing at all: the baseline of every comparison."""
    return Static({}, "passive")


def paper() -> Static:
    """The paper's rule (``paceenv.pacing.paper_delay_s``), always on."""
    return Static({"paper": (PAPER_THRESHOLD, PAPER_WINDOW)}, "paper")


class Adaptive(Policy):
    """Hold and probe: tries pacing where its trigger fires, keeps it while it pays; backs off longer at each failure.

    A rank alternates between trials. Off, it measures the level of step time; when its own slack or its own
    collective's inflation has been over the trigger it switches the matching mechanism on for a hold. The step time is
    common to all ranks, so a rank can judge alone: the mean level of the hold against that of the off phase before. The
    level is the sum of its trends and not the inflation over the baseline, which itself moves meanwhile. Success
    doubles the next hold, failure doubles the next back-off. The stagger rule holds and probes by itself and is always
    armed.
    """

    SLACK_TRIGGER, SLIDE_TRIGGER = 0.04, 0.05
    """Share of the step that is repeatedly slack; logarithm of the collective's inflation."""
    SLACK_SETTING, SLIDE_SETTING = (0.02, 0.4), (0.05, 0.4)
    """(threshold, window) while on."""
    STAGGER_SETTING = (0.5, 0.4)
    LOOK_INTERVALS, HOLD_INTERVALS, LONGEST_INTERVALS = 2, 4, 32
    MARGIN = 0.005
    """A hold must lower step time by this share to count as a success."""
    HOPELESS = 0.03
    """A hold that has raised it by this share so far ends at once."""

    name = "adaptive"

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, rows: int) -> None:
        self._mechanism_B = np.full(rows, -1)  # -1: off
        self._left_B = np.full(rows, self.LOOK_INTERVALS)
        self._hold_B = np.full(rows, self.HOLD_INTERVALS)
        self._back_off_B = np.full(rows, self.LOOK_INTERVALS)
        self._sum_B, self._count_B = np.zeros(rows), np.zeros(rows, np.int64)
        self._off_level_B = np.full(rows, np.inf)
        self._level_B = np.zeros(rows)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        self._level_B += signals.unsquash("step_trend", signals_BO[:, signals.NAMES.index("step_trend")])
        self._sum_B += self._level_B
        self._count_B += 1
        self._left_B -= 1
        on_B = self._mechanism_B >= 0
        self._left_B[on_B & (self._sum_B / self._count_B > self._off_level_B + self.HOPELESS)] = 0
        due = np.flatnonzero(self._left_B <= 0)
        if len(due):
            self._switch(due, signals_BO[due])
        settings = pacing.off(len(signals_BO))
        settings[:, pacing.STAGGER] = self.STAGGER_SETTING
        for m, setting in ((pacing.SLACK, self.SLACK_SETTING), (pacing.SLIDE, self.SLIDE_SETTING)):
            settings[self._mechanism_B == m, m] = setting
        return settings

    def _switch(self, due: NDArray[np.int64], signals_DO: NDArray[np.float32]) -> None:
        """End the phase of the rows ``due`` and start their next one."""
        mean_D = self._sum_B[due] / self._count_B[due]
        was_on = self._mechanism_B[due] >= 0
        paid = was_on & (mean_D < self._off_level_B[due] - self.MARGIN)
        failed = was_on & ~paid
        self._off_level_B[due[~was_on]] = mean_D[~was_on]
        longer = np.minimum(2 * self._hold_B[due], self.LONGEST_INTERVALS)
        self._hold_B[due] = np.where(paid, longer, np.where(failed, self.HOLD_INTERVALS, self._hold_B[due]))
        back_off = np.minimum(2 * self._back_off_B[due], self.LONGEST_INTERVALS)
        self._back_off_B[due] = np.where(failed, back_off, np.where(paid, self.LOOK_INTERVALS, self._back_off_B[due]))
        wanted = self._wanted(signals_DO)
        turn_on = ~was_on & (wanted >= 0)
        self._mechanism_B[due] = np.where(paid, self._mechanism_B[due], np.where(turn_on, wanted, -1))
        on_now = self._mechanism_B[due] >= 0
        idle = np.where(failed, self._back_off_B[due], self.LOOK_INTERVALS)
        self._left_B[due] = np.where(on_now, self._hold_B[due], idle)
        self._sum_B[due], self._count_B[due] = 0.0, 0

    def _wanted(self, signals_DO: NDArray[np.float32]) -> NDArray[np.int64]:
        """The mechanism each row's trigger asks for, -1 for none; slack first, as it is the more specific sign."""
        slack_D = signals.unsquash("slack_share", signals_DO[:, signals.NAMES.index("slack_share")])
        inflation_D = signals.unsquash("comm_inflation", signals_DO[:, signals.NAMES.index("comm_inflation")])
        return np.where(
            slack_D > self.SLACK_TRIGGER,
            pacing.SLACK,
            np.where(inflation_D > self.SLIDE_TRIGGER, pacing.SLIDE, -1),
        )
