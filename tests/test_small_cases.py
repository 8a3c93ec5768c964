"""What people post, kept as files or made again line by line: small inputs with their right answers, and what must not
be said of them; and 300 made logs of which none is answered wrong.

The reports and their answers stand in docs/evidence/reality.md.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from traced_jobs import SMALL_CASES_DIR, needs_small_cases

from paceenv.cli import application
from paceenv.diagnosis.step_times.step_diagnosis import diagnose_steps
from paceenv.importers.step_log import read_step_log

COLUMNS = (
    "step_time", "iter_time", "iteration_time", "time_per_step", "batch_time", "train_step_time", "perf/step_time",
    "sec_per_iter", "time/step", "elapsed_time_per_iteration",
)  # fmt: skip
STEP_NAMES = ("step", "iteration", "iter", "global_step", "batch")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
TAGS = ("", "[rank0]: ", "0: ", "[default0]:", "[1,0]<stdout>:")

Array = NDArray[np.float64]


CASES: dict[str, tuple[str, ...]] = {
    "19-level-late.csv": ("take 2 times as long since step 120", "150 ms before, 300 ms"),
    "19-level-megatron.log": ("since step 90", "3 s before, 5.6"),
    "19-growth.log": ("grow steadily from 39", "not ranks"),
    "15-rank-column.csv": ("rank 1 takes 3.2 s, the others 2.15 s, in every step",),
    "07-steps-then-hang.log": (
        "rank 0 in ALLREDUCE 1516 (25427968 elements); rank 1 in ALLREDUCE 1517 (1 element)", "SIGABRT", "is 300",
    ),
    "06-watchdog.log": ("ranks 0, 4 stopped", "broadcast 78 of default_pg", "1-3,5-7", "_all_gather_cpu_bytes"),
    "17-ras.txt": ("rank 21 (node 172.16.64.213, GPU 5) does not answer",),
    "02-two-runs": ("2 different runs, 34.0 h apart, not one job", "8 ranks: 30.4 ms", "2 ranks: 64.4 ms"),
    "34-one-rank": ("4 ms in collectives with nothing else to do", "cannot be told apart with one rank"),
    "08-cliff.txt": ("falls from 29.5 GB/s up to 32 MiB to 4.09 to 5.31 GB/s from 64 MiB on",),
    "24-socket-instead-of-ib.log": ("used NET/Socket on eth0", "NET/IB : No device found"),
    "12-openclip.log": ("'data' takes 61% of all time", "makes 97% of the variation", "'data' 5.8 s 61% of all time"),
    "16-litgpt.log": ("every second step takes 204 ms, the others 92.8 ms",),
    "22-mmengine.log": ("'data time' takes",),
    "23-nanotron.log": ("11.5 s, 11.5 s",),
    "26-deepspeed-phases.log": ("backward allreduce", "forward"),
    "28-detectron2.log": ("part 'data time'",),
    "13-rank-in-the-tag.log": ("ranks, slowest first", "part 'backward'"),
    "43-one-step": ("rank 3 arrives last in 1 of 1 steps, by 7.6 ms", "one step does not show whether it lasts"),
}  # fmt: skip
"""Each input, and what its answer must say."""


def answer_of(path: Path) -> str:
    """All that ``paceenv diagnose`` says of a path, in one line."""
    said, notes = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(notes):
        application.run(["diagnose", str(path), "--no-simulate", "--json", "-"])
        application.run(["diagnose", str(path), "--no-simulate"])
    text = f"{notes.getvalue()} {said.getvalue()}"
    return " ".join(text.replace("│", " ").replace("Rank", "rank").replace("Steps", "steps").split())


@needs_small_cases
@pytest.mark.parametrize("name", CASES)
def test_a_small_case_is_answered_right(name: str) -> None:
    said = answer_of(SMALL_CASES_DIR / name)
    for expected in CASES[name]:
        assert expected in said, said


def course(random: np.random.Generator, kind: str, n: int) -> tuple[Array, list[float], list[int]]:
    """Step times of a kind, with its levels, or the ends of its growth, and where levels change, or the period."""
    at = np.arange(n)
    if kind == "levels":
        many, scale = int(random.integers(2, 4)), random.choice([1.3, 1.6, 2.0, 3.0])
        cuts = [int(n * share) for share in np.sort([random.uniform(0.22, 0.4), random.uniform(0.6, 0.78)])[: many - 1]]
        levels = list(random.permutation([1.0, scale, scale**2][:many]))
        return np.array(levels)[np.searchsorted(cuts, at, side="right")], levels, cuts
    if kind == "growth":
        ends = [1.0, float(random.choice([1.5, 3.0, 6.0]))]
        return np.linspace(*ends, n), ends, []
    if kind == "alternation":
        period, factor = int(random.choice([2, 4] if n >= 40 else [2])), float(random.choice([1.5, 2.2, 4.0]))
        return np.where(at % period == period - 1, factor, 1.0), [1.0, factor], [period]
    if kind == "long steps" and n >= 200:
        period = int(random.choice([20, 50]))
        return np.where(at % period == period - 1, 5.0, 1.0), [1.0, 5.0], [period]
    return np.ones(n), [1.0], []


def written(random: np.random.Generator, step_s: Array) -> str:
    """Step times as some program writes them."""
    column, step, unit = (str(random.choice(names)) for names in (COLUMNS, STEP_NAMES, list(UNITS)))
    values = [f"{x / UNITS[unit]:.6g}" for x in step_s]
    style, tag = random.integers(5), str(random.choice(TAGS))
    if style == 0:
        return f"{step},loss,{column}_{unit}\n" + "".join(f"{i},2.5,{x}\n" for i, x in enumerate(values))
    lines = {
        1: lambda i, x: json.dumps({step: i, "loss": 2.5, f"{column}_{unit}": float(x)}),
        2: lambda i, x: f"{step}: {i} | loss: 2.5 | {column}: {x} {unit} | lr: 1e-4",
        3: lambda i, x: f"{step}={i} loss=2.5 {column}={x}{unit} lr=0.0001",
        4: lambda i, x: f" {step} {i:8d}/ 100000 | {column.replace('_', ' ')} ({unit}): {x} | lm loss: 2.1E+00 |",
    }[int(style)]
    return "".join(f"{tag}{lines(i, x)}\n" for i, x in enumerate(values))


@pytest.mark.slow
def test_of_300_mutated_logs_none_is_answered_wrong(tmp_path: Path) -> None:
    """A finding that is named is the right one, with its numbers; what cannot be told is not named."""
    random, named = np.random.default_rng(7), 0
    for case in range(300):
        kind = str(random.choice(["levels", "growth", "alternation", "long steps", "none"]))
        n = 5000 if case == 0 else int(np.exp(random.uniform(np.log(20), np.log(400))))
        relative, values, marks = course(random, kind, n)
        base_s = 10.0 ** random.uniform(-1.3, 0.8)
        step_s = base_s * relative * (1.0 + 0.012 * random.normal(size=n))
        path = tmp_path / "log"
        path.write_text(written(random, step_s))
        log = read_step_log(path)
        np.testing.assert_allclose(log.step_s_V, step_s, rtol=1e-4)
        found = diagnose_steps(log)
        assert found.ceiling is not None
        assert found.ceiling.high <= found.steady_s_V.mean() / found.steady_s_V.min() - 1.0 + 1e-9
        if not found.findings:
            continue
        named += 1
        about = (case, kind, n, found.findings[0].text)
        assert found.findings[0].kind == kind, about
        if kind == "levels":
            assert [one.level_s / base_s for one in found.ordinary.levels] == pytest.approx(values, rel=0.03), about
            warm = int(found.ordinary.warm_up_V.sum())
            assert [one.start + warm for one in found.ordinary.levels[1:]] == pytest.approx(marks, abs=2), about
        elif kind == "growth":
            assert found.drift is not None
            assert np.array(found.drift.ends_s) / base_s == pytest.approx(values, rel=0.15), about
        else:
            assert found.findings[0].period == marks[0], about
    assert named > 180


TIMEOUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=8, NumelOut=8, "
    "Timeout(ms)=600000) ran for 600061 milliseconds before timing out.\n"
)
RAS = (
    "Job summary\n===========\nGroup     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
    "    0         1         4         8        32        32   RUNNING  {state}\n"
)
OLD_NCCL = (
    "gpu01:{p}:{p} [{r}] NCCL INFO NET/IB : No device found.\ngpu01:{p}:{p} [{r}] NCCL INFO NET/Socket : Using "
    "[0]eth0:10.1.1.1<0>\ngpu01:{p}:{p} [{r}] NCCL INFO Using network Socket\n"
    "gpu01:{p}:{p} [{r}] NCCL INFO comm 0x7f rank {r} nranks 4 cudaDev {r} busId 1b000 - Init COMPLETE\n"
)
BLOCK = "  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 14692)\n"
"""What torchrun prints of a process that failed."""
STEPS = "".join(f"step {i} time: 0.5{i * 7 % 10} s\n" for i in range(40))
NOISE = 1.0 + 0.01 * np.random.default_rng(0).normal(size=400)
CLOCK_S = [int(s) for s in np.cumsum(0.5 * (1 + np.arange(301) // 200) * NOISE[:301])]


def of_group(rank: int, group: int, name: str = "TP", number: int = -1) -> str:
    """A rank of a group in which it has that number; of a tensor-parallel one 0 or 1."""
    number = rank % 2 if number < 0 else number
    head = f"[rank{rank}]:[E1206 18:44:12.7 ProcessGroupNCCL.cpp:632] "
    about = f"[PG ID 1 PG GUID {group}({name}) Rank {number}] failure detected by watchdog at work sequence id: {group}"
    return f"{head}[Rank {number}] " + TIMEOUT.format(seq=group, op="ALLREDUCE") + head + about + "\n"


TEXTS: dict[str, tuple[Any, ...]] = {
    "RAS that finds nothing": (RAS.format(state="OK"), ("NCCL RAS: all ranks answer",)),
    "RAS that names no rank": (RAS.format(state="INCOMPLETE"), ("RUNNING INCOMPLETE, and names no rank",)),
    "RAS with few ahead": (
        f"{RAS.format(state='MISMATCH')}  Communicator ranks have different AllGather operation counts\n"
        "  30 ranks have launched up to operation 640\n  2 ranks have launched up to operation 641\n"
        "  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124\n"
        "  Rank 13 -- GPU 5 managed by process 323033 on node 10.137.190.124\n",
        ("30 ranks launched no AllGather after 640, ranks 12-13 are in 641",),
    ),
    "no group is named": (
        "".join(
            f"[E ProcessGroupNCCL.cpp:458] [Rank {rank}] {TIMEOUT.format(seq=seq, op='ALLREDUCE')}"
            for rank, seq in ((0, 96120), (0, 96117), (0, 96125), (7, 64088))
        ),
        ("rank 0 in ALLREDUCE 96117", "they may be of different ones"),
    ),
    "ranks within groups": (
        "".join(of_group(rank, 70 + rank // 2) for rank in range(4)),
        ("ranks 0-1 wait in allreduce 70 of TP 70", "ranks 2-3 wait in allreduce 71 of TP 71"),
        "different collectives",
    ),
    "a rank without a line": (
        "".join(of_group(rank, 70, "default_pg", rank) for rank in range(8) if rank != 5),
        ("rank 5 left no line of the watchdog, and 7 other ranks wait for it",),
    ),
    "a rank that goes on once another has timed out": (
        "".join(
            f"[rank{rank}]:[E1127 {at} ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] {said}\n"
            for rank, at, said in (
                (0, "01:19:32.7", "by watchdog at work: 108, last enqueued work: 112, last completed work: 107"),
                (1, "01:19:32.8", "Last enqueued NCCL work: 107, last completed NCCL work: 107."),
                (1, "01:20:32.8", "by watchdog at work: 114, last enqueued work: 117, last completed work: 113"),
            )
        )
        + "[rank1]:[E1127 01:20:32.8 ProcessGroupNCCL.cpp:689] [Rank 1] "
        + TIMEOUT.format(seq=114, op="ALLREDUCE"),
        ("Rank 1 stopped", "108 of default_pg"),
        *("different collectives", " 114"),
    ),
    "stuck watchdogs": (
        "".join(
            f"[rank{rank}]:[E608 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
            "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress\n"
            for rank in (0, 1)
        ),
        ("the watchdog of ranks 0-1 got stuck".capitalize(), "cannot be told"),
    ),
    "who failed first": (
        "[rank1]: RuntimeError: no such file\n[rank3]: RuntimeError: closed by peer\n"
        f"[1]:\n{BLOCK.format(3, 1)}[2]:\n{BLOCK.format(0, -9)}Root Cause (first observed failure):\n[0]:\n"
        + BLOCK.format(1, 1),
        ("died: rank 1 first; ranks 1, 3 ended with exit code 1", "-9 (SIGKILL); rank 1 raised RuntimeError: no such"),
        "closed by peer",
    ),
    "who waited in vain": (
        "[rank0]: RuntimeError: Timed out waiting 9ms\nrank 1 had not started the collective that rank 0 waited in\n"
        + BLOCK.format(0, 1),
        ("rank 0 raised RuntimeError: Timed out waiting 9ms, so it waited in vain: look at rank 1",),
    ),
    "who stood still, in the words of its agent": (
        "paceenv live [rank 0]: rank 1 has not started the collective that rank 0 waits in: it hangs\n"
        "rank 1 had not started the collective that rank 0 waited in\n",
        ("The job stood still when its log ended: rank 1 has not started",),
    ),
    "a word about codes": (f"{STEPS}the subprocess returned code 2 questions\n", (), "died"),
    "out of memory": (f"{STEPS}srun: error: node012: task 3: Out Of Memory\n", ("task 3 ended with Out Of",)),
    "one node has no network": (
        "".join(OLD_NCCL.format(p=100 + rank, r=rank) for rank in range(4)) + STEPS,
        ("on one node, so that no data goes over it",),
        "TCP sockets instead of RDMA",
    ),
    "two runs": (
        "".join(OLD_NCCL.format(p=100 + rank, r=rank) for rank in range(4))
        + "".join(OLD_NCCL.format(p=100 + rank, r=rank).replace("anks 4", "anks 8").replace("gpu01", f"n{rank // 4}")
          for rank in range(8)) + STEPS,
        ("the run of 8 ranks on 2 nodes",),
    ),
    "a network with a space": (
        "ip-1:1:2 [0] NCCL INFO comm 0x7f rank 0 nranks 16 cudaDev 0\n"
        "ip-1:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA\n" + STEPS,
        ("used NET/AWS Libfabric",),
    ),
    "tokens a second": (
        "".join(f"step {i} | loss 3.1 | {2**14 / (1 + i // 60) * NOISE[i]:,.0f} tokens/s\n" for i in range(99)),
        ("take 2 times as long since step 60", "tokens/s before", "how long a step takes cannot be told"),
        *("µs", " ms"),
    ),
    "data without a unit": (
        "".join(
            f"Epoch: [0][{i:4d}/5005]\tTime {0.4 * x + (0.3 if i > 29 else 0.0):6.3f} ( 0.500)\t"
            f"Data {0.05 + (0.3 if i > 29 else 0.0):6.3f} ( 0.200)\tLoss 6.9 (6.9)\n"
            for i, x in enumerate(NOISE[:60])
        ),
        ("'data' takes", "of the variation"),
    ),
    "micro-steps": (
        "".join(
            f"time (ms) | forward_microstep: {200 * x:.2f} | backward_microstep: {300 * x:.2f} "
            f"| backward_inner_microstep: {100 * x:.2f} | backward_allreduce_microstep: {200 * x:.2f} |\n"
            for x in NOISE[:40]
        ),
        ("500 ms", "'backward allreduce microstep' takes 40% of all time", "transfers, and waiting in them"),
    ),
    "micro-steps and their sum": (
        "".join(
            f"time (ms) | forward{of}: {200 * x:.2f} | backward{of}: {300 * x:.2f} "
            f"| backward_allreduce{of}: {200 * x:.2f}\n"
            for x in NOISE[:40]
            for of in ("_microstep", "")
        ),
        ("500 ms", "'backward allreduce' takes 40% of all time", "part 'forward'"),
        "microstep",
    ),
    "a part that costs more than a rare step": (
        "".join(
            f"step: {i} | step_time: {900 * x + 900 * (i == 30):.1f} ms | allreduce: {400 * x:.1f} ms\n"
            for i, x in enumerate(NOISE[:60])
        ),
        ("\"verdict\": \"'allreduce' takes 44% of all time", "1 rare long step"),
    ),
    "the head of Python's logging": (
        "".join(f"INFO:tensorflow:global step {i}: loss = 1.4 ({NOISE[i]:.3f} sec/step)\n" for i in range(65, 105)),
        ("steps 65 to 104",),
    ),
    "a course that recurs": (
        "".join(f"step={i} step_time={x * (0.5 + 0.01 * (i % 100)):.4f}s\n" for i, x in enumerate(NOISE)),
        ("the same course recurs every 100 steps".capitalize(),),
        *("take turns", "grow steadily"),
    ),
    "a random walk": (
        "".join(f"step={i} step_time={x:.4f}s\n" for i, x in enumerate(0.5 * np.exp(np.cumsum(2.0 * (NOISE - 1.0))))),
        (),
        "steadily",
    ),
    "a coarse bar": (
        "\r".join(f" {i // 3}%|█ | {i}/300 [{s // 60:02d}:{s % 60:02d}<01:00, 1.2it/s]" for i, s in enumerate(CLOCK_S)),
        ("each value is the mean over about 15 steps", "20 step times"),
    ),
}  # fmt: skip
"""Text, what must be said of it in a tuple, and what must not."""


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_said_of_a_report(name: str, tmp_path: Path) -> None:
    text, expected, *wrong = TEXTS[name]
    (tmp_path / "log").write_text(text)
    said = answer_of(tmp_path / "log").replace(str(tmp_path), "")
    for one in expected:
        assert one.replace("Ranks", "ranks").replace("Rank", "rank") in said, said
    for one in wrong:
        assert one not in said.partition("{")[0] + said.rpartition("}")[2], said
