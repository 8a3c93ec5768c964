"""Before a canary: how long it would take to a verdict, from a run that was only watched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from paceenv.live.decide.canary import BLOCK_ITERATIONS, Schedule
from paceenv.live.decide.verdict_time import Forecast, outlook
from paceenv.live.record.snapshot import Snapshot, entry, number

WATCHED = ("observe", "shadow")
MIN_BLOCKS = 4
"""Neighbouring blocks of means from which the noise between blocks is taken."""


def canary_outlook(snapshots: Sequence[Snapshot]) -> tuple[Forecast, float] | None:
    """The time to a verdict and the mean iteration, seconds; None for a run that paces or has measured nothing.

    The noise of a pair is the larger of two: what independent steps give, and what neighbouring blocks of the run
    differ by. Blocks are those of a rule on slack; policies that shift phases need four times as many iterations.
    """
    if not snapshots or any(s.get("state") not in WATCHED for s in snapshots):
        return None
    own = min(snapshots, key=lambda s: int(s["rank"]))
    step_s, cv = number(own, "step", "mean_s"), number(own, "step", "cv")
    if not step_s or cv is None:
        return None
    schedule, ticks = Schedule(0, block_iterations=BLOCK_ITERATIONS), max(number(own, "step_iterations") or 1.0, 1.0)
    noise = max(
        cv * math.sqrt(2.0 * ticks / schedule.counted_iterations), _between_blocks(own, schedule.counted_iterations)
    )
    return (outlook(noise, schedule), step_s / ticks) if noise > 0.0 else None


def _between_blocks(own: Snapshot, counted: int) -> float:
    """Standard deviation of the log ratio of neighbouring blocks, as if they had ``counted`` iterations."""
    length, means = number(own, "own", "blocks", "iterations"), entry(own, "own", "blocks", "step_s")
    if not length or not isinstance(means, list):
        return 0.0
    pairs = pairwise(means)
    ratios = [math.log(b / a) for a, b in pairs if isinstance(a, float) and isinstance(b, float) and a > 0.0 < b]
    if len(ratios) < MIN_BLOCKS:
        return 0.0
    return math.sqrt(fmean(r * r for r in ratios) * length / counted)
