"""Text that people post, made again line by line: what is said of it, and what must not be said.

The reports and their answers stand in docs/evidence/reality.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_small_cases import answer_of

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
STEPS = "".join(f"step {i} time: 0.5{i * 7 % 10} s\n" for i in range(40))
NOISE = 1.0 + 0.01 * np.random.default_rng(0).normal(size=400)
CLOCK_S = [int(s) for s in np.cumsum(0.5 * (1 + np.arange(301) // 200) * NOISE[:301])]


def of_group(rank: int, group: int, name: str = "TP", number: int = -1) -> str:
    """A rank of a group in which it has that number; of a tensor-parallel one 0 or 1."""
    number = rank % 2 if number < 0 else number
    head = f"[rank{rank}]:[E1206 18:44:12.7 ProcessGroupNCCL.cpp:632] "
    about = f"[PG ID 1 PG GUID {group}({name}) Rank {number}] failure detected by watchdog at work sequence id: {group}"
    return f"{head}[Rank {number}] " + TIMEOUT.format(seq=group, op="ALLREDUCE") + head + about + "\n"


def block(rank: int, code: int) -> str:
    """What torchrun prints of a process that failed."""
    return f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 14692)\n"


TEXTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "RAS that finds nothing": (RAS.format(state="OK"), ("NCCL RAS: all ranks answer",), ()),
    "RAS that names no rank": (RAS.format(state="INCOMPLETE"), ("RUNNING INCOMPLETE, and names no rank",), ()),
    "RAS with few ahead": (
        f"{RAS.format(state='MISMATCH')}  Communicator ranks have different AllGather operation counts\n"
        "  30 ranks have launched up to operation 640\n  2 ranks have launched up to operation 641\n"
        "  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124\n"
        "  Rank 13 -- GPU 5 managed by process 323033 on node 10.137.190.124\n",
        ("30 ranks launched no AllGather after 640, ranks 12-13 are in 641",),
        (),
    ),
    "no group is named": (
        "".join(
            f"[E ProcessGroupNCCL.cpp:458] [Rank {rank}] {TIMEOUT.format(seq=seq, op='ALLREDUCE')}"
            for rank, seq in ((0, 96120), (0, 96117), (0, 96125), (7, 64088))
        ),
        ("rank 0 in ALLREDUCE 96117", "they may be of different ones"),
        (),
    ),
    "ranks within groups": (
        "".join(of_group(rank, 70 + rank // 2) for rank in range(4)),
        ("ranks 0-1 wait in allreduce 70 of TP 70", "ranks 2-3 wait in allreduce 71 of TP 71"),
        ("different collectives",),
    ),
    "a rank without a line": (
        "".join(of_group(rank, 70, "default_pg", rank) for rank in range(8) if rank != 5),
        ("rank 5 left no line of the watchdog, and 7 other ranks wait for it",),
        (),
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
        ("different collectives", " 114"),
    ),
    "stuck watchdogs": (
        "".join(
            f"[rank{rank}]:[E608 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
            "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress\n"
            for rank in (0, 1)
        ),
        ("the watchdog of ranks 0-1 got stuck".capitalize(), "cannot be told"),
        (),
    ),
    "who failed first": (
        f"[1]:\n{block(3, 1)}[2]:\n{block(0, -9)}Root Cause (first observed failure):\n[0]:\n{block(1, 1)}",
        ("died: rank 1 first; ranks 1, 3 ended with exit code 1", "-9 (SIGKILL)"),
        (),
    ),
    "a word about codes": (f"{STEPS}the subprocess returned code 2 questions\n", (), ("died",)),
    "out of memory": (f"{STEPS}srun: error: node012: task 3: Out Of Memory\n", ("task 3 ended with Out Of",), ()),
    "one node has no network": (
        "".join(OLD_NCCL.format(p=100 + rank, r=rank) for rank in range(4)) + STEPS,
        ("on one node, so that no data goes over it",),
        ("TCP sockets instead of RDMA",),
    ),
    "a network with a space": (
        "ip-1:1:2 [0] NCCL INFO comm 0x7f rank 0 nranks 16 cudaDev 0\n"
        "ip-1:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA\n" + STEPS,
        ("used NET/AWS Libfabric",),
        (),
    ),
    "tokens a second": (
        "".join(f"step {i} | loss 3.1 | {2**14 / (1 + i // 60) * NOISE[i]:,.0f} tokens/s\n" for i in range(99)),
        ("take 2 times as long since step 60", "tokens/s before", "how long a step takes cannot be told"),
        ("µs", " ms"),
    ),
    "data without a unit": (
        "".join(
            f"Epoch: [0][{i:4d}/5005]\tTime {0.4 * x + (0.3 if i > 29 else 0.0):6.3f} ( 0.500)\t"
            f"Data {0.05 + (0.3 if i > 29 else 0.0):6.3f} ( 0.200)\tLoss 6.9 (6.9)\n"
            for i, x in enumerate(NOISE[:60])
        ),
        ("'data' takes", "of the variation"),
        (),
    ),
    "micro-steps": (
        "".join(
            f"time (ms) | forward_microstep: {200 * x:.2f} | backward_microstep: {300 * x:.2f} "
            f"| backward_inner_microstep: {100 * x:.2f} | backward_allreduce_microstep: {200 * x:.2f} |\n"
            for x in NOISE[:40]
        ),
        ("500 ms", "'backward allreduce microstep' takes 40% of all time", "transfers, and waiting in them"),
        (),
    ),
    "micro-steps and their sum": (
        "".join(
            f"time (ms) | forward{of}: {200 * x:.2f} | backward{of}: {300 * x:.2f} "
            f"| backward_allreduce{of}: {200 * x:.2f}\n"
            for x in NOISE[:40]
            for of in ("_microstep", "")
        ),
        ("500 ms", "'backward allreduce' takes 40% of all time", "part 'forward'"),
        ("microstep",),
    ),
    "the head of Python's logging": (
        "".join(f"INFO:tensorflow:global step {i}: loss = 1.4 ({NOISE[i]:.3f} sec/step)\n" for i in range(65, 105)),
        ("steps 65 to 104",),
        (),
    ),
    "a course that recurs": (
        "".join(f"step={i} step_time={x * (0.5 + 0.01 * (i % 100)):.4f}s\n" for i, x in enumerate(NOISE)),
        ("the same course recurs every 100 steps".capitalize(),),
        ("take turns", "grow steadily"),
    ),
    "a random walk": (
        "".join(f"step={i} step_time={x:.4f}s\n" for i, x in enumerate(0.5 * np.exp(np.cumsum(2.0 * (NOISE - 1.0))))),
        (),
        ("steadily",),
    ),
    "a coarse bar": (
        "\r".join(f" {i // 3}%|█ | {i}/300 [{s // 60:02d}:{s % 60:02d}<01:00, 1.2it/s]" for i, s in enumerate(CLOCK_S)),
        ("each value is the mean over about 15 steps", "20 step times"),
        (),
    ),
}  # fmt: skip
"""Text, what must be said of it, and what must not."""


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_said_of_a_report(name: str, tmp_path: Path) -> None:
    text, expected, wrong = TEXTS[name]
    (tmp_path / "log").write_text(text)
    said = answer_of(tmp_path / "log").replace(str(tmp_path), "")
    for one in expected:
        assert one.replace("Ranks", "ranks").replace("Rank", "rank") in said, said
    for one in wrong:
        assert one not in said.partition("{")[0] + said.rpartition("}")[2], said
