"""Watches ranks step by step: which are late, since when, by how much, and whether once, always, or in turns.

Of each step it takes the ranks' own work, without waiting, and compares each rank with the median of the others. For
every rank it then tests one statement: "given the past, this rank is on average not later than the middle rank by more
than ``least_share`` of the step". (Where noise has a long tail, every rank's mean lies above the others' median.)

A score sums the evidence against it and begins again from zero where there is none (Page's CUSUM). Its increments are
``weight * noise - price`` where the price makes ``exp(increment)`` at most 1 on average. Such a score passes ``log(n)``
at most once in n steps on average, whatever the distribution (Shin, Ramdas & Rinaldo, "E-detectors: a nonparametric
framework for sequential change detection", 2022). With four weights and R ranks the threshold is
``log(4 * R * steps_per_false_alarm)``; looking at every step is part of that count. The price is measured on the ranks
themselves (``usual_noise``), so the count is an estimate: it supposes noise as in the last thousand steps.

A rank is named only if, besides, it was late in clearly more than half of the steps since its score began. So a few
steps of a garbage collector or of a checkpoint are not a late rank; they are told as late once.

Suffixes: R ranks, J weights, H remembered steps. Memory and time of a step are O(R).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceenv.core.errors import InputError, out_of_range
from paceenv.core.lateness import patterns
from paceenv.core.lateness.medians import Times, lateness_of
from paceenv.core.lateness.usual_noise import CLIP, LEAST_SCALE_S, MEMORY, STRETCHES, WEIGHTS, UsualNoise

LEAST_SHARE: Final = 0.02
"""A rank that is late by less than this share of the step is not named; ``diagnose`` names no smaller cause either."""
STEPS_PER_FALSE_ALARM: Final = 1e7
"""One wrong name in so many steps of a job: with steps of a second, one in 2,800 hours."""
FIRST_STEPS: Final = 8
"""Steps from which the noise is first learned. They are judged, too, once they are all there."""
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
_SIGNS: Final = 2.0
"""Standard deviations by which late steps must outnumber the others."""

Flags = NDArray[np.bool_]


@dataclass
class LateSpan:
    """A rank's lateness from one iteration to another.

    ``rank`` is the place in the steps, ``last`` None while it lasts, ``named`` the iteration that settled it,
    ``steps`` how many that took since ``first``. ``late_s`` is per step, ``error_s`` its standard error.
    """

    rank: int
    first: int
    last: int | None
    named: int
    steps: int
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
    """The ranks that are late now (largest first), those that were, the pattern of all, and what variation costs.

    ``lost_s`` is by how much the last rank of a step is later than the middle one, on average over the last steps.
    """

    late: tuple[LateRank, ...]
    past: tuple[LateRank, ...]
    pattern: str
    lost_s: float
    step_s: float


class _Scores:
    """Scores of R ranks with J weights, and what happened since each of them began."""

    def __init__(self, ranks: int, threshold: float) -> None:
        shape = (len(WEIGHTS), ranks)
        self._threshold = threshold
        self.height_JR = np.zeros(shape)
        self.steps_JR, self.signs_JR, self.sum_JR = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.first_JR = np.zeros(shape, np.int64)

    def add(self, noise_R: Times, price_J: Times, value_R: Times, known_R: Flags, iteration: int) -> Flags:
        """Add a step; returns which ranks have passed the threshold, ``(R,)``."""
        fresh_JR = (self.height_JR <= 0.0) & known_R
        self.first_JR[fresh_JR] = iteration
        for table_JR in (self.steps_JR, self.signs_JR, self.sum_JR):
            table_JR[fresh_JR] = 0.0
        self.steps_JR += known_R
        self.signs_JR += np.where(known_R, np.sign(noise_R), 0.0)
        self.sum_JR += np.where(known_R, value_R, 0.0)
        gain_JR = WEIGHTS[:, None] * np.where(known_R, noise_R, 0.0) - price_J[:, None] * known_R
        self.height_JR = np.minimum(np.maximum(self.height_JR, 0.0) + gain_JR, self._threshold)
        if self.height_JR.max() < self._threshold:
            return np.zeros(len(known_R), np.bool_)
        return np.asarray(self._passed().any(axis=0) & known_R)

    def _passed(self) -> Flags:
        clear = self.signs_JR >= _SIGNS * np.sqrt(np.maximum(self.steps_JR, 1.0))
        return np.asarray((self.height_JR >= self._threshold) & clear)

    def begin_of(self, rank: int) -> tuple[int, int, float]:
        """When the score that passed began: iteration, steps since, and their sum; of several the latest."""
        j = max(np.flatnonzero(self._passed()[:, rank]).tolist(), key=lambda j: int(self.first_JR[j, rank]))
        return int(self.first_JR[j, rank]), int(self.steps_JR[j, rank]), float(self.sum_JR[j, rank])

    def clear(self, rank: int) -> None:
        """Begin anew with a rank."""
        self.height_JR[:, rank] = 0.0


class LatenessWatch:
    """Takes in one step after the other; says at any moment which ranks are late."""

    def __init__(
        self,
        ranks: int,
        *,
        alike: Sequence[Sequence[int]] | None = None,
        least_share: float = LEAST_SHARE,
        steps_per_false_alarm: float = STEPS_PER_FALSE_ALARM,
    ) -> None:
        """Begin to watch.

        Args:
            ranks: number of ranks, at least 1; with one nobody is ever late.
            alike: places of ranks that do the same work, such as those of a pipeline stage; default: all. Ranks in no
                list, and alone in theirs, are not judged.
            least_share: smallest lateness that is worth a name, share of the step, 0 to 1.
            steps_per_false_alarm: steps of the job after which one wrong name is accepted, at least 1.

        Raises:
            InputError: a value out of range.
        """
        if ranks < 1:
            raise out_of_range("ranks", ranks, "at least 1", "lateness watch")
        if not 0.0 <= least_share <= 1.0:
            raise out_of_range("least_share", least_share, "0 to 1", "lateness watch")
        if not steps_per_false_alarm >= 1.0:
            raise out_of_range("steps_per_false_alarm", steps_per_false_alarm, "at least 1", "lateness watch")
        self.ranks, self._least_share = ranks, least_share
        self._alike = [np.array(places, np.int64) for places in alike] if alike is not None else None
        threshold = math.log(len(WEIGHTS) * ranks * steps_per_false_alarm)
        self._rising, self._falling = _Scores(ranks, threshold), _Scores(ranks, threshold)
        self._noise: UsualNoise | None = None
        self._waiting: list[tuple[Times, int]] = []
        self._begin: int | None = None
        self._end = -1
        self._steps = 0
        self._step_s = self._lost_s = 0.0
        self._recent_HR, self._recent_H = np.full((KEPT_STEPS, ranks), math.nan), np.full(KEPT_STEPS, -1, np.int64)
        self._off_HR, self._off_steps_R = np.zeros((KEPT_STEPS, ranks), np.bool_), np.zeros(ranks)
        self._judged, self._learned = 0, FIRST_STEPS
        self._usual_s_R = np.zeros(ranks)
        self._late_R = np.zeros(ranks, np.bool_)
        self._level_s_R, self._level_steps_R = np.zeros(ranks), np.zeros(ranks)
        self._calm_since_R = np.zeros(ranks, np.int64)
        self._calm_steps_R, self._calm_sum_R = np.zeros(ranks), np.zeros(ranks)
        self._settled_R = np.zeros(ranks, np.int64)
        self._open: dict[int, LateSpan] = {}
        self._closed: deque[LateSpan] = deque(maxlen=KEPT_SPANS)
        self._single: deque[LateSpan] = deque(maxlen=KEPT_SPANS)

    def add(
        self, own_s_R: ArrayLike, *, step_s: float | None = None, iteration: int | None = None
    ) -> tuple[LateSpan, ...]:
        """Take in a step; returns the lateness that it settles.

        Args:
            own_s_R: each rank's own work in the step, without waiting, seconds; unknown where it is not finite, or not
                within MAX_S.
            step_s: the whole step, seconds; default: the median of the ranks' own work.
            iteration: number of the step, larger than that before; default: counted from 0.

        Raises:
            InputError: another number of ranks, or an iteration that does not follow.
        """
        own = np.array(own_s_R, np.float64)
        if own.shape != (self.ranks,):
            raise InputError(f"lateness watch: a step of {own.shape} times; allowed: ({self.ranks},), one per rank")
        iteration = self._end + 1 if iteration is None else int(iteration)
        if iteration <= self._end:
            raise out_of_range("iteration", iteration, f"above {self._end}, the last one", "lateness watch")
        own[~(np.abs(own) < MAX_S)] = math.nan
        self._end = iteration
        if np.isnan(own).all():
            return ()
        if self._begin is None:
            self._begin = iteration
            self._calm_since_R[:] = iteration
        self._steps += 1
        late_s_R = self._differences(own)
        self._account(own, late_s_R, step_s)
        if self._noise is not None:
            return tuple(self._judge(late_s_R, iteration))
        self._waiting.append((late_s_R, iteration))
        if len(self._waiting) < FIRST_STEPS:
            return ()
        self._noise = UsualNoise(np.array([late for late, _ in self._waiting]))
        found = [span for late, when in self._waiting for span in self._judge(late, when, learned=True)]
        for span in found:  # they were judged afterwards, so none was named before this step
            span.named, span.steps = iteration, sum(when >= span.first for _, when in self._waiting)
        self._waiting = []
        return tuple(found)

    def findings(self) -> Findings:
        """What is known so far."""
        begin = self._begin if self._begin is not None else 0
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
            joined = _joined(edges)
            now = mine[-1].last is None
            if not now:
                kind = patterns.kind_of_past(joined, self._end - begin + 1)
            elif len(joined) == 1 and len(edges) > 1:
                kind = patterns.SINCE  # late before, and by much more since
            else:
                kind = patterns.kind_of(joined, begin, self._end)
            row = LateRank(rank, kind, mine[-1].late_s, mine[-1].error_s, tuple(mine))
            (late if now else past).append(row)
        late.sort(key=lambda row: (-row.late_s, row.rank))
        past.sort(key=lambda row: (row.spans[0].first, row.rank))
        changing = [row for row in (*late, *past) if row.kind in (patterns.SOMETIMES, patterns.ONCE)]
        pattern = patterns.pattern_of_all(
            [row.kind for row in late if row not in changing],
            len(changing),
            self._covered_share(changing, begin),
            self._lost_s / self._step_s if self._step_s > 0.0 and not late else 0.0,
        )
        if late and pattern in (patterns.NONE, patterns.VARIATION):
            pattern = patterns.SINCE  # one rank comes and goes, and is late now
        return Findings(tuple(late), tuple(past), pattern, self._lost_s, self._step_s)

    def _covered_share(self, rows: Sequence[LateRank], begin: int) -> float:
        """Share of the iterations in which one of these ranks was late."""
        edges = sorted((s.first, self._end if s.last is None else s.last) for row in rows for s in row.spans)
        covered, reached = 0, begin - 1
        for first, last in edges:
            covered += max(last - max(first - 1, reached), 0)
            reached = max(reached, last)
        return covered / max(self._end - begin + 1, 1)

    def _differences(self, own_s_R: Times) -> Times:
        if self._alike is None:
            return lateness_of(own_s_R)
        late_s_R = np.full(self.ranks, math.nan)
        for places in self._alike:
            late_s_R[places] = lateness_of(own_s_R[places])
        return late_s_R

    def _account(self, own_s_R: Times, late_s_R: Times, step_s: float | None) -> None:
        """The usual step, and what the last rank of a step costs; a single huge step moves neither by much."""
        known = own_s_R[~np.isnan(own_s_R)]
        value_s = float(step_s) if step_s is not None and 0.0 <= step_s < MAX_S else float(np.median(known))
        gain = 1.0 / min(self._steps, KEPT_STEPS)
        value_s = min(value_s, 3.0 * self._step_s) if self._step_s > 0.0 else value_s
        self._step_s += gain * (value_s - self._step_s)
        compared = late_s_R[~np.isnan(late_s_R)]
        last_s = min(float(compared.max()), max(self._step_s, 0.0)) if compared.size else 0.0
        self._lost_s += (last_s - self._lost_s) / min(self._steps, MEMORY)

    def _judge(self, late_s_R: Times, iteration: int, *, learned: bool = False) -> list[LateSpan]:
        noise = self._noise
        assert noise is not None
        lag = max(LAG, min(self._judged // 2, MOST_LAG))
        while not learned and self._judged - self._learned > lag:
            self._learn(noise)
        known_R = ~np.isnan(late_s_R)
        late_s_R = np.where(known_R, late_s_R, 0.0)
        least_s = self._least_share * max(self._step_s, 0.0)
        scale_s_R = np.maximum(noise.scale_s_R, 1e-3 * least_s + LEAST_SCALE_S)
        price_J = noise.price_J
        bar_s_R = self._usual_s_R + least_s + np.where(self._late_R, 1.5 * self._level_s_R, 0.0)
        up_R = np.clip((late_s_R - bar_s_R) / scale_s_R, -CLIP, CLIP)
        near_s_R = np.clip(late_s_R, self._level_s_R - 2.0 * CLIP * scale_s_R, self._level_s_R + 2.0 * CLIP * scale_s_R)
        self._calm_steps_R += known_R & ~self._late_R
        self._calm_sum_R += np.where(known_R & ~self._late_R, near_s_R, 0.0)
        used_R = known_R & self._late_R
        h = self._judged % KEPT_STEPS
        self._recent_HR[h], self._recent_H[h] = np.where(known_R, late_s_R, math.nan), iteration
        self._off_HR[h] = known_R & (np.abs(late_s_R - noise.centre_s_R) > OFF * scale_s_R)
        self._judged += 1
        risen_R = self._rising.add(up_R, price_J, near_s_R, known_R, iteration)
        fallen_R = np.zeros(self.ranks, np.bool_)
        if self._open:
            low_s_R = np.maximum(0.5 * self._level_s_R, self._usual_s_R + least_s)
            down_R = np.clip((low_s_R - late_s_R) / scale_s_R, -CLIP, CLIP)
            fallen_R = self._falling.add(down_R, price_J, near_s_R, used_R, iteration)
        apart_s_R = np.maximum(2.0 * CLIP * scale_s_R, ONE_OFF_STEPS * least_s)
        for rank in np.flatnonzero(known_R & (late_s_R - self._level_s_R > apart_s_R)).tolist():
            late_s, scale_s = float(late_s_R[rank]), float(scale_s_R[rank])
            self._single.append(LateSpan(rank, iteration, iteration, iteration, 1, late_s, scale_s))
        found = [self._name(int(rank), iteration) for rank in np.flatnonzero(risen_R)]
        for rank in np.flatnonzero(fallen_R & ~risen_R).tolist():
            self._recover(rank, least_s)
        return found

    def _learn(self, noise: UsualNoise) -> None:
        """Learn from one more step, from the ranks that were as usual in it and in most steps since."""
        h, since_H = self._learned % KEPT_STEPS, np.arange(self._learned, self._learned + LAG) % KEPT_STEPS
        self._learned += 1
        late_s_R = self._recent_HR[h]
        off_R = self._off_HR[since_H].sum(axis=0) > LAG // 2
        usual_R = ~np.isnan(late_s_R) & (self._recent_H[h] >= self._settled_R) & ~off_R
        noise.add(late_s_R, usual_R)
        if self._learned % LAG == 0:
            self._learn_usual(noise)
        still_R = usual_R & self._late_R
        self._level_steps_R += still_R
        change_s_R = np.where(still_R, late_s_R - self._level_s_R, 0.0) / np.maximum(self._level_steps_R, 1.0)
        self._level_s_R += np.clip(change_s_R, -noise.scale_s_R, noise.scale_s_R)
        self._off_steps_R = np.where(off_R, self._off_steps_R + 1.0, 0.0)
        for rank in np.flatnonzero(self._off_steps_R >= KEPT_STEPS).tolist():
            noise.move(rank, float(np.nanmedian(self._recent_HR[:, rank])))  # this is what is usual now
            self._off_steps_R[rank] = 0.0

    def _learn_usual(self, noise: UsualNoise) -> None:
        """The mean difference of the middle rank to the median of its others: above 0 where noise has a long tail."""
        for places in self._alike if self._alike is not None else [np.arange(self.ranks)]:
            if len(places):
                self._usual_s_R[places] = np.median(noise.centre_s_R[places])

    def _since(self, rank: int, first: int, last: int | None = None) -> Times:
        """A rank's lateness in the remembered steps from ``first`` on, to ``last`` if given, seconds."""
        wanted_H = (self._recent_H >= first) & (self._recent_H <= (self._end if last is None else last))
        values = self._recent_HR[wanted_H, rank]
        return np.asarray(values[~np.isnan(values)])

    def _name(self, rank: int, iteration: int) -> LateSpan:
        first, steps, sum_s = self._rising.begin_of(rank)
        level_s = float(np.median(self._since(rank, first)))
        if self._late_R[rank]:
            old = self._open.pop(rank)
            old.last = first - 1
            self._closed.append(old)
        elif self._was_always(rank, steps, sum_s):
            first, steps = int(self._calm_since_R[rank]), int(self._calm_steps_R[rank])
        span = LateSpan(rank, first, None, iteration, steps, level_s, 0.0)
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
        assert self._noise is not None
        change_s = sum_s / steps - (self._calm_sum_R[rank] - sum_s) / before
        scale_s = float(self._noise.scale_s_R[rank])
        error_s = scale_s * math.sqrt(float(self._noise.persistence_J.max()) * (1.0 / before + 1.0 / steps))
        return bool(change_s < 3.0 * error_s or change_s < 0.5 * sum_s / steps)

    def _recover(self, rank: int, least_s: float) -> None:
        """A rank is late by less than half of what it was: no longer, unless what is left is clearly enough."""
        first, steps, sum_s = self._falling.begin_of(rank)
        assert self._noise is not None
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
        if self._noise is not None and steps:
            self._noise.move(rank, level_s)

    def _update(self, rank: int, last: int | None = None) -> None:
        """The amount of a lateness that lasts, and its standard error: of a median, with noise that persists."""
        assert self._noise is not None
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
