"""The segments of a rank's trace: plain binary files that are only appended to, without any native library.

A file is a header and then blocks; every part has a CRC-32, so a reader takes all that was written before a torn or
damaged place. The format is described in ``docs/reference/live-folder.md``. Reading a file allocates at most
:data:`MAX_FILE_BYTES` and runs nothing, whatever it holds.
Legend: T iterations, N operations; times in seconds on the rank's own clock.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.files import open_regular
from paceenv.live.observe.batch import STREAM, THREAD, Batch, Kind

MAGIC: Final = b"PACESEG\0"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
MAX_BLOCK_BYTES: Final = 1 << 24
MAX_FILE_BYTES: Final = 1 << 28
MAX_BLOCKS: Final = 1 << 17
"""Per file; some ten microseconds each for a reader."""
MAX_KINDS: Final = 1 << 16
MAX_MARKS: Final = 1 << 8
MAX_NAME: Final = 200
"""Most characters in the name of an operation or of a mark."""
MAX_ITERATION: Final = 2**31 - 1

ITERATION: Final = np.dtype(
    [
        ("iteration", "<i8"),
        ("start_s", "<f8"),
        ("end_s", "<f8"),
        ("pace_start_s", "<f8"),
        ("pace_end_s", "<f8"),
        ("mark", "u1"),
        ("regular", "u1"),
        ("unused", "V6"),
    ]
)
"""The record of an iteration, 48 bytes."""
OPERATION: Final = np.dtype([("place", "<u4"), ("kind", "<u2"), ("unused", "V2"), ("start_s", "<f8"), ("end_s", "<f8")])
"""The record of an operation, 24 bytes."""

_HEAD: Final = struct.Struct("<8sHHII")  # magic, version, unused, length and CRC of the header
_BLOCK: Final = struct.Struct("<4sII")  # type, length of the content, CRC of type, length and content
_KINDS, _MARKS, _OPERATIONS, _ITERATIONS = b"KIND", b"MARK", b"OPER", b"ITER"

Records = NDArray[np.void]


@dataclass(frozen=True)
class Segment:
    """What a file held. ``note`` says in one line why its end was not read; "" if all was read."""

    header: Mapping[str, Any]
    iterations_T: Records
    operations_N: Records
    kinds: tuple[Kind, ...]
    marks: tuple[str, ...]
    note: str


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """The beginning of a file. Raises ValueError if ``header`` is no JSON or longer than a mebibyte."""
    content = json.dumps(header, allow_nan=False).encode()
    if len(content) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(content)} bytes; allowed: at most {MAX_HEADER_BYTES}")
    return _HEAD.pack(MAGIC, VERSION, 0, len(content), zlib.crc32(content)) + content


def kinds_block(kinds: Sequence[Kind]) -> bytes:
    return _block(_KINDS, json.dumps([[op[:MAX_NAME], group, size, side] for op, group, size, side in kinds]).encode())


def marks_block(marks: Sequence[str]) -> bytes:
    return _block(_MARKS, json.dumps([mark[:MAX_NAME] for mark in marks]).encode())


def to_records(batch: Batch) -> tuple[Records, Records]:
    iterations_T = np.zeros(len(batch.iteration_T), ITERATION)
    for name in ("iteration", "start_s", "end_s", "pace_start_s", "pace_end_s", "mark", "regular"):
        iterations_T[name] = getattr(batch, f"{name}_T")
    operations_N = np.zeros(len(batch.place_N), OPERATION)
    for name in ("place", "kind", "start_s", "end_s"):
        operations_N[name] = getattr(batch, f"{name}_N")
    return iterations_T, operations_N


def record_blocks(parts: Sequence[tuple[Records, Records]]) -> bytes:
    """Iterations and their operations (:func:`to_records`) as blocks.

    Operations come first: the block of iterations, of which there is one, completes what is before it.
    """
    operations, first = list[Records](), 0
    for iterations_T, operations_N in parts:
        operations.append(operations_N.copy())
        operations[-1]["place"] += first
        first += len(iterations_T)
    together_N, most = np.concatenate(operations), MAX_BLOCK_BYTES // OPERATION.itemsize
    blocks = [_block(_OPERATIONS, together_N[i : i + most].tobytes()) for i in range(0, len(together_N), most)]
    return b"".join([*blocks, _block(_ITERATIONS, b"".join(i.tobytes() for i, _ in parts))])


def read_header(path: Path) -> Mapping[str, Any]:
    """The header alone. Raises InputError as :func:`read_segment`."""
    with open_regular(path, MAX_FILE_BYTES) as file:
        return _read_header(file, path)


def read_segment(path: Path) -> Segment:
    """Read a file up to its end or the first damaged place.

    Raises:
        InputError: not a regular file, too large, or its header is damaged, foreign or of a newer version.
    """
    with open_regular(path, MAX_FILE_BYTES) as file:
        reader = _Reader(_read_header(file, path))
        place, note = file.tell(), ""
        try:
            while reader.take(*_read_block(file)):
                place = file.tell()
        except _Damage as damage:
            note = f"{path}: read up to byte {place}, where it is {damage}"
        except OSError as error:
            note = f"{path}: read up to byte {place}: {error.strerror}"
        return reader.segment(note)


class _Damage(ValueError):
    """Why a block cannot be used, in words."""


def _block(kind: bytes, content: bytes) -> bytes:
    length = len(content)
    return _BLOCK.pack(kind, length, zlib.crc32(content, zlib.crc32(struct.pack("<4sI", kind, length)))) + content


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


def _read_block(file: BinaryIO) -> tuple[bytes, bytes]:
    """The next block's type and content; both empty at the end of the file."""
    head = file.read(_BLOCK.size)
    if not head:
        return b"", b""
    if len(head) < _BLOCK.size:
        raise _Damage("torn")
    kind, length, crc = _BLOCK.unpack(head)
    if length > MAX_BLOCK_BYTES:
        raise _Damage("damaged: a block of an impossible length")
    content = file.read(length)
    if len(content) < length:
        raise _Damage("torn")
    if zlib.crc32(content, zlib.crc32(head[:8])) != crc:
        raise _Damage("damaged: a wrong checksum")
    return kind, content


class _Reader:
    """Collects the blocks of one file, each checked before it counts."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self._header, self._blocks = header, 0
        self._kinds, self._marks = list[Kind](), list[str]()
        self._iterations, self._operations = list[Records](), list[Records]()
        self._waiting = list[Records]()  # operations whose iterations have not come yet
        self._iterations_read, self._last = 0, -1

    def take(self, kind: bytes, content: bytes) -> bool:
        """Take in a block; returns whether there may be another."""
        if not kind:
            if self._waiting:
                raise _Damage("torn")
            return False
        self._blocks += 1
        if self._blocks > MAX_BLOCKS:
            raise _Damage("damaged: too many blocks")
        if kind == _KINDS:
            self._take_kinds(_parse_table(content))
        elif kind == _MARKS:
            self._take_marks(_parse_table(content))
        elif kind == _OPERATIONS:
            self._take_operations(content)
        elif kind == _ITERATIONS:
            self._take_iterations(content)
        # blocks of other types are passed over, so that later versions may add some
        return True

    def segment(self, note: str) -> Segment:
        return Segment(
            self._header,
            np.concatenate([np.zeros(0, ITERATION), *self._iterations]),
            np.concatenate([np.zeros(0, OPERATION), *self._operations]),
            tuple(self._kinds),
            tuple(self._marks),
            note,
        )

    def _take_kinds(self, entries: list[Any]) -> None:
        kinds = [_parse_kind(entry) for entry in entries]
        if len(self._kinds) + len(kinds) > MAX_KINDS:
            raise _Damage("damaged: too many kinds of operations")
        self._kinds += kinds

    def _take_marks(self, entries: list[Any]) -> None:
        if not all(isinstance(entry, str) and len(entry) <= MAX_NAME for entry in entries):
            raise _Damage("damaged: a mark that is no short text")
        if len(self._marks) + len(entries) > MAX_MARKS:
            raise _Damage("damaged: too many marks")
        self._marks += entries

    def _take_operations(self, content: bytes) -> None:
        records = _parse_records(content, OPERATION)
        if int(records["kind"].max()) >= len(self._kinds):
            raise _Damage("damaged: an operation of an unknown kind")
        _check_times(records, ("start_s", "end_s"))
        self._waiting.append(records)

    def _take_iterations(self, content: bytes) -> None:
        records = _parse_records(content, ITERATION)
        _check_times(records, ("start_s", "end_s"))
        _check_times(records, ("pace_start_s", "pace_end_s"))
        iteration_T = records["iteration"]
        if iteration_T[0] <= self._last or (np.diff(iteration_T) <= 0).any() or iteration_T[-1] > MAX_ITERATION:
            raise _Damage("damaged: iterations that do not increase")
        if int(records["mark"].max()) >= max(len(self._marks), 1):
            raise _Damage("damaged: an unknown mark")
        operations = np.concatenate([np.zeros(0, OPERATION), *self._waiting])
        if len(operations) and int(operations["place"].max()) >= len(records):
            raise _Damage("damaged: an operation of no iteration")
        operations["place"] += self._iterations_read
        self._waiting.clear()
        self._iterations.append(records)
        self._operations.append(operations)
        self._iterations_read, self._last = self._iterations_read + len(records), int(iteration_T[-1])


def _parse_table(content: bytes) -> list[Any]:
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError):
        raise _Damage("damaged: a table that is not JSON") from None
    if not isinstance(entries, list):
        raise _Damage("damaged: a table that is no list")
    return entries


def _parse_kind(entry: Any) -> Kind:
    if isinstance(entry, list) and len(entry) == 4:
        op, group, size, side = entry
        if isinstance(op, str) and 0 < len(op) <= MAX_NAME and side in (0, THREAD, STREAM):
            whole = type(group) is int and type(size) is int
            if whole and -(2**31) <= group < 2**31 and 0 <= size < 2**63:
                return Kind(op, group, size, side)
    raise _Damage("damaged: a kind that is none")


def _parse_records(content: bytes, dtype: np.dtype[np.void]) -> Records:
    if not content or len(content) % dtype.itemsize:
        raise _Damage("damaged: a block of broken records")
    return np.frombuffer(content, dtype)


def _check_times(records: Records, names: tuple[str, str]) -> None:
    start_s, end_s = (records[name] for name in names)
    if not (np.isfinite(start_s) & np.isfinite(end_s) & (end_s >= start_s)).all():
        raise _Damage("damaged: times that are none")
