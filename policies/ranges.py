"""Compares a rank's view with the range that its policy was calibrated on: one comparison, in the simulator and live.

:class:`RangeWatch` finds ranks that have been outside for too long; live, that ends the policy
(``paceenv.live.decide.guard``). :class:`RangeHold` makes such ranks passive for a while, as every learned policy does
wherever it runs. Needs numpy only. Legend: B rows, one a rank, O signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv.core import signals
from paceenv.core.errors import out_of_range

OUTSIDE_INTERVALS = 3
"""Control intervals in a row outside the calibrated range that cannot be an accident."""
RANGE_TOLERANCE = 0.05
"""How far outside the range a signal may lie, on the signals' own scale of -1 to 1."""
HOLD_INTERVALS = 20
"""How long a rank stays passive once its view is back inside: the reach of the slow signals (``signals.SLOW_WEIGHT``).

Pacing itself moves the signals, so a rank that paced again at once could be outside again at once, over and over.
"""


class RangeWatch:
    """Counts for each rank the control intervals in a row in which its view was outside the calibrated range.

    A signal without a range is outside only where it is not a number. Raises InputError for an unknown signal and for
    ends that are no range.
    """

    def __init__(self, calibrated_range: Mapping[str, tuple[float, float]], where: str = "policy") -> None:
        for signal, (low, high) in calibrated_range.items():
            if signal not in signals.NAMES:
                raise out_of_range("calibrated_range", signal, f"one of {', '.join(signals.NAMES)}", where)
            if not -np.inf < low <= high < np.inf:
                allowed = "two finite numbers, the lower first"
                raise out_of_range(f"calibrated_range of {signal}", (low, high), allowed, where)
        self.calibrated_range = dict(calibrated_range)
        range_2O = np.full((2, signals.SIGNALS), [[-np.inf], [np.inf]])
        for signal, (low, high) in calibrated_range.items():
            range_2O[:, signals.NAMES.index(signal)] = low - RANGE_TOLERANCE, high + RANGE_TOLERANCE
        self._low_O, self._high_O = range_2O
        self.reset(0)

    def reset(self, rows: int) -> None:
        self._run_B = np.zeros(rows, np.int64)

    def lost(self, signals_BO: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Which rows ``(B,)`` have been outside for ``OUTSIDE_INTERVALS`` in a row, this view included.

        A batch of another size than before starts the count anew.
        """
        if len(signals_BO) != len(self._run_B):
            self.reset(len(signals_BO))
        self._run_B += 1
        self._run_B[self.inside(signals_BO).all(axis=1)] = 0
        return self._run_B >= OUTSIDE_INTERVALS

    def inside(self, signals_BO: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Which signals ``(B, O)`` are within range and tolerance; not-a-number is outside."""
        return (signals_BO >= self._low_O) & (signals_BO <= self._high_O)

    def described(self, signals_O: NDArray[np.float32]) -> str:
        """The signals of one view that are outside, with value and range."""
        outside = np.flatnonzero(~self.inside(signals_O[None])[0]).tolist()
        ends = [self.calibrated_range.get(signals.NAMES[o], (-1.0, 1.0)) for o in outside]
        return ", ".join(
            f"{signals.NAMES[o]} = {signals_O[o]:.3g} (calibrated: {low:.3g} to {high:.3g})"
            for o, (low, high) in zip(outside, ends, strict=True)
        )


@dataclass(frozen=True)
class Outside:
    """How often a policy was passive, as a share of all ranks' decisions, because its view was outside its range.

    ``view`` describes what was outside first.
    """

    share: float
    view: str

    def __str__(self) -> str:
        share = f"{100 * self.share:.3g} % of decisions"
        return f"outside its calibrated range in {share}, first with {self.view}; passive there, a live job drops it"


class RangeHold(RangeWatch):
    """Makes ranks passive that are outside the calibrated range, and for a hold after; remembers how often and why."""

    def reset(self, rows: int) -> None:
        super().reset(rows)
        self._left_B = np.zeros(rows, np.int64)
        self._decisions, self._passive, self._holds = 0, 0, False
        self._view = ""

    def passive(self, signals_BO: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Which rows ``(B,)`` are to be passive in the coming interval; call once for each."""
        lost_B = self.lost(signals_BO)
        self._decisions += len(signals_BO)
        if not (self._holds or np.count_nonzero(lost_B)):  # the usual case, on the path of a live decision
            return lost_B
        np.maximum(self._left_B - 1, 0, out=self._left_B)
        if lost_B.any():
            self._left_B[lost_B] = HOLD_INTERVALS + 1
            self._view = self._view or self.described(signals_BO[lost_B][0])
        passive_B = self._left_B > 0
        passive = int(np.count_nonzero(passive_B))
        self._passive, self._holds = self._passive + passive, passive > 0
        return passive_B

    def outside(self) -> Outside | None:
        """Summary since the last reset; None where no decision was made passive."""
        return Outside(self._passive / self._decisions, self._view) if self._passive else None
