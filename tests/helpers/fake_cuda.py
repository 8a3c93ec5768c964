"""A CUDA layer without a device: the part of PyTorch that stamps use, with the rules that a real one enforces.

It knows which devices got a context, where events were recorded and who asked for them. Waiting raises, and so does a
query by another thread, which would break the capture of a graph, as ``cudaStreamCaptureModeGlobal`` has it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class FakeCuda:
    """Devices whose streams lag behind the host by ``lag_s`` of the stream's handle, seconds.

    ``contexts`` are the devices that something was done on, ``current`` the current one, ``stream`` the handle of each
    device's current stream. ``capturing`` holds the handles of streams that are being captured.
    """

    def __init__(self, devices: int = 2) -> None:
        self.now_s, self.current, self.contexts = 0.0, 0, set[int]()
        self.stream = {index: 16 * index for index in range(devices)}
        self.lag_s: defaultdict[int, float] = defaultdict(float)
        self.capturing = set[int]()
        self.thread = threading.get_ident()
        self._event = self._event_class()

    def event(self) -> Any:
        return self._event(enable_timing=True)

    def record(self, event: Any) -> int:
        """Record it on the current stream of device 0; that stream's handle."""
        event.record(SimpleNamespace(handle=self.stream[0], device_index=0))
        return self.stream[0]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        """Put it in place of PyTorch's own until the test ends."""
        for name, fake in {
            "_CudaEventBase": self._event,
            "_cuda_getCurrentRawStream": self.stream.__getitem__,
            "_cuda_getCurrentStream": lambda index: (self.stream[index], index, 1),
            "_cuda_getDevice": lambda: self.current,
            "_cuda_isCurrentStreamCapturing": self._is_capturing,
        }.items():
            monkeypatch.setattr(torch._C, name, fake, raising=False)
        monkeypatch.setattr(torch.cuda, "Stream", self._stream_class())
        monkeypatch.setattr(torch.cuda, "_exchange_device", self._exchange)
        monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", self._maybe_exchange)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.contexts.add(self.current))
        return self

    def _is_capturing(self) -> bool:
        return self.stream[self.current] in self.capturing

    def _exchange(self, index: int) -> int:
        self.contexts.add(index)  # cudaSetDevice makes one
        return self._maybe_exchange(index)

    def _maybe_exchange(self, index: int) -> int:
        before, self.current = self.current, index
        return before

    def _asked(self) -> None:
        assert threading.get_ident() == self.thread, "a query by another thread breaks the capture of a graph"

    def _stream_class(cuda) -> type[Any]:
        class Stream:
            def __init__(self, *, stream_id: int, device_index: int, device_type: int) -> None:
                self.handle, self.device_index = stream_id, device_index

        return Stream

    def _event_class(cuda) -> type[Any]:
        class Event:
            __slots__ = ("_at_s", "_device", "order", "stream")

            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self._at_s, self._device = float("-inf"), -1

            def record(self, stream: Any) -> None:
                assert stream.handle not in cuda.capturing, "the event becomes part of a graph, and cannot be read"
                assert self._device in (-1, stream.device_index), "an event stays on its first device"
                self._at_s, self._device = cuda.now_s + cuda.lag_s[stream.handle], stream.device_index
                cuda.contexts.add(stream.device_index)

            def query(self) -> bool:
                cuda._asked()
                return self._at_s <= cuda.now_s

            def elapsed_time(self, other: Event) -> float:
                if not (self.query() and other.query()):
                    raise RuntimeError("Both events must be completed before calculating elapsed time.")
                return 1e3 * (other._at_s - self._at_s)

            def synchronize(self) -> None:
                raise AssertionError("the agent waited for the device")

            wait = synchronize

        return Event


def on_device(loop: Any, stamps: Any) -> None:
    """Let a loop take its rank for one on a GPU, with these stamps."""
    loop.log.stamps, loop.log.on_device, loop.device, loop._takes_here = stamps, True, "cuda:0", True
    loop._optimizer.tick = loop._tick
