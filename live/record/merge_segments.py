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
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.trace import COMPUTE_OPS, OTHER_OPS, PACE_OP, POINT_TO_POINT_OPS, TraceMetadata, TraceWriter
from paceenv.live.observe.batch import THREAD, Batch
from paceenv.live.record.findings import in_short
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.segments import read_segment

NEIGHBOURS: Final = 31
"""Iterations over which a clock's shift is a running median; odd."""
_NOT_COLLECTIVE: Final = ("wait", *COMPUTE_OPS, *POINT_TO_POINT_OPS, *OTHER_OPS, PACE_OP, "evaluation")

Array = NDArray[np.float64]
Series = tuple[NDArray[np.int64], Array]
"""A time, seconds, for each of some iterations: their numbers, and the times."""


class _Rank(NamedTuple):
    """The first pass over a rank: its header and files, and the ends of each iteration's last collective, on its clock.

    ``first`` is the number and the start of its first iteration.
    """

    header: Mapping[str, Any]
    paths: list[Path]
    first: tuple[int, float]
    ends: Series

    @property
    def clock(self) -> str:
        entry = self.header["rank"]
        return str(entry.get("clock") or f"rank {entry['rank']}")


def write_merged(folder: RunFolder, path: str | Path) -> int:
    """Write the merged trace of the latest attempt, all or nothing; how many rows. Raises InputError."""
    attempt, rows = folder.latest(), 0
    ranks = _first_pass(folder, attempt)
    if not ranks:
        why = "left no trace that can be read"
        if not folder.segments(attempt):
            why = "has written no trace yet" + "; its page has the answer" * bool(folder.statuses(attempt))
        raise InputError(f"{folder.path}: attempt {attempt} {why}")
    shifts = _shifts(folder, ranks)
    origin_s = min(float(np.interp(ranks[rank].first[0], *shifts[rank])) + ranks[rank].first[1] for rank in shifts)
    lowest, says = ranks[min(shifts)].header, in_short(folder.statuses(attempt))
    entries = tuple(ranks[rank].header["rank"] for rank in shifts)
    metadata = TraceMetadata({**lowest["job"], **({"agent": says} if says else {})}, entries, lowest["source"])
    with TraceWriter(path, metadata) as writer:
        for rank, shift in shifts.items():  # time 0 is the first start of any rank
            for *_, segment in _read(folder, ranks[rank].paths):
                columns = segment_rows(segment)
                add_s_R = np.interp(columns["iteration"], *shift) - origin_s
                columns["start_s"], columns["end_s"] = columns["start_s"] + add_s_R, columns["end_s"] + add_s_R
                writer.append({"job": str(lowest["job"]["name"]), "rank": rank} | columns)
                rows += len(add_s_R)
    return rows


def segment_rows(segment: Batch) -> dict[str, Any]:
    """The rows of a segment's iterations, as columns of a trace. Without overlaps they add up to the steps."""
    iterations_T, operations_N = segment.iterations_T, segment.operations_N
    size_T = len(iterations_T)
    kinds, names = segment.kinds, [PACE_OP, COMPUTE_OPS[0], *segment.marks, *(kind.op for kind in segment.kinds)]
    distinct = {name: number for number, name in enumerate(dict.fromkeys(names))}
    start_s_T, end_s_T = iterations_T["start_s"], iterations_T["end_s"]
    rest_T = np.where(iterations_T["mark"] > 0, iterations_T["mark"].astype(np.int32) + 2, 1)

    # events in order of their start: operations, then delays
    paced = np.flatnonzero(iterations_T["pace_end_s"] > iterations_T["pace_start_s"])
    place_E = np.concatenate([operations_N["place"].astype(np.int64), paced])
    start_s_E = np.concatenate([operations_N["start_s"], iterations_T["pace_start_s"][paced]])
    order = np.lexsort((start_s_E, place_E))
    place_E, start_s_E = place_E[order], start_s_E[order]
    end_s_E = np.concatenate([operations_N["end_s"], iterations_T["pace_end_s"][paced]])[order]
    kind_E = np.concatenate([operations_N["kind"].astype(np.int32), np.full(len(paced), -1, np.int32)])[order]
    blocks_E = ~np.array([*(kind.side for kind in kinds), 0], np.bool_)[kind_E]
    # how far the rank had come before each event, and at the end of each iteration; times increase
    until_s = np.maximum.accumulate(np.concatenate([[-np.inf], np.where(blocks_E, end_s_E, -np.inf)]))
    done_s_E = np.maximum(until_s[:-1], start_s_T[place_E])
    done_s_T = np.maximum(until_s[np.searchsorted(place_E, np.arange(size_T), "right")], start_s_T)

    # a row for each event, one for the rest before it, and one for the rest at the end of an iteration
    gap_E, tail_T = blocks_E & (start_s_E > done_s_E), end_s_T > done_s_T
    place_R = np.concatenate([place_E, place_E[gap_E], np.flatnonzero(tail_T)])
    start_s_R = np.concatenate([start_s_E, done_s_E[gap_E], done_s_T[tail_T]])
    order = np.lexsort((start_s_R, place_R))
    place_R, start_s_R = place_R[order], start_s_R[order]
    end_s_R = np.concatenate([end_s_E, start_s_E[gap_E], end_s_T[tail_T]])[order]
    op_E = np.where(kind_E >= 0, kind_E + 2 + len(segment.marks), 0)
    op_R = np.concatenate([op_E, rest_T[place_E[gap_E]], rest_T[tail_T]])[order]
    kind_R = np.concatenate([kind_E, np.full(len(order) - len(kind_E), -1, np.int32)])[order]
    return {
        "iteration": iterations_T["iteration"][place_R].astype(np.int32),
        "seq": (np.arange(len(order)) - np.searchsorted(place_R, place_R)).astype(np.int32),
        "op": pa.DictionaryArray.from_arrays(
            np.array([distinct[name] for name in names], np.int32)[op_R], pa.array(distinct, pa.string())
        ),
        "group": np.array([*(kind.group for kind in kinds), -1], np.int32)[kind_R],
        "bytes": np.array([*(kind.bytes for kind in kinds), 0], np.int64)[kind_R],
        "start_s": start_s_R,
        "end_s": end_s_R,
    }


def _first_pass(folder: RunFolder, attempt: str) -> dict[int, _Rank]:
    """The ranks of an attempt whose files hold any iteration."""
    ranks = {}
    for rank, paths in folder.segments(attempt).items():
        read = []
        for path, header, segment in _read(folder, paths):
            first = int(segment.iterations_T["iteration"][0]), float(segment.iterations_T["start_s"][0])
            read.append((path, header, first, _ends(segment)))
        newest_s = max((header["began_unix_s"] for _, header, *_ in read), default=0.0)
        for path, header, *_ in read:  # an agent that was attached again counts from 0 again
            if header["began_unix_s"] < newest_s:
                folder.note(f"{path}: passed over: of an agent that was attached before another")
        if read := [row for row in read if row[1]["began_unix_s"] == newest_s]:
            _, header, first, _ = read[0]
            ends = tuple(np.concatenate([of_file[k] for *_, of_file in read]) for k in range(2))
            header = {**header, "rank": {**header["rank"], "rank": rank}}
            ranks[rank] = _Rank(header, [path for path, *_ in read], first, (ends[0], ends[1]))
    return ranks


def _read(folder: RunFolder, paths: list[Path]) -> Iterator[tuple[Path, Mapping[str, Any], Batch]]:
    """The files of a rank, with header and content."""
    for path in paths:
        try:
            header, segment, note = read_segment(path)
        except InputError as error:
            folder.note(f"passed over: {error}")
            continue
        if note:
            folder.note(note)
        if len(segment.iterations_T):
            yield path, header, segment


def _ends(segment: Batch) -> Series:
    """The end of the last collective of each iteration that has one."""
    together = np.array([kind.side != THREAD and kind.op not in _NOT_COLLECTIVE for kind in segment.kinds], np.bool_)
    operations_N = segment.operations_N[together[segment.operations_N["kind"]]]
    end_s_T = np.full(len(segment.iterations_T), -np.inf)
    np.maximum.at(end_s_T, operations_N["place"], operations_N["end_s"])
    seen = end_s_T > -np.inf
    return segment.iterations_T["iteration"][seen], end_s_T[seen]


def _shifts(folder: RunFolder, ranks: Mapping[int, _Rank]) -> dict[int, Series]:
    """The seconds to add to the times of each rank's iterations, to be interpolated for those that are not known."""
    clocks: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        clocks.setdefault(ranks[rank].clock, []).append(rank)
    lowest = min(ranks)
    reference = _median_ends([ranks[rank].ends for rank in clocks[ranks[lowest].clock]])
    shifts: dict[int, Series] = {}
    for clock, of_clock in clocks.items():
        shift: Series | None = np.zeros(1, np.int64), np.zeros(1)
        if clock != ranks[lowest].clock:
            shift = _shift_between(_median_ends([ranks[rank].ends for rank in of_clock]), reference)
        if shift is None:
            folder.note(f"ranks {of_clock}: passed over: no iteration in common with rank {lowest}")
        else:
            shifts |= dict.fromkeys(of_clock, shift)
    return {rank: shifts[rank] for rank in sorted(shifts)}


def _median_ends(ranks: list[Series]) -> Series:
    """The median over the ranks of one clock, for each iteration of any of them."""
    iteration, end_s = (np.concatenate(columns) for columns in zip(*ranks, strict=True))
    order = np.lexsort((end_s, iteration))
    iteration_T, first, count = np.unique(iteration[order], return_index=True, return_counts=True)
    low, high = first + (count - 1) // 2, first + count // 2
    return iteration_T, (end_s[order][low] + end_s[order][high]) / 2.0


def _shift_between(own: Series, reference: Series) -> Series | None:
    iteration_T, i, j = np.intersect1d(own[0], reference[0], return_indices=True)
    if not len(iteration_T):
        return None
    single_s_T = reference[1][j] - own[1][i]
    half = min(NEIGHBOURS // 2, (len(single_s_T) - 1) // 2)
    padded = np.pad(single_s_T, half, mode="edge")
    return iteration_T, np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
