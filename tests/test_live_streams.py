"""Sharded training on a GPU without one: its collectives run on streams of their own, and they tell who is late.

Each rank has a device whose streams' times follow from what FSDP2 does in PyTorch 2.13: a gather waits for the copy-out
of the one before, a scatter for its layer's backward pass, the compute for the gather of its layer and at last for the
last scatter. Only time is played; log, steps, accounts, findings and the choice of watched iterations are the agent's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fake_cuda import FakeCuda, on_device

from paceenv.live.decide.live_policy import find_policy
from paceenv.live.loop import Loop
from paceenv.live.observe.batch import STANDSTILL
from paceenv.live.observe.collective_calls import StreamWaits
from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import Group, Log, watched_next
from paceenv.live.observe.stamps import DeviceStamps, cuda_stamps
from paceenv.live.observe.steps import ALL_WATCHED, LEAST_SHARE
from paceenv.live.options import make_options
from paceenv.live.record.findings import find
from paceenv.live.record.history import unseen

LAYERS, GATHER_S, SCATTER_S, FORWARD_S, BACKWARD_S, OPTIMIZER_S = 8, 2e-3, 3e-3, 4e-3, 8e-3, 5e-3
LATE_S, ITERATIONS = 0.03, 250
COMPUTE, GATHERS, SCATTERS, ACROSS = range(4)
PLACES = ("loader", "forward", "backward")


class Shape(NamedTuple):
    """By which neighbours a job's ranks are grouped in its collectives, in number; 0: it has no such collective."""

    gathered: int
    scattered: int
    across: int = 0
    tensor: int = 0


SHAPES = {"FSDP2": Shape(8, 8), "HSDP": Shape(2, 2, across=2), "tensor parallel x FSDP2": Shape(-2, -2, tensor=2)}
SHAPES |= {"DDP, hook on a side stream": Shape(0, 8)}


def groups_of(ranks: int, size: int) -> list[list[int]]:
    """Neighbours in groups of ``size``; of a negative size those with the same place in such groups."""
    if size < 0:
        return [list(range(first, ranks, -size)) for first in range(min(-size, ranks))]
    return [list(range(first, min(first + size, ranks))) for first in range(0, ranks, size)]


class Counted:
    """A group's own count of collectives, as NCCL keeps it."""

    count = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.count


class Rank:
    """One rank: its agent's loop, and its device."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.now_s, self.cuda = [0.0] * 4, FakeCuda()
        self.rank, self.ranks, self.watched = rank, ranks, 0
        self.loop = loop = Loop(make_options({"mode": "observe", "quiet_first": 0}), find_policy("slack"))
        loop.hooks.active = True
        loop.tick()
        on_device(loop, DeviceStamps(self.cuda.event, self.cuda.record, clock=lambda: 0.0))
        self.counted = dict[int, Counted]()

    def log(self, op: str, members: Sequence[int], stream: int, start_s: float, end_s: float) -> None:
        """A row from one moment of a stream to another, as the hooks log it: one per call in a watched iteration."""
        log, number = self.loop.log, -1
        if members:
            number = int("".join(map(str, members)))
            counted = self.counted.setdefault(number, Counted())
            if number not in log.groups:
                place = members.index(self.rank)
                log.groups[number] = Group(number, str(number), place, len(members), list(members), counted)
            counted.count += 1
        self.cuda.stream[0], self.cuda.now_s = stream, start_s
        entry = log.stamps.record() if self.loop.hooks.watching else None
        self.now_s[stream] = self.cuda.now_s = end_s
        if entry is not None:
            if members:
                log.groups[number].started("allreduce")
            log.add(log.kind(op, number, 1 << 20), entry)

    def wait(self, until_s: float) -> None:
        """The compute stream waits for another."""
        self.log(STANDSTILL, (), COMPUTE, self.now_s[COMPUTE], max(self.now_s[COMPUTE], until_s))

    def tick(self) -> None:
        self.watched += self.loop.hooks.watching
        self.cuda.stream[0], self.cuda.now_s = COMPUTE, max(self.now_s)
        self.loop.tick()

    def snapshot(self) -> dict[str, Any]:
        self.loop.catch_up()
        history, groups = self.loop.history, self.loop.log.groups.values()
        names = ("own", "step", "parts", "wait", "collectives", "side")
        accounts = history.as_dict()
        return {name: accounts[name] for name in names} | {
            "rank": self.rank,
            "world_size": self.ranks,
            "iterations": self.loop.iterations,
            "unseen": unseen(self.loop.log.groups, history.count),
            "groups": {
                str(g.number): {"name": g.name, "ranks": g.listed, "member": g.member, "size": g.size} for g in groups
            },
        }


class Job:
    """A job of a shape; ``late_s`` by rank and place."""

    def __init__(
        self, ranks: int, late_s: dict[tuple[int, str], float], shape: str = "FSDP2", *, seed: int = 1
    ) -> None:
        self.ranks, self._shape = [Rank(rank, ranks) for rank in range(ranks)], SHAPES[shape]
        self._late_s, self._noise = late_s, random.Random(seed)

    def run(self, iterations: int = ITERATIONS) -> Job:
        for _ in range(iterations):
            self._step()
        return self

    def late(self) -> dict[int, float]:
        verdicts = find([rank.snapshot() for rank in self.ranks])["verdicts"]
        return {int(rank): verdict["late_s"] for rank, verdict in verdicts.items() if verdict["verdict"] == "late"}

    def _together(self, op: str, size: int, stream: int, ready_s: Sequence[float], seconds: float) -> list[float]:
        """A collective in each group, from when its last member is ready; when each rank leaves it."""
        ends_s = list(ready_s)
        for members in groups_of(len(self.ranks), size) if size else ():
            entries_s = [max(self.ranks[m].now_s[stream], ready_s[m]) for m in members]
            for member, entry_s in zip(members, entries_s, strict=True):
                ends_s[member] = max(entries_s) + seconds
                self.ranks[member].log(op, members, stream, entry_s, ends_s[member])
        return ends_s

    def _compute_s(self) -> list[float]:
        return [rank.now_s[COMPUTE] for rank in self.ranks]

    def _step(self) -> None:
        shape, noise, ranks = self._shape, self._noise, self.ranks
        late_s = [[self._late_s.get((r.rank, place), 0.0) for r in ranks] for place in PLACES]
        for rank, loader_s in zip(ranks, late_s[0], strict=True):
            rank.now_s[COMPUTE] += loader_s + noise.gauss(1e-3, 2e-4)
        ready_s = scattered_s = self._compute_s()
        for layer in range(2 * LAYERS):
            backward = layer >= LAYERS
            gathered_s = self._together("all_gather", shape.gathered, GATHERS, ready_s, GATHER_S)
            for rank, until_s in zip(ranks, gathered_s, strict=True):
                if shape.gathered:
                    rank.wait(until_s)
            ready_s = self._compute_s()  # the next gather waits for this copy-out only
            for rank, slow_s in zip(ranks, late_s[1 + backward], strict=True):
                work_s = (BACKWARD_S if backward else FORWARD_S) * noise.gauss(1.0, 0.01)
                rank.now_s[COMPUTE] += work_s + slow_s * (layer % LAYERS == LAYERS // 2)
            self._together("all_reduce", shape.tensor, COMPUTE, self._compute_s(), 5e-4)
            if backward:
                scattered_s = self._together("reduce_scatter", shape.scattered, SCATTERS, self._compute_s(), SCATTER_S)
                scattered_s = self._together("all_reduce", -shape.across, ACROSS, scattered_s, 1e-3)
        for rank, until_s in zip(ranks, scattered_s, strict=True):
            rank.wait(until_s)
            rank.now_s[COMPUTE] += OPTIMIZER_S
            rank.tick()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("shape", "ranks"), [("FSDP2", 2), *((shape, 4) for shape in SHAPES)])
def test_a_late_rank_is_named_wherever_it_is_late(shape: str, ranks: int, place: str) -> None:
    late = ranks - 1
    job = Job(ranks, {(late, place): LATE_S}, shape).run()
    assert job.late() == {late: pytest.approx(LATE_S, rel=0.2)}


@pytest.mark.parametrize("shape", SHAPES)
def test_nobody_is_named_where_nobody_is_late(shape: str) -> None:
    job = Job(4, {}, shape).run()
    assert find([rank.snapshot() for rank in job.ranks])["text"] == ["all ranks arrive on time"]


def test_what_a_collective_costs_the_step_is_what_the_compute_stands_still() -> None:
    parts = Job(2, {}).run(100).ranks[0].snapshot()["parts"]
    own_s = 1e-3 + LAYERS * (FORWARD_S + BACKWARD_S) + OPTIMIZER_S
    assert parts["compute_s"] == pytest.approx(own_s, rel=0.01), "gathers and scatters beside it are no part of it"
    assert 0.0 < parts["collective_s"] < 0.15 * own_s


def test_a_job_of_many_collectives_is_watched_now_and_then_and_at_once_where_it_is_to_pace() -> None:
    job = Job(2, {}).run(12 * LEAST_SHARE)
    assert {rank.loop.log.every for rank in job.ranks} == {8}, "the largest power of 2 in 11"
    for rank in job.ranks:
        assert rank.watched == pytest.approx(ALL_WATCHED + 128 / 2 + 256 / 4 + 256 / 8, abs=8)
        assert rank.snapshot()["unseen"] == []
        assert rank.loop.iterations == pytest.approx(12 * LEAST_SHARE, abs=8)
        rank.loop.change("shadow", find_policy("paper"), 0)
        rank.watched = 0
    job.run(40)
    assert [rank.watched for rank in job.ranks] == pytest.approx([40, 40], abs=2)
    assert [rank.loop.state for rank in job.ranks] == ["shadow", "shadow"]


def _watched(every: int, until: int) -> Iterator[int]:
    iteration = watched_next(0, every)
    while iteration < until:
        yield iteration
        iteration = watched_next(iteration + 1, every)


def test_watched_iterations_have_no_period_and_all_ranks_share_them() -> None:
    often, seldom = (list(_watched(every, 1 << 15)) for every in (8, 64))
    assert [iteration // 64 for iteration in seldom] == list(range((1 << 15) // 64)), "one in each window"
    assert set(seldom) <= set(often)
    for period in (2, 10, 16, 50, 64, 100):
        hits = [sum(iteration % period == phase for iteration in often) for phase in range(period)]
        assert max(hits) < 1.5 * len(often) / period, f"what a job does every {period} iterations is seen as often"


def test_only_waits_of_the_compute_stream_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda stream, event: None, raising=False)
    hooks, log = Hooks(pytest.fail), Log(cuda_stamps(0))
    log.on_device = hooks.active = True
    StreamWaits(log, hooks).install()
    try:
        for handle, watching in itertools.product((0, 7), (True, False)):
            hooks.watch(watching)
            torch.cuda.Stream.wait_event(SimpleNamespace(cuda_stream=handle), None)
    finally:
        hooks.restore()
    assert cuda.stream[0] == 0
    assert [log.kinds[row[0]].op for row in log.rows] == [STANDSTILL]
