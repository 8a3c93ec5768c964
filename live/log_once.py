"""How the agent says something: one line on the error stream through ``logging``, each thing once, and remembered."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

LOGGER = logging.getLogger("paceenv.live")
KEPT_EVENTS = 50


class Voice:
    """Says things once; the rank's number goes in front as soon as it is known."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self._said: set[str] = set()

    def say(self, text: str, level: int = logging.WARNING) -> None:
        """Say ``text``, unless it has been said; never raises."""
        if text in self._said:
            return
        self._said.add(text)
        self.events.append({"unix_time_s": time.time(), "text": text})
        who = "paceenv live" if self.rank is None else f"paceenv live [rank {self.rank}]"
        try:
            if not LOGGER.handlers and not logging.getLogger().handlers:
                _speak_up()
            LOGGER.log(level, "%s: %s", who, text)
        except Exception:  # a broken log must not end a training job
            self._said.discard(text)


def _speak_up() -> None:
    """A job that configured no logging still hears the agent."""
    LOGGER.addHandler(logging.StreamHandler())
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
