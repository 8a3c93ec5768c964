"""Toy jobs for the findings: ranks with own times, groups with common exits, and the accounts that agents would keep.

A program is a list of phases. In a phase each rank works, then its group's operation ends for all members together,
when the last of them has arrived and the transfer is over. Two ranks of a job differ in nothing but their own times,
so that the late one is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from live_samples import make_batch
from numpy.typing import NDArray

from paceenv.core.wording import format_list
from paceenv.live.observe.batch import Kind
from paceenv.live.record.history import History


@dataclass(frozen=True)
class Phase:
    """Work of every rank and then one operation in each of the disjoint ``groups``.

    ``op`` "recv": the second rank of a pair waits for the first, which goes on. ``seen``: whether agents see it.
    """

    op: str
    groups: Sequence[Sequence[int]]
    work_s: float = 0.01
    transfer_s: float = 0.002
    seen: bool = True
    weights: dict[int, float] = field(default_factory=dict)
    """Factors of single ranks' work: stages of a pipeline differ."""


Late = Callable[[int], NDArray[np.float64]]
"""Additional own time of every rank in an iteration, seconds, all in the phase ``late_phase``."""


def pairs(ranks: int, apart: int = 1) -> list[list[int]]:
    """Ranks two by two, ``apart`` from each other."""
    return [[r, r + apart] for r in range(ranks) if r // apart % 2 == 0]


def all_of(ranks: int) -> list[list[int]]:
    """One group of all."""
    return [list(range(ranks))]


SHAPES: dict[str, Callable[[int], list[Phase]]] = {
    "ddp": lambda n: [Phase("all_reduce", all_of(n), 0.03)],
    "expert": lambda n: [Phase("all_to_all", [[0, 1]]), Phase("all_reduce", all_of(n))],
    "buffers": lambda n: [Phase("broadcast", all_of(n), 0.001), Phase("all_reduce", all_of(n), 0.03)],
    "small": lambda n: [
        Phase("all_reduce", all_of(n), 0.005, 0.0001),
        Phase("all_gather", all_of(n), 0.005, 0.0001),
        Phase("all_reduce", all_of(n), 0.02),
        Phase("barrier", all_of(n), 0.0002, 0.0001),
    ],
    "tensor and data": lambda n: [
        *[Phase("all_reduce", pairs(n), 0.004, 0.0005)] * 4,
        Phase("reduce_scatter", pairs(n, 2), 0.01),
    ],
    "hybrid shards": lambda n: [
        *[Phase("all_gather", pairs(n), 0.004, 0.001)] * 3,
        Phase("reduce_scatter", pairs(n), 0.008),
        Phase("all_reduce", pairs(n, 2), 0.001),
    ],
    "all to all": lambda n: [Phase("all_to_all", all_of(n), 0.02), Phase("all_to_all", all_of(n), 0.01)],
}
"""Kinds of jobs by name, for a number of ranks (at least four where groups cross)."""


def run(
    phases: Sequence[Phase],
    ranks: int,
    *,
    late: Late | None = None,
    late_phase: int = 0,
    iterations: int = 512,
    seed: int = 0,
    missing: Sequence[int] = (),
    slow_s: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """The snapshots of a job; ``slow_s`` and ``late`` are own time of each rank, constant and by iteration, seconds."""
    random, now = np.random.default_rng(seed), np.zeros(ranks)
    numbers: dict[tuple[int, ...], int] = {}
    for phase in phases:
        for group in phase.groups:
            numbers.setdefault(tuple(group), len(numbers))
    kinds = list({Kind(phase.op, numbers[tuple(group)], 1 << 20): None for phase in phases for group in phase.groups})
    steps, operations = ([list[Any]() for _ in range(ranks)] for _ in range(2))
    for i in range(iterations):
        begin = now.copy()
        for f, phase in enumerate(phases):
            scale = np.array([phase.weights.get(r, 1.0) for r in range(ranks)])
            now = now + phase.work_s * scale * np.maximum(1.0 + 0.02 * random.standard_normal(ranks), 0.1)
            if f == late_phase:
                now += (late(i) if late is not None else 0.0) + (np.array(slow_s) if len(slow_s) else 0.0)
            for group in phase.groups:
                arrival = now[list(group)]
                exits = np.full(len(group), arrival.max() + phase.transfer_s)
                if phase.op in ("broadcast", "recv"):  # the root leaves at once, the others with the payload
                    exits = np.maximum(arrival, arrival[0] + phase.transfer_s)
                    exits[0] = arrival[0]
                kind = kinds.index(Kind(phase.op, numbers[tuple(group)], 1 << 20))
                for rank, *times in zip(group, arrival, exits, strict=True) if phase.seen else ():
                    operations[rank].append((i, kind, *times))
                now[list(group)] = exits
        for rank in range(ranks):
            steps[rank].append((i, begin[rank], now[rank], begin[rank], begin[rank]))
    snapshots = []
    for rank in sorted(set(range(ranks)) - set(missing)):
        history = History()
        history.take(make_batch(steps[rank], operations[rank], kinds=kinds))
        unseen = Counter(numbers[tuple(g)] for phase in phases if not phase.seen for g in phase.groups if rank in g)
        who = {"schema": "paceenv.live/2", "job": "toy", "attempt": "20261123T053000-3f2a91", "rank": rank}
        who |= {"world_size": ranks, "host": f"node{rank // 8}", "unix_time_s": 4e9, "final": False}
        seen = {"mode": "observe", "state": "observe", "iterations": iterations, "irregular": 0, "events": []}
        groups = {
            "groups": {
                str(number): {"name": f"g{number}", "ranks": format_list(list(key)), "size": len(key)}
                for key, number in numbers.items()
                if rank in key
            },
            "unseen": [{"group": number, "per_step": times} for number, times in unseen.items()],
        }
        snapshots.append(who | seen | history.as_dict() | groups)
    return snapshots


def constant(ranks: int, rank: int, late_s: float) -> Late:
    """One rank is late in every iteration."""
    extra = np.zeros(ranks)
    extra[rank] = late_s
    return lambda _: extra
