"""Who paces in which iteration: paired blocks with and without pacing, a pure function of the seed.

All candidates take turns, for ever. Every rank knows the plan from its options, so all agree on every iteration. No
clock, no file, no thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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

CANARY, ACTIVE = 2, 10
"""One block in so many is off, by mode: what is active stays under test."""


class BlockPlan(NamedTuple):
    """How long the blocks of a candidate are, in iterations.

    Attributes:
        block_iterations: of one block, at least 6.
        settle_iterations: first iterations of a block that are not counted, while the job settles.
        warm_iterations: paced iterations before the first compared block, while the policy's memory fills.
    """

    block_iterations: int
    settle_iterations: int
    warm_iterations: int

    @property
    def counted_iterations(self) -> int:
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
    """
    interval = policy.interval_iterations
    settle = PHASE_ITERATIONS if "phase_shift" in policy.mechanisms else RAMP_ITERATIONS
    least = max(settle + 2 * interval, round(settle / SETTLE_SHARE))
    block = -(-least // interval) * interval if block_iterations is None else block_iterations
    warm = interval + settle + policy.memory_iterations()
    return BlockPlan(block, min(settle, int(block * SETTLE_SHARE)), warm)


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


class Turn(NamedTuple):
    """An iteration's place in the plan.

    Attributes:
        arm: the candidate that may pace; None: no pacing.
        pair: the pair of blocks that the iteration belongs to: round, candidate; None: of none.
        counted: whether the iteration counts in its pair's comparison.
    """

    arm: int | None
    pair: tuple[int, int] | None = None
    counted: bool = False


class _Block(NamedTuple):
    begin: int
    end: int
    counted_from: int
    turn: Turn
    counted: Turn


NOBODY = Turn(None)


class Plan:
    """The order of the blocks.

    First each candidate warms up, in as many paced blocks as fill its policy's memory. Then in every round each one has
    a block with pacing next to one without, both of its own length, and after them ``every - 2`` further paced blocks.
    The order of the candidates and of the two blocks is drawn, so that nothing periodic in the job can stay in step
    with it. Of two successive rounds a candidate paces first in one, so that a steady trend cancels.

    Args:
        begin: the first iteration of the blocks.
        every: one block in so many is off.
    """

    def __init__(self, seed: int, blocks: Sequence[BlockPlan], *, begin: int = 0, every: int = CANARY) -> None:
        self._seed, self.blocks, self.begin, self.every = seed % 2**64, tuple(blocks), begin, every
        self._warm_up = sum(one.block_iterations * one.warm_blocks for one in self.blocks)
        self._round = every * sum(one.block_iterations for one in self.blocks)
        self._block = _Block(0, begin, begin, NOBODY, NOBODY)

    def turn(self, iteration: int, ticks: int = 1) -> Turn:
        """Who may pace in ``iteration``.

        Args:
            ticks: iterations of the step that it ends; a step counts only in the block in which it began.
        """
        block = self._block
        if not block.begin <= iteration < block.end:
            block = self._block = self._block_of(iteration)
        counts = iteration >= block.counted_from and iteration >= block.begin + ticks - 1
        return block.counted if counts else block.turn

    def _block_of(self, iteration: int) -> _Block:
        number, at = -1, self.begin
        if iteration < at:
            return _Block(0, at, at, NOBODY, NOBODY)
        if iteration >= at + self._warm_up:
            number = (iteration - at - self._warm_up) // self._round
            at += self._warm_up + number * self._round
        return next(block for block in self._lay_out(number, at) if iteration < block.end)

    def after(self, pairs: int) -> int:
        """The first iteration after that many pairs of every candidate."""
        return self.begin + self._warm_up + pairs * self._round

    def _lay_out(self, number: int, at: int) -> Iterator[_Block]:
        """The blocks of the round that begins ``at`` an iteration; of the warm-up for -1."""

        def drawn(*of: int) -> bytes:
            return hashlib.blake2b(repr((self._seed, self.begin, *of)).encode(), digest_size=8).digest()

        for arm in sorted(range(len(self.blocks)), key=lambda arm: drawn(number, arm)):
            plan = self.blocks[arm]
            paced_first = bool((drawn(number // 2, arm)[0] + number) & 1)
            pieces = [(True, plan.warm_blocks)]
            if number >= 0:
                pieces = [(paced_first, 1), (not paced_first, 1), (True, self.every - 2)]
            for place, (paced, blocks) in enumerate(pieces):
                pair = (number, arm) if number >= 0 and place < 2 else None
                end = at + blocks * plan.block_iterations
                counted_from = end if pair is None else at + plan.settle_iterations
                turn = Turn(arm if paced else None, pair)
                yield _Block(at, end, counted_from, turn, turn._replace(counted=True))
                at = end
