"""Profiles of GPU jobs: made ones with known truth (what they lack, clocks, kinds of steps, steps that are cut, late
hosts), of a real job on eight H100, and of two ranks on an H200, one late by a known time."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_profiles import Job, Kernel, Meeting, profiles
from importer_samples import written
from traced_jobs import H100_DIR, H200_DIR, needs_h100, needs_h200

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.diagnosis.answer import Answer, find_answer
from paceenv.diagnosis.diagnose import MIN_STEPS, UNDETERMINED, diagnose
from paceenv.importers.inputs import Inputs, read_inputs
from paceenv.importers.merge_ranks import Merged, merge_ranks
from paceenv.importers.profiler.kineto import import_kineto


def read(folder: Path, job: Job, made: list[dict[str, Any]] | None = None) -> Merged:
    files = written(folder, {f"rank{k}.json": profile for k, profile in enumerate(made or profiles(job))})
    return merge_ranks([import_kineto(path) for path in files], "job")


def answer_of(merged: Merged) -> Answer:
    return find_answer(Inputs(merged.trace, activity=merged.activity))


def slow_rank_1(rank: int, step: int, place: int, us: float) -> float:
    """The first kernel of rank 1 takes half as long again; all others vary by 1 %."""
    jitter = 1.0 + 0.01 * random.Random(f"{rank} {step} {place}").random()
    return us * jitter * (1.5 if rank == 1 and place == 0 else 1.0)


@pytest.mark.parametrize(
    ("changed", "op"),
    [
        ({}, "all_reduce"),
        ({"metadata": False}, "all_reduce"),
        ({"launches": False}, "all_reduce"),
        ({"metadata": False, "old_names": True}, "all_reduce"),
        ({"metadata": False, "said": "all_to_all", "old_names": True}, "all_to_all"),
        ({"rocm": True}, "all_reduce"),
    ],
)
def test_collectives_of_which_little_is_said(tmp_path: Path, changed: dict[str, Any], op: str) -> None:
    """Kernels of 2023 have no metadata; their names tell, and that all ranks end together. ROCm has one name for all
    collectives, and other names of launches."""
    said, is_rocm = changed.get("said", "allreduce"), "rocm" in changed
    how = {key: value for key, value in changed.items() if key not in {"said", "rocm"}}
    job = Job(program=lambda _: [Kernel(4000.0), Meeting(said), Kernel(2000.0)], took_us=slow_rank_1, **how)
    made = profiles(job)
    for event in (event for profile in made for event in profile["traceEvents"] if is_rocm):
        event["name"] = event["name"].replace("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_Generic_1")
        event["name"] = event["name"].replace("cudaLaunchKernel", "hipLaunchKernel")
        event["cat"] = event["cat"].replace("cuda_runtime", "hip_runtime")
    merged = read(tmp_path, job, made)
    trace = merged.trace
    assert set(trace.column("op").tolist()) == {"compute", op}
    assert set(trace.column("group").tolist()) == {-1, 0}
    found = answer_of(merged).diagnosis
    assert found is not None
    np.testing.assert_allclose(1e6 * found.arrivals.late_RT[1], 2000.0, atol=100.0)


def test_sends_and_receives_without_metadata_are_no_collective(tmp_path: Path) -> None:
    """Pairs of a pipeline do not end together on all ranks."""
    job = Job(ranks=4, program=lambda _: [Kernel(4000.0), Meeting("all_to_all"), Kernel(2000.0), Meeting()],
              metadata=False)  # fmt: skip
    made = profiles(job)
    for rank, profile in enumerate(made):
        draw = random.Random(rank)
        for event in profile["traceEvents"]:
            if "SendRecv" in event["name"]:
                event["dur"] += 900.0 * draw.random()
    trace = read(tmp_path, job, made).trace
    assert set(trace.column("op").tolist()) == {"compute", "all_reduce", "send_recv"}
    assert set(trace.column("group")[trace.isin("op", "send_recv")].tolist()) == {-1}


@pytest.mark.parametrize("edge", ["first", "last"])
def test_a_step_that_is_cut_is_left_out(tmp_path: Path, edge: str) -> None:
    whole = [Kernel(3000.0), Meeting(elements=64), Kernel(1000.0), Meeting("_allgather_base"), Kernel(900.0)]
    cut = {"first": (10, whole[3:]), "last": (15, whole[:2])}[edge]
    merged = read(tmp_path, Job(program=lambda step: cut[1] if step == cut[0] else whole))
    assert merged.notes == (f"step {cut[0]} left out: the {edge} one, and only part of a step like the others",)
    assert set(merged.trace.column("iteration").tolist()) == set(range(10, 16)) - {cut[0]}


def test_ranks_that_began_later_or_number_steps_otherwise(tmp_path: Path) -> None:

    def uneven(rank: int, step: int, place: int, us: float) -> float:
        return us * (1.0 + 0.2 * random.Random(f"{step} {place}").random() + 0.1 * rank)

    job = Job(steps=range(10, 18), took_us=uneven, first_step={2: 13}, clock_us=(0.0, 5e5, 0.0))
    merged = read(tmp_path, job)
    assert set(merged.trace.column("iteration").tolist()) == set(range(13, 18))
    assert "3 of 8 steps left out, as not all ranks have them: rank 2 lacks 3" in merged.notes
    made = profiles(job)
    for event in made[1]["traceEvents"]:
        if event["name"].startswith("ProfilerStep#"):
            event["name"] = f"ProfilerStep#{int(event['name'][13:]) - 4}"
    again = read(tmp_path, job, made)
    assert any("its steps are numbered +4 against those of rank 0" in note for note in again.notes)
    for name in ("rank", "op", "group", "start_s", "end_s"):
        assert again.trace.column(name).tolist() == merged.trace.column(name).tolist()


def test_missing_ranks_and_strangers(tmp_path: Path) -> None:
    made = profiles(Job(ranks=4))
    for event in made[3]["traceEvents"]:
        event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#77")
    merged = read(tmp_path, Job(), [made[0], made[1], made[3]])
    assert "rank 3 left out: it has 0 of the 6 steps that most ranks have" in merged.notes[0]
    assert merged.notes[1].startswith("1 of 4 ranks have no file: rank 2; ")
    assert set(merged.trace.column("rank").tolist()) == {0, 1}


@pytest.mark.parametrize("missing", [(0,), (3,), (0, 2), (1, 3)])
def test_whoever_has_no_file_may_be_the_one_that_all_wait_for(tmp_path: Path, missing: tuple[int, ...]) -> None:
    """Also the first or the last rank, or every other one."""
    made = profiles(Job(ranks=4, steps=range(10, 20)))
    merged = read(tmp_path, Job(), [profile for rank, profile in enumerate(made) if rank not in missing])
    named = f"rank {missing[0]} is missing" if len(missing) == 1 else f"ranks {missing[0]}, {missing[1]} are missing"
    assert diagnose(merged.trace).refused == f"{UNDETERMINED}: {named}, and the others may wait for them"


def test_bytes_of_an_all_gather_are_those_of_all_ranks(tmp_path: Path) -> None:
    """As nccl-tests counts them."""
    program = [Kernel(4000.0), Meeting("_allgather_base", took_us=1000.0, elements=8 << 20), Kernel(2000.0)]
    trace = read(tmp_path, Job(ranks=4, program=lambda _: program, took_us=slow_rank_1)).trace
    assert set(trace.column("bytes").tolist()) == {0, 64 << 20}


def test_hidden_and_exposed(tmp_path: Path) -> None:
    """A collective of 3 ms beside 2 ms of compute is hidden for two thirds."""
    job = Job(program=lambda _: [Kernel(4000.0), Meeting(took_us=3000.0, beside=True), Kernel(2000.0), Meeting()])
    merged = read(tmp_path, job)
    for one in merged.activity:
        _, alone = one.collectives
        assert one.hidden_s == pytest.approx(2e-3, abs=1e-5)
        assert one.exposed_s == pytest.approx(1e-3 + alone.end_s - alone.start_s, abs=1e-5)


@pytest.mark.parametrize(
    ("where", "extra_us", "total_us", "named"),
    [("DataLoader", 1500.0, 1500.0, "workers of its data loader"), ("Optimizer", 60.0, 1200.0, "CUDA graphs")],
)
def test_a_late_host_is_named_with_what_it_did(
    tmp_path: Path, where: str, extra_us: float, total_us: float, named: str
) -> None:
    """Its peers' hosts run ahead: they arrive after 390 us of work of the device, it after 870 us of its host."""
    program: list[Any] = [
        Kernel(50.0, 30.0, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),
        Kernel(50.0, 10.0, "aten::to", "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"),
        *[Kernel(5.0, 40.0, "Optimizer.step#Adam.step") for _ in range(20)],
        *(Kernel(90.0), Meeting(took_us=100.0)),
    ]

    def host_us(rank: int, step: int, place: int, us: float) -> float:
        return us + extra_us * (rank == 2 and where in getattr(program[place], "range", ""))

    merged = read(tmp_path, Job(steps=range(10, 20), program=lambda _: program, host_us=host_us))
    truth_us = total_us + 870.0 - 390.0
    (found,) = answer_of(merged).late_hosts
    assert found.rank == 2
    assert found.reason == "host"
    assert np.median(found.late_s) * 1e6 == pytest.approx(truth_us, rel=0.05)
    assert found.extra_s["host"] * 1e6 == pytest.approx(truth_us, rel=0.1)
    assert where in next(iter(found.ranges))
    assert next(iter(found.ranges.values())) * 1e6 == pytest.approx(total_us, rel=0.15)
    assert named in found.text
    assert found.worst.mine.op == "all_reduce"


def test_a_slow_device_is_not_blamed_on_its_host(tmp_path: Path) -> None:
    merged = read(tmp_path, Job(took_us=slow_rank_1))
    (found,) = answer_of(merged).late_hosts
    assert (found.rank, found.reason) == (1, "compute")
    assert "kernels take 2.0" in found.text
    assert not found.ranges


def test_steps_between_calls_of_the_optimizer(tmp_path: Path) -> None:
    program: list[Kernel | Meeting] = [Kernel(4000.0), Meeting(), Kernel(500.0, range="Optimizer.step#SGD.step")]
    trace = read(tmp_path, Job(program=lambda _: program, marks=False, took_us=slow_rank_1)).trace
    assert set(trace.column("iteration").tolist()) == set(range(5)), "between six calls"
    for step in range(5):
        ops = trace.column("op")[(trace.column("iteration") == step) & (trace.column("rank") == 1)].tolist()
        assert ops == ["compute", "all_reduce", "compute"]


def test_a_profile_without_steps_or_of_several_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no ProfilerStep# in .*; allowed: .*prof.step"):
        read(tmp_path, Job(marks=False))
    one, two, _ = profiles(Job())
    moved = [event | {"pid": event["pid"] + 1000} for event in two["traceEvents"]]
    with pytest.raises(InputError, match=r"rank0.json: steps of 2 processes \(100, 1100\); allowed: one file per rank"):
        read(tmp_path, Job(), [one | {"traceEvents": one["traceEvents"] + moved}])


@pytest.fixture(scope="module")
def h100() -> Merged:
    return merge_ranks([import_kineto(path) for path in sorted(H100_DIR.glob("rank*.json.gz"))], "h100")


@needs_h100
def test_clocks_agree_and_two_kinds_of_steps_take_turns(h100: Merged) -> None:
    """All ranks have the same operations in the same order, and compute as much in every step."""
    trace = h100.trace
    rank, iteration, op = (trace.column(name) for name in ("rank", "iteration", "op"))
    begins = []
    for step, collectives in ((10, 8), (11, 20), (12, 8), (13, 20)):
        mine = [(rank == r) & (iteration == step) for r in range(8)]
        ops = [op[of_rank].tolist() for of_rank in mine]
        assert all(of_rank == ops[0] for of_rank in ops)
        assert sum(name != "compute" for name in ops[0]) == collectives
        begins.append(np.median([trace.column("start_s")[of_rank].min() for of_rank in mine]))
    assert set(iteration.tolist()) == {10, 11, 12, 13}
    np.testing.assert_allclose(np.diff(begins), [0.0361, 0.0476, 0.0427], atol=2e-4)
    assert trace.metadata.job["clock_error_s"] < 100e-6
    assert not h100.notes
    assert [one.compute_s for one in h100.activity] == pytest.approx([0.0294] * len(h100.activity), abs=1e-3)


@needs_h100
def test_who_arrives_last_and_why(h100: Merged) -> None:
    """The GPUs of both idle until their hosts have launched the small kernels of the optimizer."""
    late = {one.rank: one for one in answer_of(h100).late_hosts}
    assert {rank: one.iterations for rank, one in late.items()} == {0: (10,), 1: (11, 12, 13)}
    np.testing.assert_allclose(late[0].late_s, [0.0043], atol=1e-4)
    np.testing.assert_allclose(late[1].late_s, [0.0093, 0.0105, 0.0076], atol=1e-4)
    for one in late.values():
        assert one.reason == "host"
        assert one.extra_s["host"] > 0.9 * np.mean(one.late_s)
        assert abs(one.extra_s["compute"]) < 0.1 * np.mean(one.late_s)
        assert next(iter(one.ranges)) == "Optimizer.step#NorMuon.step"
    assert "in these steps, up to the collectives that it is late to, its GPU is idle" in late[1].text


@needs_h100
def test_a_page_says_once_how_late_a_rank_is(tmp_path: Path) -> None:
    """The same rank had 9.28, 9.13 and 8.36 ms on one page, each by another definition."""
    out = tmp_path / "page.html"
    assert application.run(["report", str(H100_DIR), "-o", str(out)]) == 0
    text = re.sub(r"<svg.*?</svg>|<details.*?</details>", "", out.read_text(), flags=re.DOTALL)
    assert text.count("rank 1 arrives last in 3 of 4 steps, by") == 1
    assert "Rank 1, why it arrives last: " in text
    assert "Most is waited for rank 1." in text
    assert "on each device, mean of 4 steps" in text
    assert "2 complete iterations of its usual kind" in text


Events = list[dict[str, Any]]
TRUTH = {"ddp-slow": (1, 0.020), "fsdp-loader": (0, 0.030)}


def files_of(job: str) -> list[Path]:
    return sorted(H200_DIR.glob(f"{job}-rank[01].json.gz"))


def check(found: Answer, job: str, steps: list[int]) -> None:
    """The late rank, by how much, in which steps, and that its host is the reason."""
    rank, late_s = TRUTH[job]
    assert found.matrix is not None
    assert found.diagnosis is not None
    assert found.matrix.iteration_T.tolist() == steps
    (late,) = found.diagnosis.arrivals.late
    assert (late.rank, late.iterations) == (rank, tuple(steps))
    assert np.median(late.late_s) == pytest.approx(late_s, rel=0.2)
    assert [one.rank for one in found.late_hosts] == [rank]


@needs_h200
@pytest.mark.parametrize("job", TRUTH)
def test_the_device_is_up_to_a_step_behind_its_host(job: str) -> None:
    found = find_answer(read_inputs(files_of(job)))
    check(found, job, list(range(16, 22)))
    early = "operations from before its first whole step are left out"
    assert sum(early in note for note in found.notes) == 1, "said in one line for both ranks"
    assert found.late_hosts[0].reason == "host"
    assert found.late_hosts[0].extra_s["host"] == pytest.approx(TRUTH[job][1], rel=0.05)


def launches(events: Events) -> dict[int, float]:
    """When each correlation was launched, us."""
    calls = [event for event in events if event["cat"].endswith(("_runtime", "_driver"))]
    return {event["args"]["correlation"]: event["ts"] for event in calls if event["args"].get("correlation", 0) > 0}


def marks(events: Events) -> dict[int, tuple[float, float]]:
    found = [event for event in events if event["name"][:13] == "ProfilerStep#" and event["cat"] == "user_annotation"]
    return {int(event["name"][13:]): (event["ts"], event["ts"] + event["dur"]) for event in found}


def window(events: Events, first: int, last: int) -> Events:
    """What a profile of these steps has: also operations that were launched before them, and end in them."""
    begin, end = marks(events)[first][0], marks(events)[last][1]
    launched = launches(events)
    at = [launched.get(e["args"].get("correlation"), -1.0) if on_device(e) else e["ts"] for e in events]
    ends = [event["ts"] + event["dur"] for event in events]
    return [
        event
        for event, at_us, end_us in zip(events, at, ends, strict=True)
        if begin <= at_us <= end or (on_device(event) and at_us < begin < end_us)
    ]


def on_device(event: dict[str, Any]) -> bool:
    return event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")


def as_graphs(events: Events) -> Events:
    """One launch a step, and no word on the collectives."""
    launched, steps, first, kept = launches(events), marks(events), dict[int, int](), []
    step_of = {
        number: next((k for k, (begin, end) in steps.items() if begin <= at_us <= end), -1)
        for number, at_us in launched.items()
    }
    for number in sorted(launched, key=launched.__getitem__):
        first.setdefault(step_of[number], number)
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event["name"].startswith(("nccl:", "c10d::", "record_param_comms")) or (
            number in launched and not on_device(event) and first[step_of[number]] != number
        ):
            continue
        kept.append(event | {"args": {"correlation": first.get(step_of.get(number, -1), number)}})
    return kept


def without_launches(events: Events, step: int) -> Events:
    begin, end = marks(events)[step]
    lost = {number for number, at_us in launches(events).items() if begin <= at_us <= end}
    return [e for e in events if on_device(e) or e.get("args", {}).get("correlation") not in lost]


def from_launches_on(events: Events) -> Events:
    """Of a recording without warm-up: what was launched before it is not in it."""
    launched = launches(events)
    return [event for event in events if not on_device(event) or event["args"].get("correlation") in launched]


def with_an_idle_device(events: Events) -> Events:
    """Of a job that reads its loss in every step: its device has nothing to do when the recording begins."""
    events, launched = from_launches_on(events), launches(events)
    first = min(filter(on_device, events), key=lambda event: event["ts"])
    behind_us = first["ts"] - launched[first["args"]["correlation"]] - 10.0
    return [event if on_device(event) else event | {"ts": event["ts"] + behind_us} for event in events]


@needs_h200
@pytest.mark.parametrize(
    ("job", "parts", "changed", "steps"),
    [
        ("ddp-slow", [(17, 17)], list, [17]),
        ("ddp-slow", [(16, 21)], lambda events: without_launches(events, 18), [16, 17, 18, 19, 20, 21]),
        ("ddp-slow", [(16, 17), (20, 21)], as_graphs, [16, 17, 20, 21]),
        ("fsdp-loader", [(17, 18)], as_graphs, [17, 18]),
        ("fsdp-loader", [(17, 20)], from_launches_on, [18, 19, 20]),
        ("fsdp-loader", [(17, 20)], with_an_idle_device, [18, 19, 20]),
    ],
)
def test_profiles_with_less_in_them(
    tmp_path: Path, job: str, parts: list[tuple[int, int]], changed: Callable[[Events], Events], steps: list[int]
) -> None:
    """Fewer steps, two windows, launches that were lost, one launch a step of kernels of which nothing is said, nothing
    from before the recording."""
    for rank, path in enumerate(files_of(job)):
        events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e["ph"] == "X"]
        for first, last in parts:
            about = {"rank": rank, "world_size": 2}
            profile = {"distributedInfo": about, "traceEvents": changed(window(events, first, last))}
            (tmp_path / f"rank{rank}_{last}.json").write_text(json.dumps(profile))
    found = find_answer(read_inputs([tmp_path]))
    check(found, job, steps)
    assert found.diagnosis is not None
    assert len(steps) < MIN_STEPS or found.diagnosis.causes[0].ranks == (TRUTH[job][0],)
    assert any("of 2 windows, which are read as one" in note for note in found.notes) == (len(parts) > 1)
