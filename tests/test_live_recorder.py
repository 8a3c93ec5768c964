"""The recorder: rows that add up, bounded memory, whole segments whatever happens to the disk or the process."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_samples import DEADLINE_S, iterations, merge_trace, on_mount, record, recorder, run_python

from paceenv.calibration.fits.noise_fit import calibrate_noise
from paceenv.calibration.measurements import measure_noise
from paceenv.core.trace import COMPUTE_OPS, Trace, read_metadata, read_trace
from paceenv.live.observe.iteration import Iteration, Operation
from paceenv.live.record.merge_segments import write_merged
from paceenv.live.record.recorder import TraceRecorder, iteration_rows
from paceenv.live.record.run_folder import RunFolder
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]
FILL = """
import sys
from pathlib import Path
from live_samples import iterations, recorder
said = []
target = recorder(Path(sys.argv[1]), segment_rows=1, problem=said.append)
for first in range(0, 40000, 2000):
    for iteration in iterations(2000, first=first):
        target.append(iteration)
    target.write(False)
target.write(True)
print(*said, sep="\\n")
print(sorted(path.name[0] for path in Path(sys.argv[1]).rglob("*") if path.is_file()))
print(target.counts["dropped"] + target.counts["rows"] // 3)
"""


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=6), st.floats(0.0, 0.5), st.floats(0, 1))
def test_the_rows_of_an_iteration_add_up_to_its_step(
    parts: list[tuple[float, float]], delay_s: float, rest_s: float
) -> None:
    start_s = now_s = 1000.0
    now_s += delay_s
    operations = []
    for gap_s, length_s in parts:
        operations.append(Operation("all_reduce", 0, 1, now_s + gap_s, now_s + gap_s + length_s))
        now_s = operations[-1].end_s
    now_s += rest_s
    step_s = now_s - start_s
    rows = list(
        iteration_rows(Iteration(7, start_s, now_s, start_s, start_s + delay_s, tuple(operations), 0, 0, True, ""))
    )
    assert [row[1] for row in rows] == list(range(len(rows)))
    assert sum(row[5] - row[4] for row in rows) == pytest.approx(step_s, abs=1e-9)
    assert all(before[5] == after[4] for before, after in itertools.pairwise(rows))
    assert sum(row[5] - row[4] for row in rows if row[2] == "pace") == pytest.approx(delay_s, abs=1e-9)


def test_overlapping_operations_leave_no_compute_twice() -> None:
    operations = Operation("all_gather", 0, 1, 1.0, 3.0), Operation("reduce_scatter", 1, 1, 2.0, 4.0)
    rows = list(iteration_rows(Iteration(0, 0.0, 5.0, 0.0, 0.0, operations, 0, 0, True, "")))
    assert [(row[2], row[4], row[5]) for row in rows if row[2] == "compute"] == [("compute", 0, 1), ("compute", 4, 5)]


def test_a_marked_iteration_has_no_compute(tmp_path: Path) -> None:
    [plain] = iterations(1)
    rows = list(iteration_rows(plain._replace(mark="checkpoint", regular=False)))
    assert [row[2] for row in rows] == ["checkpoint", "all_reduce", "barrier"]


def test_what_was_appended_comes_back(tmp_path: Path) -> None:
    record(tmp_path, 300, segment_rows=200, delay_s=0.001)
    paths = RunFolder(tmp_path).segments(0)[0]
    assert len(paths) == 5
    assert [path.name for path in paths[:2]] == ["rank00000-000000.parquet", "rank00000-000001.parquet"]
    rows = [row for path in paths for row in read_trace(path).table.to_pylist()]
    expected = [row for iteration in iterations(300, delay_s=0.001) for row in iteration_rows(iteration)]
    names = ("iteration", "seq", "op", "group", "start_s", "end_s", "bytes")
    assert [tuple(row[name] for name in names) for row in rows] == expected
    metadata = read_metadata(paths[0])
    assert (metadata.source, metadata.job["name"], metadata.of_ranks("clock")) == ("paceenv live", "job", {0: "c"})


def test_the_ring_is_bounded_and_counts_what_it_drops(tmp_path: Path) -> None:
    target = recorder(tmp_path, ring_iterations=50)
    for iteration in iterations(120):
        target.append(iteration)
    assert target.counts == {"rows": 0, "dropped": 70, "segments": 0}
    target.write(True)
    assert target.counts == {"rows": 150, "dropped": 70, "segments": 1}
    kept = read_trace(RunFolder(tmp_path).segments(0)[0][0]).column("iteration")
    assert (kept.min(), kept.max()) == (70, 119)


def test_segments_wait_for_rows_or_time(tmp_path: Path) -> None:
    target = recorder(tmp_path, segment_rows=100)
    for iteration in iterations(20):
        target.append(iteration)
    target.write(False)
    assert target.counts["segments"] == 0
    soon = recorder(tmp_path, rank=1, segment_s=0.0)
    for iteration in iterations(20):
        soon.append(iteration)
    soon.write(False)
    soon.write(False)
    soon.write(True)
    assert soon.counts == {"rows": 60, "dropped": 0, "segments": 1}


def test_the_oldest_segments_go(tmp_path: Path) -> None:
    record(tmp_path, 640, segment_rows=192, max_segments=3)
    assert [path.stem[-2:] for path in RunFolder(tmp_path).segments(0)[0]] == ["07", "08", "09"]


def test_an_iteration_without_finite_times_is_left_out_and_counted(tmp_path: Path) -> None:
    target = recorder(tmp_path)
    good = list(iterations(3))
    for iteration in (good[0], good[1]._replace(start_s=math.nan), good[2]):
        target.append(iteration)
    target.write(True)
    assert target.counts == {"rows": 6, "dropped": 1, "segments": 1}


@pytest.mark.parametrize("name", ["segment_rows", "ring_iterations", "max_segments"])
def test_bounds_must_be_positive(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0; allowed: at least 1"):
        recorder(tmp_path, **{name: 0})


def test_a_full_disk_ends_the_trace_and_says_so_once(tmp_path: Path) -> None:
    done = on_mount('mount -t tmpfs -o size=128k tmpfs "$FOLDER"', FILL, tmp_path)
    assert done.returncode == 0, done.stderr
    said, files, accounted = done.stdout.splitlines()
    assert "No space left on device" in said
    assert said.startswith("the trace ends here and the job goes on: ")
    assert set(eval_list(files)) <= {"r"}  # whole segments, nothing unfinished
    assert accounted == "40000"


def test_a_read_only_folder_ends_the_trace_and_says_so_once(tmp_path: Path) -> None:
    done = on_mount('mount --bind "$FOLDER" "$FOLDER"; mount -o remount,bind,ro "$FOLDER"', FILL, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].count("Read-only file system") == 1
    assert done.stdout.splitlines()[1:] == ["[]", "40000"]


def test_a_folder_that_is_a_file_ends_the_trace_and_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("")
    said: list[str] = []
    target = recorder(tmp_path, problem=said.append)
    for iteration in iterations(3):
        target.append(iteration)
    for _ in range(3):
        target.write(True)
        target.append(iteration)
    assert len(said) == 1
    assert target.counts == {"rows": 0, "dropped": 6, "segments": 0}


def test_a_killed_writer_leaves_whole_segments_and_the_next_run_replaces_them(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from live_samples import *\n"
        "target, first = recorder(Path(sys.argv[1]), segment_rows=1), 0\n"
        "while True:\n"
        "    for iteration in iterations(500, first=first): target.append(iteration)\n"
        "    first += 500; target.write(False); print('.', flush=True)\n"
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
    place = tmp_path / "trace" / "attempt0"
    (place / ".rank00000-000099.parquet.7.tmp").write_bytes(b"PAR1")  # as if it was killed while writing
    folder = RunFolder(tmp_path)
    trace = merge_trace(folder)
    assert trace.column("iteration").max() >= 1400
    assert folder.notes == []
    record(tmp_path, 5)
    assert [path.name for path in place.iterdir()] == ["rank00000-000000.parquet"]


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from live_samples import *\n"
        "target = recorder(Path(sys.argv[1]))\n"
        "for iteration in iterations(5): target.append(iteration)\n"
        "child = os.fork()\n"
        "target.write(True) if not child else os.waitpid(child, 0)\n"
        "print(len(list(Path(sys.argv[1]).rglob('*.parquet')))) if child else os._exit(0)\n"
    )
    done = run_python(code, str(tmp_path))
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_calibration_reads_a_live_trace(tmp_path: Path) -> None:
    for rank in range(6):
        record(tmp_path, 200, rank=rank, world_size=6, delay_s=0.002)
    write_merged(RunFolder(tmp_path), tmp_path / "merged.parquet")
    [fit] = calibrate_noise(tmp_path / "merged.parquet")
    assert fit.workers == 6
    assert fit.mean_compute_s.value == pytest.approx(0.05, rel=0.01)
    assert fit.jitter_cv is not None
    assert fit.jitter_cv.value == pytest.approx(0.05, rel=0.1)


def test_a_simulated_job_that_went_through_the_recorder_measures_the_same(simulator: Make, tmp_path: Path) -> None:
    """The live writer and the simulator's mean the same by compute, a step and its collective."""
    sim = simulator(ranks=4, groups=1, uplink_work_s=0.1, has_barrier=True, barrier_s=0.01, jitter_cv=0.05)
    with RecordingWriter(tmp_path / "simulated.parquet", sim, "job") as writer:
        writer.append(sim.record(sim.off(), 60))
    simulated = read_trace(tmp_path / "simulated.parquet")
    for rank in range(4):
        target = recorder(tmp_path, rank=rank, world_size=4)
        for iteration in relived(simulated, rank):
            target.append(iteration)
        target.write(True)
    live, expected = measure_noise(merge_trace(RunFolder(tmp_path))), measure_noise(simulated)
    assert live.step_mean_s == pytest.approx(expected.step_mean_s, rel=1e-9)
    assert live.step_cv == pytest.approx(expected.step_cv, rel=1e-6)
    for name in ("mean_s", "idiosyncratic_var", "common_var"):
        assert getattr(live.stages[0].all, name) == pytest.approx(getattr(expected.stages[0].all, name), rel=1e-6)


def relived(trace: Trace, rank: int) -> list[Iteration]:
    """A rank's part of a trace as the agent would have seen it, on a clock that started elsewhere."""
    by_iteration: dict[int, list[Operation]] = {}
    for row in trace.table.to_pylist():
        if row["rank"] == rank and row["op"] not in COMPUTE_OPS:
            stamps = row["start_s"] + 5000.0, row["end_s"] + 5000.0
            by_iteration.setdefault(row["iteration"], []).append(Operation(row["op"], row["group"], 0, *stamps))
    found, start_s = [], 5000.0
    for number, operations in sorted(by_iteration.items()):
        end_s = operations[-1].end_s
        found.append(Iteration(number, start_s, end_s, start_s, start_s, tuple(operations), 0.0, 0.0, True, ""))
        start_s = end_s
    return found


def eval_list(text: str) -> list[str]:
    """The names in a printed list of single letters."""
    return [letter for letter in text if letter not in "[]', "]


def test_appending_is_safe_while_another_thread_writes(tmp_path: Path) -> None:
    target: TraceRecorder = recorder(tmp_path, segment_rows=300, ring_iterations=100_000)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            target.write(False)

    writer = threading.Thread(target=write)
    writer.start()
    for iteration in iterations(5000):
        target.append(iteration)
    done.set()
    writer.join(DEADLINE_S)
    target.write(True)
    assert target.counts["rows"] == 15000
    assert target.counts["dropped"] == 0
    seen = merge_trace(RunFolder(tmp_path)).column("iteration")
    assert sorted(set(seen.tolist())) == list(range(5000))
