"""The segments of a rank's trace: plain binary files that are only appended to, without any native library.

A file is a header and then flushes, each of which has a CRC-32, so a reader takes all that was written before a torn or
damaged place. The format is described in ``docs/reference/live-folder.md``. Reading a file allocates at most
:data:`MAX_FILE_BYTES` and runs nothing, whatever it holds.
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

MAGIC: Final = b"PACESEG\0"
VERSION: Final = 2
MAX_HEADER_BYTES: Final = 1 << 20
MAX_FLUSH_BYTES: Final = 1 << 25
MAX_FILE_BYTES: Final = 1 << 28
MAX_FLUSHES: Final = 10_000
"""Of one file, so that a reader has a bounded number of them."""
MAX_KINDS: Final = 1 << 16
MAX_MARKS: Final = 1 << 8
MAX_NAME: Final = 200
"""Most characters in the name of an operation or of a mark."""
MAX_ITERATION: Final = 2**31 - 1

_HEAD: Final = struct.Struct("<8sHHII")  # magic, version, unused, length and CRC of the header
_FLUSH: Final = struct.Struct("<IIII")  # bytes of the tables, operations, iterations, CRC of these and the content


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """The beginning of a file. Raises ValueError if ``header`` is no JSON or longer than a mebibyte."""
    content = json.dumps(header, allow_nan=False).encode()
    if len(content) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(content)} bytes; allowed: at most {MAX_HEADER_BYTES}")
    return _HEAD.pack(MAGIC, VERSION, 0, len(content), zlib.crc32(content)) + content


def flush_bytes(batches: Sequence[Batch], kinds: Sequence[Kind], marks: Sequence[str]) -> bytes:
    """Batches as one flush, with the kinds and marks that the file does not have yet."""
    new = [[op[:MAX_NAME], *rest] for op, *rest in kinds], [mark[:MAX_NAME] for mark in marks]
    tables, together = json.dumps(new).encode(), joined(batches)
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


def read_header(path: Path) -> Mapping[str, Any]:
    """The header alone. Raises InputError as :func:`read_segment`."""
    with open_regular(path, MAX_FILE_BYTES) as file:
        return _read_header(file, path)


def read_segment(path: Path) -> tuple[Mapping[str, Any], Batch, str]:
    """Read a file up to its end or the first damaged place.

    Returns:
        Its header, what it holds, and why its end was not read, in one line; "" if all was read.

    Raises:
        InputError: not a regular file, too large, or its header is damaged, foreign or of another version.
    """
    with open_regular(path, MAX_FILE_BYTES) as file:
        header = _read_header(file, path)
        flushes, kinds, marks, place, note = list[Batch](), list[Kind](), list[str](), file.tell(), ""
        try:
            while (flush := _read_flush(file, kinds, marks)) is not None:
                _check(flush, int(flushes[-1].iterations_T["iteration"][-1]) if flushes else -1)
                flushes.append(flush)
                place = file.tell()
                if len(flushes) > MAX_FLUSHES:
                    raise _Damage("damaged: too many flushes")
        except _Damage as damage:
            note = f"{path}: read up to byte {place}, where it is {damage}"
        except OSError as error:
            note = f"{path}: read up to byte {place}: {error.strerror}"
        return header, joined(flushes), note


class _Damage(ValueError):
    """Why a flush cannot be used, in words."""


def _read_header(file: BinaryIO, path: Path) -> Mapping[str, Any]:
    try:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise InputError(f"{path}: not a segment of a trace")
        _, version, _, length, crc = _HEAD.unpack(head)
        if version != VERSION:
            raise InputError(f"{path}: version = {version}; allowed: {VERSION} (newer: upgrade paceenv)")
        content = file.read(length) if length <= MAX_HEADER_BYTES else b""
        if len(content) != length or zlib.crc32(content) != crc:
            raise InputError(f"{path}: its header is damaged")
        header = json.loads(content)
        json.dumps(header)  # what is nested too deeply for the merged trace is refused here
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except InputError:
        raise
    except (ValueError, RecursionError):
        raise InputError(f"{path}: its header is not JSON") from None
    if not isinstance(header, dict):
        raise InputError(f"{path}: its header is not a JSON object")
    return header


def _read_flush(file: BinaryIO, kinds: list[Kind], marks: list[str]) -> Batch | None:
    """The next flush, whose own kinds and marks are added to those before; None at the end of the file."""
    head = file.read(_FLUSH.size)
    if not head:
        return None
    if len(head) < _FLUSH.size:
        raise _Damage("torn")
    tables, operations, iterations, crc = _FLUSH.unpack(head)
    size = tables + operations * OPERATION.itemsize + iterations * ITERATION.itemsize
    if size > MAX_FLUSH_BYTES:
        raise _Damage("damaged: a flush of an impossible length")
    content = file.read(size)
    if len(content) < size:
        raise _Damage("torn")
    if zlib.crc32(content, zlib.crc32(head[:12])) != crc:
        raise _Damage("damaged: a wrong checksum")
    _parse_tables(content[:tables], kinds, marks)
    iterations_T = np.frombuffer(content, ITERATION, iterations, size - iterations * ITERATION.itemsize)
    return Batch(iterations_T, np.frombuffer(content, OPERATION, operations, tables), kinds, marks)


def _parse_tables(content: bytes, kinds: list[Kind], marks: list[str]) -> None:
    try:
        more_kinds, more_marks = json.loads(content)
        kinds += [_parse_kind(*entry) for entry in more_kinds]
        marks += more_marks
    except (TypeError, ValueError, RecursionError) as error:
        raise error if isinstance(error, _Damage) else _Damage("damaged: tables that are none") from None
    if not all(isinstance(mark, str) and len(mark) <= MAX_NAME for mark in marks):
        raise _Damage("damaged: a mark that is no short text")
    if len(kinds) > MAX_KINDS or len(marks) > MAX_MARKS:
        raise _Damage("damaged: too many kinds or marks")


def _parse_kind(op: Any, group: Any, size: Any, side: Any) -> Kind:
    whole = type(group) is int and type(size) is int and -(2**31) <= group < 2**31 and 0 <= size < 2**63
    if whole and isinstance(op, str) and 0 < len(op) <= MAX_NAME and side in (0, THREAD, STREAM):
        return Kind(op, group, size, side)
    raise _Damage("damaged: a kind that is none")


def _check(flush: Batch, last: int) -> None:
    """Raises _Damage for records that cannot be; ``last`` is the number of the iteration before them."""
    iterations_T, operations_N = flush.iterations_T, flush.operations_N
    for records, start, end in (
        (iterations_T, "start_s", "end_s"),
        (iterations_T, "pace_start_s", "pace_end_s"),
        (operations_N, "start_s", "end_s"),
    ):
        start_s, end_s = records[start], records[end]
        if not (np.isfinite(start_s) & np.isfinite(end_s) & (end_s >= start_s)).all():
            raise _Damage("damaged: times that are none")
    iteration_T = iterations_T["iteration"]
    within = len(iteration_T) and last < iteration_T.min() and iteration_T.max() <= MAX_ITERATION
    if not within or (np.diff(iteration_T) <= 0).any():
        raise _Damage("damaged: iterations that do not increase")
    for numbers, most, what in (
        (iterations_T["mark"], max(len(flush.marks), 1), "an unknown mark"),
        (operations_N["kind"], len(flush.kinds), "an operation of an unknown kind"),
        (operations_N["place"], len(iterations_T), "an operation of no iteration"),
    ):
        if len(numbers) and int(numbers.max()) >= most:
            raise _Damage(f"damaged: {what}")
