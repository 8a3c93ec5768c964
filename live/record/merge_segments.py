"""Merges the segments of all ranks of a run into one trace on one clock.

The monotonic clocks of hosts start at different times. The end of an iteration's last collective is common to all
ranks, up to the network's delay, so the clocks are aligned there. Per iteration, the shift of a clock is the median
difference between its ranks' ends and those of the reference clock (the lowest rank's), smoothed over neighbouring
iterations. Ranks with the same ``clock`` in their metadata get the same shift, so their relative times stay unchanged.
All rows of an iteration get the same shift. So durations never change, and the shift follows a clock that runs slow or
stood still while its machine slept. Two passes, one segment in memory at a time. Legend: T iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.trace import (
    COMPUTE_OPS,
    OTHER_OPS,
    PACE_OP,
    POINT_TO_POINT_OPS,
    Trace,
    TraceMetadata,
    TraceWriter,
    read_trace,
)
from paceenv.live.record.run_folder import RunFolder

NEIGHBOURS: Final = 31
"""Iterations over which a clock's shift is a running median; odd."""
_NOT_COLLECTIVE: Final = (*COMPUTE_OPS, *POINT_TO_POINT_OPS, *OTHER_OPS, PACE_OP, "evaluation")

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Merged:
    """The result of a merge. ``spread_s`` is the agreement of each rank's clock with the reference, seconds.

    It is the median absolute deviation of single iterations from the smoothed shift; 0 on the reference clock.
    """

    attempt: int
    rows: int
    spread_s: dict[int, float]


@dataclass(frozen=True)
class _Shift:
    """The seconds to add to the times of each iteration; interpolated for unknown iterations."""

    iteration_T: Integers
    shift_s_T: Array
    spread_s: float = 0.0

    def at(self, iteration: NDArray[np.integer]) -> Array:
        return np.asarray(np.interp(iteration, self.iteration_T, self.shift_s_T))


@dataclass(frozen=True)
class _Ticks:
    iteration_T: Integers
    end_s_T: Array


@dataclass(frozen=True)
class _RankTicks:
    """The first pass over a rank: the end of the last collective of each iteration, on its own clock."""

    metadata: TraceMetadata
    clock: str
    first_iteration: int
    first_start_s: float
    ends: _Ticks


def write_merged(folder: RunFolder, path: str | Path, attempt: int | None = None) -> Merged:
    """Write the merged trace, completely or not at all.

    Args:
        folder: the run.
        path: the Parquet file to write.
        attempt: a start of the job's processes; None takes the latest.

    Raises:
        InputError: no such attempt, no readable trace, or ``path`` cannot be written.
    """
    merger = _Merger(folder, folder.chosen(attempt))
    rows = 0
    with TraceWriter(path, merger.metadata) as writer:
        for batch in merger.batches():
            writer.append(batch)
            rows += batch.num_rows
    return Merged(merger.attempt, rows, {rank: shift.spread_s for rank, shift in merger.shifts.items()})


class _Merger:
    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._folder, self.attempt = folder, attempt
        self._segments = folder.segments(attempt)
        self._unread: set[Path] = set()
        ticks = {rank: found for rank in self._segments if (found := self._ticks_of(rank)) is not None}
        if not ticks:
            raise InputError(f"{folder.path}: attempt {attempt} left no trace that can be read")
        ticks = self._of_this_run(ticks)
        self.shifts = self._shifts(ticks)
        lowest = ticks[min(self.shifts)].metadata
        entries = tuple(entry for rank in self.shifts for entry in ticks[rank].metadata.ranks)
        self.metadata = TraceMetadata(lowest.job, entries, lowest.source)
        self._origin_s = min(
            float(shift.at(np.array([ticks[rank].first_iteration]))[0]) + ticks[rank].first_start_s
            for rank, shift in self.shifts.items()
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The shifted rows, rank by rank; time 0 is the first start of any rank."""
        for rank, shift in self.shifts.items():
            for trace in self._traces(rank):
                add_s = shift.at(trace.column("iteration")) - self._origin_s
                table = trace.table
                for name in ("start_s", "end_s"):
                    moved = pa.array(trace.column(name) + add_s)
                    table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), moved)
                yield from table.to_batches()

    def _traces(self, rank: int) -> Iterator[Trace]:
        for path in self._segments[rank]:
            if path in self._unread:
                continue
            try:
                trace = read_trace(path)
                if not trace.table.num_rows:
                    raise InputError(f"{path}: empty")
                yield trace
            except InputError as error:
                self._unread.add(path)
                self._folder.note(f"passed over: {error}")

    def _ticks_of(self, rank: int) -> _RankTicks | None:
        parts: list[_Ticks] = []
        first: tuple[TraceMetadata, int, float] | None = None
        for trace in self._traces(rank):
            iteration = trace.column("iteration").astype(np.int64)
            if first is None:
                first = trace.metadata, int(iteration[0]), float(trace.column("start_s").min())
            collective = ~trace.isin("op", *_NOT_COLLECTIVE)
            iteration_T, place = np.unique(iteration[collective], return_inverse=True)
            end_s_T = np.full(len(iteration_T), -np.inf)
            np.maximum.at(end_s_T, place, trace.column("end_s")[collective])
            parts.append(_Ticks(iteration_T, end_s_T))
        if first is None:
            return None
        metadata, first_iteration, start_s = first
        clock = next((str(entry["clock"]) for entry in metadata.ranks if entry.get("clock")), f"rank {rank}")
        ends = _Ticks(np.concatenate([p.iteration_T for p in parts]), np.concatenate([p.end_s_T for p in parts]))
        return _RankTicks(metadata, clock, first_iteration, start_s, ends)

    def _of_this_run(self, ticks: dict[int, _RankTicks]) -> dict[int, _RankTicks]:
        """``ticks`` without ranks that an earlier, larger job left in this folder."""
        size = ticks[min(ticks)].metadata.job.get("ranks")
        if not isinstance(size, int):
            return ticks
        for rank in [rank for rank in ticks if rank >= size]:
            self._folder.note(f"rank {rank}: passed over: the job has {size} ranks; left by an earlier run")
        return {rank: found for rank, found in ticks.items() if rank < size}

    def _shifts(self, ticks: dict[int, _RankTicks]) -> dict[int, _Shift]:
        clocks: dict[str, list[int]] = {}
        for rank in sorted(ticks):
            clocks.setdefault(ticks[rank].clock, []).append(rank)
        common = {clock: _median_ticks([ticks[rank].ends for rank in ranks]) for clock, ranks in clocks.items()}
        reference = ticks[min(ticks)].clock
        shifts: dict[int, _Shift] = {}
        for clock, ranks in clocks.items():
            shift = _Shift(np.zeros(1, np.int64), np.zeros(1))
            if clock != reference:
                found = _shift_between(common[clock], common[reference])
                if found is None:
                    self._folder.note(f"ranks {ranks}: passed over: no iteration in common with rank {min(ticks)}")
                    continue
                shift = found
            shifts |= dict.fromkeys(ranks, shift)
        return {rank: shifts[rank] for rank in sorted(shifts)}


def _median_ticks(ranks: list[_Ticks]) -> _Ticks:
    """The median over the ranks of one clock, for each iteration of any of them."""
    iteration = np.concatenate([ticks.iteration_T for ticks in ranks])
    end_s = np.concatenate([ticks.end_s_T for ticks in ranks])
    order = np.lexsort((end_s, iteration))
    iteration_T, first, count = np.unique(iteration[order], return_index=True, return_counts=True)
    low, high = first + (count - 1) // 2, first + count // 2
    return _Ticks(iteration_T, (end_s[order][low] + end_s[order][high]) / 2.0)


def _shift_between(own: _Ticks, reference: _Ticks) -> _Shift | None:
    iteration_T, i, j = np.intersect1d(own.iteration_T, reference.iteration_T, return_indices=True)
    if not len(iteration_T):
        return None
    single_s_T = reference.end_s_T[j] - own.end_s_T[i]
    half = min(NEIGHBOURS // 2, (len(single_s_T) - 1) // 2)
    padded = np.pad(single_s_T, half, mode="edge")
    smooth_s_T = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
    return _Shift(iteration_T, smooth_s_T, float(np.median(np.abs(single_s_T - smooth_s_T))))


def describe_spread(merged: Merged) -> str:
    """The agreement of the clocks in words."""
    worst_s = max(merged.spread_s.values())
    if not worst_s:
        return "all ranks on one clock"
    return f"clocks of different hosts aligned on the ends of collectives, typically within {worst_s * 1e6:.0f} µs"
