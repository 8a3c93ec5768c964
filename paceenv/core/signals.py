"""The observation vector: what one rank sees of itself over a control interval, as numbers on fixed scales.

Contract 2 of the house, shared by the environment and a live rank. Every entry is a ratio or a logarithm of ratios.
Most are squashed by ``x / (1 + |x|)`` on a fixed scale. No running normaliser exists that could be lost at deployment,
the resolution is highest near zero, and nothing saturates hard.

Step statistics are over the control interval. A rank's own statistics are over about its last ten iterations
(``timing.SMOOTHING``). :data:`DEFINITIONS` lists the entries; every other table of them is made from it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceenv.core import slots
from paceenv.core.timing import Tick, slack_low_s, spread_s

SCHEMA = "paceenv.signals/4"
"""Name and version; a policy file carries it and is refused where it differs."""


class Signal(NamedTuple):
    """One entry of the observation vector, without a unit."""

    name: str
    meaning: str
    """The value before it is squashed."""
    scale: float
    """The value that is squashed to one half; 0: the value is not squashed."""
    low: float
    """Lower end of the entry; rounding may pass an end by some 1e-7."""
    high: float


DEFINITIONS = (
    Signal("step_inflation", "log(mean step / baseline step)", 0.1, -1.0, 1.0),
    Signal("step_cv", "standard deviation of step time / mean step", 0.05, 0.0, 1.0),
    Signal("step_trend", "log(mean step / mean step of the interval before)", 0.05, -1.0, 1.0),
    Signal("comm_share", "mean time in the payload collective / mean step", 0.0, 0.0, 1.0),
    Signal("comm_inflation", "log(time in the collective / its baseline), each at least 5 % of a step", 0.2, -1.0, 1.0),
    Signal("comm_change", "mean absolute change of that time from step to step / that baseline", 0.2, 0.0, 1.0),
    Signal("wait_share", "mean wait / mean step", 0.05, 0.0, 1.0),
    Signal("wait_variation", "standard deviation of waits / mean step", 0.05, 0.0, 1.0),
    Signal("slack_share", "low quantile of own recent slack / mean step", 0.05, 0.0, 1.0),
    Signal("delay_share", "own delay before the next step / mean step", 0.05, 0.0, 1.0),
)
"""The observation vector, in order. The order and every scale are part of :data:`SCHEMA`."""
NAMES = tuple(signal.name for signal in DEFINITIONS)
SIGNALS = len(DEFINITIONS)
SCALES = tuple(signal.scale for signal in DEFINITIONS)
LOW, HIGH = min(signal.low for signal in DEFINITIONS), max(signal.high for signal in DEFINITIONS)
"""Ends of the observation space, the same for all entries, so that rounding never leaves it."""
COMM_FLOOR = 0.05
"""Least time in the collective that counts, as a share of the baseline step. The sender of a gather hands its message
over in microseconds or in milliseconds; beside a baseline of microseconds that would look like the worst contention."""
_TINY_S = 1e-12
_FULL = 0.999


def table() -> str:
    """:data:`DEFINITIONS` as a Markdown table with the bounds and scale of each entry."""
    rows = [
        f"| {i} | `{s.name}` | {s.meaning} | {s.low:g} | {s.high:g} | {f'{s.scale:g}' if s.scale else 'not squashed'} |"
        for i, s in enumerate(DEFINITIONS)
    ]
    return "\n".join(
        ["| Num | Name | Observation | Min | Max | Scale |", "| --- | --- | --- | --- | --- | --- |", *rows]
    )


def squash(value: float, scale: float) -> float:
    """``x / (1 + |x|)`` with ``x = value / scale``: any finite ``value`` and a positive ``scale`` give -1 to 1.

    Args:
        value: in the unit of ``scale``.
        scale: the value that becomes 0.5.
    """
    x = value / scale
    return x / (1.0 + abs(x))


def unsquash(name: str, entry: ArrayLike) -> NDArray[np.float64]:
    """The physical value of entries of the signal ``name``, inverse of :func:`squash`; logarithms stay logarithms.

    Entries at the ends of the scale, which no number is squashed to, come back large and finite.

    Args:
        name: of the signal.
        entry: of the observation, -1 to 1.
    """
    scale, x = SCALES[NAMES.index(name)], np.asarray(entry, np.float64)
    if scale == 0.0:
        return x
    x = np.clip(x, -_FULL, _FULL)
    return np.asarray(scale * x / (1.0 - np.abs(x)))


def write_signals(rank: NDArray[np.float32], r: int, tick: Tick, out: NDArray[np.float32]) -> None:
    """Write the observation of one rank over the interval so far; zeros before a first step.

    Args:
        rank: estimator of the ranks, ``(timing.RANK_FIELDS, R)``.
        r: column of the rank.
        tick: what all ranks see alike, ``(timing.TICK_FIELDS,)``.
        out: written to, ``(SIGNALS,)``; see :data:`DEFINITIONS`.
    """
    for i in range(SIGNALS):
        out[i] = 0.0
    n = tick[slots.SUM_STEPS]
    if n == 0.0:
        return
    step_s = max(tick[slots.SUM_STEP_S] / n, _TINY_S)
    comm_s = max(np.float64(rank[slots.COMM_MEAN_S, r]), _TINY_S)
    wait_s = max(np.float64(rank[slots.WAIT_MEAN_S, r]), 0.0)
    floor_s = max(COMM_FLOOR * tick[slots.STEP_BASELINE_S], _TINY_S)
    comm_baseline_s = max(np.float64(rank[slots.COMM_BASELINE_S, r]), floor_s)
    before_s = tick[slots.STEP_MEAN_BEFORE_S] if tick[slots.STEP_MEAN_BEFORE_S] > 0.0 else step_s
    out[0] = squash(math.log(step_s / max(tick[slots.STEP_BASELINE_S], _TINY_S)), SCALES[0])
    out[1] = squash(spread_s(step_s, tick[slots.SUM_STEP_S2] / n) / step_s, SCALES[1])
    out[2] = squash(math.log(step_s / before_s), SCALES[2])
    out[3] = min(comm_s / step_s, 1.0)
    out[4] = squash(math.log(max(comm_s, floor_s) / comm_baseline_s), SCALES[4])
    out[5] = squash(np.float64(rank[slots.COMM_CHANGE_S, r]) / comm_baseline_s, SCALES[5])
    out[6] = squash(wait_s / step_s, SCALES[6])
    out[7] = squash(math.sqrt(np.float64(rank[slots.WAIT_VARIANCE_S2, r])) / step_s, SCALES[7])
    out[8] = squash(slack_low_s(rank, r) / step_s, SCALES[8])
    out[9] = squash(np.float64(rank[slots.DELAY_S, r]) / step_s, SCALES[9])


def start_interval(tick: Tick) -> None:
    """Clear the sums of the interval; keep its mean step, with which the next observation compares.

    Args:
        tick: what all ranks see alike, ``(K,)``; changed in place.
    """
    n = tick[slots.SUM_STEPS]
    if n > 0.0:
        tick[slots.STEP_MEAN_BEFORE_S] = tick[slots.SUM_STEP_S] / n
    tick[slots.SUM_STEPS] = 0.0
    tick[slots.SUM_STEP_S] = 0.0
    tick[slots.SUM_STEP_S2] = 0.0
