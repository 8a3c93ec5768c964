"""Time stamps that never wait: readings of the host's clock, or CUDA events that are read later.

A source records a stamp and goes on. On a CPU the stamp is the time. On a GPU it is an event on the current stream. The
agent reads it one or two iterations later, when ``query()`` reports that it has passed. Nothing here synchronises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

Clock = Callable[[], float]
"""Monotonic seconds."""


class Stamps(Protocol):
    """A source of stamps; a stamp is a return value of ``record``."""

    dropped: int
    """Stamps that could not be recorded."""

    def record(self) -> Any:
        """A stamp of now, or None if it cannot be recorded."""

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured: then stamps may neither be recorded nor read."""

    def ready(self, stamp: Any) -> bool:
        """Whether the moment has passed and can be read."""

    def seconds(self, stamp: Any) -> float:
        """The moment in seconds of this rank's own monotonic time; only for a stamp that is ready."""

    def rebase(self, stamp: Any) -> None:
        """Measure from ``stamp`` from now on; it is kept until the next call."""

    def release(self, stamps: Iterable[Any]) -> None:
        """Return stamps to the pool after they are read."""


class HostStamps:
    """Stamps of the host's clock, for gloo and all other backends that block the host."""

    dropped = 0

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.record = clock

    def capturing(self) -> bool:
        return False

    def ready(self, stamp: float) -> bool:
        return True

    def seconds(self, stamp: float) -> float:
        return stamp

    def rebase(self, stamp: float) -> None:
        """Readings of a clock need no base."""

    def release(self, stamps: Iterable[float]) -> None:
        """Readings of a clock are not pooled."""


class Event(Protocol):
    """The used part of ``torch.cuda.Event``, without anything that waits."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, other: Any) -> float: ...


class DeviceStamps:
    """CUDA events from a pool, recorded on the current stream.

    An event beyond the pool's limit, or during the capture of a graph, is dropped and counted. Times are measured from
    a base event that moves along, because the milliseconds between two events have only the digits of a float.

    Args:
        make_event: makes an event.
        capturing: whether a CUDA graph is being captured.
        pool_events: events made at the start.
        max_events: events made at most.
        clock: monotonic seconds of the host, for the base of the device's timeline.
    """

    def __init__(
        self,
        make_event: Callable[[], Event],
        *,
        capturing: Callable[[], bool] = lambda: False,
        pool_events: int = 256,
        max_events: int = 1 << 15,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._make_event, self.capturing, self.dropped = make_event, capturing, 0
        self._pool, self._left_to_make = [make_event() for _ in range(pool_events)], max_events - pool_events
        self._base, self._base_s = self._pool.pop(), clock()
        self._base.record()

    def record(self) -> Event | None:
        if self.capturing():
            self.dropped += 1
            return None
        try:
            event = self._pool.pop()
        except IndexError:
            if self._left_to_make <= 0:
                self.dropped += 1
                return None
            self._left_to_make -= 1
            event = self._make_event()
        event.record()
        return event

    def ready(self, stamp: Event) -> bool:
        return self._base.query() and stamp.query()

    def seconds(self, stamp: Event) -> float:
        return self._base_s + 1e-3 * self._base.elapsed_time(stamp)

    def rebase(self, stamp: Event) -> None:
        base_s = self.seconds(stamp)
        self._pool.append(self._base)
        self._base, self._base_s = stamp, base_s

    def release(self, stamps: Iterable[Event]) -> None:
        self._pool.extend(stamp for stamp in stamps if stamp is not self._base)


def cuda_stamps() -> DeviceStamps:
    """Stamps of the current CUDA device."""
    import torch

    capturing = torch.cuda.is_current_stream_capturing
    return DeviceStamps(lambda: torch.cuda.Event(enable_timing=True), capturing=capturing)  # type: ignore[no-untyped-call]
