"""Stamps: events are read only once they have passed, never waited for, and dropped when the pool is empty."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from fake_cuda import FakeCuda, on_device

from paceenv.live.decide.live_policy import find_policy
from paceenv.live.loop import Loop
from paceenv.live.observe.stamps import DeviceStamps, Stamps, cuda_stamps
from paceenv.live.options import make_options


def test_times_keep_their_zero_when_the_base_moves() -> None:
    device = FakeCuda()
    stamps: Stamps = DeviceStamps(device.event, device.record, pool_events=4, max_events=4, clock=lambda: 7.0)
    for second in range(1, 50):  # the pool holds four: what is released comes back, the base included
        device.now_s = float(second)
        stamp = stamps.record()
        assert stamps.seconds(stamp) == pytest.approx(7.0 + second)
        stamps.rebase(stamp)
        stamps.release([stamp])
    assert stamps.dropped == 0


def test_stamps_are_ready_when_the_last_of_every_stream_has_passed() -> None:
    device = FakeCuda()
    stamps: Stamps = DeviceStamps(device.event, device.record, clock=lambda: 100.0)
    device.stream[0], device.lag_s[1] = 1, 0.5
    entry = stamps.record()
    device.stream[0] = 0
    exit_ = stamps.record()
    for order in itertools.permutations((entry, exit_)):
        assert not stamps.ready_many(order), "the entry was recorded on a stream that is behind"
    device.now_s = 0.5
    assert stamps.ready_many((entry, exit_))
    assert stamps.seconds_many((exit_, entry)) == [stamps.seconds(exit_), stamps.seconds(entry)] == [100.0, 100.5]


def test_nothing_is_read_before_the_base_has_passed() -> None:
    device = FakeCuda()
    device.lag_s[0] = 1.0
    stamps: Stamps = DeviceStamps(device.event, device.record, clock=lambda: 100.0)
    device.stream[0] = 1
    stamp = stamps.record()
    assert not stamps.ready_many([stamp])
    assert not stamps.ready_many([stamp])
    device.now_s = 1.0
    assert stamps.ready_many([stamp])
    assert stamps.seconds(stamp) == pytest.approx(99.0), "recorded before what was queued ahead of the base had passed"


def test_the_device_is_that_of_the_parameters_and_no_other_gets_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)  # a script that never called set_device: the current one is 0
    stamps: Stamps = cuda_stamps(1)
    stamp = stamps.record()
    assert stamps.ready_many([stamp])
    stamps.seconds_many([stamp])
    assert cuda.contexts == {1}
    assert cuda.current == 0


@pytest.mark.parametrize("current", [0, 1])
def test_no_event_gets_into_a_graph_whatever_the_current_device(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    cuda = FakeCuda().install(monkeypatch)
    stamps: Stamps = cuda_stamps(1)
    cuda.current = current
    cuda.capturing.add(cuda.stream[1])
    assert stamps.capturing()
    assert stamps.record() is None
    assert stamps.dropped == 1
    assert cuda.current == current
    cuda.stream[1] = 5  # a side stream that does not take part
    assert stamps.record() is not None


@pytest.mark.parametrize("mode", ["observe", "shadow"])
def test_the_loop_reads_events_one_or_two_iterations_late_and_never_waits(mode: str) -> None:
    device = FakeCuda()
    device.lag_s[0] = 0.15
    clock = lambda: device.now_s  # noqa: E731
    loop = Loop(make_options({"mode": mode, "quiet_first": 0}), find_policy("paper"), clock=clock)
    loop.hooks.active = True
    loop.tick()
    on_device(loop, DeviceStamps(device.event, device.record, clock=clock))
    for i in range(64):
        device.now_s += 0.06
        entry = loop.log.stamps.record()
        device.now_s += 0.04
        loop.log.add(loop.log.kind("all_reduce", 0, 1 << 20), entry)
        loop.tick()
        if i % 8 < 7:
            continue
        loop.catch_up()
        housekeeping = threading.Thread(target=loop.catch_up)  # which asks the device nothing
        housekeeping.start()
        housekeeping.join()
    assert loop.state == mode, loop.reason
    assert loop.history.count >= 64 - 8 - 1 - 2  # the shape is learned from 8, the first has no start, 2 are under way
    assert loop.history.as_dict()["step"]["mean_s"] == pytest.approx(0.1)
    assert loop.history.as_dict()["parts"]["collective_s"] == pytest.approx(0.04)
    assert loop.log.stamps.dropped == 0


def test_a_record_that_waits_for_the_gpus_queue_is_told_apart() -> None:
    device = FakeCuda()

    def late(event: Any) -> int:
        until_s = time.thread_time() + 0.01
        while time.thread_time() < until_s:  # as the driver does
            pass
        return device.record(event)

    full: Stamps = DeviceStamps(device.event, late)
    for full.measures in (False, True):
        full.record()
    assert 0.009 < full.waited_s < 0.019
