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
from paceenv.live.record.segments import SCHEMA, flush_bytes, joined, read_segment

HEADER = {"source": "test", "job": {"name": "job"}, "rank": {}, "began_unix_s": 1.5}


def flush(tables: bytes, operations: bytes = b"", iterations: bytes = b"") -> bytes:
    """A flush with a right checksum, written by the words of docs/reference/live-folder.md."""
    head = struct.pack("<III", len(tables), len(operations) // 24, len(iterations) // 64)
    content = tables + operations + iterations
    return head + struct.pack("<I", zlib.crc32(head + content)) + content


def test_a_file_can_be_read_by_its_description(tmp_path: Path) -> None:
    """By the table in docs/reference/live-folder.md alone."""
    record(tmp_path, 3, delay_s=0.002)
    content = segment_files(tmp_path)[0].read_bytes()
    tables, operations, iterations, crc = struct.unpack("<IIII", content[:16])
    assert (operations, iterations, zlib.crc32(content[:12] + content[16:])) == (6, 3, crc)
    header, kinds, marks = json.loads(content[16 : 16 + tables])
    assert (header["schema"], header["job"]["name"], header["rank"]["rank"]) == (SCHEMA, "job", 0)
    assert (kinds, marks) == ([["all_reduce", 0, 4096, 0], ["barrier", -1, 0, 0]], ["", "checkpoint", "evaluation"])
    at = 16 + tables
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
    flushes = flush_bytes([batch(4)], KINDS, MARKS, HEADER), flush_bytes([batch(4, first=4)], (), ())
    content, second, is_cut = bytearray(b"".join(flushes)), len(flushes[0]), data.draw(st.booleans())
    at = data.draw(st.integers(0, len(content) - 1) | st.just(second))
    if is_cut:
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("changed") / "file"
    path.write_bytes(content)
    good = joined([batch(4)])
    try:
        _, found, note = read_segment(path)
    except InputError:
        assert at < second
        return
    assert at >= second
    assert found.iterations_T.tobytes() == good.iterations_T.tobytes()
    assert found.operations_N.tobytes() == good.operations_N.tobytes()
    assert (note == "") == (is_cut and at == second)


ITER = np.zeros(2, ITERATION)
ITER["iteration"] = [0, 1]
OPER = np.zeros(2, OPERATION)
FIRST = {"schema": SCHEMA, **HEADER}


def tables(kinds: Any = KINDS, marks: Any = MARKS, header: Any = FIRST) -> bytes:
    """A flush of two iterations with these tables."""
    return flush(json.dumps([header, kinds, marks]).encode(), b"", ITER.tobytes())


def changed(records: Any, **values: Any) -> bytes:
    """A flush of records with other values."""
    other = records.copy()
    for name, value in values.items():
        other[name] = value
    operations, iterations = (OPER, other) if records is ITER else (other, ITER)
    return flush(json.dumps([FIRST, KINDS, MARKS]).encode(), operations.tobytes(), iterations.tobytes())


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"OP", b"PAR1" * 10, struct.pack("<IIII", 1, 2**31, 2**31, 0) + bytes(100)),
        *(flush(b"[" * 100_000, b"", ITER.tobytes()), flush(b"{}", b"", ITER.tobytes())),
        *(tables([["x", 1]]), tables([["x", 1.0, 2, 0]]), tables([["x", 1, 2, 0]] * 65537)),
        *(tables(marks=["x"] * 257), tables(marks=[1])),
        *(tables(header=header) for header in (None, [], {}, FIRST | {"schema": "paceenv.segment/2"})),
        *(tables(header=FIRST | {"job": {"name": 1}}), tables(header=FIRST | {"rank": 0})),
        flush(json.dumps([FIRST, KINDS, MARKS]).encode(), OPER.tobytes()),
        *(changed(OPER, kind=2), changed(OPER, end_s=np.nan), changed(OPER, place=2)),
        *(changed(ITER, iteration=[1, 1]), changed(ITER, iteration=[2**63 - 1, -(2**63)])),
        *(changed(ITER, mark=3), changed(ITER, pace_start_s=1.0)),
    ],
)
def test_a_beginning_with_a_right_checksum_and_a_wrong_content_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a segment of a trace"):
        read_segment(path)
    path.write_bytes(changed(ITER) + content)
    _, found, note = read_segment(path)
    assert len(found.iterations_T) == 2
    assert ("torn or damaged" in note) == (content != b"")
