"""FSDP2 on a GPU without one: its collectives run on streams of their own, and the late rank is named from them.

Each rank has a device of three streams (compute, all-gather, reduce-scatter) whose times follow from what FSDP2 does
in PyTorch 2.13: a gather waits for the copy-out of the one before, a scatter for its layer's backward pass, the compute
for the gather of its layer and at last for the last scatter. Only time is played; log, steps, accounts, findings and
the choice of watched iterations are the agent's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from paceenv.live.decide.live_policy import find_policy
from paceenv.live.loop import Loop
from paceenv.live.observe.batch import STANDSTILL
from paceenv.live.observe.log import Group
from paceenv.live.observe.stamps import DeviceStamps
from paceenv.live.options import make_options
from paceenv.live.record.findings import find
from paceenv.live.record.history import unseen

LAYERS, GATHER_S, SCATTER_S, FORWARD_S, BACKWARD_S, OPTIMIZER_S = 8, 2e-3, 3e-3, 4e-3, 8e-3, 5e-3
LATE_S = 0.03
COMPUTE, GATHERS, SCATTERS = range(3)
PLACES = ("loader", "forward", "backward", "optimizer")


class Event:
    """An event at a time of a stream; nothing can wait for it."""

    stream = order = COMPUTE

    def __init__(self, rank: Rank) -> None:
        self._rank, self._at_s = rank, 0.0

    def record(self) -> int:
        self._at_s = self._rank.now_s[self._rank.stream]
        return self._rank.stream

    def query(self) -> bool:
        return self._at_s <= self._rank.passed_s

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at_s - self._at_s)


class Sequence_:
    """The group's own count of collectives, as NCCL keeps it."""

    count = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.count


class Rank:
    """One rank: its agent's loop, and its device."""

    def __init__(self, rank: int, ranks: int, group: str, mode: str = "observe") -> None:
        self.now_s, self.stream, self.passed_s, self.group = [0.0, 0.0, 0.0], COMPUTE, 0.0, Sequence_()
        self.rank, self.ranks, self.watched = rank, ranks, 0
        self.loop = loop = Loop(make_options({"mode": mode, "quiet_first": 0}), find_policy("slack"))
        loop.hooks.active = True
        loop.tick()
        stamps = DeviceStamps(lambda: Event(self), Event.record, clock=lambda: 0.0)
        loop._stamps = loop._log.stamps = stamps
        loop.device, loop._takes_here, loop._log.on_device, loop._optimizer.tick = "cuda:0", True, True, loop._tick
        members = [int(r) for r in range(ranks)]
        loop._log.groups[1] = Group(1, group, rank, ranks, members, self.group)
        self.kinds = [loop._log.kind(op, 1, 1 << 20) for op in ("all_gather", "reduce_scatter")]
        self.still = loop._log.kind(STANDSTILL, -1, 0)

    def stamp(self, stream: int, at_s: float) -> Any:
        self.stream, self.now_s[stream] = stream, at_s
        return self.loop._log.stamps.record() if self.loop.hooks.watching else None

    def log(self, kind: int, stream: int, start_s: float, end_s: float) -> None:
        """A row from one moment of a stream to another, as the hooks log it."""
        entry = self.stamp(stream, start_s)
        self.now_s[stream] = end_s
        if kind != self.still:
            self.group.count += 1
        if self.loop.hooks.watching:
            if kind != self.still:
                self.loop.groups[1].started("allgather")
            self.loop._log.add(kind, entry)

    def wait(self, until_s: float) -> None:
        """The compute stream waits for another."""
        self.log(self.still, COMPUTE, self.now_s[COMPUTE], max(self.now_s[COMPUTE], until_s))

    def tick(self) -> None:
        self.watched += self.loop.hooks.watching
        self.stream, self.passed_s = COMPUTE, max(self.now_s)
        self.loop.tick()

    def snapshot(self) -> dict[str, Any]:
        self.loop.catch_up()
        history = self.loop.history
        return {
            "rank": self.rank,
            "world_size": self.ranks,
            "iterations": self.loop.iterations,
            "irregular": 0,
            "own": history.own(),
            "step": history.step(),
            "parts": history.parts(),
            "wait": history.wait(),
            "collectives": history.collectives(),
            "side": history.side(),
            "unseen": unseen(self.loop.groups, history.count),
            "groups": {"1": {"name": "data", "ranks": f"0-{self.ranks - 1}", "member": self.rank, "size": self.ranks}},
        }


def step(ranks: Sequence[Rank], late_s: dict[tuple[int, str], float], noise: random.Random) -> None:
    """One iteration of FSDP2 on all ranks; ``late_s`` by rank and place."""
    late = lambda r, place: late_s.get((r.rank, place), 0.0)  # noqa: E731
    ready_s = []
    for r in ranks:
        r.now_s[COMPUTE] += late(r, "loader") + noise.gauss(1e-3, 2e-4)
        ready_s.append(r.now_s[COMPUTE])

    def together(kind: int, stream: int, ready_s: Sequence[float], seconds: float) -> float:
        entries_s = [max(r.now_s[stream], s) for r, s in zip(ranks, ready_s, strict=True)]
        end_s = max(entries_s) + seconds
        for r, entry_s in zip(ranks, entries_s, strict=True):
            r.log(r.kinds[kind], stream, entry_s, end_s)
        return end_s

    for layer in range(2 * LAYERS):
        backward = layer >= LAYERS
        gathered_s = together(0, GATHERS, ready_s, GATHER_S)
        ready_s = []
        for r in ranks:
            r.wait(gathered_s)
            ready_s.append(r.now_s[COMPUTE])  # the next gather waits for this copy-out only
            there = layer == (LAYERS + LAYERS // 2 if backward else LAYERS // 2)
            place = "backward" if backward else "forward"
            r.now_s[COMPUTE] += (BACKWARD_S if backward else FORWARD_S) * noise.gauss(1.0, 0.01) + there * late(
                r, place
            )
        if backward:
            scattered_s = together(1, SCATTERS, [r.now_s[COMPUTE] for r in ranks], SCATTER_S)
    for r in ranks:
        r.wait(scattered_s)
        r.now_s[COMPUTE] += OPTIMIZER_S + late(r, "optimizer")
        r.tick()


def job(ranks: int, late_s: dict[tuple[int, str], float], *, iterations: int = 400, seed: int = 1) -> list[Rank]:
    found, noise = [Rank(r, ranks, "data") for r in range(ranks)], random.Random(seed)
    for _ in range(iterations):
        step(found, late_s, noise)
    return found


def named(ranks: Sequence[Rank]) -> dict[int, float]:
    findings = find([rank.snapshot() for rank in ranks])
    return {int(r): v["late_s"] for r, v in findings["verdicts"].items() if v["verdict"] == "late"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_late_rank_is_named_wherever_it_is_late(ranks: int, place: str) -> None:
    late = ranks - 1
    assert named(job(ranks, {(late, place): LATE_S})) == {late: pytest.approx(LATE_S, rel=0.2)}


def test_nobody_is_named_where_nobody_is_late() -> None:
    for seed in range(5):
        ranks = job(4, {}, seed=seed)
        assert named(ranks) == {}
        assert find([rank.snapshot() for rank in ranks])["text"] == ["all ranks arrive on time"]
