"""The tuner of mode tune, on rank 0: which candidates stay in the search, which one is deployed, and when that ends.

Best-arm identification with a fixed error probability: successive elimination on Student's intervals of the pairs' log
ratios of block means, with the error shared out over candidates, comparisons and evaluations. Then the winner is
tested on, and rolled back when it stops paying. Pairs come from :class:`paceenv.live.decide.tune_plan.TunePlan`.
No clock, no file, no thread of its own: :meth:`Tuner.add` belongs to the training thread, the rest to one other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import stdev
from typing import Any, NamedTuple

from paceenv.core.intervals import Interval
from paceenv.core.student_t import student_t_quantile
from paceenv.live.decide.canary import MIN_GAIN, BlockPlan, PairedComparison, Stretch, clip_s
from paceenv.live.decide.tune_plan import Phase, TunePlan, Turn, Word

ERROR = 0.05
"""Probability of a wrong decision in a whole search."""
EVALUATIONS = tuple(n for k in range(2, 14) for n in (2**k, 3 * 2 ** (k - 1)))
"""Pairs of a candidate after which it is evaluated: 4, 6, 8, 12, 16, 24, ..."""
TOLERANCE = 0.1
"""The search ends when no other candidate can be better than the leader by more than this share of its gain."""
FIRST_ROUNDS = 4
"""Losses of the first rounds are measured against the time of so many: no search is shorter."""
MOST_PAIRS, MOST_LOSS = 64, 0.01
"""Most pairs of blocks for each candidate in a search, and most of its time that may be lost, a share."""
AHEAD_PAIRS = 5
"""A candidate that was evaluated rests while another one is so many pairs behind it, as one that warms up long is. The
released policy warms up in four of its usual blocks, for which no word is worth while."""
PARTS = 4
"""Parts of a block whose means tell the noise within it, before there are pairs enough to compare."""
SURE_ERRORS = 2.5
TAKEN_IN = 5
"""Iterations after the end of a block in which its last steps are taken in."""
NOTHING_LEFT = "no candidate helps"
MEMORY_PAIRS = 32
"""The test of a deployed winner restarts after this many pairs, so that an old gain does not hide a new loss."""
LONGEST_BACK_OFF = 64
"""Most durations of the last search until the next one; doubles with every search that found no lasting gain."""


class _Pair(NamedTuple):
    """A pair of blocks that is over: log ratio of clipped means, loss with its standard error, time and iterations."""

    arm: int
    ratio: float | None
    loss_s: float
    error_s: float
    all_s: float
    iterations: int


class _Open:
    """The pair under way: its steps without and with pacing, counted and all."""

    def __init__(self, key: tuple[int, int, int]) -> None:
        self.key = key
        self.counted = Stretch(), Stretch()
        self.all = Stretch(), Stretch()

    def closed(self, plan: BlockPlan) -> _Pair | None:
        (off, on), counted = self.counted, plan.block_iterations - plan.settle_iterations
        off_all, on_all = self.all
        if not off_all.iterations or not on_all.iterations:
            return None
        most_s = clip_s(off_all, on_all)
        whole = 2 * min(off.iterations, on.iterations) >= counted  # as in the canary
        ratio = math.log(on.mean_s(most_s) / off.mean_s(most_s)) if whole else None
        loss_s = on_all.iterations * (on_all.mean_s(most_s) - off_all.mean_s(most_s))
        error_s = on_all.iterations * math.hypot(_error(off_all, most_s), _error(on_all, most_s))
        error_s = error_s if error_s < math.inf else abs(loss_s)  # a block of one step must not hide all other pairs
        all_s = off_all.total_s(most_s) + on_all.total_s(most_s)
        return _Pair(self.key[2], ratio, loss_s, error_s, all_s, off_all.iterations + on_all.iterations)


def _error(block: Stretch, most_s: float) -> float:
    """Standard error of a block's mean, from the means of its parts or of few steps; infinite for a single one."""
    size = len(block.steps_s) // PARTS
    if not size:
        few_s = [min(step_s, most_s) for step_s in block.steps_s]
        return stdev(few_s) / math.sqrt(len(few_s)) if len(few_s) > 1 else math.inf
    means = [block.part(k * size, size).mean_s(most_s) for k in range(PARTS)]
    return stdev(means) / math.sqrt(PARTS)


class Arm:
    """What is known about one candidate.

    Attributes:
        name: as it was given.
        pairs: pairs compared.
        gain: relative fall of mean step time with the interval of the last evaluation; None before the first.
        dropped: why it left the search, or "".
    """

    def __init__(self, name: str, plan: BlockPlan) -> None:
        self.name, self.plan = name, plan
        self.restart()

    def restart(self) -> None:
        """A new search: everything is open again."""
        self.pairs, self.mean, self.squares, self.evaluations = 0, 0.0, 0.0, 0
        self.to_skip = -(-self.plan.warm_iterations // self.plan.block_iterations)  # pairs in which it warms up
        self.gain: Interval | None = None
        self.seen = (0.0, math.inf, 0)  # mean, squared error and pairs at the last evaluation
        self.dropped = ""
        self.loss_s = self.paced_s = self.variance_s2 = 0.0  # against no pacing, in all its pairs

    @property
    def progress(self) -> int:
        """Pairs compared, less those that are still to come in its warm-up."""
        return self.pairs - self.to_skip

    @property
    def value(self) -> float:
        """Gain so far."""
        return -math.expm1(self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation of the log ratios; infinite before there are two."""
        return math.sqrt(self.squares / (self.pairs - 1)) if self.pairs > 1 else math.inf

    def take(self, ratio: float) -> None:
        """Take in the log ratio of a pair."""
        if self.to_skip:
            self.to_skip -= 1
            return
        self.pairs += 1
        moved = ratio - self.mean
        self.mean += moved / self.pairs
        self.squares += moved * (ratio - self.mean)

    def evaluate(self, error: float) -> None:
        """Evaluate if it is time; all evaluations together miss the truth with at most the probability ``error``."""
        due = sum(n <= self.pairs for n in EVALUATIONS)
        if due <= self.evaluations:
            return
        self.evaluations, self.seen = due, (self.mean, self.deviation**2 / self.pairs, self.pairs)
        half = student_t_quantile(0.5 * _share(error, due), self.pairs - 1) * math.sqrt(self.seen[1])
        self.gain = Interval(*(-math.expm1(x) for x in (self.mean, self.mean + half, self.mean - half)))

    def better_by(self, other: Arm, error: float) -> tuple[float, float]:
        """Interval of how much more it gains than ``other``, as both were at their last evaluations; likewise."""
        (mean, variance, pairs), (other_mean, other_variance, other_pairs) = self.seen, other.seen
        both = variance + other_variance
        parts = variance**2 / (pairs - 1) + other_variance**2 / (other_pairs - 1)
        degrees = both**2 / parts if parts > 0.0 else pairs + other_pairs - 2  # Welch and Satterthwaite
        look = self.evaluations + other.evaluations - 1  # grows with either one, so that no share is spent twice
        share = _share(error, look)
        half = student_t_quantile(0.5 * share, degrees) * math.sqrt(both)
        return other_mean - mean - half, other_mean - mean + half


def _share(error: float, evaluation: int) -> float:
    """The share of an error probability for the first, second, ... evaluation; they add up to it."""
    return error / (evaluation * (evaluation + 1))


_Said = tuple[int | None, tuple[Word, PairedComparison] | None, str, int, int, int, int]
"""Winner, its test, why, searches, back-off, when the next search begins, and when the last one ended."""


class Tuner:
    """Decides what all ranks do next.

    A candidate leaves the search when its interval says that it hurts, that it cannot gain ``min_gain``, or that
    another one is better. The search ends with a winner when no other candidate left can be better than it by more than
    ``TOLERANCE`` of its gain or ``min_gain``; with none when no candidate is left; and after ``most_pairs`` pairs with
    the leader, if it surely helps.

    Its loss against no pacing is bounded. It begins with a taste of every candidate in short blocks. A candidate that
    has used up its share of the bound is dropped at once, after its first pair if need be. Before a round would
    pass the bound, the worst of the candidates that cost time are dropped; when none is left the search ends with
    none. A loss counts as far as it exceeds ``SURE_ERRORS`` standard errors of its measurement. A loss of the first
    pairs beyond the bound cannot be undone; the next search waits until the bound holds over search and waiting
    together.

    Args:
        min_gain: smallest relative gain that is worth having, 0 to 1.
        most_loss: most of a search's time that may be lost, a share, above 0 and at most 1.
        most_pairs: most pairs of a candidate in a search, at least 4.
    """

    def __init__(
        self,
        names: Sequence[str],
        plan: TunePlan,
        *,
        min_gain: float = MIN_GAIN,
        most_loss: float = MOST_LOSS,
        most_pairs: int = MOST_PAIRS,
    ) -> None:
        self.plan, self.arms = plan, [Arm(*one) for one in zip(names, plan.blocks, strict=True)]
        self.min_gain, self.most_loss, self.most_pairs = min_gain, most_loss, most_pairs
        self.winner: int | None = None
        self.why = ""
        """Why nothing is deployed, or why the winner is, in words."""
        self.searches = 0
        self._faults: dict[int, str] = {}
        self._open: _Open | None = None
        self._closed: deque[_Pair] = deque()
        self._deployed: tuple[Word, PairedComparison] | None = None
        self._back_off, self._again_at, self._none_from = 1, 0, 0
        self._was = self._said_so_far()
        self._begin_search()

    def _begin_search(self) -> None:
        for k, arm in enumerate(self.arms):
            arm.restart()
            arm.dropped = self._faults.get(k, "")  # what failed on a rank is off there for good
        self._closed.clear()
        self.searched_s = 0.0
        self._iterations = 0

    # ------------------------------------------------------------------------------------------ the training thread

    def add(self, iteration: int, turn: Turn, step_s: float, ticks: int = 1) -> None:
        """Take in a regular step; a step time that is not a positive number is left out."""
        if not 0.0 < step_s < math.inf:
            return
        open_ = self._open
        if open_ is not None and turn.pair != open_.key:
            self._open = None
            if (closed := open_.closed(self.plan.blocks[open_.key[2]])) is not None:
                self._closed.append(closed)
            open_ = None
        if turn.pair is not None:
            if open_ is None:
                open_ = self._open = _Open(turn.pair)
            paced = turn.arm is not None
            open_.all[paced].add(step_s, ticks)
            if turn.counted:
                open_.counted[paced].add(step_s, ticks)
        if (deployed := self._deployed) is not None and iteration >= deployed[0].begin:
            deployed[1].add(iteration, step_s, step_s, ticks)  # other ranks may have the delays: never "not delayed"

    def give_up(self, arm: int, why: str) -> None:
        """A candidate cannot go on, on this rank: it is dropped with the next decision."""
        self._faults[arm] = why

    # --------------------------------------------------------------------------------------------- the other thread

    def decide(self, now: int, lead: int, lease: int) -> Word | None:
        """The next word for all ranks, taken in here at once; None where the last one still says it all."""
        word = self.draft(now, lead, lease)
        if word is not None:
            self.plan.hear(word)
        return word

    def draft(self, now: int, lead: int, lease: int) -> Word | None:
        """As :meth:`decide`, but the word counts here only when the plan hears it: after it was sent."""
        self._was = self._said_so_far()
        last = self.plan.words[-1] if self.plan.words else None
        if last is not None and last.from_iteration > now:
            return None  # first the word that is under way
        if last is None:
            return self._say(now + lead, lease, "taste", self._in())
        if last.phase == "taste":
            if now >= last.begin + self.plan.round_iterations(last.arms, taste=True) + TAKEN_IN:
                self._take_in()
                self._mind_the_loss()
                left, begin = self._in(), now + lead
                return self._say(begin, lease, "search", left) if left else self._none(begin, lease, NOTHING_LEFT)
        elif last.phase == "search":
            self._take_in()
            if (word := self._search(last, now + lead, lease)) is not None:
                return word
        elif last.phase == "deployed":
            if (why := self._stops_paying()) != "":
                return self._none(now + lead, lease, why)
        else:
            self._take_in()  # candidates went on until every rank had heard of the end
            self._again_at = max(self._again_at, self._none_from + self._owed())
            if now >= self._again_at and len(self._faults) < len(self.arms):
                self._begin_search()
                return self._say(now + lead, lease, "taste", self._in())
        if last.until_iteration - now < lease // 2:
            return last._replace(number=last.number + 1, until_iteration=now + lease)
        return None

    def _said_so_far(self) -> _Said:
        return self.winner, self._deployed, self.why, self.searches, self._back_off, self._again_at, self._none_from

    def abandon(self) -> None:
        """The drafted word could not be sent in time: what it said is taken back, and what was measured stays."""
        (self.winner, self._deployed, self.why, self.searches, self._back_off, self._again_at, self._none_from) = (
            self._was
        )

    def _in(self) -> tuple[int, ...]:
        return tuple(k for k, arm in enumerate(self.arms) if not arm.dropped)

    def _take_in(self) -> None:
        """The pairs that are over by now."""
        while self._closed:
            pair = self._closed.popleft()
            arm = self.arms[pair.arm]
            self.searched_s += pair.all_s
            self._iterations += pair.iterations
            arm.loss_s += pair.loss_s
            arm.paced_s += 0.5 * pair.all_s
            arm.variance_s2 += pair.error_s**2
            if pair.ratio is not None:
                arm.take(pair.ratio)
        for k, why in self._faults.items():
            self.arms[k].dropped = self.arms[k].dropped or why

    def _search(self, last: Word, from_iteration: int, lease: int) -> Word | None:
        """The word that ends or narrows the search; None to go on."""
        for k in self._in():
            self.arms[k].evaluate(self._each)
        self._eliminate()
        self._mind_the_loss()
        left = self._in()
        if not left:
            return self._none(self.plan.pair_end(from_iteration), lease, NOTHING_LEFT)
        leader = self._leader(left)
        if leader is not None:
            return self._deploy(leader, self.plan.pair_end(from_iteration), lease)
        if min(self.arms[k].pairs for k in left) >= self.most_pairs:
            why = f"after {self.most_pairs} pairs no candidate surely helps"
            return self._none(self.plan.pair_end(from_iteration), lease, why)
        turns = self._turns(left)
        if turns != last.arms:
            return self._say(self.plan.pair_end(from_iteration), lease, "search", turns)
        return None

    def _turns(self, left: Sequence[int]) -> tuple[int, ...]:
        """The candidates of the next rounds: not those that would only wait for others to catch up."""
        behind = min(self.arms[k].progress for k in left)
        return tuple(k for k in left if self.arms[k].gain is None or self.arms[k].progress < behind + AHEAD_PAIRS)

    @property
    def _each(self) -> float:
        """The error of one candidate's intervals: one against no pacing, and one against each of the others."""
        return ERROR / (len(self.arms) * (len(self.arms) + 1) / 2)

    def _eliminate(self) -> None:
        known = [self.arms[k] for k in self._in() if self.arms[k].gain is not None]
        best = max(known, key=lambda arm: arm.value, default=None)
        for arm in known:
            gain = arm.gain
            assert gain is not None
            if gain.high < 0.0:
                arm.dropped = "it hurts"
            elif gain.high < self.min_gain:
                arm.dropped = f"it gains less than {100 * self.min_gain:g} %"
            elif best is not None and best is not arm and best.better_by(arm, self._each)[0] > 0.0:
                arm.dropped = f"{best.name} is better"

    def _leader(self, left: Sequence[int]) -> int | None:
        """The winner, if the search can end with one."""
        known = [k for k in left if self.arms[k].gain is not None]
        best = max(known, key=lambda k: self.arms[k].value, default=None)
        gain = self.arms[best].gain if best is not None else None
        if best is None or gain is None or not (gain.low > 0.0 and self.arms[best].value >= self.min_gain):
            return None
        leader = self.arms[best]
        others = [self.arms[k] for k in left if k != best]
        tolerance = max(self.min_gain, TOLERANCE * leader.value)
        clear = all(arm.gain is not None and leader.better_by(arm, self._each)[0] >= -tolerance for arm in others)
        return best if clear or min(self.arms[k].pairs for k in left) >= self.most_pairs else None

    def _mind_the_loss(self) -> None:
        """Drop candidates that have used up their share of the bound, and the worst while a round would pass it."""
        if not self.searched_s:
            return
        step_s, noise = self.searched_s / self._iterations, self._pair_noise()
        every_s = step_s * self.plan.round_iterations(range(len(self.arms)))
        why = f"more than {100 * self.most_loss:g} % of the search's time would be lost"
        errors_s = {k: self._loss_error_s(arm, noise) for k, arm in enumerate(self.arms)}
        for k in self._in():
            allowed_s = self.most_loss * max(self.searched_s, FIRST_ROUNDS * every_s) / len(self.arms)
            if self.arms[k].loss_s - SURE_ERRORS * errors_s[k] > allowed_s:
                self.arms[k].dropped = why
        while left := self._in():
            more_s = {k: self._round_loss_s(k, errors_s[k], step_s) for k in left}
            round_s = step_s * self.plan.round_iterations(left)
            sure_s = self.loss_s - SURE_ERRORS * math.hypot(*errors_s.values())
            worst = max(left, key=lambda k: more_s[k])
            allowed_s = self.most_loss * max(self.searched_s + round_s, FIRST_ROUNDS * every_s)
            if more_s[worst] <= 0.0 or sure_s + sum(more_s.values()) <= allowed_s:
                return
            self.arms[worst].dropped = why

    def _loss_error_s(self, arm: Arm, noise: float) -> float:
        """Standard error of a candidate's loss, seconds: within its blocks, or from pair to pair if that is more."""
        pairs = arm.paced_s / max(arm.plan.block_iterations * self.searched_s / self._iterations, 1e-12)
        between_s = noise * arm.paced_s / math.sqrt(pairs) if pairs >= 1.0 and noise < math.inf else 0.0
        return max(math.sqrt(arm.variance_s2), between_s)

    def _round_loss_s(self, k: int, error_s: float, step_s: float) -> float:
        """The loss that a candidate surely adds in a round, seconds; below 0 where it surely helps."""
        arm = self.arms[k]
        if not arm.paced_s or not math.isfinite(error_s):
            return 0.0
        sure_s = math.copysign(max(abs(arm.loss_s) - SURE_ERRORS * error_s, 0.0), arm.loss_s)
        return sure_s / arm.paced_s * step_s * arm.plan.block_iterations

    def _pair_noise(self) -> float:
        """Standard deviation of a pair's log ratio, over all candidates; infinite while unknown."""
        squares, degrees = sum(arm.squares for arm in self.arms), sum(max(arm.pairs - 1, 0) for arm in self.arms)
        return math.sqrt(squares / degrees) if degrees else math.inf

    def _deploy(self, winner: int, from_iteration: int, lease: int) -> Word:
        gain = self.arms[winner].gain
        self.winner = winner
        self.searches += 1
        shown = f" by {_percent(gain)}" if gain is not None else ""
        self.why = f"{self.arms[winner].name} helps{shown} of mean step time"
        word = self._say(from_iteration, lease, "deployed", (winner,))
        comparison = PairedComparison(self.plan.schedule(word), min_gain=self.min_gain, memory_pairs=MEMORY_PAIRS)
        self._deployed = word, comparison
        return word

    def _stops_paying(self) -> str:
        """Why the winner must go; "" while it pays."""
        assert self._deployed is not None
        word, comparison = self._deployed
        if (fault := self._faults.get(word.arms[0], "")) != "":
            return fault
        verdict = comparison.verdict
        if verdict.kind == "helps" and verdict.pairs >= MEMORY_PAIRS:
            self._back_off = 1  # it lasted
        return f"{self.arms[word.arms[0]].name} {verdict.text}" if verdict.kind in ("hurts", "does not help") else ""

    def _none(self, from_iteration: int, lease: int, why: str) -> Word:
        """Nothing is deployed; the next search comes after a back-off."""
        if self._deployed is None:
            self.searches += 1
        self.winner, self._deployed, self.why = None, None, why
        searched = max(self._iterations, self.plan.round_iterations(range(len(self.arms))))
        self._none_from = from_iteration
        self._again_at = from_iteration + max(self._back_off * searched, self._owed())
        self._back_off = min(2 * self._back_off, LONGEST_BACK_OFF)
        return self._say(from_iteration, lease, "none", ())

    def _owed(self) -> int:
        """Iterations of waiting after which the search and they together keep to the bound of the loss."""
        return math.ceil(max(self.loss_share, 0.0) / self.most_loss * self._iterations)

    def _say(self, from_iteration: int, lease: int, phase: Phase, arms: tuple[int, ...]) -> Word:
        number = self.plan.words[-1].number + 1 if self.plan.words else 1
        return Word(number, from_iteration, from_iteration + lease, phase, arms, from_iteration)

    # ------------------------------------------------------------------------------------------------------- report

    @property
    def phase(self) -> Phase:
        """What the last word says."""
        return self.plan.words[-1].phase if self.plan.words else "none"

    @property
    def loss_s(self) -> float:
        """Time lost in the search against no pacing, seconds."""
        return sum(arm.loss_s for arm in self.arms)

    @property
    def loss_share(self) -> float:
        """Share of the search's time that was lost against no pacing; below 0 where the candidates gained."""
        return self.loss_s / self.searched_s if self.searched_s else 0.0

    def left_iterations(self) -> int | None:
        """Iterations that the search lasts at most; None where there is none."""
        left = self._in()
        if self.phase not in ("taste", "search") or not left:
            return None
        behind = min(self.arms[k].progress for k in left)
        rounds = max(self.most_pairs - behind, 0)
        rests = {k: max(self.arms[k].progress - behind - (AHEAD_PAIRS - 1), 0) for k in left}
        return sum(max(rounds - rests[k], 0) * self.plan.round_iterations([k]) for k in left)

    def as_dict(self, tick_s: float | None) -> dict[str, Any]:
        """The state as plain data for a snapshot."""
        verdict = self._deployed[1].verdict if self._deployed else None
        return {
            "phase": self.phase,
            "text": self.text(tick_s),
            "winner": self.arms[self.winner].name if self.winner is not None else "none",
            "why": self.why,
            "error": ERROR,
            "most_loss": self.most_loss,
            "test": verdict.text if verdict is not None else "",
            "candidates": [
                {
                    "name": arm.name,
                    "pairs": arm.pairs,
                    "gain": arm.value if arm.pairs else None,
                    "low": arm.gain.low if arm.gain else None,
                    "high": arm.gain.high if arm.gain else None,
                    "dropped": arm.dropped,
                }
                for arm in self.arms
            ],
        }

    def text(self, tick_s: float | None) -> str:
        """The state in one line."""
        if self.phase in ("taste", "search"):
            left, minutes = self._in(), self.left_iterations()
            at_most = f", at most {minutes * tick_s / 60.0:.2g} min more" if minutes is not None and tick_s else ""
            names = ", ".join(self.arms[k].name for k in left)
            return f"searches among {names}{at_most}; lost so far {100 * self.loss_share:+.2f} % of its time"
        if self.winner is not None:
            return f"winner: {self.why}; the search lost {100 * self.loss_share:+.2f} % of its time"
        return f"winner: none, as {self.why}" if self.why else "waits for the start of the search"


def _percent(gain: Interval) -> str:
    value, low, high = (100.0 * one for one in gain)
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"
