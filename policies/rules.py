"""The hand-written policies: passive, static threshold, the paper's rule, adaptive."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.policies.base import Policy, checked

PAPER_THRESHOLD, PAPER_WINDOW = 0.02, 0.1
"""The paper's rule has a threshold and a maximum delay but publishes no values; ours: 2 % and 10 % of the step."""


class Static(Policy):
    """Fixed settings, always on: (threshold, window) by mechanism, both ratios in [0, 1], the other mechanisms off.

    ``passive`` and ``paper`` are cases of it. Raises InputError for an unknown mechanism and values out of range.
    """

    def __init__(self, settings: Mapping[str, tuple[float, float]], name: str = "static") -> None:
        self.name = name
        self._settings = checked(settings, f"policy {name}", [1.0] * len(pacing.MECHANISMS), 1.0)
        self.mechanisms = tuple(mechanism for mechanism, (_, window) in settings.items() if window > 0.0)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.broadcast_to(self._settings, (len(signals_BO), *self._settings.shape))

    def constant(self) -> NDArray[np.float64]:
        return self._settings


def passive() -> Static:
    """No pacing: the baseline of every comparison."""
    return Static({}, "passive")


def paper() -> Static:
    """The paper's rule (``paceenv.core.pacing.paper_delay_s``), always on."""
    return Static({"paper": (PAPER_THRESHOLD, PAPER_WINDOW)}, "paper")


class Adaptive(Policy):
    """Hold and probe: tries slack and phase_shift in turn, keeps what pays, backs off longer at each failure.

    Every switch between off and on is a measurement: the mean level of two intervals before it against two after it,
    the first one skipped. The level is the sum of the step time's trends, not its inflation over the baseline, as the
    baseline itself moves. The gain of a mechanism is averaged over its switches, with less weight on older ones. Its
    error is the noise of step time between switches. Success doubles the next hold, failure doubles the next back-off.

    Step time is common to all ranks, so all ranks evaluate alike without communication if they switch together. Holds
    therefore end where the number of intervals is a multiple of their length. Otherwise one rank's pause would be
    another rank's unexplained loss.

    Where a rank waits in a barrier, slack is measured, and its rule costs next to nothing where it does not help. There
    it is tried first, held long, and dropped only when it surely costs. Without a barrier the wait is the collective's
    time beyond its baseline, and late peers look like contention. There either rule has to prove itself, phase_shift
    first. The stagger and defer rules hold and probe by themselves and are always armed.
    """

    TRIED = (pacing.SLACK, pacing.PHASE_SHIFT)
    SLACK_SETTING, PHASE_SHIFT_SETTING = (0.02, 0.4), (0.1, 0.2)
    """(threshold, window) while on."""
    STAGGER_SETTING, DEFER_SETTING = (0.7, 0.4), (0.02, 0.1)
    LOOK_INTERVALS, HOLD_INTERVALS, LONGEST_INTERVALS = 3, 16, 64
    SHORTEST_BACK_OFF = 2
    SETTLED = 3
    """Intervals after a switch whose last two are compared with the last two before it."""
    MARGIN = 0.005
    """Share of the step that a mechanism must gain, or that slack at a barrier may seem to cost."""
    DOUBT, TRUST = 0.5, 2.0
    """Standard errors by which a gain must exceed the margin, and by which slack at a barrier may fall short of it."""
    HOPELESS, HOPELESS_NOISES, HOPELESS_BACK_OFF = 0.03, 3.0, 8
    """A trial that at once raises step time by this share, and by this multiple of the noise, ends: its back-off grows
    by this factor and not by two."""
    FORGET, NOISE_WEIGHT, BARRIER_FORGET = 0.7, 0.1, 0.95
    BARRIER_SHARE = 0.25
    """Difference between the wait and the collective's inflation, as a share of them, from which on there is one.
    Without a barrier both are the same up to moves of the baseline; with one they may be near each other by chance."""

    name = "adaptive"
    mechanisms = ("slack", "phase_shift", "stagger", "defer")

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, rows: int) -> None:
        self._interval = 0
        self._on_B = np.full(rows, -1)  # index into TRIED; -1: off
        self._measured_B = np.full(rows, -1)  # the same, of the mechanism that was last switched
        self._age_B = np.zeros(rows, np.int64)  # intervals since that switch
        self._left_B = np.full(rows, self.LOOK_INTERVALS)
        self._hold_B = np.full(rows, self.HOLD_INTERVALS)
        self._back_off_BM = np.full((rows, len(self.TRIED)), self.SHORTEST_BACK_OFF)
        self._closed_BM = np.zeros((rows, len(self.TRIED)), np.int64)  # intervals of back-off to go
        self._gain_BM, self._weight_BM = np.zeros((2, rows, len(self.TRIED)))  # sum of gains and of their weights
        self._level_B, self._before_B, self._from_B = np.zeros((3, rows))  # logarithms: now, before, at a switch
        self._noise_B, self._apart_B, self._wait_B = np.zeros((3, rows))

    def memory_iterations(self) -> int:
        """From its first look to the first switch that it has measured."""
        return (self.LOOK_INTERVALS + self.SETTLED) * self.interval_iterations

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        self._take_in(signals_BO)
        on_B, settled_B = self._on_B >= 0, self._age_B == self.SETTLED
        rise_B = self._level_B - self._from_B
        sure_B = rise_B > np.maximum(self.HOPELESS, self.HOPELESS_NOISES * self._noise_B)
        hopeless_B = on_B & (self._age_B < self.SETTLED) & sure_B
        self._learn(np.flatnonzero(hopeless_B), -rise_B)
        change_B = self._recent_B() - self._from_B
        self._learn(np.flatnonzero(settled_B & (self._measured_B >= 0)), np.where(on_B, -change_B, change_B))
        failed_B = on_B & (hopeless_B | settled_B) & ~self._pays_B()
        due = np.flatnonzero(failed_B | (self._left_B <= 0))
        if len(due):
            self._switch(due)
        settings = pacing.off(len(signals_BO))
        settings[:, pacing.STAGGER] = self.STAGGER_SETTING
        settings[:, pacing.DEFER] = self.DEFER_SETTING
        for k, setting in enumerate((self.SLACK_SETTING, self.PHASE_SHIFT_SETTING)):
            settings[self._on_B == k, self.TRIED[k]] = setting
        return settings

    def _take_in(self, signals_BO: NDArray[np.float32]) -> None:
        """Clocks, the level and noise of step time, and whether the wait differs from the collective's inflation."""
        trend_B, wait_B, inflation_B = (
            signals.unsquash(name, signals_BO[:, signals.NAMES.index(name)])
            for name in ("step_trend", "wait_share", "comm_inflation")
        )
        self._interval += 1
        self._age_B += 1
        self._left_B -= 1
        self._closed_BM -= 1
        self._level_B, self._before_B = self._level_B + trend_B, self._level_B
        calm_B = self._age_B > 1
        self._noise_B += np.where(calm_B, self.NOISE_WEIGHT * (np.abs(trend_B) - self._noise_B), 0.0)
        beyond_B = signals_BO[:, signals.NAMES.index("comm_share")] * (1.0 - np.exp(-inflation_B))
        self._apart_B = self.BARRIER_FORGET * self._apart_B + np.abs(wait_B - beyond_B)
        self._wait_B = self.BARRIER_FORGET * self._wait_B + np.maximum(wait_B, beyond_B)

    def _recent_B(self) -> NDArray[np.float64]:
        """Mean level of the last two intervals."""
        return (self._level_B + self._before_B) / 2.0

    def _barrier_B(self) -> NDArray[np.bool_]:
        """Whether a rank waits elsewhere than in its payload collective."""
        return self._apart_B > self.BARRIER_SHARE * self._wait_B

    def _learn(self, rows: NDArray[np.int64], gain_B: NDArray[np.float64]) -> None:
        """Add the gain of the mechanism last switched, as a share of the step, for the rows with that index."""
        at = rows, self._measured_B[rows]
        self._gain_BM[at] = self.FORGET * self._gain_BM[at] + gain_B[rows]
        self._weight_BM[at] = self.FORGET * self._weight_BM[at] + 1.0

    def _mean_BM(self) -> NDArray[np.float64]:
        """Mean gain of each mechanism tried; 0 where nothing was measured."""
        return np.asarray(self._gain_BM / np.maximum(self._weight_BM, 1e-9))

    def _pays_B(self) -> NDArray[np.bool_]:
        """Whether the mechanism that is on is worth keeping; meaningless where no mechanism is on."""
        row, m = np.arange(len(self._on_B)), self._on_B
        mean_B = self._mean_BM()[row, m]
        error_B = self._noise_B / np.sqrt(np.maximum(self._weight_BM[row, m], 1.0))
        trusted_B = self._barrier_B() & (m == 0)
        least_B = np.where(trusted_B, -self.MARGIN - self.TRUST * error_B, self.MARGIN + self.DOUBT * error_B)
        pays_B: NDArray[np.bool_] = mean_B > least_B
        return pays_B

    def _switch(self, due: NDArray[np.int64]) -> None:
        """End the phase of the rows ``due`` and start their next one."""
        on, pays, barrier = self._on_B[due], self._pays_B()[due], self._barrier_B()[due]
        was_on, short = on >= 0, self._age_B[due] < self.SETTLED
        paid, failed = was_on & pays, was_on & ~pays
        longer = np.where(paid, np.minimum(2 * self._hold_B[due], self.LONGEST_INTERVALS), self.HOLD_INTERVALS)
        self._hold_B[due] = np.where(was_on, longer, self._hold_B[due])
        longer = np.minimum(
            np.where(short, self.HOPELESS_BACK_OFF, 2) * self._back_off_BM[due, on], self.LONGEST_INTERVALS
        )
        back_off = np.where(failed, longer, self.SHORTEST_BACK_OFF)
        self._back_off_BM[due[was_on], on[was_on]] = back_off[was_on]
        self._closed_BM[due[failed], on[failed]] = back_off[failed]
        preference = np.where(barrier, 1e-6, -1e-6)[:, None] * (1.0, -1.0)  # between two never tried
        score = np.where(self._closed_BM[due] <= 0, self._mean_BM()[due] + preference, -np.inf)
        chosen = np.where(was_on | np.isinf(score).all(axis=1), -1, score.argmax(axis=1))
        self._start(due, chosen, np.where(was_on & ~short, on, chosen), barrier)

    def _start(
        self,
        due: NDArray[np.int64],
        chosen: NDArray[np.int64],
        measured: NDArray[np.int64],
        barrier: NDArray[np.bool_],
    ) -> None:
        """Start a phase with ``chosen`` on (-1: off); what changes with it counts as the gain of ``measured``."""
        was_on, changed = self._on_B[due] >= 0, chosen != self._on_B[due]
        self._from_B[due] = np.where(changed, self._recent_B()[due], self._from_B[due])
        self._measured_B[due] = np.where(changed, measured, self._measured_B[due])
        self._age_B[due] = np.where(changed, 0, self._age_B[due])
        hold = np.where(barrier & (chosen == 0), self.LONGEST_INTERVALS, self._hold_B[due])
        left = hold - self._interval % hold  # to the next multiple, or the one after that if it is near
        left = np.where(left < hold // 2, left + hold, left)
        self._left_B[due] = np.where(chosen >= 0, left, np.where(was_on, self.LOOK_INTERVALS, 1))
        self._on_B[due] = chosen
