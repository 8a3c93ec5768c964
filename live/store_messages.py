"""What the agents of a running job tell each other, through the job's own store, beside the training's communication.

:class:`Peers`: who paces no more, who follows a wish. :class:`TuneWords`: what rank 0 decides in mode tune.
:class:`BarrierWords`: how long a barrier takes. Every rank looks at the store on a background thread; the training
waits for nothing. A word that is not heard changes nothing: a rank's own comparison still ends pacing that hurts, and a
change of mode that not every rank follows is none.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paceenv.live.decide.blocks import Plan, Word
from paceenv.live.decide.control import BARRIER_ALONE_S, PACED
from paceenv.live.decide.modes import Tune
from paceenv.live.decide.search import Search, State
from paceenv.live.identity import Words
from paceenv.live.loop import Loop

PACING = ("probe", *PACED)
"""Modes that delay."""
POLL_S, RANKS_PER_S = 2.0, 200.0
"""Seconds between two looks of a rank, longer in large jobs: so many looks per second of all ranks together."""
LEAD_S = 20.0
WORD_S = 60.0
"""Seconds between two words of rank 0."""
LEASE_S = 300.0
"""A word holds for so long; rank 0 prolongs it when half of that is over."""
LEAST_STEPS = 4
"""Steps that all ranks have measured; of fewer nothing is concluded."""


def poll_s(world_size: int) -> float:
    """Seconds between two looks of a rank at the file."""
    return max(POLL_S, world_size / RANKS_PER_S)


def lead_s(world_size: int) -> float:
    """Seconds after which every rank has read what was asked."""
    return max(LEAD_S, 2.0 * poll_s(world_size) + POLL_S)


class _Question(NamedTuple):
    """``then`` is called once ``needed`` ranks follow the wish ``id``."""

    id: str
    needed: int
    then: Callable[[], None]


class Peers:
    """Carries these words for one loop.

    One rank that paces no more ends pacing on all: no rank may pace in a mixed job. Ranks that stopped leave a word
    under one name, with the iteration; a word from before the present mode says nothing.

    Args:
        store: the job's (``torch.distributed.Store``), or None where there is none, and then nothing is ever paced.
    """

    def __init__(self, loop: Loop, store: Any) -> None:
        self._loop, self._store = loop, store
        self._words: Words | None = None
        self._unsaid = deque[str]()
        self._question: _Question | None = None
        self._lock = threading.Lock()  # held for a moment only: a wish that came later must not be undone

    def follow(self, wish: str, then: Callable[[], None]) -> None:
        """This rank follows a wish; ``then`` is called, on another thread, once every rank does. From any thread."""
        if self._loop.world_size == 1:
            then()
            return
        self._ask(_Question(wish, self._loop.world_size, then))
        self._unsaid.append(wish)

    def followed(self, wish: str) -> None:
        """This rank has followed a wish that waits for nobody. From any thread."""
        self._ask(None)
        self._unsaid.append(wish)

    def refuse(self, wish: str, then: Callable[[], None]) -> None:
        """This rank does not follow a wish; ``then`` is called, on another thread, if another rank does."""
        self._ask(_Question(wish, 1, then))

    def waits(self, wish: str) -> bool:
        """Whether it is not known yet that every rank follows."""
        question = self._question
        return question is not None and question.id == wish

    def _ask(self, question: _Question | None) -> None:
        with self._lock:
            self._question = question

    def look(self, final: bool) -> None:
        """Say and hear what there is. Raises whatever the store raises."""
        loop = self._loop
        if final or self._store is None or not loop.attempt or loop.world_size == 1:
            return
        pacing = loop.options.mode in PACING
        if not pacing and not self._unsaid and self._question is None:
            return
        words = self.words()
        if words is not None:
            self._answer(words)
            if pacing:
                self._compare(words)

    def words(self) -> Words | None:
        """The words of this start of the job; None while it has no id, and without a store. On one thread only."""
        if self._words is None and self._store is not None and self._loop.attempt:
            self._words = Words(self._store, f"paceenv.peers/{self._loop.attempt}")
        return self._words

    def _answer(self, words: Words) -> None:
        while self._unsaid:
            words.count(f"{self._unsaid.popleft()}/follow", 1)
        question = self._question
        if question is not None and words.count(f"{question.id}/follow") >= question.needed:
            with self._lock:
                if self._question is question:
                    question.then()
                    self._question = None

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
                    control.hear(number, why[:300])
            elif number in stopped:
                words.write(name, f"{control.iteration} on rank {loop.rank}: {stopped[number]}")


class TuneWords:
    """The words of mode tune, for one loop: rank 0 decides and writes at most one in ``WORD_S``, the others read.

    A rank that hears nothing paces nothing once the last word that it heard is over.

    Args:
        store: as for :class:`Peers`; a job of one rank needs none.
    """

    def __init__(self, loop: Loop, store: Any) -> None:
        self._loop, self._store = loop, store
        self._words: Words | None = None
        self._unsent: tuple[Word, State] | None = None
        self._next_s, self._send_by, self._said = 0.0, 0, ""

    def look(self, final: bool) -> None:
        """Decide and write on rank 0, read on the others. Raises whatever the store raises."""
        loop, mode = self._loop, self._loop.control.chosen
        if final or not loop.permitted or loop.control.mode != "tune" or not isinstance(mode, Tune):
            return
        if self._store is None and loop.world_size > 1:
            loop.downgrade("mode tune needs the job's store, and there is none")
            return
        if self._words is None and loop.world_size > 1:
            self._words = Words(self._store, f"paceenv.tune/{loop.attempt}")
        if mode.search is not None:
            self._lead(mode.search)
        elif self._words is not None:
            self._follow(mode.plan, self._words)

    def _lead(self, search: Search) -> None:
        control, now, tick_s = self._loop.control, self._loop.iterations, self._loop.control.tick_s
        if self._unsent is None and tick_s > 0.0 and now >= control.quiet_until and time.monotonic() >= self._next_s:
            lead = math.ceil(lead_s(self._loop.world_size) / tick_s)
            blocks = max(plan.block_iterations for plan in search.plan.blocks)
            lease = max(math.ceil(LEASE_S / tick_s), 4 * (lead + 2 * blocks))
            self._said, self._send_by = search.text(tick_s), now + lead // 2
            self._unsent = search.next(now, lead, lease)
        if self._unsent is None:
            return
        word, state = self._unsent
        if self._words is not None and now <= self._send_by:
            self._words.write(str(word.number), word.text())
        elif self._words is not None and not self._words.read(str(word.number)):  # it might be there all the same
            self._unsent = None  # others would hear it too late
            return
        search.follow(word, state)  # only now: this rank must not pace by a word that no other can hear
        self._unsent, self._next_s = None, time.monotonic() + WORD_S
        if search.text(tick_s) != self._said:
            self._loop.messages.log_once(search.text(tick_s), level=20)

    def _follow(self, plan: Plan, words: Words) -> None:
        while text := words.read(str(plan.words[-1].number + 1 if plan.words else 1)):
            word = Word.parse(text, len(plan.blocks))
            if word is None:
                self._loop.downgrade(f"rank 0 sent {text[:60]!r}, which is no word of mode tune")
                return
            plan.hear(word)


class BarrierWords:
    """How long the barrier takes once all ranks are there, found by all ranks of one loop together.

    A rank alone cannot tell a barrier that takes 10 ms from one in which it always waits for 10 ms. If it takes the
    first for the second, the last rank delays itself, and the job with it. In each step the rank that came last has the
    shortest barrier. So every rank leaves its barriers of some steps as one word, rank 0 takes the shortest of each
    step, and their median is the answer. It happens in the quiet start and again after ever longer times. Without an
    answer nothing changes.
    """

    def __init__(self, loop: Loop, peers: Peers) -> None:
        self._loop, self._peers = loop, peers
        self._said, self._done = -1, -1  # marks, of this rank's word and of the answer
        self._told = False

    def look(self, final: bool) -> None:
        """Say what this rank measured, and hear the answer. Raises whatever the store raises."""
        loop, control = self._loop, self._loop.control
        mark = control.barriers.mark
        if final or not loop.permitted or control.mode not in PACED or mark is None or mark == self._done:
            return
        words = self._peers.words()
        if words is None:
            return
        place = f"barrier/{control.begins_at}/{mark}"
        if self._said != mark:
            words.write(f"{place}/{loop.rank}", said(control.barriers.compared_s))
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

    Returns:
        None with fewer than :data:`LEAST_STEPS` steps that all ranks have measured.
    """
    common = set(ranks[0]).intersection(*ranks[1:])
    shortest_s = [min(rank[iteration] for rank in ranks) for iteration in common]
    return statistics.median(shortest_s) if len(shortest_s) >= LEAST_STEPS else None
