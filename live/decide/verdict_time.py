"""How long until a verdict: pairs of blocks, iterations and minutes for an effect of a given size.

The answer depends on the noise of a pair of blocks. Once pairs were compared it is measured; before, it is estimated
from the steps of the quiet start, as if they were independent of each other. No clock, no file, no thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceenv.core.differences import Mean
from paceenv.core.student_t import student_t_quantile
from paceenv.core.wording import hours
from paceenv.live.decide.blocks import Plan
from paceenv.live.decide.experiment import ALPHA, FIRST_EVALUATION_PAIRS, Comparison

EFFECTS = (0.01, 0.02, 0.05)
"""Relative effects for which the time to a verdict is given."""
MOST_PAIRS = 1 << 14
"""More pairs than anybody waits for."""


class Forecast(NamedTuple):
    """The time to a verdict.

    Attributes:
        pair_noise: standard deviation of the log ratio of one pair of blocks.
        measured: whether that is from compared pairs; otherwise from the steps of the quiet start.
        pairs: for each of :data:`EFFECTS` the pairs that its verdict takes; None: more than :data:`MOST_PAIRS`.
        iterations: the same in iterations from the start of the blocks.
    """

    pair_noise: float
    measured: bool
    pairs: tuple[int | None, ...]
    iterations: tuple[int | None, ...]

    def text(self, step_s: float | None) -> str:
        """The forecast in one line."""
        found = []
        for effect, pairs, iterations in zip(EFFECTS, self.pairs, self.iterations, strict=True):
            takes = "too many pairs" if pairs is None else f"{pairs} pairs, {_long(iterations, step_s)}"
            found.append(f"{100 * effect:g} %: {takes}")
        by = "measured" if self.measured else "estimated from steps without pacing"
        noise = f"noise of a pair {100 * self.pair_noise:.2g} %, {by}"
        return f"time to a verdict on an effect of {'; '.join(found)} ({noise})"


def forecast(
    plan: Plan,
    comparison: Comparison,
    arm: int = 0,
    quiet_steps_s: Sequence[float] = (),
    *,
    ticks: int = 1,
) -> Forecast | None:
    """The time to a verdict of ``comparison``; None while nothing is known about the noise.

    Args:
        arm: number of the candidate that it is of.
        quiet_steps_s: regular steps without pacing, seconds; used until two pairs are compared.
    """
    measured = comparison.pairs > 1
    if measured:
        noise = comparison.mean.deviation
    elif len(quiet_steps_s) > 1:  # as if these steps were independent
        steps = Mean(quiet_steps_s)
        noise = steps.deviation / steps.value * math.sqrt(2.0 * ticks / plan.blocks[arm].counted_iterations)
    else:
        return None
    pairs = tuple(pairs_for(-math.log1p(-effect), noise) for effect in EFFECTS)
    begin = plan.after(0)
    each = plan.after(1) - begin
    return Forecast(noise, measured, pairs, tuple(n and begin - plan.begin + n * each for n in pairs))


def pairs_for(half_width: float, pair_noise: float) -> int | None:
    """Pairs at the first evaluation whose interval is expected to be no wider than ``half_width`` to either side."""
    pairs, share = FIRST_EVALUATION_PAIRS, 0.5 * ALPHA
    while pairs <= MOST_PAIRS:
        half = student_t_quantile(0.5 * share, pairs - 1) * pair_noise / math.sqrt(pairs)
        if half <= half_width:
            return pairs
        pairs, share = 2 * pairs, 0.5 * share
    return None


def _long(iterations: int | None, step_s: float | None) -> str:
    if iterations is None or not step_s:
        return f"{iterations:,} iterations"
    return f"{iterations:,} iterations, about {hours(iterations * step_s)}"
