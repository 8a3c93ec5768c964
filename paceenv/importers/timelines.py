"""One timeline per rank, each on its own clock and cut into steps, made into one trace on one clock.

For formats that have a file per rank (profiler, flight recorder). Clocks are aligned on collectives: the end of one is
common to its members up to what the network takes to let them go, so a rank's clock is shifted by the median difference
of those ends to the reference's, as ``paceenv.live.record.merge_segments`` does for our own. A rank's compute is
whatever it does in a step that is not waiting for a collective with nothing else to do, cut where a collective begins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.trace import COMPUTE_OPS, Trace, TraceMetadata

MIN_SHARED: Final = 3
"""Collectives that two ranks must share for their clocks to be aligned."""
_MIN_WAIT: Final = 0.002
"""Share of a step: shorter waits are compute."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Collective:
    """One collective as one rank saw it; ``group`` is whatever names its process group, "" where it has none."""

    op: str
    group: str
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True)
class Step:
    """One step of a rank: its number, when it began and ended on the rank's clock, and what happened in it."""

    iteration: int
    start_s: float
    end_s: float
    collectives: tuple[Collective, ...]
    busy_start_s: Array
    busy_end_s: Array


@dataclass(frozen=True)
class Timeline:
    """One rank. ``about`` goes to the rank's metadata."""

    rank: int
    path: Path
    steps: tuple[Step, ...]
    about: dict[str, Any] = field(default_factory=dict)


def merge_timelines(timelines: list[Timeline], name: str, source: str) -> Trace:
    """One trace of all ranks, on the clock of the lowest rank.

    Args:
        timelines: one per rank.
        name: name of the job.
        source: where the files come from, for the metadata.

    Raises:
        InputError: two files are of one rank, a rank shares no steps or too few collectives with the others, or nothing
            is left.
    """
    by_rank: dict[int, Timeline] = {}
    for timeline in timelines:
        if timeline.rank in by_rank:
            raise InputError(f"{timeline.path}: rank {timeline.rank} again, after {by_rank[timeline.rank].path}")
        by_rank[timeline.rank] = timeline
    ordered = [by_rank[rank] for rank in sorted(by_rank)]
    common = set.intersection(*({step.iteration for step in t.steps} for t in ordered)) if ordered else set()
    if not common:
        named = ", ".join(f"rank {t.rank} has {len(t.steps)}" for t in ordered[:8])
        raise InputError(f"{name}: no step that all ranks have ({named}); allowed: files of the same steps of one job")
    ends = {t.rank: _ends(t, common) for t in ordered}
    shift_s = _shifts(ordered, ends)
    groups: dict[str, int] = {}
    columns: dict[str, list[Any]] = defaultdict(list)
    for t in ordered:
        for step in t.steps:
            if step.iteration in common:
                _rows(columns, t.rank, step, shift_s[t.rank], groups)
    if not columns:
        raise InputError(f"{name}: steps without any operation")
    origin_s = min(columns["start_s"])
    for key in ("start_s", "end_s"):
        columns[key] = (np.array(columns[key]) - origin_s).tolist()
    ranks = tuple({"rank": t.rank, "dp_rank": i, "stage": 0} | t.about for i, t in enumerate(ordered))
    metadata = TraceMetadata({"name": name, "ranks": len(ordered)}, ranks, source)
    return Trace.from_columns({"job": name, **{k: np.array(v) for k, v in columns.items()}}, metadata, name)


def _ends(timeline: Timeline, common: set[int]) -> dict[tuple[int, str, str, int], float]:
    """When each collective ended on the rank's own clock, by step, group, operation and place among its like."""
    found: dict[tuple[int, str, str, int], float] = {}
    for step in timeline.steps:
        if step.iteration not in common:
            continue
        seen: dict[tuple[str, str], int] = defaultdict(int)
        for c in step.collectives:
            if c.group:
                found[step.iteration, c.group, c.op, seen[c.group, c.op]] = c.end_s
                seen[c.group, c.op] += 1
    return found


def _shifts(timelines: list[Timeline], ends: dict[int, dict[tuple[int, str, str, int], float]]) -> dict[int, float]:
    """What to add to each rank's times: breadth first from the lowest rank, along groups that ranks share."""
    shift_s = {timelines[0].rank: 0.0}
    left = [t for t in timelines if t.rank not in shift_s]
    while left:
        for t in left:
            differences = []
            for known, add_s in shift_s.items():
                shared = ends[t.rank].keys() & ends[known].keys()
                if len(shared) >= MIN_SHARED:
                    differences = [ends[known][key] + add_s - ends[t.rank][key] for key in shared]
                    break
            if differences:
                shift_s[t.rank] = float(np.median(differences))
                left.remove(t)
                break
        else:
            raise InputError(
                f"{left[0].path}: rank {left[0].rank} shares fewer than {MIN_SHARED} collectives with the other "
                "ranks, so its clock cannot be aligned; allowed: profiles of the same steps"
            )
    return shift_s


def _rows(columns: dict[str, list[Any]], rank: int, step: Step, add_s: float, groups: dict[str, int]) -> None:
    """A step's compute and collectives as rows, in the order of their start."""
    rows = [
        (c.start_s, c.end_s, c.op, groups.setdefault(c.group, len(groups)) if c.group else -1, c.bytes)
        for c in step.collectives
    ]
    rows += [(start, end, COMPUTE_OPS[0], -1, 0) for start, end in compute_spans(step)]
    for seq, (start_s, end_s, op, group, size) in enumerate(sorted(rows, key=lambda row: (row[0], row[1]))):
        for key, value in (
            ("rank", rank), ("iteration", step.iteration), ("seq", seq), ("op", op), ("group", group),
            ("start_s", start_s + add_s), ("end_s", max(end_s, start_s) + add_s), ("bytes", size),
        ):  # fmt: skip
            columns[key].append(value)


def united(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in spans that do not overlap, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def compute_spans(step: Step) -> list[tuple[float, float]]:
    """Where a rank computes: the step without what it spends idle while one of its collectives runs."""
    least_s = _MIN_WAIT * (step.end_s - step.start_s)
    busy = zip(step.busy_start_s.tolist(), step.busy_end_s.tolist(), strict=True)
    waits = _without(united([(c.start_s, c.end_s) for c in step.collectives]), united(list(busy)))
    waits = [(max(a, step.start_s), min(b, step.end_s)) for a, b in waits]
    cuts = sorted({c.start_s for c in step.collectives if step.start_s < c.start_s < step.end_s})
    spans, at = [], step.start_s
    for start, end in [*(wait for wait in waits if wait[1] - wait[0] > least_s), (step.end_s, step.end_s)]:
        if start > at:
            inside = cuts[bisect_right(cuts, at) : bisect_left(cuts, start)]
            spans += list(pairwise([at, *inside, start]))
        at = max(at, end)
    return spans


def _without(spans: list[tuple[float, float]], taken: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is left of disjoint spans, in order, when others, likewise, are taken out."""
    left, k = [], 0
    for start, end in spans:
        while k < len(taken) and taken[k][1] <= start:
            k += 1
        at, i = start, k
        while i < len(taken) and taken[i][0] < end:
            if taken[i][0] > at:
                left.append((at, taken[i][0]))
            at, i = max(at, taken[i][1]), i + 1
        if at < end:
            left.append((at, end))
    return left
