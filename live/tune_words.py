"""The words of mode tune on their way: rank 0 decides and writes, the other ranks read, through the job's own store.

On a thread of its own, beside the training's communication, and never blocking it. Rank 0 writes at most one word in
``WORD_S``. A rank that hears nothing paces nothing once the last word that it heard is over.
"""

from __future__ import annotations

import math
import time
from typing import Any

from paceenv.live.control_file import lead_s
from paceenv.live.decide.tune import Tuner
from paceenv.live.decide.tune_plan import TunePlan, Word
from paceenv.live.identity import Words
from paceenv.live.loop import Loop

WORD_S = 60.0
"""Seconds between two words of rank 0."""
LEASE_S = 300.0
"""A word holds for so long; rank 0 prolongs it when half of that is over."""


class TuneWords:
    """Carries the words for one loop.

    Args:
        loop: its control has a plan in mode tune.
        store: the job's (``torch.distributed.Store``), or None where there is none; a job of one rank needs none.
    """

    def __init__(self, loop: Loop, store: Any) -> None:
        self._loop, self._store = loop, store
        self._words: Words | None = None
        self._unsent: Word | None = None
        self._next_s, self._send_by, self._said = 0.0, 0, ""

    def look(self, final: bool) -> None:
        """Decide and write on rank 0, read on the others. Raises whatever the store raises."""
        loop, control = self._loop, self._loop.control
        if final or not loop.permitted or control.mode != "tune" or control.tune_plan is None:
            return
        if self._store is None and loop.world_size > 1:
            loop.downgrade("mode tune needs the job's store, and there is none")
            return
        if self._words is None and loop.world_size > 1:
            self._words = Words(self._store, f"paceenv.tune/{loop.attempt}")
        if control.tuner is not None:
            self._lead(control.tuner)
        elif self._words is not None:
            self._follow(control.tune_plan, self._words)

    def _lead(self, tuner: Tuner) -> None:
        control, now, tick_s = self._loop.control, self._loop.iterations, self._loop.control.tick_s
        if self._unsent is None and tick_s > 0.0 and now >= control.quiet_until and time.monotonic() >= self._next_s:
            lead = math.ceil(lead_s(self._loop.world_size) / tick_s)
            blocks = max(plan.block_iterations for plan in tuner.plan.blocks)
            lease = max(math.ceil(LEASE_S / tick_s), 4 * (lead + 2 * blocks))
            self._said, self._send_by = tuner.text(tick_s), now + lead // 2
            self._unsent = tuner.draft(now, lead, lease)
        word = self._unsent
        if word is None:
            return
        if self._words is not None and now <= self._send_by:
            self._words.write(str(word.number), word.text())
        elif self._words is not None and not self._words.read(str(word.number)):  # it might be there all the same
            self._unsent = None
            tuner.abandon()  # others would hear it too late
            return
        tuner.plan.hear(word)  # only now: this rank must not pace by a word that no other can hear
        self._unsent, self._next_s = None, time.monotonic() + WORD_S
        if tuner.text(tick_s) != self._said:
            self._loop.messages.log_once(tuner.text(tick_s), level=20)

    def _follow(self, plan: TunePlan, words: Words) -> None:
        while text := words.read(str(plan.words[-1].number + 1 if plan.words else 1)):
            word = Word.parse(text, len(plan.blocks))
            if word is None:
                self._loop.downgrade(f"rank 0 sent {text[:60]!r}, which is no word of mode tune")
                return
            plan.hear(word)
