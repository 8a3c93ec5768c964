"""The recorder: bounded memory, and whole flushes whatever happens to the disk, the folder or the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from commands import DEADLINE_S
from live_samples import ATTEMPT, batch, merge_trace, on_mount, record, recorder, run_python, segment_files

from paceenv.live.record import recorder as module
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.segments import read_segment

WRITE = os.write
FILL = """
import sys
from pathlib import Path
from live_samples import batch, read_all, recorder
said = []
target = recorder(Path(sys.argv[1]), flush_s=0.0, problem=said.append)
for first in range(0, 10000, 500):
    target.add(batch(500, first=first))
    target.write(False)
target.write(True)
print(*said, sep="\\n")
print(read_all(Path(sys.argv[1])))
print(target.counts["dropped"] + target.counts["rows"] // 3 + sum(len(b.iterations_T) for b in target._waiting))
"""


def test_what_was_added_comes_back(tmp_path: Path) -> None:
    target = recorder(tmp_path)
    for first in range(0, 300, 100):
        target.add(batch(100, first=first, delay_s=0.001))
        assert target.flush()
    [path] = segment_files(tmp_path)
    assert path == tmp_path / ATTEMPT / "node0" / "rank00000-000.pace"
    (header, found, note), expected = read_segment(path), batch(100, first=200, delay_s=0.001)
    assert (note, len(found.iterations_T), len(found.operations_N)) == ("", 300, 600)
    assert found.iterations_T[200:].tobytes() == expected.iterations_T.tobytes()
    np.testing.assert_array_equal(found.operations_N["end_s"][400:], expected.operations_N["end_s"])
    np.testing.assert_array_equal(found.operations_N["place"], np.repeat(np.arange(300), 2))
    assert target.counts == {"rows": 900, "dropped": 0, "segments": 1}
    assert (header["job"]["name"], header["rank"]["clock"]) == ("job", "c")


def test_full_files_are_followed_by_new_ones_and_the_oldest_go(tmp_path: Path) -> None:
    target = recorder(tmp_path, file_bytes=5000, max_files=3)
    for first in range(0, 600, 60):
        target.add(batch(60, first=first))
        target.flush()
    assert target.counts == {"rows": 1800, "dropped": 0, "segments": 10}
    paths = segment_files(tmp_path)
    assert [path.stem[-3:] for path in paths] == ["007", "008", "009"]
    assert [read_segment(path)[1].iterations_T["iteration"][0] for path in paths] == [420, 480, 540]
    assert merge_trace(RunFolder(tmp_path)).table.num_rows == 3 * 180


def test_memory_is_bounded_while_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 1 << 20)
    (tmp_path / ATTEMPT).write_text("in the way")
    said: list[str] = []
    target = recorder(tmp_path, problem=said.append)
    for first in range(0, 40_000, 1000):
        target.add(batch(1000, first=first))
        target.write(True)
    assert len(said) == 1
    assert "the trace cannot be written, and the job goes on: " in said[0]
    assert target._bytes() <= module.KEPT_BYTES
    kept = sum(len(waiting.iterations_T) for waiting in target._waiting)
    assert kept > 5000
    assert target.counts == {"rows": 0, "dropped": 40_000 - kept, "segments": 0}
    (tmp_path / ATTEMPT).unlink()  # the newest are still there when the folder is writable again
    assert target.flush()
    assert merge_trace(RunFolder(tmp_path)).column("iteration").max() == 39_999
    assert target.counts["dropped"] == 40_000 - kept


def test_nothing_is_written_before_the_attempt_is_known(tmp_path: Path) -> None:
    target = recorder(tmp_path, attempt="")
    target.add(batch(5))
    assert not target.flush()
    assert list(tmp_path.iterdir()) == []
    target.attempt = ATTEMPT
    assert target.flush()
    [path] = segment_files(tmp_path)
    assert read_segment(path)[0]["job"]["attempt"] == path.parts[-3] == ATTEMPT


def test_the_training_thread_adds_while_another_thread_hangs_in_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes in iterations where the housekeeping thread does not come, as on a file system that hangs."""
    said: list[str] = []
    target = recorder(tmp_path, problem=said.append)
    target.add(batch(5))
    monkeypatch.setattr(module, "KEPT_BYTES", 8 * target._bytes())
    entered, release = threading.Event(), threading.Event()

    def hang(descriptor: int, content: object) -> int:
        entered.set()
        release.wait(DEADLINE_S)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", hang)
    thread = threading.Thread(target=target.flush)
    thread.start()
    assert entered.wait(DEADLINE_S)
    for k in range(1, 12):
        target.add(batch(5, first=5 * k))
    assert target.counts["dropped"] == 3 * 5
    release.set()
    thread.join(DEADLINE_S)
    monkeypatch.setattr(os, "write", WRITE)
    assert target.flush()
    assert "Input/output error" in said[0]
    assert target.counts == {"rows": 3 * 8 * 5, "dropped": 4 * 5, "segments": 1}


@pytest.mark.parametrize("what", ["removed", "a folder removed", "replaced", "cut", "a fifo", "a link"])
def test_a_file_that_somebody_touched_is_left_alone(tmp_path: Path, what: str) -> None:
    target = recorder(tmp_path)
    target.add(batch(10))
    target.flush()
    [path] = segment_files(tmp_path)
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    if what == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
    if what == "a folder removed":
        path.parent.rmdir()
        path.parents[1].rmdir()
    elif what == "replaced":
        path.write_bytes(b"mine")
    elif what == "a fifo":
        os.mkfifo(path)
    elif what == "a link":
        path.symlink_to(mine)
    target.add(batch(10, first=10))
    assert target.flush()
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


def test_a_full_disk_ends_the_trace_and_says_so_once(tmp_path: Path) -> None:
    done = on_mount('mount -t tmpfs -o size=64k tmpfs "$FOLDER"', FILL, tmp_path)
    assert done.returncode == 0, done.stderr
    said, read, accounted = done.stdout.splitlines()
    assert "No space left on device" in said
    assert eval_pair(read)[0] >= 500  # whole flushes, and nothing torn behind them
    assert eval_pair(read)[1] == 0
    assert accounted == "10000"


def eval_pair(text: str) -> tuple[int, int]:
    """The numbers in a printed pair."""
    first, second = text.strip("()").split(", ")
    return int(first), int(second)


def test_a_killed_writer_leaves_what_it_had_flushed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from live_samples import *\n"
        "target, first = recorder(Path(sys.argv[1])), 0\n"
        "while True:\n"
        "    target.add(batch(500, first=first)); first += 500; target.flush(); print('.', flush=True)\n"
    )
    root = Path(__file__).resolve().parents[1]
    environ = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'helpers'}"}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environ)
    try:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline()
        time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
    trace = merge_trace(RunFolder(tmp_path))
    assert trace.column("iteration").max() >= 1499


def test_a_forked_child_writes_nothing_and_holds_no_file(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from live_samples import *\n"
        "target = recorder(Path(sys.argv[1]))\n"
        "target.add(batch(5)); target.flush(); target.add(batch(5, first=5))\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    target.add(batch(5, first=10)); target.write(True); target.flush()\n"
        "    held = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]\n"
        "    os._exit(any('.pace' in name for name in held))\n"
        "print(os.waitpid(child, 0)[1], read_all(Path(sys.argv[1])))\n"
    )
    done = run_python(code, str(tmp_path))
    assert (done.stdout, done.returncode) == ("0 (5, 0)\n", 0), done.stderr
