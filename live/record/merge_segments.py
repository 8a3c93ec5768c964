"""Merges the segments of all ranks of a run into one trace on one clock; needs pyarrow, which a job does not.

The monotonic clocks of hosts start at different times. The end of an iteration's last collective is common to all
ranks, up to the network's delay, so the clocks are aligned there. Per iteration, the shift of a clock is the median
difference between its ranks' ends and those of the reference clock (the lowest rank's), smoothed over neighbouring
iterations. Ranks with the same ``clock`` in their metadata get the same shift, so their relative times stay unchanged.
All rows of an iteration get the same shift. So durations never change, and the shift follows a clock that runs slow or
stood still while its machine slept. Two passes, one segment in memory at a time.

An iteration's rows are, in order of their start: pace, the operations, and compute, the rest of the iteration. In a
marked iteration (checkpoint, evaluation) the rest carries the mark's name instead; calibration leaves such an iteration
out. Operations on another thread are rows, too, but do not cut the rest. Legend: T iterations, N operations, E events
(operations and delays), R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.trace import COMPUTE_OPS, OTHER_OPS, PACE_OP, POINT_TO_POINT_OPS, TraceMetadata, TraceWriter
from paceenv.live.observe.batch import THREAD, Batch
from paceenv.live.record.findings import in_short
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.segments import read_header, read_segment

NEIGHBOURS: Final = 31
"""Iterations over which a clock's shift is a running median; odd."""
_NOT_COLLECTIVE: Final = ("wait", *COMPUTE_OPS, *POINT_TO_POINT_OPS, *OTHER_OPS, PACE_OP, "evaluation")

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class _Shift:
    """The seconds to add to the times of each iteration; interpolated for unknown iterations."""

    iteration_T: Integers
    shift_s_T: Array

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


def write_merged(folder: RunFolder, path: str | Path, attempt: str | None = None) -> int:
    """Write the merged trace of an attempt (None: the latest), all or nothing; how many rows. Raises InputError."""
    merger = _Merger(folder, folder.chosen(attempt))
    rows = 0
    with TraceWriter(path, merger.metadata) as writer:
        for columns in merger.rows():
            writer.append(columns)
            rows += len(columns["start_s"])
    return rows


def segment_rows(segment: Batch, after: int = -1) -> dict[str, Any]:
    """The rows of a segment's iterations, as columns of a trace. Without overlaps they add up to the steps.

    Args:
        after: only iterations with higher numbers, of which there is at least one.
    """
    first = int(np.searchsorted(segment.iterations_T["iteration"], after, "right"))
    iterations_T, operations_N = segment.iterations_T[first:], segment.operations_N
    operations_N = operations_N[operations_N["place"] >= first]
    size_T = len(iterations_T)
    kinds, names = segment.kinds, [PACE_OP, COMPUTE_OPS[0], *segment.marks, *(kind.op for kind in segment.kinds)]
    distinct = {name: number for number, name in enumerate(dict.fromkeys(names))}
    start_s_T, end_s_T = iterations_T["start_s"], iterations_T["end_s"]
    rest_T = np.where(iterations_T["mark"] > 0, iterations_T["mark"].astype(np.int32) + 2, 1)

    # events in order of their start: operations, then delays
    paced = np.flatnonzero(iterations_T["pace_end_s"] > iterations_T["pace_start_s"])
    place_E = np.concatenate([operations_N["place"].astype(np.int64) - first, paced])
    start_s_E = np.concatenate([operations_N["start_s"], iterations_T["pace_start_s"][paced]])
    order = np.lexsort((start_s_E, place_E))
    place_E, start_s_E = place_E[order], start_s_E[order]
    end_s_E = np.concatenate([operations_N["end_s"], iterations_T["pace_end_s"][paced]])[order]
    kind_E = np.concatenate([operations_N["kind"].astype(np.int32), np.full(len(paced), -1, np.int32)])[order]
    blocks_E = ~np.array([*(kind.side for kind in kinds), 0], np.bool_)[kind_E]
    size_E = len(place_E)

    # one list of the beginnings of iterations and, behind each, its events
    begin_T = np.searchsorted(place_E, np.arange(size_T)) + np.arange(size_T)
    at_E = np.arange(size_E) + place_E + 1
    until_s = np.empty(size_T + size_E)
    until_s[begin_T], until_s[at_E] = start_s_T, np.where(blocks_E, end_s_E, -np.inf)
    segment_of = np.repeat(np.arange(size_T), np.diff(np.append(begin_T, size_T + size_E)))
    done_s = np.maximum.accumulate(until_s)  # times increase from iteration to iteration
    last_T = np.append(begin_T[1:], size_T + size_E) - 1

    # a row for each event, one for the rest before it, and one for the rest at the end of an iteration
    gap_E, tail_T = blocks_E & (start_s_E > done_s[at_E - 1]), end_s_T > done_s[last_T]
    rows = np.zeros(size_T + size_E, np.int64)
    rows[at_E] = 1 + gap_E
    rows[last_T] += tail_T
    before = np.cumsum(rows) - rows
    event_R, gap_R = before[at_E] + gap_E, before[at_E][gap_E]
    tail_R = before[last_T] + rows[last_T] - 1
    size_R = int(rows.sum())
    place_R, op_R = np.repeat(segment_of, rows), np.empty(size_R, np.int32)
    start_s_R, end_s_R, kind_R = np.empty(size_R), np.empty(size_R), np.full(size_R, -1, np.int32)
    op_R[event_R] = np.where(kind_E >= 0, kind_E + 2 + len(segment.marks), 0)
    kind_R[event_R], start_s_R[event_R], end_s_R[event_R] = kind_E, start_s_E, end_s_E
    op_R[gap_R], start_s_R[gap_R], end_s_R[gap_R] = rest_T[place_E[gap_E]], done_s[at_E - 1][gap_E], start_s_E[gap_E]
    tail_R = tail_R[tail_T]
    op_R[tail_R], start_s_R[tail_R], end_s_R[tail_R] = rest_T[tail_T], done_s[last_T][tail_T], end_s_T[tail_T]
    if not blocks_E.all():  # a row of the rest may begin before an operation that did not cut it
        order = np.lexsort((start_s_R, place_R))
        op_R, kind_R, start_s_R, end_s_R = op_R[order], kind_R[order], start_s_R[order], end_s_R[order]
    return {
        "iteration": iterations_T["iteration"][place_R].astype(np.int32),
        "seq": (np.arange(size_R) - np.searchsorted(place_R, place_R)).astype(np.int32),
        "op": pa.DictionaryArray.from_arrays(
            np.array([distinct[name] for name in names], np.int32)[op_R], pa.array(distinct, pa.string())
        ),
        "group": np.array([*(kind.group for kind in kinds), -1], np.int32)[kind_R],
        "bytes": np.array([*(kind.bytes for kind in kinds), 0], np.int64)[kind_R],
        "start_s": start_s_R,
        "end_s": end_s_R,
    }


class _Merger:
    def __init__(self, folder: RunFolder, attempt: str) -> None:
        self._folder, self.attempt = folder, attempt
        self._headers = dict[Path, Mapping[str, Any]]()
        self._segments = {rank: self._of_one_recording(paths) for rank, paths in self._readable().items()}
        ticks = {rank: found for rank in self._segments if (found := self._ticks_of(rank)) is not None}
        if not ticks:
            raise InputError(f"{folder.path}: attempt {attempt} left no trace that can be read")
        self.shifts = self._shifts(ticks)
        lowest = ticks[min(self.shifts)].metadata
        entries = tuple(entry for rank in self.shifts for entry in ticks[rank].metadata.ranks)
        says = in_short(folder.statuses(attempt))
        self.metadata = TraceMetadata({**lowest.job, **({"agent": says} if says else {})}, entries, lowest.source)
        self._origin_s = min(
            float(shift.at(np.array([ticks[rank].first_iteration]))[0]) + ticks[rank].first_start_s
            for rank, shift in self.shifts.items()
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """The shifted rows, rank by rank; time 0 is the first start of any rank."""
        job = str(self.metadata.job["name"])
        for rank, shift in self.shifts.items():
            after = -1
            for _, segment in self._read(rank):
                if segment.iterations_T["iteration"][-1] <= after:
                    continue
                columns = segment_rows(segment, after)
                after = int(segment.iterations_T["iteration"][-1])
                add_s_R = shift.at(columns["iteration"]) - self._origin_s
                columns["start_s"], columns["end_s"] = columns["start_s"] + add_s_R, columns["end_s"] + add_s_R
                yield {"job": job, "rank": rank} | columns

    def _readable(self) -> dict[int, list[Path]]:
        """The segments whose headers belong here, by rank."""
        found = self._folder.segments(self.attempt)
        for path in [path for paths in found.values() for path in paths]:
            try:
                header = _checked(read_header(path), path)
            except InputError as error:
                self._folder.note(f"passed over: {error}")
                continue
            job, entry = header["job"], header["rank"]
            if self._folder.is_in_place(path, job.get("attempt"), entry.get("host", ""), entry["rank"], job["ranks"]):
                self._headers[path] = header
        apart = self._folder.apart({p: (h["job"]["name"], h["job"]["ranks"]) for p, h in self._headers.items()})
        kept = self._headers.keys() - apart
        return {rank: left for rank, paths in found.items() if (left := [path for path in paths if path in kept])}

    def _of_one_recording(self, paths: list[Path]) -> list[Path]:
        """The files of the recording that began last: an agent that was attached again counts from 0 again."""
        began = {path: self._headers[path]["began_unix_s"] for path in paths}
        for path in paths:
            if began[path] < max(began.values()):
                self._folder.note(f"{path}: passed over: of an agent that was attached before another")
        return [path for path in paths if began[path] == max(began.values())]

    def _read(self, rank: int) -> Iterator[tuple[Path, Batch]]:
        """The segments of a rank that hold any iteration."""
        for path in self._segments[rank]:
            try:
                _, segment, note = read_segment(path)
            except InputError as error:  # replaced meanwhile
                self._folder.note(f"passed over: {error}")
                continue
            if note:
                self._folder.note(note)
            if len(segment.iterations_T):
                yield path, segment

    def _ticks_of(self, rank: int) -> _RankTicks | None:
        parts: list[_Ticks] = []
        first: tuple[Path, int, float] | None = None
        for path, segment in self._read(rank):
            iterations_T = segment.iterations_T
            if first is None:
                first = path, int(iterations_T["iteration"][0]), float(iterations_T["start_s"][0])
            together = np.array(
                [kind.side != THREAD and kind.op not in _NOT_COLLECTIVE for kind in segment.kinds], np.bool_
            )
            operations_N = segment.operations_N
            operations_N = operations_N[together[operations_N["kind"]]] if len(operations_N) else operations_N
            end_s_T = np.full(len(iterations_T), -np.inf)
            np.maximum.at(end_s_T, operations_N["place"], operations_N["end_s"])
            seen = end_s_T > -np.inf
            parts.append(_Ticks(iterations_T["iteration"][seen], end_s_T[seen]))
        if first is None:
            return None
        path, first_iteration, start_s = first
        header = self._headers[path]
        metadata = TraceMetadata(header["job"], (header["rank"],), header["source"])
        clock = str(header["rank"].get("clock") or f"rank {rank}")
        ends = _Ticks(np.concatenate([p.iteration_T for p in parts]), np.concatenate([p.end_s_T for p in parts]))
        return _RankTicks(metadata, clock, first_iteration, start_s, ends)

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
    return _Shift(iteration_T, smooth_s_T)


def _checked(header: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """A header with the entries that a merge needs. Raises InputError if one is missing or of a wrong type."""
    job, entry = header.get("job"), header.get("rank")
    if isinstance(job, dict) and isinstance(entry, dict) and isinstance(header.get("source"), str):
        numbers = type(job.get("ranks")) is int and type(entry.get("rank")) is int
        if numbers and isinstance(job.get("name"), str) and isinstance(header.get("began_unix_s"), float):
            return header
    raise InputError(f"{path}: its header does not say which job and rank it is of")
