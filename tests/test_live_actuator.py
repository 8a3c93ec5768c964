"""The actuators: how long a delay really is."""

from __future__ import annotations

import math

import pytest

from paceenv.live.decide.actuator import MIN_DELAY_S, MIN_RATE_HZ, DeviceActuator, HostActuator
from paceenv.live.observe.stamps import HostStamps


class Device:
    """A host clock and a device that works through a queue behind it: clock, stamps, sleeper and spin in one."""

    immediate, dropped = False, 0

    def __init__(self, *, backlog_s: float = 0.0, rate_hz: float = 2e9, stamps: int = 10**6) -> None:
        self.host_s, self.done_s, self.rate_hz, self.stamps = 5.0, 5.0 + backlog_s, rate_hz, stamps

    def __call__(self) -> float:
        return self.host_s

    def sleep(self, seconds: float, /) -> None:
        self.host_s += seconds

    def spin(self, cycles: int) -> None:
        self.done_s = max(self.done_s, self.host_s) + cycles / self.rate_hz

    def record(self) -> float | None:
        self.stamps -= 1
        self.done_s = max(self.done_s, self.host_s)
        return self.done_s if self.stamps >= 0 else None

    def seconds(self, stamp: float) -> float:
        assert self.host_s >= stamp, "nobody may ask for the time of a stamp that is not ready"
        return stamp


def _host(device: Device, cap_s: float = 0.1) -> HostActuator:
    return HostActuator(device, cap_s=cap_s, sleeper=device, clock=device)


def test_a_real_sleep_delays_the_host_s_timeline_by_at_least_what_was_asked() -> None:
    actuator = HostActuator(HostStamps(), cap_s=0.1)
    delay = actuator.delay(0.003)
    assert delay is not None
    assert actuator.settle(delay) >= delay.slept_s >= 0.003


@pytest.mark.parametrize("asked", [math.nan, -1.0, 0.0, 0.99 * MIN_DELAY_S, -math.inf, 0.01])
def test_what_is_no_delay_or_cannot_be_measured_is_not_slept(asked: float) -> None:
    device = Device(stamps=0 if asked == 0.01 else 9)
    actuator = DeviceActuator(device, cap_s=0.1, spin=device.spin)
    assert _host(device).delay(asked) is None
    assert actuator.delay(asked) is None
    assert (device.host_s, device.done_s) == (5.0, 5.0)


def test_no_delay_is_longer_than_the_cap() -> None:
    device = Device()
    assert _host(device, cap_s=0.02).delay(math.inf) is not None
    assert device.host_s == pytest.approx(5.02)
    device = Device(rate_hz=MIN_RATE_HZ)
    assert DeviceActuator(device, cap_s=0.02, spin=device.spin).delay(math.inf) is not None
    assert device.done_s == pytest.approx(5.02)


@pytest.mark.parametrize("rate_hz", [0.5e9, 1.98e9])
def test_a_device_learns_its_clock_from_its_delays_and_one_that_falls_makes_one_delay_too_long(rate_hz: float) -> None:
    device = Device(rate_hz=rate_hz, backlog_s=0.3)  # a backlog takes nothing from a delay on the device
    actuator = DeviceActuator(device, cap_s=0.1, spin=device.spin)
    effects = list[float]()
    for i in range(30):
        device.rate_hz = rate_hz if i < 20 else 0.45 * rate_hz
        delay = actuator.delay(0.01)
        assert delay is not None
        assert delay.slept_s == 0.01
        device.host_s += 1.0
        effects.append(actuator.settle(delay))
    assert effects[0] == pytest.approx(0.01 * MIN_RATE_HZ / rate_hz), "at first it is taken for the slowest"
    assert effects[19] == pytest.approx(0.01, rel=1e-3)
    assert effects[20] == pytest.approx(0.01 / 0.45, rel=0.01)
    assert max(effects[21:]) == pytest.approx(0.01, rel=0.01)
