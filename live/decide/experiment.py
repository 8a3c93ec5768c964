"""The experiment of a live job: one or more candidates, each against no pacing, in paired blocks (switchback test).

A canary is an experiment with one candidate. The end of a step is the same instant on every rank, so each rank
evaluates alone, without communication. Uses ``paceenv.core.differences`` for the measure and
``paceenv.live.decide.blocks`` for the blocks. No clock, no file, no thread.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from paceenv.core import differences
from paceenv.core.differences import Mean
from paceenv.core.intervals import Interval
from paceenv.live.decide.blocks import ACTIVE, Plan
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

Kind = Literal["helps", "does not help", "insufficient evidence", "hurts"]


class Verdict(NamedTuple):
    """The result of a comparison, as a snapshot has it: ``gain`` is the relative fall of mean step time.

    ``low`` and ``high`` are the evaluation's interval. Before the first evaluation there is no gain.
    """

    verdict: Kind
    text: str
    gain: float | None
    low: float | None
    high: float | None
    pairs: int


class Comparison:
    """One candidate against no pacing, while the job runs.

    Evaluations follow 4, 8, 16, 32, ... pairs. Evaluation ``k`` has an error share of ``ALPHA / 2 ** k``, so all of
    them together err in at most ``ALPHA`` of the jobs. Between evaluations the last verdict stands. After one of
    ``memory_pairs`` (4, 8, 16, ...) the comparison starts anew with its own share; None: never.
    """

    def __init__(self, name: str, *, memory_pairs: int | None = None) -> None:
        self.name, self._memory_pairs, self._earlier = name, memory_pairs, False
        self._forget()
        self.verdict = self._evaluate(1.0)
        """The last evaluation's verdict."""

    def _forget(self) -> None:
        self.mean, self.evaluations = Mean(), 0
        """Of the log ratios of block means, with pacing over without, since it last started anew; and evaluations."""
        self._delays_s = self._paced_s = 0.0

    @property
    def pairs(self) -> int:
        return self.mean.count

    def take(self, ratio: float, delay_s: float, paced_s: float) -> bool:
        """Take in a pair of blocks; whether there was a new evaluation.

        This rank's delays took ``delay_s`` of the ``paced_s`` that the counted steps with pacing lasted.
        """
        self.mean.add(ratio)
        self._delays_s += delay_s
        self._paced_s += paced_s
        if self.pairs < FIRST_EVALUATION_PAIRS:
            self._settle(self._evaluate(1.0))  # its text counts them
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
        if not (self._earlier and new.verdict == "insufficient evidence" and new.pairs < self.verdict.pairs):
            self.verdict = new

    def _evaluate(self, error_share: float) -> Verdict:
        n, error = self.pairs, self.mean.error
        if n < FIRST_EVALUATION_PAIRS:  # no evaluation yet, so no error share is spent
            waits = f"insufficient evidence: {n} of at least {FIRST_EVALUATION_PAIRS} pairs of blocks"
            return Verdict("insufficient evidence", waits, None, None, None, n)
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
        return Verdict(kind, _sentence(kind, gain, n, undelayed), *gain, n)


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
        self.plan = plan
        self._pair: tuple[int, int] | None = None
        self._rows = array("d")  # of the pair of blocks under way, five numbers a step, in little memory
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
        """Take in a regular step; the number of the candidate that surely hurts since this iteration, if any.

        A step time that is not a positive number is left out.
        """
        turn = self.plan.turn(iteration, ticks)
        hurting = self._end_pair() if turn.pair != self._pair else None
        self._pair = turn.pair
        if turn.pair is not None and 0.0 < step_s < math.inf:
            self._rows.extend((turn.arm is not None, turn.counted, step_s / ticks, ticks, delay_s))
        return hurting

    def _end_pair(self) -> int | None:
        """The pair of blocks under way ends; the number of its candidate if that surely hurts since then.

        It does not count where a block has less than half of its counted iterations, or the candidate was stopped.
        """
        pair, (on, counts, each_s, ticks, delay_s) = self._pair, np.array(self._rows).reshape(-1, 5).T
        self._pair, self._rows = None, array("d")
        off, on = (on == 0.0) & (counts > 0.0), (on > 0.0) & (counts > 0.0)
        if pair is None or pair[1] in self.out:
            return None
        number, candidate = pair[1], self.candidates[pair[1]]
        if min(ticks[off].sum(), ticks[on].sum()) < 0.5 * self.plan.blocks[number].counted_iterations:
            return None
        ratio = float(differences.log_ratio(each_s[off], each_s[on], ticks[off], ticks[on]))
        evaluated = candidate.take(ratio, float(delay_s[on].sum()), float((each_s[on] * ticks[on]).sum()))
        return number if evaluated and candidate.verdict.verdict == "hurts" else None

    def final(self) -> None:
        """The last evaluation of every candidate that still paces, at the end of the job."""
        self._end_pair()
        for k, candidate in enumerate(self.candidates):
            if k not in self.out:
                candidate.final()

    @property
    def leading(self) -> Comparison:
        """The candidate that gained most so far."""
        return max(self.candidates, key=lambda one: -one.mean.value)

    def as_dict(self) -> dict[str, Any]:
        named, leader = enumerate(self.candidates), self.leading
        listed = [{"name": one.name, **one.verdict._asdict(), "stopped": self.out.get(k, "")} for k, one in named]
        canary = leader.verdict._asdict() | {"candidates": listed}
        if len(listed) > 1:
            canary["text"] = f"{leader.name}: {leader.verdict.text}"
        return {"canary": canary}
