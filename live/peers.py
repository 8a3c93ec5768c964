"""What the agents of a running job tell each other, through the job's own store: who paces no more, who follows a wish.

Every rank looks at the store on a background thread; the training waits for nothing. A word that is not heard changes
nothing: a rank's own comparison still ends pacing that hurts, and a change of mode that not every rank follows is none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from paceenv.live.decide.control import PACED
from paceenv.live.identity import Words
from paceenv.live.loop import Loop

PACING = ("probe", *PACED)
"""Modes that delay."""


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
        loop: of this rank.
        store: the job's (``torch.distributed.Store``), or None where there is none, and then nothing is ever paced.
    """

    def __init__(self, loop: Loop, store: Any) -> None:
        self._loop, self._store = loop, store
        self._words: Words | None = None
        self._unsaid = deque[str]()
        self._question: _Question | None = None
        self._lock = threading.Lock()  # held for a moment only: a wish that came later must not be undone

    def follow(self, wish: str, then: Callable[[], None]) -> None:
        """This rank follows a wish; ``then`` is called, on another thread, once every rank does. From any thread.

        Args:
            wish: its id.
            then: changes over.
        """
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
        """This rank does not follow a wish; ``then`` is called, on another thread, if another rank does.

        Args:
            wish: its id.
            then: what remains to this rank.
        """
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
