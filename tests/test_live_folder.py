"""A run's folder: status files of many ranks, hostile ones among them, and segments merged onto one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_samples import STEP_S, merge_trace, record, snapshot

from paceenv.core.errors import InputError
from paceenv.core.trace import Trace, read_trace
from paceenv.live.record.merge_segments import write_merged
from paceenv.live.record.run_folder import RunFolder, segment_path, status_path, write_status


def rows_of(trace: Trace, rank: int, op: str) -> dict[str, Any]:
    """One rank's rows of one operation."""
    mine = (trace.column("rank") == rank) & trace.isin("op", op)
    return {name: trace.column(name)[mine] for name in ("iteration", "start_s", "end_s")}


def test_a_status_comes_back_by_rank_and_numbers_that_are_not_finite_as_null(tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        write_status(tmp_path, snapshot(rank, step={"mean_s": np.float64(0.1), "cv": float("nan")}))
    run = RunFolder(tmp_path)
    assert [s["rank"] for s in run.statuses(0)] == [0, 1, 2]
    assert run.statuses(0)[0]["step"] == {"mean_s": 0.1, "cv": None}
    assert [path.name for path in status_path(tmp_path, 0, 0).parent.iterdir() if path.name.startswith(".")] == []


def test_the_latest_attempt_is_the_one_heard_of_last(tmp_path: Path) -> None:
    """A new run in an old folder starts again at attempt 0, whatever the old one had come to."""
    write_status(tmp_path, snapshot(attempt=3, unix_time_s=1000.0))
    write_status(tmp_path, snapshot(attempt=0, unix_time_s=2000.0))
    run = RunFolder(tmp_path)
    assert (run.attempts(), run.latest(), run.chosen(None), run.chosen(3)) == ([0, 3], 0, 0, 3)
    with pytest.raises(InputError, match=r"attempt = 1; allowed: one of \[0, 3\]"):
        run.chosen(1)


def test_ranks_of_an_earlier_larger_job_are_not_of_this_run(tmp_path: Path) -> None:
    for rank in range(4):
        write_status(tmp_path, snapshot(rank, world_size=4, unix_time_s=1000.0))
    for rank in range(2):
        write_status(tmp_path, snapshot(rank, world_size=2, unix_time_s=2000.0))
    assert [s["rank"] for s in RunFolder(tmp_path).statuses(0)] == [0, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'{"schema": "other/9", "rank": 1}',
        b'{"schema": "paceenv.live/1", "rank": true}',
        b"[" * 100_000,
        json.dumps(snapshot(1)).encode()[:200],
    ],
)
def test_a_status_that_is_none_is_passed_over_and_named(tmp_path: Path, content: bytes) -> None:
    write_status(tmp_path, snapshot(0))
    status_path(tmp_path, 0, 1).write_bytes(content)
    run = RunFolder(tmp_path)
    assert [s["rank"] for s in run.statuses(0)] == [0]
    assert len(run.notes) == 1
    assert "rank00001.json: passed over: not " in run.notes[0]
    run.statuses(0)
    assert len(run.notes) == 1


def test_unfinished_and_foreign_files_disturb_nobody(tmp_path: Path) -> None:
    record(tmp_path, 5)
    write_status(tmp_path, snapshot(0))
    for path in (status_path(tmp_path, 0, 1), segment_path(tmp_path, 0, 1, 0)):
        path.with_name(f".{path.name}.x1").write_bytes(b"half")
        path.with_name("notes.txt").write_text("mine")
    (tmp_path / "trace" / "attempt1.old").mkdir()
    run = RunFolder(tmp_path)
    assert run.attempts() == [0]
    assert [s["rank"] for s in run.statuses(0)] == [0]
    assert merge_trace(run).table.num_rows == 15
    assert run.notes == []


@pytest.mark.parametrize(("make", "problem"), [(False, "no such folder"), (True, "not the folder of a run")])
def test_a_folder_that_is_none_says_so(tmp_path: Path, make: bool, problem: str) -> None:
    place = tmp_path / "run"
    if make:
        place.mkdir()
    with pytest.raises(InputError, match=problem):
        RunFolder(place)


def test_clocks_of_different_hosts_are_laid_over_each_other(tmp_path: Path) -> None:
    """Ranks 2 and 3 sit on a host that has been up for a day longer and whose clock gains 100 us a second."""
    for rank in range(4):
        far = {"clock": "b", "clock_s": 86400.0, "drift": 1e-4} if rank >= 2 else {"clock": "a", "clock_s": 77.0}
        record(tmp_path, 600, rank=rank, world_size=4, segment_rows=500, delay_s=0.002 * rank, **far)
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


def test_ranks_on_one_clock_keep_what_they_see_of_each_other(tmp_path: Path) -> None:
    """Rank 1 leaves every barrier 3 ms late, on the same clock: that is what happened, not an error of the clock."""
    record(tmp_path, 50, rank=0, world_size=2)
    record(tmp_path, 50, rank=1, world_size=2, clock_s=0.003)
    ends = [rows_of(merge_trace(RunFolder(tmp_path)), rank, "barrier")["end_s"] for rank in range(2)]
    assert ends[1] - ends[0] == pytest.approx(0.003, abs=1e-9)


def test_a_clock_that_stood_still_is_followed(tmp_path: Path) -> None:
    """A suspended machine's monotonic clock stops: after iteration 100 it is an hour behind."""
    record(tmp_path, 200, rank=0, world_size=2, clock="a")
    record(tmp_path, 100, rank=1, world_size=2, clock="b", clock_s=5000.0, segment_rows=10)
    record_more(tmp_path, rank=1, first=100, number=100, clock_s=5000.0 - 3600.0)
    trace = merge_trace(RunFolder(tmp_path))
    ends = [rows_of(trace, rank, "barrier")["end_s"] for rank in range(2)]
    np.testing.assert_allclose(ends[0][[50, 150]], ends[1][[50, 150]], atol=1e-6)
    assert np.all(trace.column("end_s") >= trace.column("start_s"))


def record_more(folder: Path, *, rank: int, **options: Any) -> None:
    """Further segments of a rank that already has some."""
    aside = folder / "aside"
    record(aside, rank=rank, world_size=2, clock="b", **options)
    number = len(RunFolder(folder).segments(0)[rank])
    for path in RunFolder(aside).segments(0)[rank]:
        path.rename(segment_path(folder, 0, rank, number))
        number += 1


def test_damaged_segments_are_passed_over_and_named(tmp_path: Path) -> None:
    record(tmp_path, 300, segment_rows=192)
    paths = RunFolder(tmp_path).segments(0)[0]
    paths[0].write_bytes(b"")
    paths[2].write_bytes(paths[2].read_bytes()[:300])
    run = RunFolder(tmp_path)
    merged = write_merged(run, tmp_path / "merged.parquet")
    assert [("rank00000-000000" in note, "rank00000-000002" in note) for note in run.notes] == [(1, 0), (0, 1)]
    assert merged.rows == read_trace(tmp_path / "merged.parquet").table.num_rows == 900 - 2 * 192


def test_a_rank_without_a_common_iteration_is_passed_over_and_named(tmp_path: Path) -> None:
    record(tmp_path, 10, rank=0, world_size=2, clock="a")
    record(tmp_path, 10, rank=1, world_size=2, clock="b", first=500)
    run = RunFolder(tmp_path)
    assert set(merge_trace(run).column("rank").tolist()) == {0}
    assert run.notes == ["ranks [1]: passed over: no iteration in common with rank 0"]


def test_a_run_without_a_trace_says_so(tmp_path: Path) -> None:
    write_status(tmp_path, snapshot(0))
    with pytest.raises(InputError, match="attempt 0 left no trace"):
        merge_trace(RunFolder(tmp_path))


def test_segments_of_an_earlier_larger_job_are_left_out(tmp_path: Path) -> None:
    record(tmp_path, 10, rank=1, world_size=2)
    record(tmp_path, 10, rank=0, world_size=1)
    run = RunFolder(tmp_path)
    assert set(merge_trace(run).column("rank").tolist()) == {0}
    assert run.notes == ["rank 1: passed over: the job has 1 ranks; left by an earlier run"]
