"""How long the barrier takes once all ranks are there, found by all ranks together through the job's own store.

A rank alone cannot tell a barrier that takes 10 ms from one in which it always waits for 10 ms. If it takes the first
for the second, the last rank delays itself, and the job with it. In each step the rank that came last has the shortest
barrier. So at the end of the quiet start every rank leaves its barriers of some steps as one word, rank 0 takes the
shortest of each step, and their median is the answer. Beside the training, once; without an answer nothing changes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from paceenv.live.decide.control import BARRIER_ALONE_S, PACED
from paceenv.live.identity import Words
from paceenv.live.loop import Loop

DECIDING = (*PACED, "shadow")
"""Modes in which a policy looks at waiting."""
LEAST_STEPS = 4
"""Steps that all ranks have measured; of fewer nothing is concluded."""


class BarrierWords:
    """Carries these words for one loop.

    Args:
        loop: of this rank.
        store: the job's (``torch.distributed.Store``), or None where there is none.
    """

    def __init__(self, loop: Loop, store: Any) -> None:
        self._loop, self._store = loop, store
        self._words: Words | None = None
        self._said, self._done = 0, 0  # the quiet starts, by the iteration that ends them

    def look(self, final: bool) -> None:
        """Say what this rank measured, and hear the answer. Raises whatever the store raises."""
        loop, control = self._loop, self._loop.control
        if (
            final
            or self._store is None
            or not loop.attempt
            or loop.world_size == 1
            or loop.options.mode not in DECIDING
        ):
            return
        now = control.quiet_until
        if self._done == now or control.iteration < now or not control.has_barrier:
            return
        if self._words is None:
            self._words = Words(self._store, f"paceenv.barrier/{loop.attempt}")
        if self._said != now:
            self._words.write(f"{now}/{loop.rank}", said(control.barriers_s()))
            self._words.count(f"{now}/said", 1)
            self._said = now
        if loop.rank == 0 and self._words.count(f"{now}/said") == loop.world_size:
            heard = [self._words.read(f"{now}/{rank}") for rank in range(loop.world_size)]
            self._words.write(f"{now}/alone", f"{1e6 * alone_s([read(word) for word in heard]):.0f}")
        if word := self._words.read(f"{now}/alone"):
            self._done = now
            self._hear(1e-6 * float(word))

    def _hear(self, seconds: float) -> None:
        if math.isnan(seconds):
            return
        self._loop.control.know_barrier_alone(seconds)
        if self._loop.rank == 0 and seconds > BARRIER_ALONE_S:
            found = f"a barrier takes {1e3 * seconds:.1f} ms once all ranks are there; the time beyond it is waiting"
            self._loop.messages.log_once(found, level=20)


def said(barriers_s: Sequence[float]) -> str:
    """A rank's barriers as a word: whole microseconds, ``-`` where it measured none."""
    return " ".join("-" if math.isnan(seconds) else f"{1e6 * seconds:.0f}" for seconds in barriers_s)


def read(word: str) -> list[float]:
    """The barriers of such a word, seconds."""
    return [math.nan if part == "-" else 1e-6 * float(part) for part in word.split()]


def alone_s(barriers_s_RT: Sequence[Sequence[float]]) -> float:
    """The barrier once all ranks are there: median over the steps of the shortest of all ranks; seconds.

    Args:
        barriers_s_RT: every rank's barriers of the same steps, seconds; not-a-number where it measured none.

    Returns:
        Not-a-number with fewer than :data:`LEAST_STEPS` steps that all ranks have measured.
    """
    shortest_s = [min(step) for step in zip(*barriers_s_RT, strict=True) if not any(map(math.isnan, step))]
    return statistics.median(shortest_s) if len(shortest_s) >= LEAST_STEPS else math.nan
