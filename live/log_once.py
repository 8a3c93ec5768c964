"""The agent's messages: one line each through ``logging``, each text once, and kept for the snapshot."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from traceback import walk_tb
from types import FrameType
from typing import Any

LOGGER = logging.getLogger("paceenv.live")
PATIENCE_S = 1.0  # for a log handler of the script's, at most


class Messages:
    """Logs each message once. ``rank`` is put in front as soon as it is known."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.events: deque[dict[str, Any]] = deque(maxlen=50)
        self._logged: set[str] = set()

    def log_once(self, text: str, level: int = logging.WARNING) -> None:
        """Log ``text``, unless it has been logged before; raises only what a signal handler of the script did."""
        if text in self._logged:
            return
        self._logged.add(text)
        prefix = "paceenv live" if self.rank is None else f"paceenv live [rank {self.rank}]"
        try:
            self.events.append({"unix_time_s": time.time(), "text": text})
            if not LOGGER.handlers and not logging.getLogger().handlers:  # nobody would print it
                LOGGER.addHandler(logging.StreamHandler())
                LOGGER.setLevel(logging.INFO)
                LOGGER.propagate = False
            _log(level, "%s: %s", prefix, text)
        except Exception as error:  # a broken log must not end a training job
            if raised_by_a_signal_handler(error):
                raise
            self._logged.discard(text)


def _log(*record: Any) -> None:
    """Log on a thread: Python runs signal handlers in the main thread, where ``logging`` eats what they raise."""
    if threading.current_thread() is not threading.main_thread() or not _signal_handlers():
        LOGGER.log(*record)
        return

    def write() -> None:
        with contextlib.suppress(Exception):
            LOGGER.log(*record)

    writer = threading.Thread(target=write, name="paceenv log", daemon=True)
    try:
        writer.start()
    except RuntimeError:  # no new threads, or Python is ending
        LOGGER.log(*record)
    else:
        writer.join(PATIENCE_S)  # the script may hold a lock of its own log handler


def described(error: BaseException, *, of_script: bool = False) -> str:
    """An error and its place, or the last place in the script's folder, in one line; never raises."""
    places = list(walk_tb(error.__traceback__))
    if of_script:
        places = _in_script(places) or places
    at = f" ({_place(*places[-1])})" if places else ""
    try:
        said = " ".join(str(error).split())
        said, most = f"{type(error).__name__}{': ' * bool(said)}{said}", 160 if of_script else 300
        return said[:most] + "..." * (len(said) > most) + at
    except Exception:
        return type(error).__name__ + at


def place_in_script(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The last line of the script's own among these frames, and its function; never raises."""
    with contextlib.suppress(Exception):
        for frame, line in _in_script(frames)[-1:]:
            return f"{_place(frame, line)}, {frame.f_code.co_name}"
    return ""


def _in_script(frames: Iterable[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    """The frames whose code lies in the script's folder, where an agent's may lie, too."""
    folder = os.path.dirname(os.path.abspath(getattr(sys.modules["__main__"], "__file__", ""))) + os.sep
    inside = [(f, line) for f, line in frames if os.path.abspath(f.f_code.co_filename).startswith(folder)]
    own = [(f, line) for f, line in inside if not str(f.f_globals.get("__name__")).startswith("paceenv.live.")]
    return [(f, line) for f, line in own if "site-packages" not in f.f_code.co_filename]


def _place(frame: FrameType, line: int) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{line}"


def raised_by_a_signal_handler(error: BaseException) -> bool:
    """Whether ``error`` came from a handler that the script has set for a signal."""
    codes = {getattr(f, "__code__", None) or getattr(type(f).__call__, "__code__", None) for f in _signal_handlers()}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _signal_handlers() -> list[Any]:
    """The functions that are set for signals, without the one that Python sets itself."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    theirs = [h for h in handlers if callable(h) and h is not signal.default_int_handler]
    return [getattr(h, "func", h) for h in theirs]  # the function inside a partial
