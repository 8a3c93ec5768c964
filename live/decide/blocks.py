"""Who paces in which iteration: paired blocks with and without pacing, a pure function of seed and words.

A word says what is on from an iteration on. In modes canary and active every rank knows the one word from its options:
all candidates take turns, for ever. In mode tune rank 0 sends words: a short taste of every candidate, a search among
some, one deployed, or none. A word holds until an iteration that it names; without a newer one nothing is paced from
there. So ranks that know the same words agree on every iteration. No clock, no file, no thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

from paceenv.core import pacing
from paceenv.policies.base import Policy

RAMP_ITERATIONS = round(2.0 / pacing.SLACK_STEP)
"""Two time constants of the slowest rule's approach, after which a job has settled with or without its delays."""
PHASE_ITERATIONS = 80
"""The same for two jobs that were shifted apart: without delays they take that long to collide again. Measured in
simulation: blocks of 60 show a quarter of the gain that always pacing has there, blocks of 240 all of it."""
SETTLE_SHARE = 1 / 3
"""Most of a block that is not counted."""
BLOCK_ITERATIONS = 60
"""What :func:`block_plan` gives a rule on slack, at the usual control interval."""

Phase = Literal["canary", "taste", "search", "deployed", "none"]
SENT: tuple[Phase, ...] = ("taste", "search", "deployed", "none")
"""What rank 0 may say in mode tune."""
EVERY: dict[Phase, int] = {"canary": 2, "taste": 2, "search": 2, "deployed": 10}
"""One block in so many is off. Of a deployed candidate one in ten, so that pacing stays under test."""
WARMS_UP: tuple[Phase, ...] = ("canary", "deployed")
"""Begins with paced blocks that fill memories; in a search every candidate leaves out its first pairs instead."""
KEPT_WORDS = 4
"""More than are ever needed at once: the one in force, and one for later."""
_MOST = 1 << 53


class BlockPlan(NamedTuple):
    """How long the blocks of a candidate are, in iterations.

    Attributes:
        block_iterations: of one block, at least 6.
        settle_iterations: first iterations of a block that are not counted, while the job settles.
        warm_iterations: paced iterations before the first compared block, while the policy's memory fills.
        taste_iterations: the shortest block in which a policy shows whether it does harm.
    """

    block_iterations: int
    settle_iterations: int
    warm_iterations: int
    taste_iterations: int

    @property
    def counted_iterations(self) -> int:
        """Iterations that count in a compared block."""
        return self.block_iterations - self.settle_iterations

    @property
    def warm_blocks(self) -> int:
        """Paced blocks that warm up, at least one."""
        return max(1, -(-self.warm_iterations // self.block_iterations))


def block_plan(policy: Policy, block_iterations: int | None = None) -> BlockPlan:
    """The blocks that suit a policy with memory, from its own time constants.

    A policy's history is unbroken over the blocks (``paceenv.core.standing``), so a block need not hold its memory. It
    holds the time that the job takes to settle, which is not counted, and at least two decisions of the policy.
    Before the first compared block the policy acts for its first interval, which has no delays, settles, and fills its
    longest memory.

    Args:
        block_iterations: iterations of a block, at least 6; None: as long as the policy needs.
    """
    interval = policy.interval_iterations
    settle = PHASE_ITERATIONS if "phase_shift" in policy.mechanisms else RAMP_ITERATIONS
    least = max(settle + 2 * interval, round(settle / SETTLE_SHARE))
    block = -(-least // interval) * interval if block_iterations is None else block_iterations
    warm = interval + settle + policy.memory_iterations()
    return BlockPlan(block, min(settle, int(block * SETTLE_SHARE)), warm, min(block, interval + RAMP_ITERATIONS))


def shared_seed(environ: Mapping[str, str]) -> int:
    """A 64-bit number that all ranks of a job get from their own environment, without communication.

    It is a hash of the launcher's run id, the batch job and the master's port. The master's address counts only where
    no id exists, because one rank may know it by name and another by number. ``TORCHELASTIC_RESTART_COUNT`` does not
    count: each node's launcher counts its own restarts.
    """
    named = [(key, environ.get(key, "")) for key in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
    names_the_job = any(value not in ("", "none") for _, value in named)  # torchrun calls a run without an id "none"
    keys = ("MASTER_PORT", "WORLD_SIZE") if names_the_job else ("MASTER_PORT", "WORLD_SIZE", "MASTER_ADDR")
    named += [(key, environ.get(key, "")) for key in keys]
    return int.from_bytes(hashlib.blake2b(repr(named).encode(), digest_size=8).digest())


class Word(NamedTuple):
    """What is on from an iteration on.

    Attributes:
        number: words are numbered from 1; a later one replaces an earlier one.
        from_iteration: the first iteration in which it holds.
        until_iteration: the end of its time, exclusive.
        arms: numbers of the candidates that take turns; in mode tune one is deployed.
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
        if phase not in SENT or any(type(one) is not int or not 0 <= one < _MOST for one in numbers):
            return None
        wrong = {"none": bool(chosen), "deployed": len(chosen) != 1}.get(phase, not chosen)
        if wrong or any(arm >= arms for arm in chosen) or len(set(chosen)) != len(chosen):
            return None
        return cls(number, first, until, cast(Phase, phase), tuple(chosen), begin)


class Turn(NamedTuple):
    """An iteration's place in the plan.

    Attributes:
        arm: the candidate that may pace; None: no pacing.
        pair: the pair of blocks that the iteration belongs to: begin of the word, round, candidate; None: of none.
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


class Plan:
    """The plan as far as its words are known.

    In every round each candidate has a block with pacing next to one without, both of its own length, and after them
    further paced blocks where it is deployed. The order of the candidates and of the two blocks is drawn, so that
    nothing periodic in the job can stay in step with it. Of two successive rounds a candidate paces first in one, so
    that a steady trend cancels. A taste is one round of blocks just long enough to show harm.
    """

    def __init__(self, seed: int, blocks: Sequence[BlockPlan]) -> None:
        self._seed, self.blocks = seed % 2**64, tuple(blocks)
        self.words: tuple[Word, ...] = ()
        """Replaced as a whole: one thread may hear while another one asks."""
        self._round: tuple[tuple[object, ...], list[_Block]] | None = None

    @classmethod
    def fixed(cls, seed: int, blocks: Sequence[BlockPlan], *, begin: int = 0, phase: Phase = "canary") -> Plan:
        """The plan of mode canary, or active (``deployed``): one word that every rank knows."""
        plan = cls(seed, blocks)
        plan.hear(Word(1, begin, _MOST, phase, tuple(range(len(blocks))), begin))
        return plan

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
        number, offset = self._place(word, iteration)
        if word.phase == "taste" and number > 0:
            return NOBODY
        for block in self._blocks_of(word, number):
            if offset < block.end:
                counted_from = max(block.counted_from, block.begin + ticks - 1)
                return block.turn._replace(counted=True) if offset >= counted_from else block.turn
        raise AssertionError("a round is as long as its blocks")

    def round_iterations(self, arms: Sequence[int], phase: Phase = "search") -> int:
        """Iterations of one round among ``arms``."""
        return sum(EVERY[phase] * self._length(k, phase) for k in arms)

    def after(self, pairs: int) -> int:
        """The first iteration after that many pairs of every candidate, if the last word holds that long."""
        word = self.words[-1]
        return word.begin + self._warm_up(word) + pairs * self.round_iterations(word.arms, word.phase)

    def pair_end(self, iteration: int) -> int:
        """The first iteration at or after ``iteration`` at which no pair of a search is under way."""
        word = self.word(iteration)
        if word is None or word.phase != "search" or iteration <= word.begin:
            return iteration
        number, offset = self._place(word, iteration)
        ends = [0, *(block.end for block in self._blocks_of(word, number))][::2]
        return iteration - offset + min(end for end in ends if end >= offset)

    def _length(self, arm: int, phase: Phase) -> int:
        plan = self.blocks[arm]
        return plan.taste_iterations if phase == "taste" else plan.block_iterations

    def _warm_up(self, word: Word) -> int:
        """Iterations before the first round: of each candidate as many paced blocks as fill its policy's memory."""
        if word.phase not in WARMS_UP:
            return 0
        return sum(self.blocks[k].block_iterations * self.blocks[k].warm_blocks for k in word.arms)

    def _place(self, word: Word, iteration: int) -> tuple[int, int]:
        """The round, -1 while warming up, and the iteration in it."""
        since, warm_up = iteration - word.begin, self._warm_up(word)
        if since < warm_up:
            return -1, since
        return divmod(since - warm_up, self.round_iterations(word.arms, word.phase))

    def _blocks_of(self, word: Word, number: int) -> list[_Block]:
        known, key = self._round, (word.begin, word.phase, word.arms, number)
        if known is None or known[0] != key:
            self._round = known = (key, self._lay_out(word, number))
        return known[1]

    def _lay_out(self, word: Word, number: int) -> list[_Block]:
        def drawn(*of: int) -> bytes:
            return hashlib.blake2b(repr((self._seed, word.begin, *of)).encode(), digest_size=8).digest()

        found, at = list[_Block](), 0
        for arm in sorted(word.arms, key=lambda arm: drawn(number, arm)):
            plan, length = self.blocks[arm], self._length(arm, word.phase)
            paced_first = bool((drawn(number // 2, arm)[0] + number) & 1)
            pieces = [(True, plan.warm_blocks)]
            if number >= 0:
                pieces = [(paced_first, 1), (not paced_first, 1), (True, EVERY[word.phase] - 2)]
            for place, (paced, blocks) in enumerate(pieces):
                pair = (word.begin, number, arm) if number >= 0 and place < 2 else None
                counted_from = end = at + blocks * length
                if pair is not None and word.phase != "taste":  # which is too short
                    counted_from = at + plan.settle_iterations
                if blocks:
                    found.append(_Block(at, end, counted_from, Turn(arm if paced else None, pair)))
                at = end
        return found
