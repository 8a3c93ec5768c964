"""How long until a verdict: pairs of blocks, iterations and minutes for an effect of a given size.

The answer depends on the noise of a pair of blocks, which is measured. No clock, no file, no thread.
"""

from __future__ import annotations

import math

from paceenv.core.student_t import student_t_quantile
from paceenv.core.wording import hours
from paceenv.live.decide.blocks import Plan
from paceenv.live.decide.experiment import ALPHA, FIRST_EVALUATION_PAIRS, Comparison

EFFECTS = (0.01, 0.02, 0.05)
"""Relative effects for which the time to a verdict is given."""
MOST_PAIRS = 1 << 14
"""More pairs than anybody waits for."""


def time_to_verdict(plan: Plan, comparison: Comparison, step_s: float | None) -> str:
    """The time to a verdict of ``comparison`` in one line; "" while nothing is known about the noise.

    Args:
        step_s: a usual iteration; None leaves minutes out.
    """
    if comparison.pairs < 2:
        return ""
    noise, takes = comparison.mean.deviation, []
    for effect in EFFECTS:
        pairs, text = pairs_for(-math.log1p(-effect), noise), "too many pairs"
        if pairs is not None:
            iterations = plan.after(0) - plan.begin + pairs * (plan.after(1) - plan.after(0))
            text = f"{pairs} pairs, {iterations:,} iterations"
            text += f", about {hours(iterations * step_s)}" if step_s else ""
        takes.append(f"{100 * effect:g} %: {text}")
    return f"time to a verdict on an effect of {'; '.join(takes)} (noise of a pair {100 * noise:.2g} %)"


def pairs_for(half_width: float, pair_noise: float) -> int | None:
    """Pairs at the first evaluation whose interval is expected to be no wider than ``half_width`` to either side."""
    pairs, share = FIRST_EVALUATION_PAIRS, 0.5 * ALPHA
    while pairs <= MOST_PAIRS:
        half = student_t_quantile(0.5 * share, pairs - 1) * pair_noise / math.sqrt(pairs)
        if half <= half_width:
            return pairs
        pairs, share = 2 * pairs, 0.5 * share
    return None
