"""Time stamps that never wait: readings of the host's clock, or CUDA events that are read later.

A source records a stamp and goes on. On a CPU the stamp is the time. On a GPU it is an event on the current stream of
the model's device. The training thread reads it at a tick one or two iterations later, when ``query()`` reports that it
has passed. Nothing here synchronises, and nothing creates a context on another device.

Stamps are recorded by every thread that starts a collective (autograd has its own). Events are read and released by the
training thread only: a query by another thread breaks the capture of a CUDA graph (``docs/evidence/gpu.md``).
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Clock = Callable[[], float]
"""Monotonic seconds."""
MAX_STREAMS = 256
"""Streams remembered; a script with more makes new ones all the time."""
RECORD_S = 5e-6
"""What it takes to record an event (docs/evidence/gpu.md); whoever takes longer waits for room in the GPU's queue."""
_ORDER = operator.attrgetter("order")


class HostStamps:
    """Stamps of the host's clock, for gloo and all other backends that block the host: a stamp is its own time."""

    dropped, waited_s, measures = 0, 0.0, False

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.record: Callable[[], Any] = clock

    def capturing(self) -> bool:
        return False

    def seconds(self, stamp: float) -> float:
        return stamp

    def release(self, stamps: Iterable[float]) -> None:
        """Readings of a clock are not pooled."""


class DeviceStamps:
    """CUDA events from a pool; each remembers as ``stream`` where and as ``order`` as which one it was recorded.

    An event beyond the pool's limit, or during the capture of a graph, is dropped and counted. Times are measured from
    a base event that moves along, because the milliseconds between two events have only the digits of a float. The pool
    is a deque: threads take from it and give to it without a lock.
    """

    waited_s, measures = 0.0, False
    """CPU seconds in which records waited, while it measures, for room in the GPU's queue, as the next kernel would."""

    def __init__(
        self,
        make_event: Callable[[], Any],
        record_event: Callable[[Any], int],
        *,
        capturing: Callable[[], bool] = lambda: False,
        stream: Callable[[], int] = lambda: 0,
        pool_events: int = 256,
        max_events: int = 1 << 15,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._make_event, self._record_event, self.capturing, self.dropped = make_event, record_event, capturing, 0
        self.stream = stream
        """The handle of the stream on which this thread would record."""
        self._pool, self._left_to_make = deque(make_event() for _ in range(pool_events)), max_events - pool_events
        self._base, self._base_s, self._base_passed = self._pool.pop(), clock(), False
        self._count = itertools.count()
        self._base.stream, self._base.order = record_event(self._base), next(self._count)

    def record(self) -> Any:
        """A stamp of now, or None if it cannot be recorded."""
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
        start_s = time.thread_time() if self.measures else 0.0
        event.stream, event.order = self._record_event(event), next(self._count)
        if self.measures and start_s:
            self.waited_s += max(time.thread_time() - start_s - RECORD_S, 0.0)
        return event

    def ready_many(self, stamps: Sequence[Any]) -> bool:
        """Whether all moments have passed, and can be read."""
        # a stream passes its stamps in order, so one query each is enough: the latest first, as the likeliest to miss
        last = {stamp.stream: stamp for stamp in sorted(stamps, key=_ORDER)}
        return all([stamp.query() for stamp in reversed(last.values())]) and self._base_has_passed()

    def _base_has_passed(self) -> bool:
        self._base_passed = self._base_passed or self._base.query()  # a later base was read, so it has passed
        return self._base_passed

    def seconds(self, stamp: Any) -> float:
        """The moment in seconds of this rank's own monotonic time; only for a stamp that is ready."""
        elapsed_ms: float = self._base.elapsed_time(stamp)
        return self._base_s + 1e-3 * elapsed_ms

    def seconds_many(self, stamps: Sequence[Any]) -> list[float]:
        base_s, elapsed_ms = self._base_s, self._base.elapsed_time
        return [base_s + 1e-3 * elapsed_ms(stamp) for stamp in stamps]

    def rebase(self, stamp: Any) -> None:
        """Measure from ``stamp`` from now on; it is kept until the next call."""
        base_s = self.seconds(stamp)
        self._pool.append(self._base)
        self._base, self._base_s = stamp, base_s

    def release(self, stamps: Iterable[Any]) -> None:
        """Return stamps to the pool after they are read."""
        self._pool.extend([stamp for stamp in stamps if stamp is not self._base])


Stamps = HostStamps | DeviceStamps
"""A source of stamps; a stamp is what ``record`` returned."""


def cuda_stamps(device: int) -> DeviceStamps:
    """Stamps of a CUDA device, on whichever stream is its current one for the thread that records.

    Args:
        device: its index; a context must exist there.
    """
    import torch

    # The methods of C++: PyTorch's wrappers in Python make a new stream object for every record.
    class CudaEvent(torch._C._CudaEventBase):
        __slots__ = ("order", "stream")
        order: int
        stream: int

    current_handle, current_stream = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getCurrentStream
    current_device, on_capturing_stream = torch._C._cuda_getDevice, torch._C._cuda_isCurrentStreamCapturing
    streams: dict[int, Any] = {}

    def record(event: Any) -> int:
        handle: int = current_handle(device)
        stream = streams.get(handle)
        if stream is None:
            number, index, kind = current_stream(device)
            if len(streams) >= MAX_STREAMS:
                streams.clear()
            make: Any = torch.cuda.Stream
            stream = streams[handle] = make(stream_id=number, device_index=index, device_type=kind)
        event.record(stream)
        return handle

    def capturing() -> bool:
        if current_device() == device:
            return on_capturing_stream()
        with torch.cuda.device(device):  # restores without creating a context
            return on_capturing_stream()

    return DeviceStamps(
        lambda: CudaEvent(enable_timing=True), record, capturing=capturing, stream=lambda: current_handle(device)
    )
