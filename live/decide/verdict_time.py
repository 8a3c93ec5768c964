"""How long until a verdict: pairs of blocks, iterations and minutes for an effect of a given size.

The answer depends on the noise of a pair of blocks. Once pairs were compared it is measured; before, it is estimated
from the steps of the quiet start, as if they were independent of each other. No clock, no file, no thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from paceenv.core.student_t import student_t_quantile
from paceenv.core.wording import hours
from paceenv.live.decide.canary import ALPHA, FIRST_EVALUATION_PAIRS, PairedComparison, Schedule
from paceenv.live.decide.contest import Contest

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
        done_pairs: pairs compared so far.
        waits: whether the evidence was insufficient so far.
        more_pairs: pairs that are still needed where the evidence was insufficient so far; None: no such case, or more
            than :data:`MOST_PAIRS`.
        more_iterations: iterations that these take from now on; None as for the pairs.
    """

    pair_noise: float
    measured: bool
    pairs: tuple[int | None, ...]
    iterations: tuple[int | None, ...]
    done_pairs: int
    waits: bool
    more_pairs: int | None
    more_iterations: int | None

    def text(self, step_s: float | None) -> str:
        """The forecast in one line."""
        found = []
        for effect, pairs, iterations in zip(EFFECTS, self.pairs, self.iterations, strict=True):
            takes = "too many pairs" if pairs is None else f"{pairs} pairs, {_long(iterations, step_s)}"
            found.append(f"{100 * effect:g} %: {takes}")
        return f"time to a verdict on an effect of {'; '.join(found)} ({self._noise()})"

    def more_text(self, step_s: float | None) -> str:
        """What is missing to a verdict at the present spread; "" where nothing is known to be."""
        if not self.waits:
            return ""
        so_far = f"{self.done_pairs} pair{'s' * (self.done_pairs != 1)} so far"
        if self.more_pairs is None:
            return f"{so_far}, needs more than {MOST_PAIRS:,} at this noise ({self._noise()})"
        takes = _long(self.more_iterations, step_s)
        return f"{so_far}, needs about {self.more_pairs} more pairs, {takes} ({self._noise()})"

    def _noise(self) -> str:
        by = "measured" if self.measured else "estimated from steps without pacing"
        return f"noise of a pair {100 * self.pair_noise:.2g} %, {by}"


def forecast(
    schedule: Schedule,
    comparison: PairedComparison,
    quiet_steps_s: Sequence[float],
    contest: Contest | None = None,
    *,
    iteration: int = 0,
    ticks: int = 1,
) -> Forecast | None:
    """The time to a verdict of ``comparison``; None while nothing is known about the noise.

    Args:
        quiet_steps_s: regular steps without pacing, seconds; used until two pairs are compared.
        contest: in which the blocks of several candidates take turns; None: nobody else has blocks.
    """
    noise, measured = comparison.pair_noise, True
    if noise is None:
        if len(quiet_steps_s) < 2:
            return None
        step_noise = stdev(quiet_steps_s) / fmean(quiet_steps_s)
        noise, measured = step_noise * math.sqrt(2.0 * ticks / schedule.counted_iterations), False
    return _forecast(noise, measured, contest or schedule, comparison, iteration)


def outlook(pair_noise: float, schedule: Schedule) -> Forecast:
    """The time to a verdict of a comparison that has not begun."""
    begun = PairedComparison(schedule)
    return _forecast(pair_noise, False, schedule, begun, schedule.first_iteration)


def _forecast(
    noise: float, measured: bool, whole: Schedule | Contest, comparison: PairedComparison, iteration: int
) -> Forecast:
    pairs = tuple(pairs_for(-math.log1p(-effect), noise) for effect in EFFECTS)
    begin, each = whole.after(0) - whole.first_iteration, whole.after(1) - whole.after(0)
    waits, more = comparison.verdict.kind == "insufficient evidence", None
    if waits:
        ratio = comparison.mean_log_ratio
        gain = 0.0 if ratio is None else -math.expm1(ratio)  # before the first pair: as if it did nothing
        half = max(abs(gain), comparison.min_gain - gain)  # it helps, it hurts, or it does not help enough
        needed = pairs_for(half, noise, comparison.pairs)
        more = None if needed is None else needed - comparison.pairs
    left = None if more is None else max(whole.after(0) - iteration, 0) + more * each
    takes = tuple(n and begin + n * each for n in pairs)
    return Forecast(noise, measured, pairs, takes, comparison.pairs, waits, more, left)


def pairs_for(half_width: float, pair_noise: float, after: int = 0) -> int | None:
    """Pairs at the first evaluation whose interval is expected to be no wider than ``half_width`` to either side.

    Args:
        after: pairs compared so far; only a later evaluation counts.
    """
    pairs, share = FIRST_EVALUATION_PAIRS, 0.5 * ALPHA
    while pairs <= MOST_PAIRS:
        half = student_t_quantile(0.5 * share, pairs - 1) * pair_noise / math.sqrt(pairs)
        if pairs > after and half <= half_width:
            return pairs
        pairs, share = 2 * pairs, 0.5 * share
    return None


def _long(iterations: int | None, step_s: float | None) -> str:
    if iterations is None or not step_s:
        return f"{iterations:,} iterations"
    return f"{iterations:,} iterations, about {hours(iterations * step_s)}"
