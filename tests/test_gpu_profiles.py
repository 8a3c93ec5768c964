"""Profiles of GPU jobs with known truth: what they lack, clocks, kinds of steps, steps that are cut, and late hosts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_profiles import Job, Kernel, Meeting, profiles
from importer_samples import written
from traced_jobs import answer_of

from paceenv.core.errors import InputError
from paceenv.diagnosis.diagnose import UNDETERMINED, diagnose
from paceenv.importers.merge_ranks import Merged, merge_ranks
from paceenv.importers.profiler.kineto import import_kineto


def read(folder: Path, job: Job, made: list[dict[str, Any]] | None = None) -> Merged:
    files = written(folder, {f"rank{k}.json": profile for k, profile in enumerate(made or profiles(job))})
    return merge_ranks([import_kineto(path) for path in files], "job")


def late_us(merged: Merged) -> np.ndarray[Any, Any]:
    """How long the others waited for each rank, us, ``(steps, ranks)``."""
    found = answer_of(merged).diagnosis
    assert found is not None
    return found.arrivals.late_RT.T * 1e6


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
    for late_R in late_us(merged):
        assert late_R[1] == pytest.approx(2000.0, abs=100.0)


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


def late_host(where: str, extra_us: float) -> Job:
    program: list[Kernel | Meeting] = [
        Kernel(50.0, 30.0, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),
        Kernel(50.0, 10.0, "aten::to", "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"),
        *[Kernel(5.0, 40.0, "Optimizer.step#Adam.step") for _ in range(20)],
        Kernel(90.0),
        Meeting(took_us=100.0),
    ]

    def host_us(rank: int, step: int, place: int, us: float) -> float:
        op = program[place]
        return us + extra_us * (rank == 2 and isinstance(op, Kernel) and where in op.range)

    return Job(steps=range(10, 20), program=lambda _: program, host_us=host_us)


@pytest.mark.parametrize(
    ("where", "extra_us", "total_us", "named"),
    [("DataLoader", 1500.0, 1500.0, "workers of its data loader"), ("Optimizer", 60.0, 1200.0, "CUDA graphs")],
)
def test_a_late_host_is_named_with_what_it_did(
    tmp_path: Path, where: str, extra_us: float, total_us: float, named: str
) -> None:
    """Its peers' hosts run ahead: they arrive after 390 us of work of the device, it after 870 us of its host."""
    merged = read(tmp_path, late_host(where, extra_us))
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
