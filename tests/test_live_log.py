"""The tables of a rank's log: kinds that become coarse, groups that end or have no name, threads, marks; its place."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from paceenv.live.observe import locality
from paceenv.live.observe.log import EXACT_KINDS, MAX_KINDS, TOO_MANY, UNKNOWN_WAIT, Log
from paceenv.live.observe.stamps import HostStamps
from paceenv.live.record.history import unseen


@pytest.fixture
def log() -> Log:
    clock = iter(range(10**9))
    return Log(HostStamps(lambda: float(next(clock))))


class ProcessGroup:
    """What the log asks of a process group."""

    def __init__(self, name: str, counts: bool = True) -> None:
        if name:
            self.group_name = name
        self.count, self.counts = 0, counts

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 4

    def _get_sequence_number_for_group(self) -> int:
        if not self.counts:
            raise RuntimeError("not for this backend")
        return self.count


def test_with_many_sizes_kinds_become_coarse_and_at_last_no_more(log: Log) -> None:
    for size in range(EXACT_KINDS):
        assert log.kinds[log.kind("all_gather", 0, size)].bytes == size
    sizes = range(10**6, 2 * 10**6, 997)
    coarse = {log.kinds[log.kind("all_gather", 0, size)].bytes for size in sizes}
    assert coarse == {1 << 20, 1 << 21}  # rounded up
    assert log.kinds[log.kind("all_gather", 0, 5)].bytes == 5  # the exact ones stay
    for group in range(2 * MAX_KINDS):
        log.kind("broadcast", group, 4096)
    assert len(log.kinds) <= MAX_KINDS
    assert log.kind("broadcast", 2 * MAX_KINDS, 4096) == UNKNOWN_WAIT
    assert log.kinds[log.kind("broadcast", 7, 4096)].group == 7


def test_a_group_has_the_same_number_on_every_rank(log: Log) -> None:
    clock = HostStamps(lambda: 0.0)
    first, second = ProcessGroup("12"), ProcessGroup("mesh_tp")
    assert log.known(first).number == 12
    assert log.known(second).number == Log(clock).known(ProcessGroup("mesh_tp")).number >= 1 << 9
    known = log.known(second)
    assert (known.name, known.member, known.size, known.ended) == ("mesh_tp", 1, 4, False)
    assert set(log.groups) == {12, known.number}


def test_a_group_that_ends_is_forgotten_and_its_name_may_come_again(log: Log) -> None:
    group = ProcessGroup("3")
    assert log.known(group).number == 3
    group.count = 9
    before = log.known(group)
    assert before.unseen() == 9
    before.seen = 4
    assert before.unseen() == 5
    assert unseen({3: before}, 10) == [{"group": 3, "per_step": 0.5}]
    before.opaque = True  # of DDP's reducer: counted, and timed as one
    assert unseen({3: before}, 10) == []
    before.opaque = False
    del group
    gc.collect()
    assert before.ended
    assert log._by_identity == {}
    assert log._followed == {}
    assert before.unseen() == 0
    again = ProcessGroup("3")
    again.count = 2
    assert log.known(again) is not before
    assert log.groups[3] is log.known(again)
    assert log.known(again).unseen() == 0  # counted from the first meeting


def test_a_group_that_nobody_can_name_or_follow(log: Log) -> None:
    class Bare:
        """Of torchft, for example: no name, no counter; and it cannot be referenced weakly."""

        __slots__ = ()

    bare, nameless = Bare(), ProcessGroup("", counts=False)
    assert log.known(bare).number == log.known(nameless).number == -1
    assert log.known(bare).counted() is None
    assert log.known(bare).unseen() == 0
    assert id(bare) not in log._by_identity  # whose identity another object may get
    log.known(ProcessGroup("4"))
    assert log.known(nameless).number == -1


def test_a_group_with_a_backend_for_each_device_counts_by_them(log: Log) -> None:
    group, backend = ProcessGroup("5", counts=False), ProcessGroup("")
    group._device_types, group._get_backend = ["cpu", "cuda"], lambda device: backend
    backend.count = 3
    assert log.known(group).counted() == 3


def test_what_another_thread_waits_for_is_on_the_side_unless_autograd_does(log: Log) -> None:
    """On a GPU the backward pass runs on a thread of its own, for which the training thread waits."""
    kind = log.kind("all_reduce", 0, 64)
    log.add(kind, 0.0)
    for log._in_graph in (lambda: -1, lambda: 17):
        other = threading.Thread(target=lambda: log.add(kind, 0.0))
        other.start()
        other.join()
    assert [log.kinds[row[0]].side for row in log.rows] == [False, True, False]


def test_without_a_tick_the_rows_are_bounded_and_the_iteration_is_marked(log: Log, monkeypatch: Any) -> None:
    monkeypatch.setattr("paceenv.live.observe.log.MAX_ROWS", 5)
    released: list[float] = []
    monkeypatch.setattr(log.stamps, "release", released.extend)
    kind = log.kind("all_reduce", 0, 64)
    for i in range(8):
        log.add(kind, float(i))
    assert (len(log.rows), released) == (5, [5.0, 6.0, 7.0])
    log.tick()
    log.add(kind, 9.0)
    log.tick()
    assert [(len(rows or ()), mark) for _, rows, mark, *_ in log.over] == [(5, TOO_MANY), (1, "")]


def test_a_rank_s_place_leaves_out_what_is_not_there(tmp_path: Path) -> None:
    assert not {"clock", "process", "backend"} & set(locality.describe(device="cuda:x", proc=tmp_path / "none"))
    for folder in ("sys/kernel/random", "self/ns"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "random" / "boot_id").write_text("b0-07\n")
    (tmp_path / "self" / "ns" / "time").symlink_to("time:[4026531834]")
    found = locality.describe(device="cuda:0", backend="nccl", proc=tmp_path)
    assert (found["clock"], found["backend"]) == ("b0-07 time:[4026531834]", "nccl")
