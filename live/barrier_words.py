"""How long the barrier takes once all ranks are there, found by all ranks together through the job's own store.

A rank alone cannot tell a barrier that takes 10 ms from one in which it always waits for 10 ms. If it takes the first
for the second, the last rank delays itself, and the job with it. In each step the rank that came last has the shortest
barrier. So every rank leaves its barriers of some steps as one word, rank 0 takes the shortest of each step, and their
median is the answer. It happens in the quiet start and again after ever longer times, beside the training. Without an
answer nothing changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from paceenv.live.decide.control import BARRIER_ALONE_S, PACED
from paceenv.live.identity import Words
from paceenv.live.loop import Loop
from paceenv.live.peers import Peers

LEAST_STEPS = 4
"""Steps that all ranks have measured; of fewer nothing is concluded."""


class BarrierWords:
    """Carries these words for one loop.

    Args:
        loop: of this rank.
        peers: have the connection to the job's store.
    """

    def __init__(self, loop: Loop, peers: Peers) -> None:
        self._loop, self._peers = loop, peers
        self._said, self._done = -1, -1  # marks, of this rank's word and of the answer
        self._told = False

    def look(self, final: bool) -> None:
        """Say what this rank measured, and hear the answer. Raises whatever the store raises."""
        loop, control = self._loop, self._loop.control
        mark = control.barrier_mark
        if final or not loop.permitted or control.mode not in PACED or mark is None or mark == self._done:
            return
        words = self._peers.words()
        if words is None:
            return
        place = f"barrier/{control.begins_at}/{mark}"
        if self._said != mark:
            words.write(f"{place}/{loop.rank}", said(control.barriers_s))
            words.count(f"{place}/said", 1)
            self._said = mark
        if loop.rank == 0 and words.count(f"{place}/said") >= loop.world_size:
            self._lead(words, place)
        if word := words.read(f"{place}/alone"):
            self._done = mark
            if word != "-":
                self._hear(1e-6 * float(word))

    def _lead(self, words: Words, place: str) -> None:
        heard = words.read_all([f"{place}/{rank}" for rank in range(self._loop.world_size)])
        if not heard or "" in heard:  # a count that came twice
            return
        found = alone_s([read(word) for word in heard])
        words.write(f"{place}/alone", "-" if found is None else f"{1e6 * found:.0f}")

    def _hear(self, seconds: float) -> None:
        self._loop.control.know_barrier_alone(seconds)
        if self._loop.rank == 0 and seconds > BARRIER_ALONE_S and not self._told:
            self._told = True
            found = f"a barrier takes {1e3 * seconds:.1f} ms once all ranks are there; the time beyond it is waiting"
            self._loop.messages.log_once(found, level=20)


def said(barriers_s: Mapping[int, float]) -> str:
    """A rank's barriers, by iteration, as a word: ``iteration:microseconds``."""
    return " ".join(f"{iteration}:{1e6 * seconds:.0f}" for iteration, seconds in barriers_s.items())


def read(word: str) -> dict[int, float]:
    """The barriers of such a word, seconds by iteration."""
    pairs = (part.split(":") for part in word.split())
    return {int(iteration): 1e-6 * float(us) for iteration, us in pairs}


def alone_s(ranks: Sequence[Mapping[int, float]]) -> float | None:
    """The barrier once all ranks are there: median over the steps of the shortest of all ranks; seconds.

    Args:
        ranks: every rank's barriers, seconds by iteration.

    Returns:
        None with fewer than :data:`LEAST_STEPS` steps that all ranks have measured.
    """
    common = set(ranks[0]).intersection(*ranks[1:])
    shortest_s = [min(rank[iteration] for rank in ranks) for iteration in common]
    return statistics.median(shortest_s) if len(shortest_s) >= LEAST_STEPS else None
