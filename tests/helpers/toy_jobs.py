"""Toy jobs for the findings: ranks with own times, groups with common exits, and the snapshots that agents would write.

A program is a list of phases. In a phase each rank works, then its group's operation ends for all members together,
when the last of them has arrived and the transfer is over. Two ranks of a job differ in nothing but their own times,
so that the late one is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core.wording import format_list

BLOCKS = 64


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
    bytes: int = 1 << 20
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
        Phase("all_reduce", all_of(n), 0.005, 0.0001, bytes=4),
        Phase("all_gather", all_of(n), 0.005, 0.0001, bytes=64),
        Phase("all_reduce", all_of(n), 0.02),
        Phase("barrier", all_of(n), 0.0002, 0.0001, bytes=0),
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
    noise: float = 0.02,
    seed: int = 0,
    missing: Sequence[int] = (),
    per_host: int = 8,
    slow_s: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """The snapshots of a job; ``slow_s`` and ``late`` are own time of each rank, constant and by iteration, seconds."""
    random = np.random.default_rng(seed)
    now = np.zeros(ranks)
    own, step = np.zeros((iterations, ranks)), np.zeros((iterations, ranks))
    blocked = np.zeros((len(phases), iterations, ranks))
    for i in range(iterations):
        begin = now.copy()
        for f, phase in enumerate(phases):
            scale = np.array([phase.weights.get(r, 1.0) for r in range(ranks)])
            work = phase.work_s * scale * np.maximum(1.0 + noise * random.standard_normal(ranks), 0.1)
            if f == late_phase:
                work += (late(i) if late is not None else 0.0) + (np.array(slow_s) if len(slow_s) else 0.0)
            now = now + work
            own[i] += work
            for group in phase.groups:
                arrival = now[list(group)]
                if phase.op == "broadcast":  # the root leaves at once, the others with the payload
                    exits = np.maximum(arrival, arrival[0] + phase.transfer_s)
                    exits[0] = arrival[0] + 1e-5
                elif phase.op == "recv":
                    exits = np.maximum(arrival, arrival[0] + phase.transfer_s)
                    exits[0] = arrival[0]
                else:
                    exits = np.full(len(group), arrival.max() + phase.transfer_s)
                took = exits - arrival
                if phase.seen:
                    blocked[f, i, list(group)] += took
                else:
                    own[i, list(group)] += took
                now[list(group)] = exits
        step[i] = now - begin
    return _snapshots(phases, own, step, blocked, missing, per_host)


def _snapshots(
    phases: Sequence[Phase],
    own: NDArray[np.float64],
    step: NDArray[np.float64],
    blocked: NDArray[np.float64],
    missing: Sequence[int],
    per_host: int,
) -> list[dict[str, Any]]:
    iterations, ranks = own.shape
    size = 1
    while iterations // size > BLOCKS:
        size *= 2
    kept = iterations // size * size

    def means(values: NDArray[np.float64]) -> list[float]:
        return [float(v) for v in values[:kept].reshape(-1, size).mean(axis=1)]

    numbers: dict[tuple[int, ...], int] = {}
    for phase in phases:
        for group in phase.groups:
            numbers.setdefault(tuple(group), len(numbers))
    found = []
    for rank in range(ranks):
        if rank in missing:
            continue
        mine = {key: number for key, number in numbers.items() if rank in key}
        sums: dict[tuple[str, int, int], NDArray[np.float64]] = {}
        counts: dict[tuple[str, int, int], int] = {}
        unseen: dict[int, int] = {}
        for f, phase in enumerate(phases):
            for group in phase.groups:
                if rank not in group:
                    continue
                number = mine[tuple(group)]
                if not phase.seen:
                    unseen[number] = unseen.get(number, 0) + 1
                    continue
                kind = (phase.op, number, phase.bytes)
                sums[kind] = sums.get(kind, np.zeros(iterations)) + blocked[f, :, rank]
                counts[kind] = counts.get(kind, 0) + 1
        total = sum(sums.values(), np.zeros(iterations))
        blocks = {"iterations": size, "first": 0, "own_s": means(own[:, rank]), "step_s": means(step[:, rank])}
        own_s = float(own[:, rank].mean())
        who = {"schema": "paceenv.live/2", "job": "toy", "attempt": "20261123T053000-3f2a91", "rank": rank}
        who |= {"world_size": ranks, "host": f"node{rank // per_host}", "unix_time_s": 1.8e9, "final": False}
        course = {"iterations": iterations, "regular": iterations, "irregular": 0, "step_iterations": 1}
        measured = {
            "mode": "observe",
            "state": "observe",
            "step": {"mean_s": float(step[:, rank].mean())},
            "parts": {"compute_s": own_s, "pacing_s": 0.0},
            "own": {"blocks": blocks},
            "wait": {"mean_s": float(np.maximum(total - np.quantile(total, 0.05), 0.0).mean())},
            "collectives": [
                {"op": kind[0], "group": kind[1], "per_step": counts[kind], "blocked_s": float(times.mean())}
                | {"blocks_s": means(times)}
                for kind, times in sums.items()
            ],
            "groups": {
                str(number): {
                    "name": f"g{number}",
                    "ranks": format_list(list(key)),
                    "member": key.index(rank),
                    "size": len(key),
                }
                for key, number in mine.items()
            },
            "unseen": [{"group": number, "per_step": times} for number, times in unseen.items()],
            "side": {"per_step": 0.0, "seconds": 0.0},
            "events": [],
        }
        found.append(who | course | measured)
    return found


def constant(ranks: int, rank: int, late_s: float) -> Late:
    """One rank is late in every iteration."""
    extra = np.zeros(ranks)
    extra[rank] = late_s
    return lambda _: extra
