"""The plan of mode tune: who paces in which iteration, a pure function of the words of rank 0 that every rank hears.

A word says what is on from an iteration on: one short taste of every candidate, a search among some of them, one
candidate deployed, or none. It holds
until an iteration that it names; without a newer word nothing is paced from there. So ranks that heard the same words
agree on every iteration, and a missing word means no pacing, on all ranks at once. No clock, no file, no thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from paceenv.live.decide.canary import ACTIVE_HOLDOUT_EVERY, BlockPlan, Schedule

Phase = Literal["taste", "search", "deployed", "none"]
PHASES: tuple[Phase, ...] = ("taste", "search", "deployed", "none")
KEPT_WORDS = 4
"""More than are ever needed at once: the one in force, and one for later."""
_MOST = 1 << 53


class Word(NamedTuple):
    """A decision of rank 0.

    Attributes:
        number: words are numbered from 1; a later one replaces an earlier one.
        from_iteration: the first iteration in which it holds.
        until_iteration: the end of its time, exclusive.
        phase: one of :data:`PHASES`.
        arms: numbers of the candidates: those that take turns in the search, or the one that is deployed.
        begin: iteration from which the blocks are counted; the same in a word that only prolongs another.
    """

    number: int
    from_iteration: int
    until_iteration: int
    phase: Phase
    arms: tuple[int, ...]
    begin: int

    def text(self) -> str:
        """As the ranks send it."""
        return json.dumps(self)

    @classmethod
    def parse(cls, text: str, arms: int) -> Word | None:
        """The word that ``text`` holds, of a plan with that many candidates; None for anything else."""
        try:
            number, first, until, phase, chosen, begin = json.loads(text)
            numbers = (number, first, until, begin, *chosen)
        except (ValueError, TypeError, RecursionError):
            return None
        if phase not in PHASES or any(type(one) is not int or not 0 <= one < _MOST for one in numbers):
            return None
        wrong = {"none": bool(chosen), "deployed": len(chosen) != 1}.get(phase, not chosen)
        if wrong or any(arm >= arms for arm in chosen) or len(set(chosen)) != len(chosen):
            return None
        return cls(number, first, until, cast(Phase, phase), tuple(chosen), begin)


class Turn(NamedTuple):
    """An iteration's place in the plan.

    Attributes:
        arm: the candidate that may pace; None: no pacing.
        pair: of a search, the pair of blocks that the iteration belongs to: begin of the word, round, candidate.
        counted: whether the iteration counts in its pair's comparison.
    """

    arm: int | None
    pair: tuple[int, int, int] | None = None
    counted: bool = False


class _Block(NamedTuple):
    begin: int
    end: int
    counted_from: int
    turn: Turn


NOBODY = Turn(None)


class TunePlan:
    """The plan as far as it was heard.

    A taste is one round of blocks just long enough to show harm. In a search every candidate gets a block of its own
    length in each round, next to a block without pacing of the same length. The order of the candidates and of the
    two blocks is drawn; of two successive rounds a candidate comes first in one, so that a steady trend cancels.
    """

    def __init__(self, seed: int, blocks: Sequence[BlockPlan]) -> None:
        self._seed, self.blocks = seed % 2**64, tuple(blocks)
        self.words: tuple[Word, ...] = ()
        """Replaced as a whole: one thread may hear while another one asks."""
        self._round: tuple[tuple[Word, int], list[_Block]] | None = None
        self._schedule: tuple[Word, Schedule] | None = None

    def hear(self, word: Word) -> None:
        """Take in a word; one that is not newer than the last changes nothing."""
        if not self.words or word.number > self.words[-1].number:
            self.words = (*self.words[1 - KEPT_WORDS :], word)

    def word(self, iteration: int) -> Word | None:
        """The word that holds in ``iteration``; None without one."""
        for word in reversed(self.words):
            if word.from_iteration <= iteration:
                return word if iteration < word.until_iteration else None
        return None

    def turn(self, iteration: int, ticks: int = 1) -> Turn:
        """Who may pace in ``iteration``.

        Args:
            ticks: iterations of the step that it ends; a step counts only in the block in which it began.
        """
        word = self.word(iteration)
        if word is None or word.phase == "none" or iteration < word.begin:
            return NOBODY
        if word.phase == "deployed":
            return Turn(word.arms[0]) if self.schedule(word).slot(iteration).on else NOBODY
        number, offset = self._place(word, iteration)
        for block in self._blocks_of(word, number):
            if offset < block.end:
                counted_from = max(block.counted_from, block.begin + ticks - 1)
                return block.turn._replace(counted=True) if offset >= counted_from else block.turn
        return NOBODY  # after the taste

    def schedule(self, word: Word) -> Schedule:
        """The blocks of a deployed candidate, with one block in ten held out."""
        known = self._schedule
        if known is None or (known[0].begin, known[0].arms) != (word.begin, word.arms):
            plan, first = self.blocks[word.arms[0]], word.begin
            made = plan.schedule(self._seed, first_iteration=first, holdout_every=ACTIVE_HOLDOUT_EVERY)
            self._schedule = known = (word, made)
        return known[1]

    def round_iterations(self, arms: Sequence[int], *, taste: bool = False) -> int:
        """Iterations of one round of a search among ``arms``, or of their taste."""
        return sum(2 * (self.blocks[k].taste_iterations if taste else self.blocks[k].block_iterations) for k in arms)

    def pair_end(self, iteration: int) -> int:
        """The first iteration at or after ``iteration`` at which no pair of a search is under way."""
        word = self.word(iteration)
        if word is None or word.phase != "search" or iteration <= word.begin:
            return iteration
        number, offset = self._place(word, iteration)
        ends = [0, *(block.end for block in self._blocks_of(word, number))][::2]
        return iteration - offset + min(end for end in ends if end >= offset)

    def _place(self, word: Word, iteration: int) -> tuple[int, int]:
        """The round, and the iteration in it."""
        since = iteration - word.begin
        return (0, since) if word.phase == "taste" else divmod(since, self.round_iterations(word.arms))

    def _blocks_of(self, word: Word, number: int) -> list[_Block]:
        known, key = self._round, (word._replace(number=0, from_iteration=0, until_iteration=0), number)
        if known is None or known[0] != key:
            self._round = known = (key, self._lay_out(word, number))
        return known[1]

    def _lay_out(self, word: Word, number: int) -> list[_Block]:
        def drawn(*of: int) -> bytes:
            return hashlib.blake2b(repr((self._seed, word.begin, *of)).encode(), digest_size=8).digest()

        found, at = list[_Block](), 0
        for arm in sorted(word.arms, key=lambda arm: drawn(number, arm)):
            plan, pair = self.blocks[arm], (word.begin, number, arm)
            paced_first = bool((drawn(number // 2, arm)[0] + number) & 1)
            for paced in (paced_first, not paced_first):
                end, counted_from = at + plan.block_iterations, at + plan.settle_iterations
                if word.phase == "taste":
                    end = counted_from = at + plan.taste_iterations  # too short to be compared
                found.append(_Block(at, end, counted_from, Turn(arm if paced else None, pair)))
                at = end
        return found
