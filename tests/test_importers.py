"""The one way in, and importers of other formats: files, folders and patterns, of which what is foreign is named and
skipped; real profiles, clocks that differ, damaged files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from importer_samples import BACKWARD_S, FORWARD_S, STEPS, dump_of, profile_of, written
from live_samples import run_python

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.answer import find_answer
from paceenv.diagnosis.diagnose import diagnose
from paceenv.importers.flight_recorder import read_dump
from paceenv.importers.formats import list_files
from paceenv.importers.inputs import read_inputs
from paceenv.importers.plain_pickle import read_plain_pickle
from paceenv.importers.profiler.kineto import import_kineto


def gpu_job(folder: Path, ranks: int = 3) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return written(folder, {f"rank{rank}.json.gz": profile_of(rank, 0.7 + 0.1 * rank) for rank in range(ranks)})


def test_files_folders_and_patterns_give_the_same_trace(tmp_path: Path) -> None:
    files = gpu_job(tmp_path / "run" / "profiles")
    expected = read_inputs(files).require_trace()
    assert read_inputs([tmp_path]).require_trace() == expected
    assert read_inputs([tmp_path / "run" / "*" / "rank?.json.gz"]).require_trace() == expected
    assert read_inputs([f"{tmp_path}/**/*.gz", tmp_path, *files]).require_trace() == expected, "each file once"


def test_foreign_files_are_named_in_one_line_a_reason(tmp_path: Path) -> None:
    gpu_job(tmp_path)
    for name in ("LICENSE", "a.py", "b.py", "c.py", "d.py"):
        (tmp_path / name).write_text("text")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "broken.json").write_text('{"traceEvents": 3}')
    (tmp_path / ".hidden").write_text("text")
    found = read_inputs([tmp_path])
    assert found.trace is not None
    assert [note.replace(f"{tmp_path}/", "") for note in found.notes] == [
        "LICENSE, a.py, b.py and 2 more: unknown format; skipped",
        'broken.json: not a JSON trace: no list "traceEvents" in its first 4 MB; skipped',
        "empty: empty; skipped",
    ]


def test_nothing_usable_is_one_line_with_the_first_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(InputError, match=r"a\.txt: unknown format; allowed: .* \(1 more file cannot be used either\)"):
        application.run(["diagnose", str(tmp_path)])
    assert not capsys.readouterr().out


def test_a_part_that_cannot_be_diagnosed_is_a_note_beside_the_others(tmp_path: Path) -> None:
    written(tmp_path, {f"rank{rank}.json": profile_of(rank) for rank in range(3)})
    log = tmp_path / "train.log"
    log.write_text("".join(f"iter {i}: loss 3.0, time {ms}ms, mfu 1%\n" for i, ms in enumerate((5000, 500, 501, 500))))
    answer = find_answer(read_inputs([tmp_path]))
    assert answer.diagnosis is not None
    assert not answer.steps
    assert "train.log: 3 step times after the warm-up" in answer.notes[-1]
    with pytest.raises(InputError, match="another"):
        find_answer(read_inputs([tmp_path]), "another")
    log.write_text("".join(f"iter {i}: loss 3.0, time {500 + i % 7}ms, mfu 1%\n" for i in range(40)))
    found = read_inputs([tmp_path])
    trace = found.require_trace()
    first = trace.table.filter(pc.equal(trace.table["iteration"], trace.column("iteration")[0]))
    answer = find_answer(replace(found, trace=replace(trace, table=first)))
    assert answer.steps
    assert answer.diagnosis is not None
    assert "one step does not show whether it lasts" in answer.diagnosis.refused


def test_of_two_recordings_of_the_same_ranks_one_is_read(tmp_path: Path) -> None:
    gpu_job(tmp_path / "iteration_10")
    gpu_job(tmp_path / "iteration_20", ranks=2)
    found = read_inputs([tmp_path])
    assert len(found.require_trace().metadata.ranks) == 3
    assert [note for note in found.notes if "iteration_20: another recording of the same ranks; skipped" in note]
    assert found.run == tmp_path / "iteration_10"


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        ("nowhere", "nowhere: no such file or folder"),
        ("no*where", r"no\*where: no file has such a name"),
        ("pipe", "pipe: is no regular file"),
        ("", ": no file; allowed"),
    ):
        with pytest.raises(InputError, match=message):
            list_files([tmp_path / path])
    with pytest.raises(InputError, match="none given"):
        list_files([])
    for name in "abc":
        (tmp_path / name).write_text("x")
    monkeypatch.setattr("paceenv.importers.formats.MAX_FILES", 2)
    with pytest.raises(InputError, match="more than 2 files"):
        list_files([tmp_path])


def test_links_that_lead_in_circles_end(tmp_path: Path) -> None:
    gpu_job(tmp_path / "run")
    (tmp_path / "run" / "again").symlink_to(tmp_path)
    assert len(list_files([tmp_path])) == 3


def load_traces(paths: Sequence[Path]) -> tuple[Trace, tuple[str, ...]]:
    """The trace in these files, and the notes."""
    found = read_inputs(paths)
    return found.require_trace(), found.notes


def rows(trace: Trace, rank: int, iteration: int) -> list[tuple[Any, ...]]:
    mine = (trace.column("rank") == rank) & (trace.column("iteration") == iteration)
    chosen = [trace.column(name)[mine] for name in ("op", "group", "bytes", "start_s", "end_s")]
    return list(zip(*(column.tolist() for column in chosen), strict=True))


def test_profiles_of_a_gpu_job_on_clocks_that_differ(tmp_path: Path) -> None:
    offsets_s = {0: 0.0, 1: 12.5, 2: -0.05}
    compute = {0: 0.7, 1: 0.7, 2: 1.0}
    profiles = {
        f"p{rank}.json{'.gz' if rank == 1 else ''}": profile_of(rank, compute[rank], offsets_s[rank])
        for rank in offsets_s
    }
    trace, notes = load_traces(written(tmp_path, profiles))
    assert len(notes) == 1
    assert "clocks differ by up to 12.5" in notes[0]
    found = rows(trace, 1, 9)
    assert [row[0] for row in found] == ["compute", "all_reduce", "compute", "all_reduce"]
    assert {row[1] for row in found if row[0] == "all_reduce"} == {0}
    assert {row[2] for row in found if row[0] == "all_reduce"} == {2 << 20}
    for iteration in range(7, 7 + STEPS):
        ends = [max(row[4] for row in rows(trace, rank, iteration) if row[0] == "all_reduce") for rank in range(3)]
        np.testing.assert_allclose(ends, ends[0], atol=1e-7, err_msg="the end of a collective is common to its members")
    first, second = (row for row in found if row[0] == "compute")
    assert second[4] - first[3] == pytest.approx(0.7 * (FORWARD_S + BACKWARD_S)), "it waits for the last bucket"
    assert first[4] == pytest.approx(first[3] + 0.7 * FORWARD_S), "cut where the first bucket begins"
    diagnosis = diagnose(trace)
    assert diagnosis.causes[0].cause == names.SLOW_RANK
    assert "rank 2" in diagnosis.causes[0].advice


def gloo_profile(rank: int, world: int, late_us: float, *, blocks: bool, marked_us: float = 0.0) -> dict[str, Any]:
    """Six steps of a job on the CPU, its last rank late before the first of two reductions of its backward pass.

    Both are waited for in the end, as in DDP, or each in the hook that calls it, inside an operation of autograd. In
    every other step the backend's thread marks the end of the second by ``marked_us`` too late.
    """
    events: list[dict[str, Any]] = []

    def add(name: str, begin_us: float, end_us: float, tid: int = 1, cat: str = "cpu_op") -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": begin_us, "dur": end_us - begin_us}
        )

    def at_us(who: int) -> float:
        return begin_us + 10e3 + (late_us if who == world - 1 else 0.0) + 10.0 * who

    begin_us = 1e6
    for step in range(6):
        began_us, first_us = begin_us, at_us(rank)
        add("aten::mm", first_us - 9e3, first_us)
        ends_us = at_us(world - 1) + 3e3
        seconds = [max(at_us(who), ends_us if blocks else 0.0) + 20e3 for who in range(world)]
        add("gloo:all_reduce", first_us, ends_us, 2, "user_annotation")
        second_us, last_us = seconds[rank], max(seconds) + 3e3
        add("aten::mm", second_us - 19e3, second_us)
        add("gloo:all_reduce", second_us, last_us + marked_us * (step % 2), 3, "user_annotation")
        for call_us, waited_us in ((first_us, ends_us), (second_us, last_us)):
            add("autograd::engine::evaluate_function: Hook", call_us, waited_us if blocks else call_us + 50.0)
            add("Hook", call_us, waited_us if blocks else call_us + 50.0)
            add("c10d::allreduce_", call_us, call_us + 20.0)
        add("aten::add", last_us, last_us + 5e3)
        begin_us = last_us + 5e3
        add(f"ProfilerStep#{step}", began_us, begin_us, cat="user_annotation")
    return {"distributedInfo": {"rank": rank, "world_size": world}, "traceEvents": events}


@pytest.mark.parametrize(
    ("world", "blocks", "marked_us"),
    [(2, False, 0.0), (2, True, 0.0), (4, False, 0.0), (4, True, 0.0), (2, False, 4e3)],
)
def test_who_is_late_in_a_profile_of_the_cpu(tmp_path: Path, world: int, blocks: bool, marked_us: float) -> None:
    """Work beside a reduction is no lateness, and an operation that holds the waiting for one is no work."""
    made = {
        f"rank{rank}.json": gloo_profile(rank, world, 30e3, blocks=blocks, marked_us=marked_us) for rank in range(world)
    }
    written(tmp_path, made)
    found = find_answer(read_inputs([tmp_path])).diagnosis
    assert found is not None
    (late,) = found.arrivals.late
    assert (late.rank, len(late.iterations)) == (world - 1, 6)
    assert late.mean_late_s == pytest.approx(0.03, rel=0.05)
    assert f"before all_reduce 1 takes rank {world - 1}" in found.causes[0].evidence
    assert found.causes[0].lost_s == pytest.approx(0.03, rel=0.1)


def test_threads_of_a_busy_host_end_late_and_another_run_is_refused(tmp_path: Path) -> None:
    """Ends of the same collectives lie far apart then, but none ends before all ranks have begun it."""
    one, two, other = (gloo_profile(rank, 2, late_us, blocks=False) for rank, late_us in ((0, 0), (1, 0), (1, 90e3)))
    for rank, profile in enumerate((one, two)):
        for k, event in enumerate(e for e in profile["traceEvents"] if e["name"] == "gloo:all_reduce"):
            event["dur"] += 40e3 * ((k // 2) % 2 == rank)
    files = written(tmp_path, {"rank0.json": one, "rank1.json": two, "rank1-other.json": other})
    assert len(set(load_traces(files[:2])[0].column("iteration").tolist())) == 6
    with pytest.raises(InputError, match="these are not the same collectives"):
        load_traces([files[0], files[2]])


RANKS_BY_NAME = {
    "rank3.json": 3, "iter_100_rank3.json": 3, "trainer0_iter20_rank1.json": 1, "worker2.1700000000.pt.trace.json": 2,
    "node7_r12.json.gz": 12, "R-4.json": 4, "server12_4711.1700000000.pt.trace.json": None, "iter_100.json": None,
    "r20261126.json": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "rank"), RANKS_BY_NAME.items())
def test_a_name_says_the_rank_where_the_profile_does_not(tmp_path: Path, name: str, rank: int | None) -> None:
    files = written(tmp_path, {name: {key: value for key, value in profile_of(0).items() if key != "distributedInfo"}})
    if rank is None:
        files += written(tmp_path, {"other.json": json.loads(files[0].read_text())})
        with pytest.raises(InputError, match="neither distributedInfo nor its name says which rank it is"):
            load_traces(files)
    else:
        assert import_kineto(files[0]).rank == rank


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickled_dumps_are_read_as_data(tmp_path: Path, protocol: int) -> None:
    """The same entries as from JSON; of a torn one those that were complete."""
    (tmp_path / "rank_0.json").write_text(json.dumps(dump_of(0)))
    expected, content = read_dump(tmp_path / "rank_0.json").entries, pickle.dumps(dump_of(0), protocol)
    path = tmp_path / "nccl_trace_rank_0"
    for written_content in (content, gzip.compress(content)):
        path.write_bytes(written_content)
        assert read_dump(path).entries == expected
    path.write_bytes(content[: len(content) * 3 // 4])
    torn = read_dump(path)
    assert "nccl_trace_rank_0: damaged, " in torn.notes[0]
    assert 12 < len(torn.entries) < 24
    assert [one.collective_seq for one in torn.entries] == [one.collective_seq for one in expected[: len(torn.entries)]]


@pytest.mark.slow
def test_dumps_that_pytorch_writes(tmp_path: Path) -> None:
    """Its own writer, in C++."""
    code = (
        "import sys; from pathlib import Path\n"
        "import torch, torch.distributed as dist\n"
        "from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(9): dist.all_reduce(torch.ones(9)); dist.broadcast(torch.ones(2, 3), 0)\n"
        "Path(sys.argv[1], 'rank_0').write_bytes(_dump_fr_trace())\n"
        "Path(sys.argv[1], 'rank_0.json').write_bytes(_dump_fr_trace_json())\n"
    )
    done = run_python(code, str(tmp_path), TORCH_FR_BUFFER_SIZE="100")
    assert done.returncode == 0, done.stderr
    found, damage = read_plain_pickle((tmp_path / "rank_0").read_bytes())
    told = json.loads((tmp_path / "rank_0.json").read_text())["entries"]
    assert not damage
    assert len(found["entries"]) == len(told) == 18
    for key in ("collective_seq_id", "profiling_name", "state", "is_p2p", "input_sizes", "input_dtypes"):
        assert [entry[key] for entry in found["entries"]] == [entry[key] for entry in told]
    assert len(read_dump(tmp_path / "rank_0").entries) == 18


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "run"),)

    path = tmp_path / "rank_0"
    for protocol in range(2, 6):
        path.write_bytes(pickle.dumps({"entries": [dump_of(0)["entries"][0], Evil()]}, protocol))
        with pytest.raises(InputError):
            load_traces([path])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps([1, 2]), 'a pickle without a list "entries"'),
        (pickle.dumps(Path("/")), "rank_0: STACK_GLOBAL is no plain data and is not run; allowed"),
        (b"\x80\x02S'\\y'\n.", "STRING is no plain data"),  # an escape that Python warns of
        (pickle.dumps({("a", 1): 2}), "a key that is neither text nor a number"),
        (json.dumps(dump_of(0)).encode(), "dumps have no steps; paceenv diagnose"),
        (b'{"traceEvents": []}', "no ProfilerStep# in 0 events"),
        (b'{"traceEvents": 5}', "not a JSON trace: no list"),
        (b"\x1f\x8b\x08\x00 torn", "rank_0: damaged gzip file: Compressed file ended before"),
        (b"\x1f\x8bno gzip", "damaged gzip file: Compressed file ended before"),
        (b"", "rank_0: empty; allowed: "),
        (b"some text\n", "rank_0: unknown format; allowed: "),
        (b"<!DOCTYPE html>\n<p>step 1 time: 5 ms\n" * 9, "rank_0: an HTML page; allowed: "),
        (b"some\0bytes\n", "rank_0: unknown format; allowed: "),
    ],
)
def test_what_cannot_be_read_gets_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_traces([path])


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    one, two, dump = written(tmp_path, {"r0.json": profile_of(0), "r1.json": profile_of(0), "rank_1.json": dump_of(1)})
    assert "looked at (r1.json), not r0.json" in load_traces([one, two])[1][0], "several recordings of the same ranks"
    assert [found.rank for found in read_inputs([one, dump]).dumps] == [1], "beside the trace of the profile"
    elsewhere = profile_of(1)
    for event in elsewhere["traceEvents"]:
        event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#9")
    with pytest.raises(InputError, match="no step that all ranks have"):
        load_traces([one, *written(tmp_path, {"r9.json": elsewhere})])


def test_of_a_torn_profile_what_came_before_is_used(tmp_path: Path) -> None:
    files = written(tmp_path, {"r0.json": profile_of(0), "r1.json": profile_of(1), "r2.json.gz": profile_of(2)})
    for path, share in ((files[1], 0.75), (files[2], 0.8)):
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
    trace, notes = load_traces(files)
    assert all("damaged after event" in note and "what came before is used" in note for note in notes[:2])
    assert notes[2:] == ("6 of 20 steps left out, as not all ranks have them: rank 1 lacks 6",)
    assert 5 < len(np.unique(trace.column("iteration"))) < STEPS
