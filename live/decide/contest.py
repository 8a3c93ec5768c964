"""Several candidates on one job: whose turn it is in every iteration, and how they compare with each other.

A canary with one policy is a contest of one. Every rank derives the whole order from the shared seed, so no word passes
between ranks. No candidate is eliminated. Uses the blocks and comparisons of ``paceenv.live.decide.canary``. No clock,
no file, no thread.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from paceenv.core.intervals import Interval
from paceenv.core.student_t import student_t_quantile
from paceenv.live.decide.canary import BlockPlan, PairedComparison, Slot, Verdict

DIFFERENCE_ALPHA = 0.05
"""Share of differences between two candidates whose interval may miss the truth, at one look."""


class Place(NamedTuple):
    """An iteration's place in a contest.

    Attributes:
        candidate: number of the candidate whose blocks these are; before the first iteration the first.
        iteration: number of the iteration in the candidate's own schedule; below 0 before that begins.
        slot: its place there. With ``slot.on`` the candidate paces.
    """

    candidate: int
    iteration: int
    slot: Slot


class Contest:
    """Which candidate paces in which iteration: a pure function, the same on every rank with the same seed.

    Each candidate has a :class:`paceenv.live.decide.canary.Schedule` with blocks of its own length, and moves through
    it in its own turns only. First every candidate warms up. Then each round has one cycle of every candidate: a pair
    of blocks with and without pacing. Their order is drawn anew for each round, so nothing in the job can stay in step
    with it.
    """

    def __init__(
        self, seed: int, plans: Sequence[BlockPlan], *, first_iteration: int = 0, holdout_every: int = 2
    ) -> None:
        self._seed, self.first_iteration = seed % 2**64, first_iteration
        self.schedules = tuple(
            plan.schedule(seed + k, first_iteration=0, holdout_every=holdout_every) for k, plan in enumerate(plans)
        )
        """Of each candidate, in its own iterations."""
        self._warm = tuple(schedule.after(0) for schedule in self.schedules)
        self._cycle = tuple(schedule.after(1) - schedule.after(0) for schedule in self.schedules)
        self._drawn: tuple[int, tuple[int, ...]] = (-1, ())  # the round that was asked for last, and its order

    def after(self, pairs: int) -> int:
        """The first iteration after that many compared pairs of every candidate."""
        return self.first_iteration + sum(self._warm) + pairs * sum(self._cycle)

    def place(self, iteration: int) -> Place:
        """The place of ``iteration``."""
        number, offset, order, lengths = 0, iteration - self.first_iteration, tuple(range(len(self._warm))), self._warm
        if offset < 0:
            return Place(0, offset, self.schedules[0].slot(offset))
        warming = offset < sum(self._warm)
        if not warming:
            number, offset = divmod(offset - sum(self._warm), sum(self._cycle))
            order, lengths = self._order(number), self._cycle
        for k in order:
            if offset < lengths[k]:
                own = offset if warming else self._warm[k] + number * self._cycle[k] + offset
                return Place(k, own, self.schedules[k].slot(own))
            offset -= lengths[k]
        raise AssertionError("a round is as long as its parts")

    def _order(self, number: int) -> tuple[int, ...]:
        """The order of the candidates in a round."""
        if number != self._drawn[0]:
            keys = [hashlib.blake2b(b"%d %d %d" % (self._seed, number, k)).digest() for k in range(len(self._cycle))]
            self._drawn = number, tuple(sorted(range(len(keys)), key=keys.__getitem__))
        return self._drawn[1]


class Comparisons:
    """The paired comparisons of a contest's candidates while the job runs.

    Args:
        min_gain: a smaller relative gain counts as no help, 0 to 1.
    """

    def __init__(self, names: Sequence[str], contest: Contest, *, min_gain: float, memory_pairs: int | None) -> None:
        self.names, self._contest = tuple(names), contest
        self.of = [PairedComparison(one, min_gain=min_gain, memory_pairs=memory_pairs) for one in contest.schedules]
        """By candidate."""
        self.out: dict[int, str] = {}
        """The candidates that pace no more, and why."""

    def add(self, iteration: int, step_s: float, delay_s: float, ticks: int = 1) -> int | None:
        """Take in a regular step; the number of the candidate that surely hurts since this iteration, if any."""
        k, own, _ = self._contest.place(iteration)
        if k in self.out:
            return None
        evaluated = self.of[k].add(own, step_s, delay_s, ticks)
        return k if evaluated and self.of[k].verdict.kind == "hurts" else None

    def final(self) -> None:
        """The last evaluation of every candidate that still paces, at the end of the job."""
        for k, comparison in enumerate(self.of):
            if k not in self.out:  # a block in which one stopped was paced in part
                comparison.final()

    @property
    def leader(self) -> int:
        """Number of the candidate that gained most so far."""
        return min(range(len(self.of)), key=lambda k: self.of[k].mean_log_ratio or 0.0)

    @property
    def verdict(self) -> Verdict:
        """The leader's verdict."""
        return self.of[self.leader].verdict

    def differences(self) -> list[dict[str, Any]]:
        """How much more one candidate gains than another, of every two with at least two rounds in common."""
        return [
            {"name": self.names[a], "than": self.names[b], "gain": gain, "low": low, "high": high, "pairs": pairs}
            for a in range(len(self.of))
            for b in range(a)
            if (found := gain_over(self.of[a].ratios, self.of[b].ratios)) is not None
            for (gain, low, high), pairs in [found]
        ]

    def as_dict(self) -> dict[str, Any]:
        """Candidates and differences as plain data for a snapshot."""
        candidates = [
            {"name": name, **verdict_dict(one.verdict), "pairs": one.pairs, "stopped": self.out.get(k, "")}
            for k, (name, one) in enumerate(zip(self.names, self.of, strict=True))
        ]
        return {"candidates": candidates, "differences": self.differences()}


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data for a snapshot."""
    gain, low, high = verdict.gain or (None, None, None)
    known = {"verdict": verdict.kind, "text": verdict.text, "gain": gain, "low": low, "high": high}
    return {**known, "pairs": verdict.pairs}


def gain_over(ratios: Mapping[int, float], other: Mapping[int, float]) -> tuple[Interval, int] | None:
    """How much more one candidate gains than another, and the rounds that it rests on; None with fewer than two."""
    mine, theirs = dict(ratios), dict(other)  # copies: another thread may be adding to them
    by_round = [ratio - theirs[pair] for pair, ratio in mine.items() if pair in theirs]
    n = len(by_round)
    if n < 2:
        return None
    mean = fmean(by_round)
    half = student_t_quantile(0.5 * DIFFERENCE_ALPHA, n - 1) * stdev(by_round) / math.sqrt(n)
    return Interval(*(-math.expm1(x) for x in (mean, mean + half, mean - half))), n
