"""What the agents of a running job tell each other, through the job's own store, beside the training's communication.

Who paces no more, and how long a barrier takes; who follows a change of mode is in ``paceenv.live.control_file``. Every
rank looks at the store on one background thread; the training waits for nothing. A word that is not heard changes
nothing: a rank's own comparison still ends pacing that hurts, and a change of mode that not every rank follows is none.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceenv.live.decide.control import BARRIER_ALONE_S
from paceenv.live.identity import Words
from paceenv.live.loop import Loop
from paceenv.live.options import DELAYING, PACED

POLL_S, RANKS_PER_S = 2.0, 200.0
"""Seconds between two looks of a rank, longer in large jobs: so many looks per second of all ranks together."""
LEAD_S = 20.0
LEAST_STEPS = 4
"""Steps that all ranks have measured; of fewer nothing is concluded."""


def poll_s(world_size: int) -> float:
    return max(POLL_S, world_size / RANKS_PER_S)


def lead_s(world_size: int) -> float:
    """Seconds after which every rank has read what was asked."""
    return max(LEAD_S, 2.0 * poll_s(world_size) + POLL_S)


class Peers:
    """What the ranks of one loop say to each other; without a store nothing is ever paced.

    One rank that paces no more ends pacing on all: no rank may pace in a mixed job. Ranks that stopped leave a word
    under one name, with the iteration; a word from before the present mode says nothing.

    A rank alone cannot tell a barrier that takes 10 ms from one in which it always waits for 10 ms. If it takes the
    first for the second, the last rank delays itself, and the job with it. In each step the rank that came last has the
    shortest barrier. So every rank leaves its barriers of some steps as one word, rank 0 takes the shortest of each
    step, and their median is the answer. Without one nothing changes.
    """

    def __init__(self, loop: Loop, store: Any) -> None:
        self._loop, self._store = loop, store
        self._words: Words | None = None
        self._said, self._done = -1, -1  # marks, of this rank's word about barriers and of the answer

    def words(self) -> Words | None:
        """The words of this start of the job; None while it has no id, and without a store."""
        if self._words is None and self._store is not None and (attempt := self._loop.identity.attempt):
            self._words = Words(self._store, f"paceenv.peers/{attempt}")
        return self._words

    def look(self, final: bool) -> None:
        """Say and hear what there is. Raises whatever the store raises."""
        loop = self._loop
        words = self.words() if not final and loop.world_size > 1 else None
        if words is None:
            return
        if loop.options.mode in DELAYING:
            self._compare(words)
        mark = loop.control.barriers.mark
        if loop.identity.complete and loop.control.mode in PACED and mark is not None and mark != self._done:
            self._compare_barriers(words, mark)

    def _compare(self, words: Words) -> None:
        """Hear what other ranks have stopped, and say what this one has."""
        loop, control = self._loop, self._loop.control
        stopped = control.stopped()
        if loop.state == "off":
            stopped[None] = f"the agent is off: {loop.reason}"
        for number in (None, *range(len(loop.policy.candidates))):
            name = "stopped" if number is None else f"stopped/{number}"
            iteration, _, why = words.read(name).partition(" ")
            if iteration.isdecimal() and int(iteration) >= control.begins_at:
                if number not in stopped:
                    loop.at_next_tick(control.hear, number, why[:300])
            elif number in stopped:
                words.write(name, f"{control.iteration} on rank {loop.rank}: {stopped[number]}")

    def _compare_barriers(self, words: Words, mark: int) -> None:
        """Say what barriers took before an iteration, and hear the answer."""
        loop, barriers = self._loop, self._loop.control.barriers
        place = f"barrier/{loop.control.begins_at}/{mark}"
        if self._said != mark:
            microseconds = {i: round(1e6 * seconds) for i, seconds in barriers.compared_s.items()}
            words.write(f"{place}/{loop.rank}", json.dumps(microseconds))
            words.count(f"{place}/said", 1)
            self._said = mark
        if loop.rank == 0 and words.count(f"{place}/said") >= loop.world_size:
            heard = [words.read(f"{place}/{rank}") for rank in range(loop.world_size)]
            if "" not in heard:  # else a count came twice
                alone_us = alone([json.loads(word) for word in heard])
                words.write(f"{place}/alone", "-" if alone_us is None else f"{alone_us:.0f}")
        if word := words.read(f"{place}/alone"):
            self._done = mark
            seconds = barriers.alone_s if word == "-" else 1e-6 * float(word)
            if loop.rank == 0 and barriers.alone_s <= BARRIER_ALONE_S < seconds:
                said = f"a barrier takes {1e3 * seconds:.1f} ms once all ranks are there; the time beyond it is waiting"
                loop.messages.log_once(said, level=20)
            if word != "-":
                loop.control.know_barrier_alone(seconds)


def alone(ranks: Sequence[Mapping[Any, float]]) -> float | None:
    """The barrier once all ranks are there: the median over steps of the shortest of all ranks; None with few steps."""
    common = set(ranks[0]).intersection(*ranks[1:])
    shortest = [min(rank[iteration] for rank in ranks) for iteration in common]
    return statistics.median(shortest) if len(shortest) >= LEAST_STEPS else None
