"""What the delays in a trace did: its steps with delays against its steps without, without any model.

As in a live job (:mod:`paceenv.core.differences`): each stretch of steps with delays is compared with the stretch
without beside it. Axes: T steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.differences import Mean, log_ratio
from paceenv.core.intervals import Interval
from paceenv.core.operation_matrix import Integers, OperationMatrix
from paceenv.core.wording import duration

MIN_STEPS: Final = 20
"""Of either kind; fewer say little."""
MIN_SHARE: Final = 0.1
"""Of all steps; with fewer steps without delays the causes are those of all steps."""


@dataclass(frozen=True)
class PacedSteps:
    """Steps with delays and steps without, of one job."""

    paced_s: float  # mean step with delays, seconds
    plain_s: float  # mean step without, seconds
    paced: int  # number of steps with delays
    plain_T: Integers  # places of the steps without delays
    gain: Interval  # of throughput, a share; without an interval where they do not take turns
    SHOWN: ClassVar = ("paced", "plain", "paced_s", "plain_s", "gain")

    @property
    def plain(self) -> int:
        return len(self.plain_T)

    @property
    def text(self) -> str:
        if self.gain.is_bounded:
            return (
                f"measured in paired blocks: {in_words(self.gain)}; {self.paced} steps have delays, {self.plain} none"
            )
        with_delays = f"{self.paced} steps with delays take {duration(self.paced_s)}"
        steps = f"{with_delays}, {self.plain} without {duration(self.plain_s)}"
        return f"measured: {self.gain.value:+z.1%} throughput; no interval, as they do not take turns; {steps}"


def in_words(gain: Interval) -> str:
    return f"{gain.value:+z.1%} throughput [{gain.low:+z.1%} to {gain.high:+z.1%}]"


def measure_pacing(matrix: OperationMatrix) -> PacedSteps | None:
    """Compare the steps with delays to those without; None with fewer than MIN_STEPS of either.

    The first step, which warms up, counts for neither.
    """
    is_paced_T: NDArray[np.bool_] = np.asarray((matrix.duration_NT[matrix.is_pace_N] > 0.0).any(axis=0))
    step_s_T, is_paced_T = matrix.step_s_T[1:], is_paced_T[1:]
    plain_T = 1 + np.flatnonzero(~is_paced_T)
    if min(is_paced_T.sum(), len(plain_T)) < MIN_STEPS or not (step_s_T > 0.0).all():
        return None
    return PacedSteps(
        paced_s=float(step_s_T[is_paced_T].mean()),
        plain_s=float(step_s_T[~is_paced_T].mean()),
        paced=int(is_paced_T.sum()),
        plain_T=plain_T,
        gain=_gain(step_s_T, is_paced_T),
    )


def _gain(step_s_T: NDArray[np.float64], is_paced_T: NDArray[np.bool_]) -> Interval:
    """Throughput of the paced steps against the others; without an interval for one pair of stretches."""
    stretches = np.split(np.arange(len(step_s_T)), np.flatnonzero(np.diff(is_paced_T)) + 1)
    ratios = Mean()
    for pair in zip(stretches[::2], stretches[1::2], strict=False):
        off, on = pair if is_paced_T[pair[1][0]] else pair[::-1]
        ratios.add(float(log_ratio(step_s_T[off], step_s_T[on])))
    log_s = ratios.interval(0.05)
    return Interval(*(math.expm1(-end) for end in (log_s.value, log_s.high, log_s.low)))
