"""The search of mode tune, on rank 0: which candidates stay, which one is deployed, and when that ends.

Best-arm identification with a fixed error probability: successive elimination on the intervals of
``paceenv.live.decide.experiment``, with the error shared out over candidates, comparisons and evaluations. Then the
winner is tested on, and rolled back when it stops paying. No clock, no file, no thread of its own: :meth:`Search.add`
belongs to the training thread, the rest to one other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceenv.core.intervals import Interval
from paceenv.live.decide.blocks import Phase, Plan, Turn, Word
from paceenv.live.decide.experiment import MEMORY_PAIRS, MIN_GAIN, Comparison, Pair, Pairs

ERROR = 0.05
"""Probability of a wrong decision in a whole search."""
TOLERANCE = 0.1
"""The search ends when no other candidate can be better than the leader by more than this share of its gain."""
FIRST_ROUNDS = 4
"""Losses of the first rounds are measured against the time of so many: no search is shorter."""
MOST_PAIRS, MOST_LOSS = 64, 0.01
"""Most pairs of blocks for each candidate in a search, and most of its time that may be lost, a share."""
SURE_ERRORS = 2.5
TAKEN_IN = 5
"""Iterations after the end of a block in which its last steps are taken in."""
NOTHING_LEFT = "no candidate helps"
LONGEST_BACK_OFF = 64
"""Most durations of the last search until the next one; doubles with every search that found no lasting gain."""


class State(NamedTuple):
    """What the last word that all ranks know has decided.

    Attributes:
        winner: number of the candidate that is deployed; None: none is.
        test: its comparison since then.
        why: why nothing is deployed, or why the winner is, in words.
        searches: how many have ended.
        back_off: durations of the last search until the next one.
        none_from: when the last search or deployment ended, an iteration.
        again_at: when the next search begins, if the bound of the loss holds by then.
    """

    winner: int | None = None
    test: Comparison | None = None
    why: str = ""
    searches: int = 0
    back_off: int = 1
    none_from: int = 0
    again_at: int = 0


class Search:
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
        plan: Plan,
        *,
        min_gain: float = MIN_GAIN,
        most_loss: float = MOST_LOSS,
        most_pairs: int = MOST_PAIRS,
    ) -> None:
        self.plan, self._names, self._pairs = plan, tuple(names), Pairs(plan)
        self.min_gain, self.most_loss, self.most_pairs = min_gain, most_loss, most_pairs
        self.state = State()
        self._faults: dict[int, str] = {}
        self._closed: deque[Pair] = deque()
        self._begin()

    def _begin(self) -> None:
        """A new search: everything is open again, but what failed on a rank is off there for good."""
        self._each = ERROR / (len(self._names) * (len(self._names) + 1) / 2)
        """The error of one candidate's intervals: one against no pacing, and one against each of the others."""
        self.arms = [
            Comparison(name, min_gain=self.min_gain, to_skip=blocks.warm_blocks, error=self._each)
            for name, blocks in zip(self._names, self.plan.blocks, strict=True)
        ]
        self._drop_faults()
        self._closed.clear()
        self.searched_s, self._iterations, self._lasted = 0.0, 0, False

    # ------------------------------------------------------------------------------------------ the training thread

    def add(self, turn: Turn, step_s: float, ticks: int = 1) -> None:
        """Take in a regular step."""
        pair = self._pairs.add(turn, step_s, ticks, step_s)  # other ranks may have the delays: never "not delayed"
        if pair is not None:
            self._closed.append(pair)

    def give_up(self, arm: int, why: str) -> None:
        """A candidate cannot go on, on this rank: it is dropped with the next decision."""
        self._faults[arm] = why

    # --------------------------------------------------------------------------------------------- the other thread

    def next(self, now: int, lead: int, lease: int) -> tuple[Word, State] | None:
        """The next word for all ranks and what it decides; None where the last word still says it all.

        It counts only with :meth:`follow`, after it was sent. What was measured stays in any case.
        """
        last, begin = self.plan.words[-1] if self.plan.words else None, now + lead
        if last is None:
            return self._say(self.state, begin, lease, "taste", self._in())
        if last.from_iteration > now:
            return None  # first the word that is under way
        self._take_in()
        if last.phase == "taste":
            if now >= last.begin + self.plan.round_iterations(last.arms, "taste") + TAKEN_IN:
                self._mind_the_loss()
                left = self._in()
                return self._say(self.state, begin, lease, "search", left) if left else self._none(begin, lease)
        elif last.phase == "search":
            if (found := self._search(last, self.plan.pair_end(begin), lease)) is not None:
                return found
        elif last.phase == "deployed":
            if (why := self._stops_paying(last.arms[0])) != "":
                return self._none(begin, lease, why)
        elif now >= self._again_at() and len(self._faults) < len(self.arms):
            self._begin()
            return self._say(self.state, begin, lease, "taste", self._in())
        if last.until_iteration - now < lease // 2:
            return last._replace(number=last.number + 1, until_iteration=now + lease), self.state
        return None

    def follow(self, word: Word, state: State) -> None:
        """A word was sent: it counts here, too."""
        self.state = state
        self.plan.hear(word)

    def _say(
        self, state: State, begin: int, lease: int, phase: Phase, arms: tuple[int, ...] = ()
    ) -> tuple[Word, State]:
        number = self.plan.words[-1].number + 1 if self.plan.words else 1
        return Word(number, begin, begin + lease, phase, arms, begin), state

    def _in(self) -> tuple[int, ...]:
        return tuple(k for k, arm in enumerate(self.arms) if not arm.dropped)

    def _drop_faults(self) -> None:
        for k, why in self._faults.items():
            self.arms[k].dropped = self.arms[k].dropped or why

    def _take_in(self) -> None:
        """The pairs that are over by now: of the search, or of what is deployed."""
        deployed = {word.begin for word in self.plan.words if word.phase == "deployed"}
        while self._closed:
            pair = self._closed.popleft()
            test = self.state.test
            if pair.key[0] not in deployed:
                self.searched_s += pair.all_s
                self._iterations += pair.iterations
                self.arms[pair.key[2]].take(pair)
            elif test is not None and test.take(pair):
                self._lasted |= test.verdict.kind == "helps" and test.verdict.pairs >= MEMORY_PAIRS
        self._drop_faults()

    def _search(self, last: Word, begin: int, lease: int) -> tuple[Word, State] | None:
        """The word that ends or narrows the search; None to go on."""
        self._eliminate()
        self._mind_the_loss()
        left = self._in()
        if not left:
            return self._none(begin, lease)
        if (leader := self._leader(left)) is not None:
            return self._deploy(leader, begin, lease)
        if min(self.arms[k].pairs for k in left) >= self.most_pairs:
            return self._none(begin, lease, f"after {self.most_pairs} pairs no candidate surely helps")
        return self._say(self.state, begin, lease, "search", left) if left != last.arms else None

    def _eliminate(self) -> None:
        known = [(arm, arm.verdict.gain) for arm in self.arms if arm.verdict.gain is not None and not arm.dropped]
        best = max((arm for arm, _ in known), key=lambda arm: arm.value, default=None)
        for arm, gain in known:
            if gain.high < 0.0:
                arm.dropped = "it hurts"
            elif gain.high < self.min_gain:
                arm.dropped = f"it gains less than {100 * self.min_gain:g} %"
            elif best is not None and best is not arm and best.better_by(arm, self._each) > 0.0:
                arm.dropped = f"{best.name} is better"

    def _leader(self, left: Sequence[int]) -> int | None:
        """The winner, if the search can end with one."""
        best = max(left, key=lambda k: self.arms[k].value if self.arms[k].evaluations else -math.inf)
        leader = self.arms[best]
        if leader.verdict.kind != "helps" or leader.value < self.min_gain:
            return None
        others = [self.arms[k] for k in left if k != best]
        tolerance = max(self.min_gain, TOLERANCE * leader.value)
        clear = all(arm.evaluations and leader.better_by(arm, self._each) >= -tolerance for arm in others)
        return best if clear or min(self.arms[k].pairs for k in left) >= self.most_pairs else None

    def _deploy(self, winner: int, begin: int, lease: int) -> tuple[Word, State]:
        name, gain = self.arms[winner].name, self.arms[winner].verdict.gain
        assert gain is not None
        state = self.state._replace(
            winner=winner,
            test=Comparison(name, min_gain=self.min_gain, memory_pairs=MEMORY_PAIRS),
            why=f"{name} helps by {_percent(gain)} of mean step time",
            searches=self.state.searches + 1,
        )
        return self._say(state, begin, lease, "deployed", (winner,))

    def _stops_paying(self, winner: int) -> str:
        """Why the winner must go; "" while it pays."""
        assert self.state.test is not None
        if (fault := self._faults.get(winner, "")) != "":
            return fault
        verdict = self.state.test.verdict
        return f"{self._names[winner]} {verdict.text}" if verdict.kind in ("hurts", "does not help") else ""

    def _none(self, begin: int, lease: int, why: str = NOTHING_LEFT) -> tuple[Word, State]:
        """Nothing is deployed; the next search comes after a back-off."""
        searched = max(self._iterations, self.plan.round_iterations(range(len(self.arms))))
        back_off = 1 if self._lasted else self.state.back_off
        state = State(
            why=why,
            searches=self.state.searches + (self.state.test is None),
            back_off=min(2 * back_off, LONGEST_BACK_OFF),
            none_from=begin,
            again_at=begin + back_off * searched,
        )
        return self._say(state, begin, lease, "none")

    # ----------------------------------------------------------------------------------------- the bound of the loss

    def _mind_the_loss(self) -> None:
        """Drop candidates that surely pass their share of the bound with their next block.

        Where all of them together have surely passed it, drop all that cost time.
        """
        if not self.searched_s:
            return
        step_s, noise = self.searched_s / self._iterations, self._pair_noise()
        first_s = FIRST_ROUNDS * step_s * self.plan.round_iterations(range(len(self.arms)))
        allowed_s, errors_s = self.most_loss * max(self.searched_s, first_s), list[float]()
        passes = list[int]()
        for k, arm in enumerate(self.arms):
            block_s = step_s * self.plan.blocks[k].block_iterations
            blocks, error_s = max(arm.lost_from_s / block_s, 1e-9), math.sqrt(arm.variance_s2)
            if blocks >= 1.0 and noise < math.inf:  # from pair to pair, if that is more than within blocks
                error_s = max(error_s, noise * block_s * math.sqrt(blocks))
            errors_s.append(error_s)
            sure_s = max(arm.loss_s - SURE_ERRORS * error_s, 0.0)
            if sure_s * (1.0 + 1.0 / blocks) > allowed_s / len(self.arms):
                passes.append(k)
        sum_passes = self.loss_s - SURE_ERRORS * math.hypot(*errors_s) > allowed_s
        for k in self._in():
            if k in passes or (sum_passes and self.arms[k].loss_s > 0.0):
                self.arms[k].dropped = f"more than {100 * self.most_loss:g} % of the search's time would be lost"

    def _pair_noise(self) -> float:
        """Standard deviation of a pair's log ratio, over all candidates; infinite while unknown."""
        squares, degrees = sum(arm.mean.squares for arm in self.arms), sum(max(arm.pairs - 1, 0) for arm in self.arms)
        return math.sqrt(squares / degrees) if degrees else math.inf

    def _again_at(self) -> int:
        """When the next search may begin: the last one and the waiting together then keep to the bound of the loss."""
        owed = math.ceil(max(self.loss_share, 0.0) / self.most_loss * self._iterations)
        return max(self.state.again_at, self.state.none_from + owed)

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

    def as_dict(self, tick_s: float | None) -> dict[str, Any]:
        """The state as plain data for a snapshot."""
        winner, test = self.state.winner, self.state.test
        found = []
        for arm in self.arms:
            gain = arm.verdict.gain
            known = {"gain": arm.value if arm.pairs else None, "low": gain and gain.low, "high": gain and gain.high}
            found.append({"name": arm.name, "pairs": arm.pairs, **known, "dropped": arm.dropped})
        return {
            "phase": self.phase,
            "text": self.text(tick_s),
            "winner": self._names[winner] if winner is not None else "none",
            "why": self.state.why,
            "error": ERROR,
            "most_loss": self.most_loss,
            "test": test.verdict.text if test is not None else "",
            "candidates": found,
        }

    def text(self, tick_s: float | None) -> str:
        """The state in one line."""
        left = self._in()
        if self.phase in ("taste", "search"):
            at_most = ""
            if left and tick_s:
                rounds = self.most_pairs - min(self.arms[k].pairs - self.arms[k].to_skip for k in left)
                minutes = max(rounds, 0) * self.plan.round_iterations(left) * tick_s / 60.0
                at_most = f", at most {minutes:.2g} min more"
            names = ", ".join(self.arms[k].name for k in left)
            return f"searches among {names}{at_most}; lost so far {100 * self.loss_share:+.2f} % of its time"
        if self.state.winner is not None:
            return f"winner: {self.state.why}; the search lost {100 * self.loss_share:+.2f} % of its time"
        return f"winner: none, as {self.state.why}" if self.state.why else "waits for the start of the search"


def _percent(gain: Interval) -> str:
    value, low, high = (100.0 * one for one in gain)
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"
