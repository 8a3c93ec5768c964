"""Records a rank's iterations as segments of a trace: a bounded ring in front, whole Parquet files behind.

The training thread only appends to the ring. The housekeeping thread turns iterations into rows of the trace's schema
(``paceenv.core.trace``) and writes a segment after enough rows or enough time. It renames a finished file, so a reader
never sees half a segment, and a killed process loses only the unwritten rows. This module imports pyarrow, which takes
a while and must not happen on the housekeeping thread: import it when attaching, and only if a trace is wanted.

An iteration's rows are, in order of their start: pace, the operations, and compute, the rest of the iteration. In a
marked iteration (checkpoint, evaluation) the rest carries the mark's name instead; calibration leaves such an iteration
out.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from paceenv.core.files import atomic_write
from paceenv.core.trace import COMPUTE_OPS, PACE_OP, TraceMetadata, trace_bytes
from paceenv.live.observe.iteration import Iteration
from paceenv.live.record import run_folder as run_folder
from paceenv.live.record.housekeeping import describe, native

SOURCE: Final = "paceenv live"
RING_OPERATIONS: Final = 200_000
"""Operations that the ring may hold, some 100 bytes each."""
CHUNK_ITERATIONS: Final = 64
"""Iterations turned into rows at a time; after each chunk another thread may take the interpreter."""

Row = tuple[int, int, str, int, float, float, int]
_COLUMNS: Final = ("iteration", "seq", "op", "group", "start_s", "end_s", "bytes")
_TYPES: Final = (pa.int32(), pa.int32(), pa.string(), pa.int32(), pa.float64(), pa.float64(), pa.int64())
# pyarrow imports pandas, where it is installed, with its first array: do that here, not on the thread
pa.array([], pa.int64())


def rank_metadata(
    job: str,
    settings: Mapping[str, Any] | None = None,
    *,
    rank: int,
    world_size: int,
    attempt: int,
    locality: Mapping[str, Any],
    **more: Any,
) -> TraceMetadata:
    """The metadata of a rank's segments.

    Args:
        job: the job's name.
        settings: further fields of the job.
        rank: this rank, 0 to ``world_size - 1``.
        world_size: ranks of the job.
        attempt: number of the start of the job's processes, from 0.
        locality: the rank's place (:func:`paceenv.live.observe.locality.describe`).
        more: further fields of the rank, such as ``dp_rank`` and ``stage``.
    """
    described = {"name": job, "ranks": world_size, "attempt": attempt} | dict(settings or {})
    entry = {"rank": rank, "dp_rank": rank, "stage": 0, "locality": dict(locality)} | more
    entry |= {key: locality[key] for key in ("host", "clock", "device") if key in locality}
    return TraceMetadata(described, (entry,), SOURCE)


def iteration_rows(iteration: Iteration) -> Iterator[Row]:
    """The rows of one iteration. Without overlaps their durations add up to the step."""
    events = [(op.start_s, max(op.end_s, op.start_s), op.op, op.group, op.bytes) for op in iteration.operations]
    if iteration.pace_end_s > iteration.pace_start_s:
        events.append((iteration.pace_start_s, iteration.pace_end_s, PACE_OP, -1, 0))
    events.sort(key=_start)
    rest, seq, done_s = iteration.mark or COMPUTE_OPS[0], 0, iteration.start_s
    for start_s, end_s, op, group, size in events:
        if start_s > done_s:
            yield iteration.iteration, seq, rest, -1, done_s, start_s, 0
            seq += 1
        yield iteration.iteration, seq, op, group, start_s, end_s, size
        seq += 1
        done_s = max(done_s, end_s)
    if iteration.end_s > done_s:
        yield iteration.iteration, seq, rest, -1, done_s, iteration.end_s, 0


def _to_batch(rows: list[Row]) -> pa.RecordBatch:
    with native:
        arrays = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), _TYPES, strict=True)]
        return pa.record_batch(arrays, names=_COLUMNS)


def _start(event: tuple[float, float, str, int, int]) -> float:
    return event[0]


def _is_finite(iteration: Iteration, rows: list[Row]) -> bool:
    edges = math.isfinite(iteration.start_s) and math.isfinite(iteration.end_s)
    return edges and all(math.isfinite(row[4]) and math.isfinite(row[5]) for row in rows)


class TraceRecorder:
    """Takes iterations on one thread and writes them on another.

    Args:
        folder: the run's folder, made when the first segment is written.
        metadata: of this rank (:func:`rank_metadata`); its job's ``name`` is the trace's column ``job``.
        rank: this rank, in the files' names.
        attempt: number of the start of the job's processes, in the files' names.
        problem: called once with one line if the trace cannot be written; from then on nothing is kept.
        segment_rows: a segment is written when it has this many rows, at least 1.
        segment_s: a segment is written when it spans this many seconds.
        ring_iterations: iterations kept for the writer, at least 1; the oldest is dropped and counted.
        max_segments: segments kept per rank, at least 1; the oldest is removed.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        metadata: TraceMetadata,
        *,
        rank: int,
        attempt: int,
        problem: Callable[[str], None],
        segment_rows: int = 1 << 16,
        segment_s: float = 30.0,
        ring_iterations: int = 8192,
        max_segments: int = 1000,
    ) -> None:
        for name, value in (
            ("segment_rows", segment_rows),
            ("ring_iterations", ring_iterations),
            ("max_segments", max_segments),
        ):
            if value < 1:
                raise ValueError(f"{name} = {value!r}; allowed: at least 1")
        self._folder, self._metadata, self._rank, self._attempt = Path(folder), metadata, rank, attempt
        self._problem, self._segment_rows, self._segment_s = problem, segment_rows, segment_s
        self._ring: deque[Iteration] = deque(maxlen=ring_iterations)
        self._max_segments, self._process = max_segments, os.getpid()
        self._appended = self._taken = self._unfit = 0
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_iterations = self._lost = 0
        self._opened_s = 0.0
        self._rows = self._segments = 0
        self._off = False

    def append(self, iteration: Iteration) -> None:
        """Take in an iteration within microseconds; never blocks, never raises."""
        if not self._appended:  # bounded in operations too: a step may have thousands
            most = RING_OPERATIONS // max(len(iteration.operations), 1)
            self._ring = deque(maxlen=max(min(self._ring.maxlen or most, most), 1))
        if not self._off:
            self._ring.append(iteration)
        self._appended += 1

    @property
    def counts(self) -> dict[str, int]:
        """``rows`` and ``segments`` written so far, and all iterations ``dropped``."""
        dropped = self._appended - self._taken - len(self._ring) + self._unfit + self._lost
        return {"rows": self._rows, "dropped": max(dropped, 0), "segments": self._segments}

    def write(self, final: bool) -> None:
        """Empty the ring, and write a segment if it is due, or ``final``. Housekeeping thread only."""
        if self._off or os.getpid() != self._process:
            return
        try:
            while True:
                self._drain()
                full = self._pending_rows >= self._segment_rows
                late = final or time.monotonic() - self._opened_s >= self._segment_s
                if self._pending_rows and (full or late):
                    self._write_segment()
                if not full:
                    break
        except Exception as error:
            self._give_up(error)

    def _drain(self) -> None:
        if self._ring and not self._pending:
            self._opened_s = time.monotonic()
        while self._ring and self._pending_rows < self._segment_rows:
            rows: list[Row] = []
            for _ in range(min(CHUNK_ITERATIONS, len(self._ring))):
                self._taken += 1
                iteration = self._ring.popleft()
                new = list(iteration_rows(iteration))
                if _is_finite(iteration, new):
                    rows += new
                    self._pending_iterations += 1
                else:
                    self._unfit += 1
            if rows:
                self._pending.append(_to_batch(rows))
                self._pending_rows += len(rows)
            time.sleep(0.0)  # the training thread may be waiting for the interpreter

    def _write_segment(self) -> None:
        if not self._segments:
            run_folder.remove_leftovers(self._folder, self._attempt, self._rank)
        path = run_folder.segment_path(self._folder, self._attempt, self._rank, self._segments)
        with native:
            table = pa.Table.from_batches(self._pending).combine_chunks()
            columns = {name: table[name].combine_chunks() for name in _COLUMNS}
            rows = {"job": str(self._metadata.job["name"]), "rank": self._rank} | columns
            content = trace_bytes(rows, self._metadata, str(path))
        atomic_write(path, content)
        self._rows += self._pending_rows
        self._segments += 1
        self._pending, self._pending_rows, self._pending_iterations = [], 0, 0
        if self._segments > self._max_segments:
            oldest = self._segments - self._max_segments - 1
            run_folder.segment_path(self._folder, self._attempt, self._rank, oldest).unlink(missing_ok=True)

    def _give_up(self, error: Exception) -> None:
        self._off = True
        self._lost = self._pending_iterations + len(self._ring)
        self._taken += len(self._ring)
        self._ring.clear()
        self._pending, self._pending_rows, self._pending_iterations = [], 0, 0
        with contextlib.suppress(OSError):
            run_folder.remove_leftovers(self._folder, self._attempt, self._rank, unfinished_only=True)
        self._problem(f"the trace ends here and the job goes on: {describe(error)}")
