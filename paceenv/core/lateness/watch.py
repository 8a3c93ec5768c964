"""The one detector of late ranks: which are late, since when, by how much, and whether once, always, or in turns.

It takes one table: how late each rank was in each step, in seconds, up to what all ranks of the step share. The steps
of a trace feed it, the blocks of iterations that live ranks report, and the times of collectives. Each rank is compared
with the median of the others, so that what slows all of them cancels. For every rank one statement is then tested:
"given the past, this rank is on average not later than the middle rank by more than ``LEAST_SHARE`` of the step".
(Where noise has a long tail, every rank's mean lies above the others' median.)

A score sums the evidence against it and begins again from zero where there is none (Page's CUSUM). Its increments are
``weight * noise - price`` where the price makes ``exp(increment)`` at most 1 on average. Such a score passes ``log(n)``
at most once in n steps on average, whatever the distribution (Shin, Ramdas & Rinaldo, "E-detectors: a nonparametric
framework for sequential change detection", 2022). With four weights and R ranks the threshold is
``log(4 * R * STEPS_PER_FALSE_ALARM)``; looking at every step is part of that count. The price is measured on the ranks
themselves (``sequential_test``), so the count is an estimate: it supposes noise as in the last thousand steps.

A rank is named only if, besides, it was late in clearly more than half of the steps since its score began. So a few
steps of a garbage collector or of a checkpoint are not a late rank; they are told as late once.

Suffixes: T steps, R ranks, J weights. The time of a step is O(R).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceenv.core.errors import InputError
from paceenv.core.lateness.sequential_test import (
    CLIP,
    LEAST_SCALE_S,
    MEMORY,
    STRETCHES,
    WEIGHTS,
    Scores,
    Times,
    UsualNoise,
)

COMMON_END: Final = ("all_reduce", "barrier", "reduce_scatter", "all_gather", "all_to_all")
"""Collectives that all members leave together: nobody before everybody has entered."""
CHRONIC, SINCE, SOMETIMES, ONCE = "chronic", "since", "now and then", "once"
IN_TURNS, VARIATION, NONE = "in turns", "variation", "none"
LEAST_SHARE: Final = 0.02
"""A rank that is late by less than this share of the step is not named; ``diagnose`` names no smaller cause either."""
STEPS_PER_FALSE_ALARM: Final = 1e7
"""One wrong name in so many steps of a job: with steps of a second, one in 2,800 hours."""
FIRST_STEPS: Final = 8
"""Steps from which the noise is first learned. They are judged, too, once they are all there."""
ONCE_SHARE: Final = 0.1
"""Lateness that is over, and lasted for at most this share of what was observed, happened once."""
TURNS_SHARE: Final = 0.5
"""Ranks take turns where one of them is late in at least this share of what was observed."""
VARIATION_SHARE: Final = 0.05
"""Time lost to the last rank of each step, below this share of the step, is not worth a line."""
LAG, MOST_LAG = 8, 56
"""The noise is learned from older steps, so that a rank that just turns late does not count as noise: half as old as
the watch, within these limits."""
OFF: Final = 2.5
"""A rank that is so many standard deviations off its usual difference in most of LAG steps is not as usual."""
KEPT_STEPS: Final = 64
KEPT_SPANS: Final = 256
"""Of all ranks together; older ones are forgotten."""
ONE_OFF_STEPS: Final = 16
"""A single step is told if it costs as much as so many of a rank that is just late enough to be named."""
MAX_S: Final = 1e12


@dataclass
class LateSpan:
    """A rank's lateness from one iteration to another.

    ``rank`` is the column of the table, ``last`` None while it lasts, ``named`` the iteration that settled it.
    ``late_s`` is per step, ``error_s`` its standard error.
    """

    rank: int
    first: int
    last: int | None
    named: int
    late_s: float
    error_s: float


class LateRank(NamedTuple):
    """What is known about a rank that is or was late; ``spans`` in ascending order, amounts of the last one."""

    rank: int
    kind: str
    late_s: float
    error_s: float
    spans: tuple[LateSpan, ...]


class Findings(NamedTuple):
    """The ranks that are late at the end (largest first), those that were, and the pattern of all.

    ``lost_s`` is by how much the last rank of a step is later than the middle one, on average over the last steps.
    ``least_s_R`` is the smallest constant lateness that would have been named by now, infinite where none would.
    ``named`` are the names as they were when they were given.
    """

    late: tuple[LateRank, ...]
    past: tuple[LateRank, ...]
    pattern: str
    lost_s: float
    step_s: float
    least_s_R: Times
    named: tuple[LateSpan, ...]


def find_late_ranks(
    late_s_TR: ArrayLike,
    step_s: ArrayLike,
    iteration_T: ArrayLike | None = None,
    *,
    alike: Sequence[Sequence[int]] | None = None,
    steps_T: ArrayLike = 1.0,
) -> Findings:
    """Which ranks are late, from how late each of them was in every step.

    Args:
        late_s_TR: seconds ``(T, R)``, up to what all ranks of a step share, so any of: own work without waiting,
            arrivals on one clock, or minus the time that a collective took (the last to arrive waits least). Unknown
            where it is not finite, or not within MAX_S.
        step_s: the whole step, seconds: one for all, or ``(T,)``.
        iteration_T: numbers of the steps, ascending; default: counted from 0.
        alike: columns of ranks that do the same work, such as those of a pipeline stage; default: all. Ranks in no
            list, and alone in theirs, are not judged.
        steps_T: a row is the mean of so many steps, at least 1: one number for all, or ``(T,)``.
    """
    table_TR = np.array(late_s_TR, np.float64)
    iterations = np.arange(len(table_TR)) if iteration_T is None else np.asarray(iteration_T, np.int64)
    if table_TR.ndim != 2 or iterations.shape != table_TR.shape[:1] or (np.diff(iterations) <= 0).any():
        shape = f"{table_TR.shape} with {iterations.size} iterations"
        raise InputError(f"lateness of {shape}; allowed: (steps, ranks), and iterations that ascend, one per step")
    table_TR[~(np.abs(table_TR) < MAX_S)] = math.nan
    groups = [np.array(places, np.int64) for places in alike or [range(table_TR.shape[1])]]
    late_TR = np.full(table_TR.shape, math.nan)
    for places in groups:
        late_TR[:, places] = lateness_of(table_TR[:, places])
    step_s_T, steps_T = (np.broadcast_to(np.asarray(of, np.float64), len(table_TR)) for of in (step_s, steps_T))
    used = np.flatnonzero(~np.isnan(table_TR).all(axis=1))
    per_alarm = max(STEPS_PER_FALSE_ALARM * len(used) / max(sum(steps_T[used].tolist()), 1.0), 1.0)
    threshold = math.log(len(WEIGHTS) * max(table_TR.shape[1], 1) * per_alarm)
    watch = _Watch(late_TR[used], step_s_T[used], iterations[used], steps_T[used], groups, threshold)
    return watch.findings(int(iterations[-1]) if len(iterations) else 0)


def lateness_of(own_s: Times) -> Times:
    """How much later each rank is than the median of the others, seconds; ranks are the last axis.

    Unknown where no other rank is known.
    """
    ordered = np.sort(own_s, axis=-1)
    known = np.count_nonzero(~np.isnan(own_s), axis=-1, keepdims=True)
    half = known // 2

    def at(place: NDArray[np.int64]) -> Times:
        return np.take_along_axis(ordered, np.clip(place, 0, np.maximum(known - 1, 0)), axis=-1)

    low, middle, high = at(half - 1), at(half), at(half + 1)
    of_even = np.where(own_s <= low, middle, low)
    below, above = 0.5 * (middle + high), 0.5 * (low + middle)
    of_odd = np.where(own_s < middle, below, np.where(own_s > middle, above, 0.5 * (low + high)))
    return np.where(known < 2, math.nan, own_s - np.where(known % 2 == 0, of_even, of_odd))


class _Watch:
    """Goes through the steps, one after the other, with what is known of the ranks up to each of them.

    A row is how much later each rank was than its like, the mean of ``steps_T`` steps; its noise is ``spread_T`` times
    that of a typical row.
    """

    def __init__(
        self,
        late_s_TR: Times,
        step_s_T: Times,
        iteration_T: NDArray[np.int64],
        steps_T: Times,
        alike: Sequence[NDArray[np.int64]],
        threshold: float,
    ) -> None:
        count, ranks = late_s_TR.shape
        self._late_s_TR, self._iteration_T, self._steps_T = late_s_TR, iteration_T, steps_T
        self._spread_T = np.sqrt(np.median(steps_T) / steps_T) if count else steps_T
        self._alike, self._ranks, self._threshold = alike, ranks, threshold
        self._begin = self._end = int(iteration_T[0]) if count else 0
        self._rising, self._falling = Scores(ranks, threshold), Scores(ranks, threshold)
        self._noise = UsualNoise(late_s_TR[:FIRST_STEPS], steps_T[:FIRST_STEPS], self._spread_T[:FIRST_STEPS])
        self._step_s = self._lost_s = 0.0
        self._off_TR, self._off_steps_R = np.zeros((count, ranks), np.bool_), np.zeros(ranks)
        self._judged, self._learned = 0, FIRST_STEPS
        self._usual_s_R = np.zeros(ranks)
        self._late_R = np.zeros(ranks, np.bool_)
        self._level_s_R, self._level_steps_R = np.zeros(ranks), np.zeros(ranks)
        self._calm_since_R = np.full(ranks, self._begin, np.int64)
        self._calm_steps_R, self._calm_sum_R = np.zeros(ranks), np.zeros(ranks)
        self._settled_R = np.zeros(ranks, np.int64)
        self._open: dict[int, LateSpan] = {}
        self._closed: deque[LateSpan] = deque(maxlen=KEPT_SPANS)
        self._single: deque[LateSpan] = deque(maxlen=KEPT_SPANS)
        self._named: list[LateSpan] = []
        for t in range(min(count, FIRST_STEPS)):
            self._account(t, float(step_s_T[t]))
        for t in range(count) if count >= FIRST_STEPS else ():
            if t >= FIRST_STEPS:
                self._account(t, float(step_s_T[t]))
            self._end = int(iteration_T[max(t, FIRST_STEPS - 1)])  # no rank is named before there are so many
            self._named += map(replace, self._judge(t))

    def findings(self, end: int) -> Findings:
        self._end = max(self._end, end)
        spans: dict[int, list[LateSpan]] = {}
        for rank in self._open:
            self._update(rank)
        single = [span for span in self._single if span.rank not in self._open]
        for span in (*self._closed, *single, *self._open.values()):
            spans.setdefault(span.rank, []).append(span)
        late: list[LateRank] = []
        past: list[LateRank] = []
        for rank, mine in spans.items():
            mine.sort(key=lambda span: span.first)
            edges = [(span.first, self._end if span.last is None else span.last) for span in mine]
            now = mine[-1].last is None
            kind = _kind_of(_joined(edges), len(edges), self._begin, self._end, goes_on=now)
            row = LateRank(rank, kind, mine[-1].late_s, mine[-1].error_s, tuple(mine))
            (late if now else past).append(row)
        late.sort(key=lambda row: (-row.late_s, row.rank))
        past.sort(key=lambda row: (row.spans[0].first, row.rank))
        pattern, least_s_R = self._pattern(late, past), self._least_s_R()
        return Findings(tuple(late), tuple(past), pattern, self._lost_s, self._step_s, least_s_R, tuple(self._named))

    def _least_s_R(self) -> Times:
        """The smallest lateness that as many steps as these would have settled, with the noise as it is now."""
        if len(self._late_s_TR) < FIRST_STEPS:
            return np.full(self._ranks, math.inf)
        known_R = (~np.isnan(self._late_s_TR)).sum(axis=0)
        earned_R = self._threshold / np.maximum(known_R, 1.0)
        needed_R = ((earned_R + self._noise.price_J[:, None]) / WEIGHTS[:, None]).min(axis=0)
        least_s_R = self._usual_s_R + LEAST_SHARE * self._step_s + needed_R * self._noise.scale_s_R
        return np.where((needed_R <= CLIP) & (known_R > 0), least_s_R, math.inf)

    def _pattern(self, late: Sequence[LateRank], past: Sequence[LateRank]) -> str:
        """The pattern of all ranks, CHRONIC, SINCE, IN_TURNS, VARIATION or NONE."""
        changing = [row for row in (*late, *past) if row.kind in (SOMETIMES, ONCE)]
        if lasting := {row.kind for row in late} - {SOMETIMES}:
            return SINCE if lasting == {SINCE} else CHRONIC
        if len(changing) > 1 and self._covered_share(changing) >= TURNS_SHARE:
            return IN_TURNS
        if late:
            return SINCE  # one rank comes and goes, and is late now
        return VARIATION if self._step_s > 0.0 and self._lost_s / self._step_s > VARIATION_SHARE else NONE

    def _covered_share(self, rows: Sequence[LateRank]) -> float:
        """Share of the iterations in which one of these ranks was late."""
        edges = sorted((s.first, self._end if s.last is None else s.last) for row in rows for s in row.spans)
        covered = sum(max(last - first + 1, 0) for first, last in _joined(edges))
        return covered / max(self._end - self._begin + 1, 1)

    def _account(self, t: int, step_s: float) -> None:
        """The usual step, and what the last rank of a step costs; a single huge step moves neither by much."""
        value_s = step_s if 0.0 <= step_s < MAX_S else self._step_s
        gain = 1.0 / min(t + 1, KEPT_STEPS)
        value_s = min(value_s, 3.0 * self._step_s) if self._step_s > 0.0 else value_s
        self._step_s += gain * (value_s - self._step_s)
        compared = self._late_s_TR[t][~np.isnan(self._late_s_TR[t])]
        last_s = min(float(compared.max()), max(self._step_s, 0.0)) if compared.size else 0.0
        self._lost_s += (last_s - self._lost_s) / min(t + 1, MEMORY)

    def _judge(self, t: int) -> list[LateSpan]:
        noise, late_s_R, iteration = self._noise, self._late_s_TR[t], int(self._iteration_T[t])
        while t - self._learned > max(LAG, min(t // 2, MOST_LAG)):
            self._learn()
        known_R = ~np.isnan(late_s_R)
        late_s_R = np.where(known_R, late_s_R, 0.0)
        least_s = LEAST_SHARE * max(self._step_s, 0.0)
        scale_s_R = np.maximum(noise.scale_s_R * self._spread_T[t], 1e-3 * least_s + LEAST_SCALE_S)
        price_J = noise.price_J
        bar_s_R = self._usual_s_R + least_s + np.where(self._late_R, 1.5 * self._level_s_R, 0.0)
        up_R = np.clip((late_s_R - bar_s_R) / scale_s_R, -CLIP, CLIP)
        near_s_R = np.clip(late_s_R, self._level_s_R - 2.0 * CLIP * scale_s_R, self._level_s_R + 2.0 * CLIP * scale_s_R)
        self._calm_steps_R += known_R & ~self._late_R
        self._calm_sum_R += np.where(known_R & ~self._late_R, near_s_R, 0.0)
        used_R = known_R & self._late_R
        self._off_TR[t] = known_R & (np.abs(late_s_R - noise.centre_s_R) > OFF * scale_s_R)
        self._judged = t + 1
        risen_R = self._rising.add(up_R, price_J, near_s_R, known_R, iteration)
        fallen_R = np.zeros(self._ranks, np.bool_)
        if self._open:
            low_s_R = np.maximum(0.5 * self._level_s_R, self._usual_s_R + least_s)
            down_R = np.clip((low_s_R - late_s_R) / scale_s_R, -CLIP, CLIP)
            fallen_R = self._falling.add(down_R, price_J, near_s_R, used_R, iteration)
        apart_s_R = np.maximum(2.0 * CLIP * scale_s_R, ONE_OFF_STEPS * least_s)
        for rank in np.flatnonzero(known_R & (late_s_R - self._level_s_R > apart_s_R)).tolist():
            late_s, scale_s = float(late_s_R[rank]), float(scale_s_R[rank])
            self._single.append(LateSpan(rank, iteration, iteration, iteration, late_s, scale_s))
        spans = [self._name(rank) for rank in np.flatnonzero(risen_R).tolist()]
        for rank in np.flatnonzero(fallen_R & ~risen_R).tolist():
            self._recover(rank, least_s)
        return spans

    def _learn(self) -> None:
        """Learn from one more step, from the ranks that were as usual in it and in most steps since."""
        t, noise = self._learned, self._noise
        self._learned += 1
        late_s_R = self._late_s_TR[t]
        off_R = self._off_TR[t : t + LAG].sum(axis=0) > LAG // 2
        usual_R = ~np.isnan(late_s_R) & (self._iteration_T[t] >= self._settled_R) & ~off_R
        noise.add(late_s_R, usual_R, float(self._steps_T[t]), float(self._spread_T[t]))
        if self._learned % LAG == 0:
            for places in filter(len, self._alike):  # the middle rank's is above 0 where noise has a long tail
                self._usual_s_R[places] = np.median(noise.centre_s_R[places])
        still_R = usual_R & self._late_R
        self._level_steps_R += still_R
        change_s_R = np.where(still_R, late_s_R - self._level_s_R, 0.0) / np.maximum(self._level_steps_R, 1.0)
        self._level_s_R += np.clip(change_s_R, -noise.scale_s_R, noise.scale_s_R)
        self._off_steps_R = np.where(off_R, self._off_steps_R + 1.0, 0.0)
        for rank in np.flatnonzero(self._off_steps_R >= KEPT_STEPS).tolist():
            noise.move(rank, float(np.median(self._since(rank, self._begin))))  # this is what is usual now
            self._off_steps_R[rank] = 0.0

    def _since(self, rank: int, first: int, last: int | None = None) -> Times:
        """A rank's lateness in the last KEPT_STEPS steps, of those from ``first`` on, to ``last`` if given, seconds."""
        recent = slice(max(self._judged - KEPT_STEPS, 0), self._judged)
        iteration_T, values = self._iteration_T[recent], self._late_s_TR[recent, rank]
        wanted_T = (iteration_T >= first) & (iteration_T <= (self._end if last is None else last))
        return np.asarray(values[wanted_T & ~np.isnan(values)])

    def _name(self, rank: int) -> LateSpan:
        first, steps, sum_s = self._rising.begin_of(rank)
        level_s = float(np.median(self._since(rank, first)))
        if self._late_R[rank]:
            old = self._open.pop(rank)
            old.last = first - 1
            self._closed.append(old)
        elif self._was_always(rank, steps, sum_s):
            first, steps = int(self._calm_since_R[rank]), int(self._calm_steps_R[rank])
        span = LateSpan(rank, first, None, self._end, level_s, 0.0)
        self._open[rank] = span
        self._late_R[rank] = True
        self._set_level(rank, level_s, steps)
        self._update(rank)
        kept = [single for single in self._single if single.rank != rank or single.first < first]
        self._single = deque(kept, maxlen=KEPT_SPANS)
        return span

    def _was_always(self, rank: int, steps: int, sum_s: float) -> bool:
        """Whether the steps before the score began were as late as those since: it began late only by chance."""
        before = self._calm_steps_R[rank] - steps
        if before < FIRST_STEPS // 2:
            return True
        change_s = sum_s / steps - (self._calm_sum_R[rank] - sum_s) / before
        scale_s = float(self._noise.scale_s_R[rank])
        error_s = scale_s * math.sqrt(float(self._noise.persistence_J.max()) * (1.0 / before + 1.0 / steps))
        return bool(change_s < 3.0 * error_s or change_s < 0.5 * sum_s / steps)

    def _recover(self, rank: int, least_s: float) -> None:
        """A rank is late by less than half of what it was: no longer, unless what is left is clearly enough."""
        first, steps, sum_s = self._falling.begin_of(rank)
        level_s = float(np.median(self._since(rank, first)))
        if level_s - 2.0 * float(self._noise.scale_s_R[rank]) / math.sqrt(steps) > least_s:
            self._set_level(rank, level_s, steps)
            return
        self._update(rank, first - 1)
        span = self._open.pop(rank)
        span.last = first - 1
        self._closed.append(span)
        self._late_R[rank] = False
        self._set_level(rank, 0.0, 0)
        self._calm_since_R[rank], self._calm_steps_R[rank], self._calm_sum_R[rank] = first, steps, sum_s
        self._noise.move(rank, level_s)

    def _set_level(self, rank: int, level_s: float, steps: int) -> None:
        self._level_s_R[rank], self._level_steps_R[rank] = level_s, steps
        self._rising.clear(rank)
        self._falling.clear(rank)
        self._settled_R[rank] = self._end + 1
        if steps:
            self._noise.move(rank, level_s)

    def _update(self, rank: int, last: int | None = None) -> None:
        """The amount of a lateness that lasts, and its standard error: of a median, with noise that persists."""
        span = self._open[rank]
        recent_s = self._since(rank, span.first, last)
        steps, late_s = float(self._level_steps_R[rank]), float(self._level_s_R[rank])
        if recent_s.size > steps:
            steps, late_s = float(recent_s.size), float(np.median(recent_s))
        steps = max(steps, 1.0)
        longest = int(np.searchsorted(STRETCHES, steps, side="right"))
        persistence = float(self._noise.persistence_J[: max(longest, 1)].max())
        scale_s = float(self._noise.scale_s_R[rank])
        span.late_s, span.error_s = late_s, 1.25 * scale_s * math.sqrt(persistence / steps)


def _joined(edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in ascending order, with those that follow without a gap made one."""
    joined = [edges[0]]
    for first, last in edges[1:]:
        if first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def _kind_of(joined: Sequence[tuple[int, int]], spans: int, begin: int, end: int, *, goes_on: bool) -> str:
    """The kind of a rank's lateness from its joined spans in ascending order, of so many."""
    if not goes_on:
        lasted = joined[-1][1] - joined[0][0] + 1
        return ONCE if len(joined) == 1 and lasted <= max(1, int(ONCE_SHARE * (end - begin + 1))) else SOMETIMES
    if len(joined) > 1:
        return SOMETIMES
    return CHRONIC if spans == 1 and joined[0][0] <= begin else SINCE  # or late before, and by much more since
