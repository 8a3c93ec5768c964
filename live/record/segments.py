"""The segments of a rank's trace: plain binary files that are only appended to, without any native library.

A file is a list of flushes, each of which has a CRC-32, so a reader takes all that was written before a torn or damaged
place. The first one says whose the file is. The format is described in ``docs/reference/live-folder.md``. Reading a
file allocates at most :data:`MAX_FILE_BYTES` and runs nothing, whatever it holds.
Legend: T iterations, N operations; times in seconds on the rank's own clock.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from paceenv.core.errors import InputError
from paceenv.core.files import open_regular
from paceenv.live.observe.batch import ITERATION, OPERATION, STREAM, THREAD, Batch, Kind
from paceenv.live.record.snapshot import entry

SCHEMA: Final = "paceenv.segment/3"
MAX_FLUSH_BYTES: Final = 1 << 25
MAX_FILE_BYTES: Final = 1 << 28
MAX_FLUSHES: Final = 10_000
"""Of one file, so that a reader has a bounded number of them."""
MAX_KINDS: Final = 1 << 16
MAX_MARKS: Final = 1 << 8
MAX_NAME: Final = 200
"""Most characters in the name of an operation or of a mark."""
MAX_ITERATION: Final = 2**31 - 1

_FLUSH: Final = struct.Struct("<IIII")  # bytes of the JSON, operations, iterations, CRC of these and the content


def flush_bytes(
    batches: Sequence[Batch], kinds: Sequence[Kind], marks: Sequence[str], header: Mapping[str, Any] | None = None
) -> bytes:
    """Batches as one flush, with the kinds and marks that the file does not have yet; the first one has the header."""
    about = None if header is None else {"schema": SCHEMA, **header}
    new = [about, [[op[:MAX_NAME], *rest] for op, *rest in kinds], [mark[:MAX_NAME] for mark in marks]]
    tables, together = json.dumps(new, allow_nan=False).encode(), joined(batches)
    content = tables + together.operations_N.tobytes() + together.iterations_T.tobytes()
    sizes = struct.pack("<III", len(tables), len(together.operations_N), len(together.iterations_T))
    return sizes + struct.pack("<I", zlib.crc32(content, zlib.crc32(sizes))) + content


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches as one, with the newest tables."""
    operations, first = [np.zeros(0, OPERATION)], 0
    for batch in batches:
        operations.append(batch.operations_N.copy())
        operations[-1]["place"] += first
        first += len(batch.iterations_T)
    iterations = [np.zeros(0, ITERATION), *(batch.iterations_T for batch in batches)]
    kinds, marks = (batches[-1].kinds, batches[-1].marks) if batches else ((), ())
    return Batch(np.concatenate(iterations), np.concatenate(operations), kinds, marks)


def read_segment(path: Path) -> tuple[Mapping[str, Any], Batch, str]:
    """Read a file up to its end or the first damaged place.

    Returns:
        Its header, what it holds, and where its end was not read, in one line; "" if all was read.

    Raises:
        InputError: not a regular file, too large, or its beginning is damaged, foreign or of another version.
    """
    with open_regular(path, MAX_FILE_BYTES) as file:
        headers, flushes, kinds, marks, place = list[Any](), list[Batch](), list[Kind](), list[str](), 0
        try:
            while len(head := file.read(_FLUSH.size)) == _FLUSH.size and len(flushes) < MAX_FLUSHES:
                header, flush = _read_flush(head, file, kinds, marks)
                _check(flush, int(flushes[-1].iterations_T["iteration"][-1]) if flushes else -1)
                flushes.append(flush)
                headers.append(header)
                place = file.tell()
        except (OSError, TypeError, ValueError, RecursionError):
            head = b"damaged"
    if not headers or not _is_header(headers[0]):
        raise InputError(f"{path}: not a segment of a trace ({SCHEMA}), or damaged at its beginning")
    note = f"{path}: read up to byte {place}; what follows is torn or damaged" if head else ""
    return headers[0], joined(flushes), note


def _read_flush(head: bytes, file: BinaryIO, kinds: list[Kind], marks: list[str]) -> tuple[Any, Batch]:
    """The flush that begins with ``head``, and its header; its own kinds and marks are added to those before.

    Raises ValueError, TypeError or RecursionError for one that no agent has written.
    """
    tables, operations, iterations, crc = _FLUSH.unpack(head)
    size = tables + operations * OPERATION.itemsize + iterations * ITERATION.itemsize
    content = file.read(size) if size <= MAX_FLUSH_BYTES else b""
    if len(content) < size or zlib.crc32(content, zlib.crc32(head[:12])) != crc:
        raise ValueError
    header, more_kinds, more_marks = json.loads(content[:tables])
    json.dumps(header)  # what is nested too deeply for the merged trace is refused here
    new = [Kind(*kind) for kind in more_kinds]
    if not all(map(_is_kind, new)) or not all(isinstance(mark, str) and len(mark) <= MAX_NAME for mark in more_marks):
        raise ValueError
    kinds += new
    marks += more_marks
    if len(kinds) > MAX_KINDS or len(marks) > MAX_MARKS:
        raise ValueError
    iterations_T = np.frombuffer(content, ITERATION, iterations, size - iterations * ITERATION.itemsize)
    return header, Batch(iterations_T, np.frombuffer(content, OPERATION, operations, tables), kinds, marks)


def _is_header(header: Any) -> bool:
    """Whether it says which job and rank the file is of."""
    named = isinstance(entry(header, "job", "name"), str) and isinstance(entry(header, "source"), str)
    dated = isinstance(entry(header, "began_unix_s"), float)
    return named and dated and isinstance(entry(header, "rank"), dict) and entry(header, "schema") == SCHEMA


def _is_kind(kind: Kind) -> bool:
    op, group, size, side = kind
    whole = type(group) is int and type(size) is int and -(2**31) <= group < 2**31 and 0 <= size < 2**63
    return whole and isinstance(op, str) and 0 < len(op) <= MAX_NAME and side in (0, THREAD, STREAM)


def _check(flush: Batch, last: int) -> None:
    """Raises ValueError for records that cannot be; ``last`` is the number of the iteration before them."""
    iterations_T, operations_N = flush.iterations_T, flush.operations_N
    iteration_T = iterations_T["iteration"]
    good = len(iteration_T) and last < iteration_T.min() and iteration_T.max() <= MAX_ITERATION
    good = good and (np.diff(iteration_T) > 0).all()
    for records, start, end in (
        (iterations_T, "start_s", "end_s"),
        (iterations_T, "pace_start_s", "pace_end_s"),
        (operations_N, "start_s", "end_s"),
    ):
        start_s, end_s = records[start], records[end]
        good = good and (np.isfinite(start_s) & np.isfinite(end_s) & (end_s >= start_s)).all()
    for numbers, most in (
        (iterations_T["mark"], max(len(flush.marks), 1)),
        (operations_N["kind"], len(flush.kinds)),
        (operations_N["place"], len(iterations_T)),
    ):
        good = good and (not len(numbers) or int(numbers.max()) < most)
    if not good:
        raise ValueError
