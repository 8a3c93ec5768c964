"""Stamps: events are read only once they have passed, never waited for, and dropped when the pool is empty."""

from __future__ import annotations

from typing import Any

import pytest

from paceenv.live.decide.live_policy import find_policy
from paceenv.live.loop import Loop
from paceenv.live.observe.stamps import DeviceStamps, HostStamps
from paceenv.live.observe.timing_source import Observed
from paceenv.live.options import make_options


class Device:
    """A fake device: its events pass when ``now_s`` does, a while after the host recorded them."""

    def __init__(self, lag_s: float = 0.0) -> None:
        self.now_s, self.lag_s = 0.0, lag_s


class FakeEvent:
    """What ``torch.cuda.Event`` offers; all that would wait raises."""

    def __init__(self, device: Device) -> None:
        self._device, self._at_s = device, float("inf")

    def record(self) -> None:
        self._at_s = self._device.now_s + self._device.lag_s

    def query(self) -> bool:
        return self._at_s <= self._device.now_s

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query(), "torch raises for an event that has not passed"
        assert other.query(), "torch raises for an event that has not passed"
        return 1e3 * (other._at_s - self._at_s)

    def synchronize(self) -> None:
        raise AssertionError("the agent waited for the device")

    wait = synchronize


def test_a_host_stamp_is_the_clock_reading() -> None:
    stamps = HostStamps(lambda: 3.5)
    assert stamps.ready(stamps.record())
    assert stamps.seconds(stamps.record()) == 3.5


def test_a_device_stamp_is_ready_when_the_device_has_passed_it() -> None:
    device = Device(lag_s=0.25)
    stamps = DeviceStamps(lambda: FakeEvent(device), clock=lambda: 100.0)
    first = stamps.record()
    device.now_s = 0.5
    second = stamps.record()
    assert stamps.ready(first)
    assert not stamps.ready(second)
    device.now_s = 0.75
    assert stamps.seconds(second) - stamps.seconds(first) == pytest.approx(0.5)
    assert stamps.seconds(first) == pytest.approx(100.0)


def test_times_keep_their_zero_when_the_base_moves() -> None:
    device = Device()
    stamps = DeviceStamps(lambda: FakeEvent(device), pool_events=4, max_events=4, clock=lambda: 7.0)
    for second in range(1, 50):  # the pool holds four: what is released comes back, the base included
        device.now_s = float(second)
        stamp = stamps.record()
        assert stamps.seconds(stamp) == pytest.approx(7.0 + second)
        stamps.rebase(stamp)
        stamps.release([stamp])
    assert stamps.dropped == 0


def test_an_empty_pool_drops_and_counts() -> None:
    device = Device()
    stamps = DeviceStamps(lambda: FakeEvent(device), pool_events=2, max_events=3)
    assert [stamps.record() is None for _ in range(4)] == [False, False, True, True]
    assert stamps.dropped == 2


def test_nothing_is_recorded_while_a_graph_is_captured() -> None:
    stamps = DeviceStamps(lambda: FakeEvent(Device()), capturing=lambda: True)
    assert stamps.record() is None
    assert stamps.dropped == 1


def _looped(monkeypatch: pytest.MonkeyPatch, device: Device, mode: str, **options: Any) -> Loop:
    clock = lambda: device.now_s  # noqa: E731
    loop = Loop(make_options({"mode": mode, "quiet_first": 0} | options), find_policy("paper"), clock=clock)
    stamps = DeviceStamps(lambda: FakeEvent(device), clock=clock, pool_events=256)
    monkeypatch.setattr(loop, "_stamps", stamps)
    monkeypatch.setattr(loop._log, "stamps", stamps)
    loop.tick()
    return loop


def _iterations(loop: Loop, device: Device, count: int) -> None:
    for _ in range(count):
        device.now_s += 0.06
        entry = loop._log.stamps.record()
        device.now_s += 0.04
        loop._log.operations.append(Observed("all_reduce", 0, 1 << 20, entry, loop._log.stamps.record()))
        loop.tick()


@pytest.mark.parametrize("mode", ["observe", "shadow"])
def test_the_loop_reads_events_one_or_two_iterations_late_and_never_waits(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    device = Device(lag_s=0.15)
    loop = _looped(monkeypatch, device, mode)
    _iterations(loop, device, 64)
    assert loop.state == mode, loop.reason
    assert loop.history.count >= 64 - 8 - 1 - 2  # the shape is learned from 8, the first has no start, 2 are under way
    assert loop.history.step()["mean_s"] == pytest.approx(0.1)
    assert loop.history.parts()["collective_s"] == pytest.approx(0.04)
    assert loop.dropped_stamps == 0


def test_a_device_that_never_answers_costs_nothing_but_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(lag_s=float("inf"))
    loop = _looped(monkeypatch, device, "shadow")
    _iterations(loop, device, 100)
    assert loop.state == "shadow"
    assert loop.history.count == 0
    assert loop.irregular >= 90
