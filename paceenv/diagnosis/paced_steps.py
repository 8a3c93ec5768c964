"""What the delays in a trace did: its steps with delays against its steps without, without any model.

Whether a step has delays is the choice of a controller or of a test, so neighbouring steps are alike. The interval
therefore comes from leaving out one contiguous block of steps at a time (delete-a-group jackknife; Kunsch 1989).
Axes: T steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.differences import Mean
from paceenv.core.intervals import Interval
from paceenv.core.wording import duration
from paceenv.diagnosis.operation_matrix import Integers, OperationMatrix

MIN_STEPS: Final = 20
"""Of either kind; fewer say little."""
MIN_SHARE: Final = 0.1
"""Of all steps; with fewer steps without delays the causes are those of all steps."""
BLOCKS: Final = 20
"""Contiguous blocks of steps that are left out in turn."""


@dataclass(frozen=True)
class PacedSteps:
    """Steps with delays and steps without, of one job."""

    paced_s: float  # mean step with delays, seconds
    plain_s: float  # mean step without, seconds
    paced: int  # number of steps with delays
    stretches: int  # into how many stretches these fall
    plain_T: Integers  # places of the steps without delays
    gain: Interval  # of throughput, a share; without an interval where either kind is in one block
    SHOWN: ClassVar = ("paced", "plain", "stretches", "paced_s", "plain_s", "gain")

    @property
    def plain(self) -> int:
        """How many steps have no delays."""
        return len(self.plain_T)

    @property
    def text(self) -> str:
        """What was measured, in words."""
        with_delays = f"{self.paced} steps with delays take {duration(self.paced_s)}"
        steps = f"{with_delays}, {self.plain} without {duration(self.plain_s)}"
        if not self.gain.is_bounded:
            return f"measured: {self.gain.value:+z.1%} throughput; no interval, as they do not take turns; {steps}"
        return (
            f"measured: {self.gain.value:+z.1%} throughput [{self.gain.low:+z.1%} to {self.gain.high:+z.1%}]; {steps}"
        )


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
        stretches=int(np.count_nonzero(np.diff(is_paced_T.astype(np.int8), prepend=0) == 1)),
        plain_T=plain_T,
        gain=_gain(step_s_T, is_paced_T),
    )


def _gain(step_s_T: NDArray[np.float64], is_paced_T: NDArray[np.bool_]) -> Interval:
    """Throughput of the paced steps against the others, with the jackknife's interval on a logarithmic scale."""
    block_T = np.arange(len(step_s_T)) * BLOCKS // len(step_s_T)
    counts, sums = (
        np.array([np.bincount(block_T, weight_T * of_T, BLOCKS) for of_T in (is_paced_T, ~is_paced_T)])
        for weight_T in (np.ones_like(step_s_T), step_s_T)
    )
    whole = math.log(_ratio(sums.sum(axis=1), counts.sum(axis=1)))
    left_counts = counts.sum(axis=1, keepdims=True) - counts
    if not (left_counts > 0.0).all():
        return Interval(math.expm1(whole))
    left_B = np.log(_ratio(sums.sum(axis=1, keepdims=True) - sums, left_counts))
    apart = Mean((BLOCKS - 1) * left_B).interval(0.05)  # the jackknife's pseudo-values, but for where they lie
    return Interval(*(math.expm1(whole + end - apart.value) for end in apart))


def _ratio(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Any:
    """Mean step without delays over that with, from sums and counts of both (the paced first)."""
    return sums[1] / counts[1] * counts[0] / sums[0]
