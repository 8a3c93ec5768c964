"""The binary segments of a trace: what is written comes back, and no file harms its reader."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_samples import KINDS, MARKS, batch, record, segment_files

from paceenv.core.errors import InputError
from paceenv.live.observe.batch import ITERATION, OPERATION
from paceenv.live.record.segments import flush_bytes, header_bytes, joined, read_segment

HEADER = {"source": "test", "job": {"name": "job"}}


def flush(tables: bytes, operations: bytes = b"", iterations: bytes = b"") -> bytes:
    """A flush with a right checksum, written by the words of docs/reference/live-folder.md."""
    head = struct.pack("<III", len(tables), len(operations) // 24, len(iterations) // 64)
    content = tables + operations + iterations
    return head + struct.pack("<I", zlib.crc32(head + content)) + content


def whole(number: int = 20) -> bytes:
    """A file of two flushes."""
    first = flush_bytes([batch(number)], KINDS, MARKS)
    return header_bytes(HEADER) + first + flush_bytes([batch(number, first=number)], (), ())


def test_a_file_can_be_read_by_its_description(tmp_path: Path) -> None:
    """By the table in docs/reference/live-folder.md alone."""
    record(tmp_path, 3, delay_s=0.002)
    content = segment_files(tmp_path)[0].read_bytes()
    magic, version, _, length, crc = struct.unpack("<8sHHII", content[:20])
    assert (magic, version) == (b"PACESEG\0", 2)
    header = json.loads(content[20 : 20 + length])
    assert (header["job"]["name"], header["rank"]["rank"], zlib.crc32(content[20 : 20 + length])) == ("job", 0, crc)
    at = 20 + length
    tables, operations, iterations, crc = struct.unpack("<IIII", content[at : at + 16])
    assert (operations, iterations, zlib.crc32(content[at : at + 12] + content[at + 16 :])) == (6, 3, crc)
    kinds = [["all_reduce", 0, 4096, 0], ["barrier", -1, 0, 0]]
    assert json.loads(content[at + 16 : at + 16 + tables]) == [kinds, ["", "checkpoint", "evaluation"]]
    at += 16 + tables
    of = [struct.unpack_from("<IIdd", content, at + 24 * i) for i in range(6)]
    assert [o[:2] for o in of] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert of[5][3] == pytest.approx(0.3)
    found = struct.unpack_from("<qddddddIHH", content, at + 6 * 24 + 2 * 64)
    assert found == pytest.approx((2, 0.2, 0.3, 0.2, 0.202, 0, math.nan, 1, 0, 1), nan_ok=True)
    assert len(content) == at + 6 * 24 + 3 * 64


@given(st.data())
def test_of_a_file_that_is_cut_or_changed_the_flushes_before_are_read(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    content, is_cut = bytearray(whole(4)), data.draw(st.booleans())
    header, first = len(header_bytes(HEADER)), len(content) - len(flush_bytes([batch(4)], (), ()))
    at = data.draw(st.integers(0, len(content) - 1) | st.sampled_from([header, first]))
    if is_cut:
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("changed") / "file"
    path.write_bytes(content)
    good = joined([batch(4), batch(4, first=4)])
    unused = not is_cut and at in (10, 11)  # the only bytes that nothing depends on
    try:
        _, found, note = read_segment(path)
    except InputError:
        assert at < header
        assert not unused
        return
    iterations = 8 if unused else 4 * (at >= first)
    assert found.iterations_T.tobytes() == good.iterations_T[:iterations].tobytes()
    assert found.operations_N.tobytes() == good.operations_N[: 2 * iterations].tobytes()
    assert (note == "") == (unused or (is_cut and at in (header, first)))


ITER = np.zeros(2, ITERATION)
ITER["iteration"] = [0, 1]
OPER = np.zeros(2, OPERATION)
TABLES = json.dumps([KINDS, MARKS]).encode()


def changed(records: Any, **values: Any) -> bytes:
    """A flush of records with other values."""
    other = records.copy()
    for name, value in values.items():
        other[name] = value
    operations, iterations = (OPER, other) if records is ITER else (other, ITER)
    return flush(TABLES, operations.tobytes(), iterations.tobytes())


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<IIII", 1, 2**31, 2**31, 0) + bytes(100),
        flush(b"[" * 100_000),
        flush(b"{}"),
        flush(b'[[["x", 1, 2]], []]'),
        flush(b'[[["x", 1.0, 2, 0]], []]'),
        flush(json.dumps([[["x", 1, 2, 0]] * 65537, []]).encode()),
        flush(json.dumps([[], ["x"] * 257]).encode()),
        flush(b"[[], [1]]"),
        flush(TABLES, OPER.tobytes()),
        flush(b"[[], []]", OPER.tobytes(), ITER.tobytes()),
        changed(OPER, kind=2),
        changed(OPER, end_s=np.nan),
        changed(OPER, place=2),
        changed(ITER, iteration=[1, 1]),
        changed(ITER) * 2,
        changed(ITER, iteration=[2**63 - 1, -(2**63)]),
        changed(ITER, mark=3),
        changed(ITER, pace_start_s=1.0),
        b"OP",
    ],
)
def test_flushes_with_right_checksums_and_wrong_contents_end_the_reading(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(header_bytes(HEADER) + content)
    _, found, note = read_segment(path)
    assert "torn or damaged" in note
    assert len(found.iterations_T) in (0, 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a segment"),
        (b"PAR1" * 10, "not a segment"),
        (b"PACESEG\0", "not a segment"),
        (struct.pack("<8sHHII", b"PACESEG\0", 1, 0, 0, 0), r"version = 1; allowed: 2"),
        (struct.pack("<8sHHII", b"PACESEG\0", 2, 0, 2**32 - 1, 0), "header is damaged"),
        (struct.pack("<8sHHII", b"PACESEG\0", 2, 0, 2, 0) + b"{}", "header is damaged"),
        (struct.pack("<8sHHII", b"PACESEG\0", 2, 0, 2, zlib.crc32(b"[]")) + b"[]", "header is damaged"),
        (struct.pack("<8sHHII", b"PACESEG\0", 2, 0, 9**5, zlib.crc32(b"[" * 9**5)) + b"[" * 9**5, "header is damaged"),
    ],
)
def test_a_file_that_is_none_says_so(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError, match=why):
        read_segment(path)
