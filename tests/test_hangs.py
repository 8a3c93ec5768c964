"""Jobs that hang: what is said of their Flight Recorder dumps, against the truth of a model and of real incidents."""

from __future__ import annotations

import gzip
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hung_jobs import Job, Op, data_parallel, parallel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traced_jobs import HANGS_DIR, json_of, needs_hangs

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.diagnosis.hang import NOTHING_HANGS, Hang, find_hangs
from paceenv.importers.flight_recorder import read_dump
from paceenv.importers.inputs import read_inputs


def seen(job: Job, folder: Path, **how: Any) -> Hang:
    """What is said of a job's dumps."""
    (found,) = find_hangs(read_inputs([job.run().write(folder, **how)]).dumps)
    return found


@pytest.mark.parametrize("how", [{}, {"only_active": True}, {"status": False}, {"timing": True}, {"as_json": True}])
def test_a_rank_that_stops_is_named_with_what_it_did_last(tmp_path: Path, how: dict[str, bool]) -> None:
    found = seen(data_parallel(4, host_stops={2: 3}), tmp_path, **how)
    assert found.stopped == (2,)
    assert found.verdict.startswith("rank 2 stopped: it waits for nobody, and 3 other ranks wait for it in the end, ")
    assert "first in all_reduce 4 of default_pg (ranks 0-3)" in found.verdict
    assert found.ends() == {0: (2,), 1: (2,), 3: (2,)}
    (last,) = found.last_seen()
    assert (last[0], last[3]) == ("2", "3 collectives"), "the others are three ahead"
    assert last[4] == "all_reduce 4 of default_pg (ranks 0-3)"
    if "only_active" not in how:
        assert last[1].startswith("_all_gather_base 3 of default_pg (ranks 0-3), completed")
        assert last[2] == "step__all_gather_base at /job/train.py:12"


def test_a_device_that_stops_while_its_host_goes_on(tmp_path: Path) -> None:
    """Its peers finished what it never saw the end of; or, where its record is whole, starts tell."""
    blind = seen(data_parallel(4, device_stops={3: 4}, lag=3), tmp_path / "blind", only_active=True)
    assert blind.blind == (3,)
    assert "rank 3 never saw the end of 3 collectives that others finished" in blind.verdict
    timed = seen(data_parallel(4, device_stops={3: 4}), tmp_path / "timed", timing=True)
    assert "all have entered _all_gather_base 5" in timed.verdict
    assert "the devices of ranks 0-2 have begun it: rank 3 did not get there" in timed.verdict
    untimed = seen(data_parallel(4, device_stops={3: 4}), tmp_path / "untimed")
    assert untimed.stopped == ()
    assert "which rank is stuck cannot be determined without TORCH_NCCL_ENABLE_TIMING=1" in untimed.verdict


_SHAPES = [(2, 2, 2), (1, 4, 1), (2, 4, 1), (4, 1, 2), (1, 2, 3), (1, 1, 6)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_only_ranks_that_stopped_are_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the job, the rank, the moment and the way of dumping."""
    tensor, pipeline, replicas = data.draw(st.sampled_from(_SHAPES))
    job = parallel(tensor, pipeline, replicas, batches=data.draw(st.integers(1, 3)))
    job.ahead, job.lag = data.draw(st.sampled_from([1, 2, 5, 12, 50])), data.draw(st.sampled_from([0, 3]))
    ranks = data.draw(st.lists(st.integers(0, len(job.programs) - 1), min_size=1, max_size=2, unique=True))
    kind = data.draw(st.sampled_from(["host", "device", "no dump"]))
    for rank in ranks:
        at = data.draw(st.integers(0, len(job.programs[rank]) - 1))
        (job.device_stops if kind == "device" else job.host_stops)[rank] = at
    how = {key: data.draw(st.booleans()) for key in ("only_active", "timing", "status")}
    without = tuple(ranks) if kind == "no dump" else ()
    found = seen(job, tmp_path_factory.mktemp("job"), without=without, **how)
    silent = {rank for root in found.roots if root.kind == "no dump" for rank in root.ranks}
    if kind == "host":
        assert set(found.stopped) <= job.stopped
        assert found.stopped
        assert not found.blind
    elif kind == "device":
        assert not set(found.stopped) - set(ranks), "its device stopped, and then its host"
        assert found.hangs
        assert set(found.blind) <= set(ranks)
    else:
        assert silent
        assert silent <= set(ranks)
        assert not found.stopped
    reachable = set(found.stopped) | silent
    if kind != "device":
        assert all(set(ends) <= reachable for ends in found.ends().values())
        assert set(found.ends()) == set(job.programs) - set(without) - {r for r in ranks if r not in found.waits}


def test_a_job_that_does_not_hang(tmp_path: Path) -> None:
    found = seen(parallel(), tmp_path)
    assert not found.hangs
    assert found.verdict == NOTHING_HANGS
    empty = seen(parallel(), tmp_path / "active", only_active=True)
    assert empty.verdict == "cannot be determined: the 8 dumps have no entries of known groups"


@pytest.mark.parametrize(
    ("other", "what", "said"),
    [
        (Op("0", "_all_gather_base"), "operation", "all_reduce on ranks 0-1, 3; _all_gather_base on rank 2"),
        (Op("0", "all_reduce", sizes=(7, 3)), "size", r"of \[\[7, 3\]\] \['BFloat16'\] on rank 2"),
        (Op("0", "all_reduce", dtype="Float"), "type", r"of \[\[1024\]\] \['Float'\] on rank 2"),
    ],
)
def test_collectives_that_do_not_match(tmp_path: Path, other: Op, what: str, said: str) -> None:
    """All enter collective 4, and it can never end."""
    job = data_parallel(4, device_stops=dict.fromkeys(range(4), 3))
    job.programs[2][3] = other
    found = seen(job, tmp_path)
    (mismatch,) = found.mismatches
    assert (mismatch.seq, mismatch.what) == (4, what)
    assert re.search(said, found.verdict)
    assert "all_reduce 4 of default_pg (ranks 0-3) cannot end for that reason" in found.verdict
    assert found.to_json()["mismatches"] == [mismatch.text]


def test_ranks_that_enter_collectives_in_different_orders(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", (0, 1)), "1": ("A", (0, 1)), "2": ("B", (0, 1))}
    orders = {0: ["1", "2"], 1: ["2", "1"]}
    job = Job(groups, {rank: [Op(name, "all_reduce", waits=True) for name in order] for rank, order in orders.items()})
    found = seen(job, tmp_path)
    assert [root.kind for root in found.roots] == ["circle"]
    assert found.stopped == ()
    assert "rank 0 in all_reduce 1 of A (ranks 0-1) for 1" in found.verdict
    assert "which one cannot be determined" in found.verdict


@pytest.mark.parametrize("left_out", [False, True])
def test_parts_of_a_coalesced_operation_have_its_state(tmp_path: Path, left_out: bool) -> None:
    """Batched sends and receives stay "scheduled" for ever; one whose last entry is missing completed before."""
    job = data_parallel(2).run()
    for rank in range(2):
        dump = job.dump(rank, status=False)
        dump["pg_config"]["7"] = {"name": "7", "desc": "PIPE", "ranks": "[0, 1]"}
        first, last = dump["entries"][0], dump["entries"][-1]
        parts = [(f"send {rank}->{1 - rank}", "scheduled"), (f"recv {rank}<-{1 - rank}", "scheduled")]
        for k, (name, state) in enumerate([*parts, *([] if left_out else [("coalesced", "completed")])], start=1):
            about = {"profiling_name": f"nccl:{name}", "state": state, "is_p2p": name != "coalesced"}
            about |= {"process_group": ("7", "PIPE"), "pg_id": 7, "collective_seq_id": last["collective_seq_id"] + 1}
            dump["entries"].append(last | about | {"record_id": last["record_id"] + k})
        if left_out:
            dump["entries"].append(first | {"record_id": 99, "collective_seq_id": 7})
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    (found,) = find_hangs(read_inputs([tmp_path]).dumps)
    assert not found.hangs


def test_the_content_says_which_rank_it_is(tmp_path: Path) -> None:
    folder = parallel(host_stops={5: 4}).run().write(tmp_path)
    for rank in range(8):
        (folder / f"nccl_trace_rank_{rank}").rename(folder / f"dump.{99 - rank}")
    inputs = read_inputs([folder])
    assert sorted(dump.rank for dump in inputs.dumps) == list(range(8))
    assert find_hangs(inputs.dumps)[0].stopped == (5,)


@pytest.mark.parametrize(("name", "rank"), [("_dump_1", 1), ("r1.pickle.gz", 1), ("dump", None), ("trace_17", None)])
def test_the_name_says_which_rank_it_is_where_the_content_does_not(tmp_path: Path, name: str, rank: int | None) -> None:
    content = pickle.dumps(data_parallel(2).run().dump(1), 2)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    if rank is None:
        with pytest.raises(InputError, match="neither its content nor its name says which rank it is of"):
            read_dump(tmp_path / name)
    else:
        assert read_dump(tmp_path / name).rank == rank


def test_of_two_dumps_of_a_rank_the_later_counts(tmp_path: Path) -> None:
    early = data_parallel(3, host_stops={2: 1}).run()
    late = data_parallel(3, host_stops={1: 4}).run()
    for rank in range(3):
        dump = late.dump(rank)
        for entry in dump["entries"]:
            entry["time_created_ns"] += int(60e9)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(early.dump(rank), 2))
        (tmp_path / f"nccl_trace_rank_{rank}_1758610505").write_bytes(pickle.dumps(dump, 2))
    (found,) = find_hangs(read_inputs([tmp_path]).dumps)
    assert found.stopped == (1,)
    assert found.verdict.endswith("3 older dumps of the same ranks left out")


def test_each_incident_has_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_parallel(4, host_stops={0: 2}).run().write(tmp_path / "monday" / "node0")
    data_parallel(4, host_stops={3: 2}).run().write(tmp_path / "tuesday")
    (tmp_path / "monday" / "node1").mkdir()
    for rank in (2, 3):
        path = tmp_path / "monday" / "node0" / f"nccl_trace_rank_{rank}"
        path.rename(tmp_path / "monday" / "node1" / path.name)
    (tmp_path / "notes.txt").write_text("what happened")
    assert [hang["stopped"] for hang in json_of("diagnose", tmp_path)["hang"]] == [[0], [3]]
    assert "notes.txt: unknown format; skipped" in capsys.readouterr().err.replace("\n", "")
    assert application.run(["diagnose", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "Rank 0 stopped" in out
    assert "Rank 3 stopped" in out


@needs_hangs
def test_real_incidents() -> None:
    """Injected faults: the log beside the dumps names the ranks."""
    answers = {Path(hang["folder"]).name: hang for hang in json_of("diagnose", HANGS_DIR)["hang"]}
    for log in HANGS_DIR.glob("*/fault_injection.log"):
        faulty = {int(rank) for rank in re.findall(r"^Rank (\d+)", log.read_text(), re.MULTILINE)}
        answer = answers[log.parent.name]
        assert {*answer["stopped"], *map(int, answer["never_saw_ends"])} == faulty
        assert answer["stopped"]
        if log.parent.name in {"gpu_error_1st", "lock_gil_2nd"}:
            assert answer["suspects"] == sorted(faulty)
            assert ", ".join(map(str, sorted(faulty))) in answer["verdict"].partition(";")[0], "in the first words"
        assert len(answer["waits"]) == 16 - len(answer["stopped"])
