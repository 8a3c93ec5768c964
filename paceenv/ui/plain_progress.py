"""Progress as plain lines on the error stream, for logs and pipelines: a few, however fast the work goes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from paceenv.core.wording import hours

FIRST_S, NEXT_S = 2.0, 10.0
"""Seconds of work before its first line, and at least between two lines of a process."""


class _Pace:
    """When the last line was written, by whichever work; a process has one error stream."""

    def __init__(self) -> None:
        self._lock, self._last_s = threading.Lock(), float("-inf")

    def wait_s(self, now_s: float) -> float:
        """Seconds until a line may be written."""
        return max(self._last_s + NEXT_S - now_s, 0.0)

    def take(self, now_s: float) -> bool:
        """Whether a line may be written now; then it counts as written."""
        with self._lock:
            if self.wait_s(now_s) > 0.0:
                return False
            self._last_s = now_s
            return True


_PACE = _Pace()


@contextlib.contextmanager
def plain_progress(
    description: str,
    total: float | None,
    *,
    write: Callable[[str], object] | None = None,
    pace: _Pace = _PACE,
    first_s: float = FIRST_S,
) -> Iterator[Callable[[float], None]]:
    """Write lines while the work goes on, on a thread of their own: silent work is reported, too.

    Args:
        description: what is being done.
        total: all of it; None where nobody knows how much there is.
        write: takes a line; None: the error stream.
        pace: when the last line was written.
        first_s: seconds before the first line.

    Yields:
        A function that takes how much of ``total`` is done.
    """
    began_s, ended, reached = time.monotonic(), threading.Event(), 0.0

    def done(amount: float) -> None:
        nonlocal reached
        reached = amount

    def lines() -> None:
        wait_s = first_s
        while not ended.wait(max(wait_s, pace.wait_s(time.monotonic()))):
            now_s = time.monotonic()
            if pace.take(now_s):
                with contextlib.suppress(OSError, ValueError):  # the stream is gone
                    (write or _to_stderr)(_line(description, reached, total, now_s - began_s))
            wait_s = 0.1  # another's line came first

    thread = threading.Thread(target=lines, name="paceenv-progress", daemon=True)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


def _line(description: str, reached: float, total: float | None, took_s: float) -> str:
    """``train: 40 %, 20 s so far, about 30 s left``."""
    share = reached / total if total else 0.0
    if not 0.0 < share <= 1.0:
        return f"{description}: {_clock(took_s)} so far"
    left = f", about {hours(took_s / share - took_s)} left" if share < 1.0 else ""
    return f"{description}: {100.0 * share:.0f} %, {_clock(took_s)} so far{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
