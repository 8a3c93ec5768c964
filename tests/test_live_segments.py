"""The binary segments of a trace: what is written comes back, and no file harms its reader."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_samples import KINDS, MARKS, batch, make_batch, record, segment_files

from paceenv.core.errors import InputError
from paceenv.live.observe.batch import Kind
from paceenv.live.record import segments
from paceenv.live.record.segments import (
    header_bytes,
    kinds_block,
    marks_block,
    read_header,
    read_segment,
    record_blocks,
    to_records,
)

HEADER = {"source": "test", "job": {"name": "job"}}


def block(kind: bytes, content: bytes) -> bytes:
    """A block with a right checksum, written by the words of docs/reference/live-folder.md."""
    head = kind + struct.pack("<I", len(content))
    return head + struct.pack("<I", zlib.crc32(head + content)) + content


def whole(number: int = 20) -> bytes:
    """A file of two flushes."""
    parts = [to_records(batch(number, first=first)) for first in (0, number)]
    tables = kinds_block(KINDS) + marks_block(MARKS)
    return header_bytes(HEADER) + tables + record_blocks(parts[:1]) + record_blocks(parts[1:])


def test_a_file_can_be_read_by_its_description(tmp_path: Path) -> None:
    """By the table in docs/reference/live-folder.md alone."""
    record(tmp_path, 3, delay_s=0.002)
    content = segment_files(tmp_path)[0].read_bytes()
    magic, version, _, length, crc = struct.unpack("<8sHHII", content[:20])
    assert (magic, version) == (b"PACESEG\0", 1)
    header = json.loads(content[20 : 20 + length])
    assert (header["job"]["name"], header["rank"]["rank"], zlib.crc32(content[20 : 20 + length])) == ("job", 0, crc)
    at, found = 20 + length, list[tuple[bytes, bytes]]()
    while at < len(content):
        kind, size, crc = struct.unpack("<4sII", content[at : at + 12])
        inside = content[at + 12 : at + 12 + size]
        assert zlib.crc32(content[at : at + 8] + inside) == crc
        found.append((kind, inside))
        at += 12 + size
    assert [kind for kind, _ in found] == [b"KIND", b"MARK", b"OPER", b"ITER"]
    assert json.loads(found[0][1]) == [["all_reduce", 0, 4096, False], ["barrier", -1, 0, False]]
    assert json.loads(found[1][1]) == ["", "checkpoint", "evaluation"]
    operations = [struct.unpack_from("<IHxxdd", found[2][1], 24 * i) for i in range(6)]
    iterations = [struct.unpack_from("<qddddBB6x", found[3][1], 48 * i) for i in range(3)]
    assert [o[:2] for o in operations] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert iterations[2] == pytest.approx((2, 0.2, 0.3, 0.2, 0.202, 0, 1))
    assert operations[5][3] == pytest.approx(0.3)


def test_whatever_is_cut_off_the_end_the_flushes_before_it_are_read(tmp_path: Path) -> None:
    content, path = whole(), tmp_path / "file"
    path.write_bytes(content)
    full = read_segment(path)
    assert (len(full.iterations_T), len(full.operations_N), full.note) == (40, 80, "")
    first = content.index(b"ITER") + 12 + 20 * 48
    for size in [*range(first - 5, first + 30), *range(first + 30, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:size])
        found = read_segment(path)
        assert len(found.iterations_T) == (20 if size >= first else 0)
        assert len(found.operations_N) == 2 * len(found.iterations_T)
        assert bool(found.note) == (size != first)
        assert found.note == "" or f"{path}: read up to byte" in found.note


@given(st.data())
def test_whatever_byte_is_changed_no_wrong_number_is_read(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    content = bytearray(whole(4))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("changed") / "file"
    path.write_bytes(content)
    good = batch(4), batch(4, first=4)
    try:
        found = read_segment(path)
    except InputError:
        assert at < len(header_bytes(HEADER))
        return
    for i, iteration in enumerate(found.iterations_T):
        expected = good[i // 4]
        assert (iteration["iteration"], iteration["end_s"]) == (i, expected.end_s_T[i % 4])
    # the unused two bytes of the header are the only ones that nothing depends on
    assert len(found.iterations_T) < 8 or at in (10, 11)


ITER = np.zeros(2, segments.ITERATION)
ITER["iteration"] = [0, 1]
OPER = np.zeros(2, segments.OPERATION)


def changed(records: Any, **values: Any) -> bytes:
    """A block of records with other values."""
    other = records.copy()
    for name, value in values.items():
        other[name] = value
    return block(b"ITER" if records is ITER else b"OPER", other.tobytes())


GOOD_OPERATIONS, GOOD_ITERATIONS, TABLES = changed(OPER), changed(ITER), kinds_block(KINDS) + marks_block(MARKS)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"ITER\xff\xff\xff\xff" + bytes(100), "impossible length"),
        (block(b"KIND", b"[" * 100_000), "not JSON"),
        (block(b"KIND", b"{}"), "no list"),
        (block(b"KIND", b'[["x", 1, 2]]'), "kind that is none"),
        (block(b"KIND", json.dumps([["x", 1, 2, False]] * 65537).encode()), "too many kinds"),
        (block(b"MARK", json.dumps(["x"] * 257).encode()), "too many marks"),
        (block(b"MARK", b"[1]"), "no short text"),
        (block(b"OPER", b""), "broken records"),
        (block(b"ITER", bytes(47)), "broken records"),
        (changed(OPER, kind=2), "unknown kind"),
        (changed(OPER, end_s=np.nan), "times that are none"),
        (changed(OPER, place=2) + GOOD_ITERATIONS, "of no iteration"),
        (changed(ITER, iteration=[1, 1]), "do not increase"),
        (GOOD_ITERATIONS * 2, "do not increase"),
        (changed(ITER, mark=3), "unknown mark"),
        (changed(ITER, pace_start_s=1.0), "times that are none"),
        (block(b"WHAT", b"") * 140_000, "too many blocks"),
        (GOOD_OPERATIONS, "torn"),
        (b"OP", "torn"),
    ],
)
def test_blocks_with_right_checksums_and_wrong_contents_end_the_reading(
    tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(header_bytes(HEADER) + TABLES + content)
    found = read_segment(path)
    assert why in found.note
    assert found.note.count("\n") == 0
    assert len(found.iterations_T) in (0, 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a segment"),
        (b"PAR1" * 10, "not a segment"),
        (b"PACESEG\0", "not a segment"),
        (struct.pack("<8sHHII", b"PACESEG\0", 2, 0, 0, 0), r"version = 2; allowed: 1"),
        (struct.pack("<8sHHII", b"PACESEG\0", 1, 0, 2**32 - 1, 0), "header is damaged"),
        (struct.pack("<8sHHII", b"PACESEG\0", 1, 0, 2, 0) + b"{}", "header is damaged"),
        (struct.pack("<8sHHII", b"PACESEG\0", 1, 0, 2, zlib.crc32(b"[]")) + b"[]", "not a JSON object"),
        (struct.pack("<8sHHII", b"PACESEG\0", 1, 0, 9**5, zlib.crc32(b"[" * 9**5)) + b"[" * 9**5, "not JSON"),
    ],
)
def test_a_file_that_is_none_says_so(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in (read_header, read_segment):
        with pytest.raises(InputError, match=why):
            read(path)


def test_many_kinds_and_operations_come_back(tmp_path: Path) -> None:
    kinds = [Kind("x" * 300, i, i) for i in range(40_000)]
    number = segments.MAX_BLOCK_BYTES // segments.ITERATION.itemsize // 2
    parts = []
    for part in range(2):
        rows = np.zeros((number, 5))
        rows[:, 0] = np.arange(number) + part * number
        operations = np.zeros((2 * number, 4))
        operations[:, 0] = np.repeat(np.arange(number), 2)
        operations[:, 1] = part
        parts.append(to_records(make_batch(rows, operations)))
    path = tmp_path / "file"
    path.write_bytes(header_bytes(HEADER) + kinds_block(kinds) + record_blocks(parts))
    found = read_segment(path)
    assert found.note == ""
    assert (len(found.kinds), found.kinds[-1].op) == (40_000, "x" * 200)
    assert found.operations_N["place"].tolist() == np.repeat(np.arange(2 * number), 2).tolist()
