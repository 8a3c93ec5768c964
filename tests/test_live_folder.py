"""A run's folder: status files of many ranks, hostile ones among them, and segments merged onto one clock."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_samples import ATTEMPT, STEP_S, make_batch, merge_trace, record, segment_files, snapshot

from paceenv.core.errors import InputError
from paceenv.core.trace import Trace, read_trace
from paceenv.live.observe.batch import Kind
from paceenv.live.record import segments
from paceenv.live.record.merge_segments import segment_rows, write_merged
from paceenv.live.record.run_folder import MAX_STATUS_BYTES, RunFolder, rank_file, write_status
from paceenv.live.record.snapshot import SCHEMA
from paceenv.live.record.summary import summarise

LATER = "20261123T060000-000000"


def rows_of(trace: Trace, rank: int, op: str) -> dict[str, Any]:
    """One rank's rows of one operation."""
    mine = (trace.column("rank") == rank) & trace.isin("op", op)
    return {name: trace.column(name)[mine] for name in ("iteration", "start_s", "end_s")}


def path_of(folder: Path, rank: int) -> Path:
    """The status file of a rank of :func:`snapshot`."""
    return rank_file(folder, ATTEMPT, rank, ".json")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"schema": "other/9", "rank": 1}', "not a status"),
    ],
)
def test_a_status_that_is_none_is_passed_over_and_named(tmp_path: Path, content: bytes, why: str) -> None:
    for rank in range(4):
        write_status(tmp_path, snapshot(rank))
    path_of(tmp_path, 3).write_bytes(content)
    run = RunFolder(tmp_path)
    for _ in range(2):
        assert [s["rank"] for s in run.statuses(ATTEMPT)] == [0, 1, 2]
        assert [("rank00003.json: " in note, "passed over" in note, why in note) for note in run.notes] == [(True,) * 3]


def test_a_status_comes_back_by_rank_and_the_path_says_whose_it_is(tmp_path: Path) -> None:
    for rank in (1, 0):
        write_status(tmp_path, snapshot(rank, step={"mean_s": np.float64(0.1), "cv": float("nan")}))
    content = {"schema": SCHEMA, "rank": True, "attempt": LATER, "world_size": [], "host": 7, "unix_time_s": None}
    path_of(tmp_path, 3).write_text(json.dumps(content))
    statuses = RunFolder(tmp_path).statuses(ATTEMPT)
    assert [(s["rank"], s["attempt"]) for s in statuses] == [(rank, ATTEMPT) for rank in (0, 1, 3)]
    assert statuses[0]["step"] == {"mean_s": 0.1, "cv": None}
    assert "Where the step went" in summarise(statuses)
    assert not list(tmp_path.rglob(".*"))


def test_a_rank_that_ends_while_it_is_read_has_left_its_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(process: str) -> bool:
        write_status(tmp_path, snapshot(1))
        return True

    write_status(tmp_path, snapshot(1, final=False))
    monkeypatch.setattr("paceenv.live.record.run_folder.is_gone", ends)
    assert "without a last word" not in summarise(RunFolder(tmp_path).statuses(ATTEMPT))
    write_status(tmp_path, snapshot(2, final=False))
    assert "rank 2 ended without a last word" in summarise(RunFolder(tmp_path).statuses(ATTEMPT))


def test_what_is_no_regular_file_is_skipped_and_named(tmp_path: Path) -> None:
    write_status(tmp_path, snapshot(0))
    record(tmp_path, 5, world_size=4)
    place = tmp_path / ATTEMPT
    for rank in (1, 2, 3):
        os.mkfifo(place / f"rank{rank:05d}.json")
        os.mkfifo(place / f"rank{rank:05d}-000.pace")
    for name in ("rank00003.json", "rank00003-000.pace"):
        (place / name).unlink()
        (place / name).touch()
        os.truncate(place / name, 1 << 40)
    (place / "rank00002.json").unlink()
    (place / "rank00002.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / LATER)
    os.mkfifo(tmp_path / ATTEMPT / "host")
    (tmp_path / ATTEMPT / "loop").symlink_to(tmp_path / ATTEMPT)
    run = RunFolder(tmp_path)
    assert run.attempts() == [ATTEMPT]
    assert [s["rank"] for s in run.statuses(ATTEMPT)] == [0]
    whys = ["not a regular file", "a link", f"{1 << 40} bytes; allowed: at most {MAX_STATUS_BYTES}"]
    assert [why in note for why, note in zip(whys, run.notes, strict=True)] == [True] * 3
    assert merge_trace(run).table.num_rows == 15
    assert len(run.notes) == 6
    assert str(segments.MAX_FILE_BYTES) in run.notes[-1]


@pytest.mark.parametrize(("made", "problem"), [(None, "no such folder"), ("", "not the folder of a run")])
def test_a_folder_that_is_none_says_so(tmp_path: Path, made: str | None, problem: str) -> None:
    place = tmp_path / "run"
    if made is not None:
        (place / made).mkdir(parents=True)
    with pytest.raises(InputError, match=problem):
        RunFolder(place)


# The merge


def events_of(iterations: Any, operations: Any = (), **more: Any) -> list[tuple[str, float, float]]:
    """The rows of iterations as (op, start, end)."""
    columns = segment_rows(make_batch(iterations, operations, **more))
    places = columns["iteration"].tolist()
    for i, seq in enumerate(columns["seq"].tolist()):
        assert seq == i - places.index(places[i])
    return list(zip(columns["op"].to_pylist(), columns["start_s"].tolist(), columns["end_s"].tolist(), strict=True))


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=6),
            st.floats(0.0, 0.5),
            st.floats(0, 1),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_rows_of_an_iteration_add_up_to_its_step(
    steps: list[tuple[list[tuple[float, float]], float, float]],
) -> None:
    iterations, operations, now_s = [], [], 1000.0
    for number, (parts, delay_s, rest_s) in enumerate(steps):
        begun_s = now_s
        now_s += delay_s
        for gap_s, length_s in parts:
            operations.append((number, 0, now_s + gap_s, now_s + gap_s + length_s))
            now_s = operations[-1][-1]
        now_s += rest_s
        iterations.append((number, begun_s, now_s, begun_s, begun_s + delay_s))
    rows = events_of(iterations, operations)
    assert sum(end - start for _, start, end in rows) == pytest.approx(now_s - 1000.0, abs=1e-9)
    assert all(before[2] == after[1] for before, after in itertools.pairwise(rows))
    paced_s = sum(end - start for op, start, end in rows if op == "pace")
    assert paced_s == pytest.approx(sum(delay_s for _, delay_s, _ in steps), abs=1e-9)


def test_operations_on_another_thread_do_not_cut_the_rest() -> None:
    kinds = [Kind("all_reduce", 0, 8), Kind("broadcast", 1, 8, side=True)]
    operations = [(0, 1, 0.5, 1.0), (0, 0, 2.0, 3.0), (0, 1, 2.5, 3.5), (1, 1, 4.5, 9.0)]
    rows = events_of([(0, 0.0, 4.0, 0.0, 0.0), (1, 4.0, 5.0, 4.0, 4.0)], operations, kinds=kinds)
    assert rows == [
        ("compute", 0.0, 2.0),
        ("broadcast", 0.5, 1.0),
        ("all_reduce", 2.0, 3.0),
        ("broadcast", 2.5, 3.5),
        ("compute", 3.0, 4.0),
        ("compute", 4.0, 5.0),
        ("broadcast", 4.5, 9.0),
    ]


def test_clocks_of_different_hosts_are_laid_over_each_other(tmp_path: Path) -> None:
    """Ranks 2 and 3 sit on a host that has been up for a day longer and whose clock gains 100 us a second."""
    for rank in range(4):
        far = {"clock": "b", "clock_s": 86400.0, "drift": 1e-4} if rank >= 2 else {"clock": "a", "clock_s": 77.0}
        record(tmp_path, 600, rank=rank, world_size=4, delay_s=0.002 * rank, **far)
    run = RunFolder(tmp_path)
    trace = merge_trace(run)
    assert run.notes == []
    assert trace.column("start_s").min() == pytest.approx(0.0, abs=1e-9)
    ends = np.array([rows_of(trace, rank, "barrier")["end_s"] for rank in range(4)])
    assert ends.shape == (4, 600)
    assert np.ptp(ends, axis=0).max() < 2e-4  # at the edges the drift of 15 iterations is left
    assert np.abs(ends[0] - STEP_S * np.arange(1, 601)).max() < 2e-5
    paces = rows_of(trace, 3, "pace")
    assert paces["end_s"] - paces["start_s"] == pytest.approx(0.006 * (1 + 1e-4), abs=1e-9)
    assert [entry["rank"] for entry in trace.metadata.ranks] == [0, 1, 2, 3]
    assert (trace.metadata.source, trace.metadata.job["name"]) == ("paceenv live", "job")


def test_ranks_on_one_clock_keep_what_they_see_of_each_other(tmp_path: Path) -> None:
    """Rank 1 leaves every barrier 3 ms late, on the same clock: that is what happened, not an error of the clock."""
    record(tmp_path, 50, rank=0, world_size=2)
    record(tmp_path, 50, rank=1, world_size=2, clock_s=0.003)
    ends = [rows_of(merge_trace(RunFolder(tmp_path)), rank, "barrier")["end_s"] for rank in range(2)]
    assert ends[1] - ends[0] == pytest.approx(0.003, abs=1e-9)


def test_damaged_segments_are_read_as_far_as_possible_and_named(tmp_path: Path) -> None:
    for rank in range(3):
        record(tmp_path, 300, rank=rank, world_size=3)
    paths = segment_files(tmp_path)
    paths[1].write_bytes(b"")
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    run = RunFolder(tmp_path)
    rows = write_merged(run, tmp_path / "merged.parquet")
    assert ["rank00001-000.pace: not a segment" in run.notes[0], "rank00002-000.pace: read up to byte" in run.notes[1]]
    assert len(run.notes) == 2
    assert rows == read_trace(tmp_path / "merged.parquet").table.num_rows == 900


def test_a_rank_without_a_common_iteration_is_passed_over_and_named(tmp_path: Path) -> None:
    record(tmp_path, 10, rank=0, world_size=2, clock="a")
    record(tmp_path, 10, rank=1, world_size=2, clock="b", first=500)
    run = RunFolder(tmp_path)
    assert set(merge_trace(run).column("rank").tolist()) == {0}
    assert run.notes == ["ranks [1]: passed over: no iteration in common with rank 0"]
