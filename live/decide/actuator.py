"""How a rank is delayed: by a sleep on a CPU, by a spin on a GPU's stream, where a sleep would reach nothing.

Two stamps bracket each delay, and the time between them is the delay that counts. Nothing ever waits for a stamp. The
caller of ``delay`` releases them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from paceenv.live.observe.log import Delay
from paceenv.live.observe.stamps import Stamps

MIN_DELAY_S = 1e-4
"""A shorter delay is left out: an operating system oversleeps by about as much."""
MIN_RATE_HZ, MAX_RATE_HZ = 0.2e9, 3e9
"""An unknown device clock is assumed to be the slowest: a delay that is too short does no harm."""
RATE_SMOOTHING = 0.5


class HostActuator:
    def __init__(
        self, stamps: Stamps, *, cap_s: float, sleeper: Any = time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stamps, self._cap_s, self._sleeper, self._clock = stamps, cap_s, sleeper, clock

    def delay(self, seconds: float) -> Delay | None:
        """Delay this rank. None, without a delay, for a very short one, or if it cannot be measured."""
        if not seconds >= MIN_DELAY_S:
            return None
        before = self._stamps.record()
        if before is None:
            return None
        slept_s, cycles = self._spend(min(seconds, self._cap_s))
        return Delay(slept_s, before, self._stamps.record(), cycles)

    def _spend(self, seconds: float) -> tuple[float, int]:
        start_s = self._clock()
        self._sleeper.sleep(seconds)
        return max(self._clock() - start_s, 0.0), 0

    def settle(self, delay: Delay) -> float:
        """Seconds between the two stamps, which are ready; 0 without a second one: too little slack does no harm."""
        if delay.after is None:
            return 0.0
        seconds = self._stamps.seconds(delay.after) - self._stamps.seconds(delay.before)
        return seconds if 0.0 < seconds < math.inf else 0.0


class DeviceActuator(HostActuator):
    """Spins on the device, on the current stream, so that a delay counts however far the host runs ahead.

    A spin counts cycles. Their rate is learned from the measured delays, so nothing has to wait; the first delays are
    too short rather than too long. Nothing is launched while a CUDA graph is being captured, when no stamp can be
    recorded either: the graph would replay the delay for ever.
    """

    def __init__(
        self, stamps: Stamps, *, cap_s: float, device: str = "cuda", spin: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(stamps, cap_s=cap_s)
        self._rate_hz, self._spin = MIN_RATE_HZ, spin or functools.partial(_spin, device)

    def _spend(self, seconds: float) -> tuple[float, int]:
        cycles = int(seconds * self._rate_hz)
        self._spin(cycles)
        return seconds, cycles

    def settle(self, delay: Delay) -> float:
        effective_s = super().settle(delay)
        if effective_s:
            seen_hz = min(max(delay.cycles / effective_s, MIN_RATE_HZ), MAX_RATE_HZ)
            rise_hz = RATE_SMOOTHING * (seen_hz - self._rate_hz)
            self._rate_hz = min(seen_hz, self._rate_hz + rise_hz)  # a clock that falls makes delays too long
        return effective_s


class DelayLengths:
    def __init__(self) -> None:
        self.count = 0
        self.total_s = self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def as_dict(self) -> dict[str, float | None]:
        mean_s = self.total_s / self.count if self.count else None
        return {"mean_s": mean_s, "max_s": self.longest_s, "total_s": self.total_s}


def _spin(device: str, cycles: int) -> None:
    """Occupy the current stream of ``device``; the current device may be another one."""
    import torch

    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
