"""The agent's messages: one line each through ``logging``, each text once, and kept for the snapshot."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import Any

LOGGER = logging.getLogger("paceenv.live")
KEPT_EVENTS = 50


class Messages:
    """Logs each message once. ``rank`` is put in front as soon as it is known."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self._logged: set[str] = set()

    def log_once(self, text: str, level: int = logging.WARNING) -> None:
        """Log ``text``, unless it has been logged before; never raises."""
        if text in self._logged:
            return
        self._logged.add(text)
        prefix = "paceenv live" if self.rank is None else f"paceenv live [rank {self.rank}]"
        try:
            self.events.append({"unix_time_s": time.time(), "text": text})
            if not LOGGER.handlers and not logging.getLogger().handlers:
                _print_to_stderr()
            LOGGER.log(level, "%s: %s", prefix, text)
        except Exception:  # a broken log must not end a training job
            self._logged.discard(text)


def _print_to_stderr() -> None:
    """In a job that configures no logging, print the messages to the error stream."""
    LOGGER.addHandler(logging.StreamHandler())
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


def described(error: BaseException) -> str:
    """An error and its place in one line; never raises, whatever its text does."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    at = f" ({os.path.basename(where.tb_frame.f_code.co_filename)}:{where.tb_lineno})" if where else ""
    try:
        return f"{type(error).__name__}: {error}"[:300] + at
    except Exception:
        return type(error).__name__ + at
