"""The recorder: bounded memory, and whole flushes whatever happens to the disk, the folder or the process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from commands import DEADLINE_S
from live_samples import ATTEMPT, batch, merge_trace, record, recorder, segment_files

from paceenv.live.record import recorder as module
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.segments import read_segment

WRITE = os.write


def test_what_was_added_comes_back(tmp_path: Path) -> None:
    target = recorder(tmp_path)
    for first in range(0, 300, 100):
        target.add(batch(100, first=first, delay_s=0.001))
        target.write(True)
    [path] = segment_files(tmp_path)
    assert path == tmp_path / ATTEMPT / "rank00000-000.pace"
    (header, found, note), expected = read_segment(path), batch(100, first=200, delay_s=0.001)
    assert (note, len(found.iterations_T), len(found.operations_N)) == ("", 300, 600)
    assert found.iterations_T[200:].tobytes() == expected.iterations_T.tobytes()
    np.testing.assert_array_equal(found.operations_N["end_s"][400:], expected.operations_N["end_s"])
    np.testing.assert_array_equal(found.operations_N["place"], np.repeat(np.arange(300), 2))
    assert target.counts == {"rows": 900, "dropped": 0, "segments": 1}
    assert (header["job"]["name"], header["rank"]["clock"]) == ("job", "c")


def test_full_files_are_followed_by_new_ones_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 5000)
    monkeypatch.setattr(module, "MAX_FILES", 3)
    target = recorder(tmp_path)
    for first in range(0, 600, 60):
        target.add(batch(60, first=first))
        target.write(True)
    assert target.counts == {"rows": 1800, "dropped": 0, "segments": 10}
    paths = segment_files(tmp_path)
    assert [path.stem[-3:] for path in paths] == ["007", "008", "009"]
    assert [read_segment(path)[1].iterations_T["iteration"][0] for path in paths] == [420, 480, 540]
    assert merge_trace(RunFolder(tmp_path)).table.num_rows == 3 * 180


def test_memory_is_bounded_while_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 1 << 20)
    (tmp_path / ATTEMPT).write_text("in the way")
    target = recorder(tmp_path)
    for first in range(0, 40_000, 1000):
        target.add(batch(1000, first=first))
        with pytest.raises(FileExistsError):
            target.write(True)
    assert target._bytes() <= module.KEPT_BYTES
    kept = sum(len(waiting.iterations_T) for waiting in target._waiting)
    assert kept > 5000
    assert target.counts == {"rows": 0, "dropped": 40_000 - kept, "segments": 0}
    (tmp_path / ATTEMPT).unlink()  # the newest are still there when the folder is writable again
    target.write(True)
    assert merge_trace(RunFolder(tmp_path)).column("iteration").max() == 39_999
    assert target.counts["dropped"] == 40_000 - kept


def test_nothing_is_written_before_the_attempt_is_known(tmp_path: Path) -> None:
    target = recorder(tmp_path, attempt="")
    target.add(batch(5))
    target.write(True)
    assert list(tmp_path.iterdir()) == []
    target.attempt = ATTEMPT
    target.write(True)
    [path] = segment_files(tmp_path)
    assert read_segment(path)[0]["job"]["attempt"] == path.parent.name == ATTEMPT


def test_the_training_thread_adds_while_another_thread_hangs_in_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes in iterations where the housekeeping thread does not come, as on a file system that hangs."""
    target = recorder(tmp_path)
    target.add(batch(5))
    monkeypatch.setattr(module, "KEPT_BYTES", 8 * target._bytes())
    entered, release = threading.Event(), threading.Event()

    def hang(descriptor: int, content: bytes) -> int:
        if not entered.is_set():
            entered.set()
            return WRITE(descriptor, bytes(content)[:7])
        release.wait(DEADLINE_S)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", hang)

    def flush() -> None:
        with pytest.raises(OSError, match="Input/output error"):
            target.write(True)

    thread = threading.Thread(target=flush)
    thread.start()
    assert entered.wait(DEADLINE_S)
    for k in range(1, 12):
        target.add(batch(5, first=5 * k))
    assert target.counts["dropped"] == 3 * 5
    release.set()
    thread.join(DEADLINE_S)
    monkeypatch.setattr(os, "write", WRITE)
    target.write(True)
    assert target.counts == {"rows": 3 * 8 * 5, "dropped": 4 * 5, "segments": 1}
    [path] = segment_files(tmp_path)
    assert read_segment(path)[2] == "", "half a write was taken back"


@pytest.mark.parametrize("what", ["removed", "a folder removed", "replaced", "cut", "a fifo", "a link"])
def test_a_file_that_somebody_touched_is_left_alone(tmp_path: Path, what: str) -> None:
    target = recorder(tmp_path)
    target.add(batch(10))
    target.write(True)
    [path] = segment_files(tmp_path)
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    if what == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
    if what == "a folder removed":
        path.parent.rmdir()
    elif what == "replaced":
        path.write_bytes(b"mine")
    elif what == "a fifo":
        os.mkfifo(path)
    elif what == "a link":
        path.symlink_to(mine)
    target.add(batch(10, first=10))
    target.write(True)
    assert mine.read_bytes() == b"mine"
    newest = segment_files(tmp_path)[-1]
    assert newest.name == "rank00000-001.pace"
    assert read_segment(newest)[1].iterations_T["iteration"].tolist() == list(range(10, 20))


def test_an_agent_that_is_attached_again_begins_a_new_file(tmp_path: Path) -> None:
    record(tmp_path, 20)
    time.sleep(0.01)
    record(tmp_path, 7)
    assert [path.stem[-3:] for path in segment_files(tmp_path)] == ["000", "001"]
    run = RunFolder(tmp_path)
    assert merge_trace(run).table.num_rows == 3 * 7
    assert [("000.pace" in note, "attached before another" in note) for note in run.notes] == [(True, True)]
