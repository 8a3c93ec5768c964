"""The experiment of a live job: one or more candidates, each against no pacing, in paired blocks (switchback test).

A canary is an experiment with one candidate. The end of a step is the same instant on every rank, so each rank
evaluates alone, without communication. Uses ``paceenv.core.differences`` for the measure and
``paceenv.live.decide.blocks`` for the blocks. No clock, no file, no thread.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from paceenv.core import differences
from paceenv.core.differences import Mean
from paceenv.core.intervals import Interval
from paceenv.core.student_t import student_t_quantile
from paceenv.core.wording import hours
from paceenv.live.decide.blocks import ACTIVE, Plan, Turn
from paceenv.live.decide.modes import Mode, Stop
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.observe.step import Step

ALPHA, FIRST_EVALUATION_PAIRS = 0.05, 4
"""Share of comparisons whose interval may miss the truth at any evaluation, and pairs before the first one."""
MIN_GAIN = 0.01
"""Smallest relative gain in mean step time that counts as help."""
MEMORY_PAIRS = 32
"""The test of what is deployed starts anew after this many pairs, so that an old gain does not hide a new loss."""
NEGLIGIBLE_DELAY_SHARE = 1e-3
"""A rank counts as not paced if its delays were below this share of its paced blocks."""
DIFFERENCE_ALPHA = 0.05
"""Share of differences between two candidates whose interval may miss the truth, at one look."""
EFFECTS = (0.01, 0.02, 0.05)
"""Relative effects for which the time to a verdict is given."""
MOST_PAIRS = 1 << 14
"""More pairs than anybody waits for."""

Kind = Literal["helps", "does not help", "insufficient evidence", "hurts"]


class Pair(NamedTuple):
    """A pair of blocks that is over; times in seconds.

    Attributes:
        key: as in :class:`paceenv.live.decide.blocks.Turn`.
        ratio: log ratio of the counted steps' means; None where a block has less than half of its counted iterations.
        delay_s: this rank's delays in counted steps.
        paced_s: time of the counted steps with pacing.
    """

    key: tuple[int, int]
    ratio: float | None
    delay_s: float
    paced_s: float


class Pairs:
    """Collects the steps of the pair of blocks that is under way."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._key: tuple[int, int] | None = None
        self._rows = array("d")  # five numbers a step, in little memory

    def add(self, turn: Turn, step_s: float, ticks: int = 1, delay_s: float = 0.0) -> Pair | None:
        """Take in a regular step; a step time that is not a positive number is left out. The pair that it ended."""
        closed = self.close() if turn.pair != self._key else None
        self._key = turn.pair
        if turn.pair is not None and 0.0 < step_s < math.inf:
            self._rows.extend((turn.arm is not None, turn.counted, step_s / ticks, ticks, delay_s))
        return closed

    def close(self) -> Pair | None:
        """The pair under way, as if it ended here; None where a block has no step."""
        key, (on, counts, each_s, ticks, delay_s) = self._key, np.array(self._rows).reshape(-1, 5).T
        self._key, self._rows = None, array("d")
        paced, counted = on > 0.0, counts > 0.0
        if key is None or paced.all() or not paced.any():
            return None
        off, on, ratio = ~paced & counted, paced & counted, None
        least = 0.5 * self._plan.blocks[key[1]].counted_iterations
        if min(ticks[off].sum(), ticks[on].sum()) >= least:
            ratio = float(differences.log_ratio(each_s[off], each_s[on], ticks[off], ticks[on]))
        return Pair(key, ratio, float(delay_s[on].sum()), float((each_s[on] * ticks[on]).sum()))


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison: ``gain`` is the relative fall of mean step time, with the evaluation's interval.

    ``text`` is the result as a sentence. Before the first evaluation there is no gain.
    """

    kind: Kind
    gain: Interval | None
    pairs: int
    text: str

    def as_dict(self) -> dict[str, Any]:
        gain, low, high = self.gain or (None, None, None)
        known = {"verdict": self.kind, "text": self.text, "gain": gain, "low": low, "high": high}
        return {**known, "pairs": self.pairs}


class Comparison:
    """One candidate against no pacing, while the job runs.

    Evaluations follow 4, 8, 16, 32, ... pairs. Evaluation ``k`` has an error share of ``ALPHA / 2 ** k``, so all of
    them together err in at most ``ALPHA`` of the jobs. Between evaluations the last verdict stands.

    Args:
        memory_pairs: after an evaluation of this many pairs (4, 8, 16, ...) the comparison starts anew with its own
            share, so that an old gain does not hide a new loss; None: never.
    """

    def __init__(self, name: str, *, memory_pairs: int | None = None) -> None:
        self.name, self._memory_pairs, self._earlier = name, memory_pairs, False
        self._forget()
        self.verdict = self._evaluate(1.0)
        """The last evaluation's verdict."""

    def _forget(self) -> None:
        self.ratios = dict[int, float]()
        """Log ratio of the block means by round, with pacing over without, since the comparison last started anew."""
        self.mean, self.evaluations = Mean(), 0
        """Of these ratios; and evaluations so far."""
        self._delays_s = self._paced_s = 0.0

    @property
    def pairs(self) -> int:
        return self.mean.count

    def take(self, pair: Pair) -> bool:
        """Take in a pair; whether there was a new evaluation."""
        if pair.ratio is None:
            return False
        self.ratios[pair.key[0]] = pair.ratio
        self.mean.add(pair.ratio)
        self._delays_s += pair.delay_s
        self._paced_s += pair.paced_s
        if self.pairs != FIRST_EVALUATION_PAIRS << self.evaluations:
            return False
        self.evaluations += 1
        self._settle(self._evaluate(ALPHA / 2.0**self.evaluations))
        if self.pairs == self._memory_pairs:
            self._forget()
            self._earlier = True
        return True

    def final(self) -> Verdict:
        """The last evaluation, at the end of the job, with the error share of the evaluation that would come next."""
        if self.pairs != self.verdict.pairs:
            self._settle(self._evaluate(ALPHA / 2.0 ** (self.evaluations + 1)))
        return self.verdict

    def _settle(self, new: Verdict) -> None:
        """Take over a verdict, unless it only says that a new comparison has fewer pairs than the one before."""
        if not (self._earlier and new.kind == "insufficient evidence" and new.pairs < self.verdict.pairs):
            self.verdict = new

    def _evaluate(self, error_share: float) -> Verdict:
        n, error = self.pairs, self.mean.error
        if n < FIRST_EVALUATION_PAIRS:  # no evaluation yet, so no error share is spent
            waits = f"insufficient evidence: {n} of at least {FIRST_EVALUATION_PAIRS} pairs of blocks"
            return Verdict("insufficient evidence", None, n, waits)
        gain = differences.gain(self.mean.interval(error_share))
        undelayed = self._delays_s < NEGLIGIBLE_DELAY_SHARE * self._paced_s
        kind: Kind = "insufficient evidence"
        if gain.low > 0.0:
            kind = "helps"
        elif gain.high < 0.0:
            kind = "hurts"
        # other ranks may make room for a rank that was not delayed: a gain that points to that is no null result
        elif gain.high < MIN_GAIN or (undelayed and (gain.value < MIN_GAIN or self.mean.value > -2 * error)):
            kind = "does not help"
        return Verdict(kind, gain, n, _sentence(kind, gain, n, undelayed))


def _sentence(kind: Kind, gain: Interval, pairs: int, undelayed: bool) -> str:
    percent, low, high = (100 * number for number in gain)
    interval = f"[{low:z.1f}, {high:z.1f}]"
    if kind == "helps":
        effect = f"helps by {percent:.1f} % {interval} of mean step time"
    elif kind == "hurts":
        effect = f"hurts by {-percent:.1f} % [{-high:z.1f}, {-low:z.1f}] of mean step time"
    else:
        effect = f"{kind}: {percent:+z.1f} % {interval} of mean step time"
    own = "; this rank had almost no delay" if undelayed else ""
    return f"{effect}, {pairs} pairs of blocks{own}"


class Experiment(Mode):
    """Modes canary and active: candidates take turns by a plan that all ranks share; what surely hurts, stops.

    No other candidate is eliminated.
    """

    follows = True

    def __init__(self, names: Sequence[str], plan: Plan) -> None:
        super().__init__()
        self.plan, self._pairs = plan, Pairs(plan)
        memory_pairs = MEMORY_PAIRS if plan.every == ACTIVE else None
        self.candidates = [Comparison(name, memory_pairs=memory_pairs) for name in names]

    def acting(self, iteration: int) -> int | None:
        arm = self.plan.turn(iteration).arm
        return None if arm in self.out else arm

    def give_up(self, number: int, why: str) -> bool:
        self.out[number] = why
        return len(self.out) < len(self.candidates)

    def take_in(self, step: Step, pacer: RankPacer, delay_s: float) -> Stop | None:
        hurting = self.add(step.iteration, step.step_s, delay_s, step.ticks)
        if hurting is None:
            return None
        return hurting, f"rolled back, as pacing {self.candidates[hurting].verdict.text}"

    def add(self, iteration: int, step_s: float, delay_s: float = 0.0, ticks: int = 1) -> int | None:
        """Take in a regular step; the number of the candidate that surely hurts since this iteration, if any."""
        pair = self._pairs.add(self.plan.turn(iteration, ticks), step_s, ticks, delay_s)
        if pair is None or pair.key[1] in self.out:  # a block in which one stopped was paced in part
            return None
        candidate = self.candidates[pair.key[1]]
        return pair.key[1] if candidate.take(pair) and candidate.verdict.kind == "hurts" else None

    def final(self) -> None:
        """The last evaluation of every candidate that still paces, at the end of the job."""
        pair = self._pairs.close()
        for k, candidate in enumerate(self.candidates):
            if k not in self.out:
                if pair is not None and pair.key[1] == k:
                    candidate.take(pair)
                candidate.final()

    @property
    def leading(self) -> Comparison:
        """The candidate that gained most so far."""
        return max(self.candidates, key=lambda one: -one.mean.value)

    def as_dict(self, tick_s: float) -> dict[str, Any]:
        of, leader = self.candidates, self.leading
        differing = [
            {"name": of[a].name, "than": of[b].name, "gain": gain, "low": low, "high": high, "pairs": pairs}
            for a in range(len(of))
            for b in range(a)
            if (compared := gain_over(of[a].ratios, of[b].ratios)) is not None
            for (gain, low, high), pairs in [compared]
        ]
        listed = [
            {"name": one.name, **one.verdict.as_dict(), "pairs": one.pairs, "stopped": self.out.get(k, "")}
            for k, one in enumerate(of)
        ]
        canary = leader.verdict.as_dict() | {"candidates": listed, "differences": differing}
        if len(of) > 1:
            canary["text"] = f"{leader.name}: {leader.verdict.text}"
        until = time_to_verdict(self.plan, leader, tick_s)
        return {"canary": canary | {"forecast": {"text": until} if until else None}}


def gain_over(ratios: Mapping[int, float], other: Mapping[int, float]) -> tuple[Interval, int] | None:
    """How much more one candidate gains than another, and the rounds that it rests on; None with fewer than two."""
    mine, theirs = dict(ratios), dict(other)  # copies: another thread may be adding to them
    by_round = Mean(ratio - theirs[number] for number, ratio in mine.items() if number in theirs)
    return (differences.gain(by_round.interval(DIFFERENCE_ALPHA)), by_round.count) if by_round.count > 1 else None


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
