"""The switchback test of modes canary and active: when pacing is on or off, and its effect on mean step time.

Every rank alternates blocks with and without pacing. Blocks come in pairs, in an order drawn from a seed that all ranks
of the job share. The end of a step is the same instant on every rank, so each rank evaluates alone, without
communication. The effect is the logarithm of the ratio of the two blocks' mean step times, pair by pair: noise that is
common to both blocks of a pair cancels, and most of the drift in a shared cluster is.

Block length and settling come from the policies' own time constants (:func:`block_plan`). Uses
``paceenv.core.student_t`` for the width of an interval. No clock, no file, no thread.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceenv.core import pacing
from paceenv.core.intervals import Interval
from paceenv.core.student_t import student_t_quantile
from paceenv.policies.base import Policy

RAMP_ITERATIONS = round(2.0 / pacing.SLACK_STEP)
"""Two time constants of the slowest rule's approach, after which a job has settled with or without its delays."""
PHASE_ITERATIONS = 80
"""The same for two jobs that were shifted apart: without delays they take that long to collide again. Measured in
simulation: blocks of 60 show a quarter of the gain that always pacing has there, blocks of 240 all of it."""
SETTLE_SHARE = 1 / 3
"""Most of a block that is not counted."""
ACTIVE_HOLDOUT_EVERY = 10
"""In mode active one block in ten is off, so that pacing stays under test."""
ALPHA, FIRST_EVALUATION_PAIRS = 0.05, 4
"""Share of comparisons whose interval may miss the truth at any evaluation, and pairs before the first one."""
MIN_GAIN = 0.01
"""Smallest relative gain in mean step time that counts as help."""
CLIP_MEDIANS = 4.0
"""A step longer than this many medians of its pair counts as this many."""
NEGLIGIBLE_DELAY_SHARE = 1e-3
"""A rank counts as not paced if its delays were below this share of its paced blocks."""
_BALANCED = (0b0011, 0b0101, 0b0110, 0b1001, 0b1010, 0b1100)
"""The ways to start two of four pairs with the paced block."""

Kind = Literal["helps", "does not help", "insufficient evidence", "hurts"]


class BlockPlan(NamedTuple):
    """How long blocks must be, in iterations.

    Attributes:
        block_iterations: of one block.
        settle_iterations: first iterations of a block that are not counted, while the job settles.
        warm_iterations: paced iterations before the first compared block, while the policies' memory fills.
        taste_iterations: the shortest block in which a policy shows whether it does harm.
    """

    block_iterations: int
    settle_iterations: int
    warm_iterations: int
    taste_iterations: int

    def schedule(self, seed: int, *, first_iteration: int, holdout_every: int) -> Schedule:
        """The schedule with these blocks."""
        return Schedule(
            seed,
            block_iterations=self.block_iterations,
            first_iteration=first_iteration,
            holdout_every=holdout_every,
            settle_iterations=self.settle_iterations,
            warm_iterations=self.warm_iterations,
        )


def block_plan(policies: Sequence[Policy], block_iterations: int | None = None) -> BlockPlan:
    """The blocks that suit policies with memory, from their own time constants.

    A policy's history is unbroken over the blocks (``paceenv.core.standing``), so a block need not hold its memory. It
    holds the time that the job takes to settle, which is not counted, and at least two decisions of every policy.
    Before the first compared block each policy acts for its first interval, which has no delays, settles, and fills its
    longest memory.

    Args:
        block_iterations: iterations of a block, at least 6; None: as long as the policies need.
    """
    interval = max(one.interval_iterations for one in policies)
    shifts = any("phase_shift" in one.mechanisms for one in policies)
    settle = PHASE_ITERATIONS if shifts else RAMP_ITERATIONS
    least = max(settle + 2 * interval, round(settle / SETTLE_SHARE))
    block = -(-least // interval) * interval if block_iterations is None else block_iterations
    memory = max(one.memory_iterations() for one in policies)
    settle_share = min(settle, int(block * SETTLE_SHARE))
    return BlockPlan(block, settle_share, interval + settle + memory, min(block, interval + RAMP_ITERATIONS))


BLOCK_ITERATIONS = 60
"""What :func:`block_plan` gives a rule on slack, at the usual control interval."""


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


class Slot(NamedTuple):
    """An iteration's place in the schedule: pacing ``on`` or off, its ``pair`` (-1: none), and if it is ``counted``."""

    on: bool
    pair: int
    counted: bool


class Schedule:
    """Which iterations are paced: a pure function of the iteration, the same on every rank with the same seed.

    Before ``first_iteration`` pacing is off. The first blocks warm up and are not compared: one without pacing and, in
    one stretch, as many with pacing as ``warm_iterations`` fill. Two of every four
    pairs start with the paced block; which two is drawn. So a steady trend cancels, and nothing periodic in the job
    can stay in step with the blocks.

    Args:
        block_iterations: iterations of a block, at least 6, best a multiple of the policy's control interval.
        holdout_every: one block in this many is off, at least 2. With 2 the blocks are compared all the time; a larger
            number puts paced blocks between the pairs.
        settle_iterations: first iterations of a compared block that are not counted, at most half of the block; a third
            of it by default.
        warm_iterations: paced iterations before the first compared block, at least 0; they are filled up to whole
            blocks, at least one.
    """

    def __init__(
        self,
        seed: int,
        *,
        block_iterations: int = BLOCK_ITERATIONS,
        first_iteration: int = 0,
        holdout_every: int = 2,
        settle_iterations: int | None = None,
        warm_iterations: int = 0,
    ) -> None:
        settle = int(block_iterations * SETTLE_SHARE) if settle_iterations is None else settle_iterations
        self.block_iterations, self.settle_iterations = block_iterations, settle
        self._seed, self.first_iteration, self._every = seed % 2**64, first_iteration, holdout_every
        self._warm = max(1, -(-warm_iterations // block_iterations))  # paced blocks that warm up
        self._drawn = (-2, 0)  # the four pairs that were asked for last, and their order

    @property
    def counted_iterations(self) -> int:
        """Iterations that count in a compared block."""
        return self.block_iterations - self.settle_iterations

    @staticmethod
    def of(
        seed: int,
        policy: Policy,
        *,
        block_iterations: int | None = None,
        first_iteration: int = 0,
        holdout_every: int = 2,
    ) -> Schedule:
        """The schedule that suits a policy; ``block_iterations`` None: blocks as long as it needs."""
        plan = block_plan([policy], block_iterations)
        return plan.schedule(seed, first_iteration=first_iteration, holdout_every=holdout_every)

    def after(self, pairs: int) -> int:
        """The first iteration after that many compared pairs."""
        return self.first_iteration + self.block_iterations * (1 + self._warm + self._every * pairs)

    def slot(self, iteration: int, ticks: int = 1) -> Slot:
        """The place of ``iteration`` in the schedule.

        Args:
            ticks: iterations of the step that it ends; a step counts only in the block in which it began.
        """
        block, offset = divmod(iteration - self.first_iteration, self.block_iterations)
        if block < 0:
            return Slot(False, -1, False)
        if block <= self._warm:
            return Slot(block < self._warm if self._paced_first(-1) else block > 0, -1, False)
        pair, place = divmod(block - self._warm - 1, self._every)
        if place >= 2:
            return Slot(True, -1, False)
        return Slot(self._paced_first(pair) == (place == 0), pair, offset >= max(self.settle_iterations, ticks - 1))

    def _paced_first(self, pair: int) -> bool:
        four, place = divmod(pair, 4)
        if four != self._drawn[0]:
            drawn = hashlib.blake2b(b"%d %d" % (self._seed, four), digest_size=8).digest()
            self._drawn = four, _BALANCED[int.from_bytes(drawn) % len(_BALANCED)]
        return bool(self._drawn[1] >> place & 1)


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison: ``gain`` is the relative fall of mean step time, with the evaluation's interval.

    ``text`` is the result as a sentence. Before the first evaluation there is no gain.
    """

    kind: Kind
    gain: Interval | None
    pairs: int
    text: str


class Stretch:
    """Steps of the rank, each with its iterations: a step may take several."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.ticks: list[int] = []

    def add(self, step_s: float, ticks: int) -> None:
        """Take in a step."""
        self.steps_s.append(step_s)
        self.ticks.append(ticks)

    def part(self, begin: int, size: int) -> Stretch:
        """A stretch of ``size`` of its steps, from step ``begin`` on."""
        part, steps = Stretch(), slice(begin, begin + size)
        part.steps_s, part.ticks = self.steps_s[steps], self.ticks[steps]
        return part

    @property
    def iterations(self) -> int:
        """Of all steps together."""
        return sum(self.ticks)

    def total_s(self, most_s: float) -> float:
        """Time of the steps, seconds; each counts with at most ``most_s`` an iteration."""
        return sum(min(step_s, most_s * ticks) for step_s, ticks in zip(self.steps_s, self.ticks, strict=True))

    def mean_s(self, most_s: float) -> float:
        """Mean time of an iteration, seconds; ``most_s`` as in :meth:`total_s`."""
        return self.total_s(most_s) / self.iterations


def clip_s(*stretches: Stretch) -> float:
    """``CLIP_MEDIANS`` of the time of an iteration in all stretches together, seconds."""
    each = sorted(s / n for one in stretches for s, n in zip(one.steps_s, one.ticks, strict=True))
    return CLIP_MEDIANS * each[len(each) // 2]


class _Block(Stretch):
    """One compared block: counted regular steps of the rank, and the delays in it."""

    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.0


class PairedComparison:
    """Compares the paired blocks of a schedule while the job runs, on the step time that all ranks have in common.

    **The interval** is Student's t over the pairs' log ratios. Interim evaluations follow 4, 8, 16, 32, ... pairs.
    Evaluation ``k`` has an error share of ``ALPHA / 2 ** k``, so all of them together err in at most ``ALPHA`` of the
    jobs. Between evaluations the last verdict stands.

    **A block's mean, not its median**: the job pays the mean. A step counts with at most ``CLIP_MEDIANS`` medians of
    its pair, in both blocks alike, so that one stall of half a minute does not decide a comparison. Clipped steps still
    count for their own block.

    **A pair counts** when both blocks have at least half of their counted iterations; other pairs are dropped.
    A step of several iterations weighs as many, with their mean time.

    Args:
        min_gain: a smaller relative gain counts as no help, 0 to 1.
        memory_pairs: after an evaluation of this many pairs (4, 8, 16, ...) a new comparison starts with its own share,
            so that an old gain does not hide a new loss; None: never.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        min_gain: float = MIN_GAIN,
        memory_pairs: int | None = None,
    ) -> None:
        self._schedule, self.min_gain, self._memory_pairs = schedule, min_gain, memory_pairs
        self._pair, self._blocks = -1, (_Block(), _Block())
        self._earlier = False
        self.ratios = dict[int, float]()
        """Log ratio of the block means by pair, with pacing over without, since the comparison last started anew."""
        self._forget()
        self.verdict = self._evaluate(self._share(1))
        """The last evaluation's verdict."""

    def add(self, iteration: int, step_s: float, delay_s: float = 0.0, ticks: int = 1) -> bool:
        """Take in a regular step; a step time that is not a positive number is left out.

        Returns:
            Whether there was a new evaluation.
        """
        slot, evaluated = self._schedule.slot(iteration, ticks), False
        if slot.pair != self._pair:
            evaluated = self._close()
            self._pair, self._blocks = slot.pair, (_Block(), _Block())
        if slot.counted and 0.0 < step_s < math.inf:
            block = self._blocks[slot.on]
            block.add(step_s, ticks)
            block.delay_s += delay_s
        return evaluated

    def final(self) -> Verdict:
        """The last evaluation, at the end of the job, with the error share of the evaluation that would come next."""
        self._close()
        self._pair = -1
        if self._pairs != self.verdict.pairs:
            self._settle(self._evaluate(self._share(self._evaluations + 1)))
        return self.verdict

    @property
    def pairs(self) -> int:
        """Pairs compared so far."""
        return self._pairs

    @property
    def mean_log_ratio(self) -> float | None:
        """Mean log ratio of the pairs so far; None before the first."""
        return self._mean if self._pairs else None

    @property
    def pair_noise(self) -> float | None:
        """Standard deviation of the pairs' log ratios so far; None before there are two."""
        return math.sqrt(self._squares / (self._pairs - 1)) if self._pairs > 1 else None

    def _forget(self) -> None:
        self._pairs, self._mean, self._squares, self._evaluations = 0, 0.0, 0.0, 0
        self._delays_s = self._paced_s = 0.0
        self.ratios = {}

    def _share(self, evaluation: int) -> float:
        return ALPHA / 2.0**evaluation

    def _close(self) -> bool:
        """Fold the pair that just ended into the comparison and evaluate it if it is time."""
        off, on = self._blocks
        if self._pair < 0 or 2 * min(off.iterations, on.iterations) < self._schedule.counted_iterations:
            return False
        most_s = clip_s(off, on)
        ratio = math.log(on.mean_s(most_s) / off.mean_s(most_s))
        self.ratios[self._pair] = ratio
        self._pairs += 1
        moved = ratio - self._mean
        self._mean += moved / self._pairs
        self._squares += moved * (ratio - self._mean)
        self._delays_s += on.delay_s
        self._paced_s += sum(on.steps_s)
        if self._pairs != FIRST_EVALUATION_PAIRS << self._evaluations:
            return False
        self._evaluations += 1
        self._settle(self._evaluate(self._share(self._evaluations)))
        if self._pairs == self._memory_pairs:
            self._forget()
            self._earlier = True
        return True

    def _settle(self, new: Verdict) -> None:
        """Take over a verdict, unless it only says that a new comparison has fewer pairs than the one before."""
        if not (self._earlier and new.kind == "insufficient evidence" and new.pairs < self.verdict.pairs):
            self.verdict = new

    def _evaluate(self, error_share: float) -> Verdict:
        n = self._pairs
        if n < FIRST_EVALUATION_PAIRS:  # no evaluation yet, so no error share is spent
            waits = f"insufficient evidence: {n} of at least {FIRST_EVALUATION_PAIRS} pairs of blocks"
            return Verdict("insufficient evidence", None, n, waits)
        deviation = math.sqrt(self._squares / (n - 1) / n)
        half = student_t_quantile(0.5 * error_share, n - 1) * deviation
        gain = Interval(*(-math.expm1(x) for x in (self._mean, self._mean + half, self._mean - half)))
        undelayed = self._delays_s < NEGLIGIBLE_DELAY_SHARE * self._paced_s
        kind: Kind = "insufficient evidence"
        if gain.low > 0.0:
            kind = "helps"
        elif gain.high < 0.0:
            kind = "hurts"
        # other ranks may make room for a rank that was not delayed: a gain that points to that is no null result
        elif gain.high < self.min_gain or (undelayed and (gain.value < self.min_gain or self._mean > -2.0 * deviation)):
            kind = "does not help"
        return Verdict(kind, gain, n, _sentence(kind, gain, n, undelayed))


def _sentence(kind: Kind, gain: Interval, pairs: int, undelayed: bool) -> str:
    percent, low, high = (100 * number for number in gain)
    interval = f"[{low:.1f}, {high:.1f}]"
    if kind == "helps":
        effect = f"helps by {percent:.1f} % {interval} of mean step time"
    elif kind == "hurts":
        effect = f"hurts by {-percent:.1f} % [{-high:.1f}, {-low:.1f}] of mean step time"
    else:
        effect = f"{kind}: {percent:+.1f} % {interval} of mean step time"
    own = "; this rank had almost no delay" if undelayed else ""
    return f"{effect}, {pairs} pairs of blocks{own}"
