"""What the live agent costs a training job, measured from outside: thread CPU, process CPU, memory and start-up.

Jobs on gloo, or on NCCL where there is a GPU, run side by side in processes of their own, one without the agent and one
for each of its modes. They take turns on the same core, a twentieth of a second each, so what drifts on the machine is
alike in both and cancels. Where the agent delays a rank, the job without it sleeps as long: what a sleep does to caches
is no cost of the agent. The agent is used through ``attach``, ``summary`` and ``detach`` only, so that a number means
the same for every version of it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import math
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from paceenv.core.intervals import Interval
from paceenv.report.section import Section, print_sections

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSES, WARM, TURNS, TIMED = 6, 4096, 30, 64
"""Sets of fresh processes; untimed iterations of each, after which the agent watches as few as it ever does; turns;
iterations of a turn, so that each holds as many that are watched."""
ONE_CARD = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks that share a GPU talk through sockets: NCCL is told that they sit on different hosts."""
FRESH, FRESH_ITERATIONS = 3, 1000
"""Fresh processes for memory and start-up, and iterations of each."""
WIDTH, LAYERS, BATCH = 256, 4, 16
COLLECTIVES = 110
"""As FSDP2 starts in an iteration of a model of 36 layers; alone, a rank of FSDP2 starts none."""
CONFIDENCE = 0.95
POLICY = "static:stagger=0/0.1"
"""Asks for a delay of every rank but the first, in every iteration."""
QUICK = {"quiet_first": 0, "cap_share": 0.5, "budget_s_per_minute": 30.0, "block_iterations": 10**6, "seed": 2}
"""Paced from the first block on, which is longer than the run: useless delays are not taken back meanwhile."""
MODES: dict[str, dict[str, Any]] = {
    "observe": {"mode": "observe"},
    "observe, files": {"mode": "observe", "out": "run"},
    "active": {"mode": "active", "policy": POLICY, **QUICK},
}
NONE = "no agent"
Iteration = Callable[[], None]


def data_parallel() -> Iteration:
    """One iteration of a small DDP model."""
    return _trained(DistributedDataParallel(_layers()))


def alone() -> Iteration:
    """The same model without DDP and without a process group."""
    return _trained(_layers())


def _layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(DEVICE)


def _trained(model: nn.Module) -> Iteration:
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-6), torch.randn(BATCH, WIDTH, device=DEVICE)

    def iteration() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return iteration


def reductions(count: int) -> Iteration:
    """One iteration of a job that starts its collectives in Python, as sharded and tensor-parallel jobs do."""
    parameter = nn.Parameter(torch.ones(8, device=DEVICE))
    optimizer, tensor = torch.optim.SGD([parameter], lr=1e-6), torch.zeros(1 << 10, device=DEVICE)

    def iteration() -> None:
        for _ in range(count):
            distributed.all_reduce(tensor)
        parameter.grad = torch.zeros(8, device=DEVICE)
        optimizer.step()

    return iteration


JOBS: dict[str, tuple[Callable[[], Iteration], Sequence[str], int]] = {
    "DDP": (data_parallel, ("observe", "observe, files"), 1),
    "DDP, 2 ranks": (data_parallel, ("observe",), 2),
    "DDP, 2 ranks, delayed": (data_parallel, ("active",), 2),
    "1 all-reduce": (lambda: reductions(1), ("observe",), 1),
    f"{COLLECTIVES} all-reduces": (lambda: reductions(COLLECTIVES), ("observe",), 1),
    "no process group": (alone, ("observe",), 0),
}
"""How to make one iteration of a job, the modes measured, and its ranks; 0 is a process without a group. A single rank
waits for nobody, so its times scatter least."""


def _turn(iteration: Iteration, sleep_s: float = 0.0) -> tuple[float, float]:
    """CPU microseconds of this thread and of the whole process per iteration, each of which may end with a sleep.

    A GPU ends what it was given before the clock runs again: a thread that waits for it spins.
    """
    thread_s, process_s = time.thread_time(), time.process_time()
    for _ in range(TIMED):
        iteration()
        if sleep_s > 0.0:
            time.sleep(sleep_s)
    thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return 1e6 / TIMED * thread_s, 1e6 / TIMED * process_s


@contextlib.contextmanager
def _agent(mode: str) -> Iterator[Callable[[], Mapping[str, Any]]]:
    """The agent in a mode, or none; the value says what its summary is."""
    if mode == NONE:
        yield dict
        return
    from paceenv import live

    agent = live.attach(**MODES[mode])
    try:
        yield agent.summary
        assert agent.summary()["state"] == MODES[mode]["mode"], agent.summary()["reason"]
    finally:
        with contextlib.redirect_stderr(io.StringIO()):  # the page
            agent.detach()


def _takes_turns(iteration: Iteration, mode: str, parent: Connection) -> None:
    """Answer each sleep that ``parent`` sends by a turn, and the last word by the agent's summary."""
    with _agent(mode) as summary:
        for _ in range(WARM):
            iteration()
        gc.freeze()  # a collection of what PyTorch brought along takes a tenth of a second
        parent.send(None)
        os.sched_setaffinity(0, {parent.recv()})  # this thread; those of the agent run where they like
        while (sleep_s := parent.recv()) is not None:
            parent.send((*_turn(iteration, sleep_s), summary().get("pacing", {}).get("total_s", 0.0)))
        parent.send(summary())


def _rank(rank: int, ranks: int, port: int, job: str, mode: str, is_fresh: bool, parent: Connection) -> None:
    """One rank of a job, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where the agent may write
        torch.set_num_threads(1)
        logging.getLogger("paceenv.live").addHandler(logging.NullHandler())
        if ranks:
            settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ |= {name: str(value) for name, value in settings.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= ONE_CARD | {"NCCL_HOSTID": f"rank{rank}"}
            distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
        iteration = JOBS[job][0]()
        if is_fresh:
            parent.send(_started(iteration, mode))
        else:
            _takes_turns(iteration, mode, parent)
        if ranks:
            distributed.barrier()
        os.chdir("/")
    os._exit(0)  # gloo's threads and the reducer need no orderly end


def _start(job: str, mode: str, is_fresh: bool = False) -> list[Connection]:
    """Start a job; a connection to each of its ranks."""
    ranks, context, ranks_of_job = JOBS[job][2], get_context("forkserver"), list[Connection]()
    context.set_forkserver_preload(["torch.nn.parallel"])  # once, and at the same addresses in all
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(max(ranks, 1)):
        ours, theirs = context.Pipe()
        context.Process(target=_rank, args=(rank, ranks, port, job, mode, is_fresh, theirs), daemon=True).start()
        theirs.close()  # so that the end of the rank is seen
        ranks_of_job.append(ours)
    return ranks_of_job


def _ask(ranks: Sequence[Connection], sleep_s: float | None) -> Any:
    """Let every rank of a job take a turn, or end; what the last one says, the only one that is delayed."""
    for rank in ranks:
        rank.send(sleep_s if sleep_s is None or rank is ranks[-1] else 0.0)
    return [rank.recv() for rank in ranks][-1]


def _paired(job: str) -> dict[str, dict[str, float]]:
    """What each mode adds in one set of processes, microseconds per iteration: medians over turns."""
    modes, cores = (NONE, *JOBS[job][1]), sorted(os.sched_getaffinity(0))
    jobs = {mode: _start(job, mode) for mode in modes}
    for ranks in jobs.values():
        for rank in ranks:
            rank.recv()
    for ranks in jobs.values():
        for i, rank in enumerate(ranks):
            rank.send(cores[i % len(cores)])
    turns: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in modes}
    slept_s = sleep_s = 0.0
    for turn in range(TURNS + 1):
        for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
            *taken_us, all_slept_s = _ask(jobs[mode], sleep_s if mode == NONE else 0.0)
            if mode != NONE:
                sleep_s, slept_s = (all_slept_s - slept_s) / TIMED if slept_s else 0.0, all_slept_s
            if turn > 0:
                turns[mode].append(tuple(taken_us))
    ends = {mode: _ask(jobs[mode], None) for mode in modes}
    plain = np.array(turns[NONE])
    found = dict[str, dict[str, float]]()
    for mode in modes[1:]:
        thread_us, process_us = np.median(np.array(turns[mode]) - plain, axis=0)
        own_s = ends[mode]["overhead"]["mean_s"]
        own_us = math.nan if own_s is None else 1e6 * own_s
        plain_us = float(np.median(plain[:, 0]))
        found[mode] = {"thread_us": thread_us, "process_us": process_us, "own_us": own_us, "plain_us": plain_us}
    return found


def _started(iteration: Iteration, mode: str) -> dict[str, float]:
    """Start-up and memory in a process that never had an agent; ``mode`` may be none at all."""
    for _ in range(WARM):
        iteration()
    one_s = _turn(iteration)[1] * 1e-6
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before_mb, wall_s, cpu_s = _memory_mb("VmRSS"), time.perf_counter(), time.process_time()
    with _agent(mode):
        iteration()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s - one_s
        for _ in range(FRESH_ITERATIONS):
            iteration()
        held_mb = _memory_mb("VmRSS") - before_mb
    return {"wall_s": wall_s, "cpu_s": cpu_s, "held_mb": held_mb, "peak_mb": _memory_mb("VmHWM") - before_mb}


def _memory_mb(name: str) -> float:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1e3


def _cost(turns: Sequence[float]) -> Interval:
    """The median, and the two order statistics that hold it with :data:`CONFIDENCE`."""
    ordered, count = sorted(turns), len(turns)
    below = [sum(math.comb(count, k) for k in range(i + 1)) * 0.5**count for i in range(count // 2)]
    out = sum(share <= 0.5 * (1.0 - CONFIDENCE) for share in below)
    return Interval(statistics.median(ordered), ordered[max(out - 1, 0)], ordered[min(count - out, count - 1)])


def _text(cost: Interval) -> str:
    return f"{cost.value:.1f} [{cost.low:.1f}, {cost.high:.1f}]"


def _fresh() -> dict[str, dict[str, float]]:
    """Medians over fresh processes of what an agent adds at its start, by mode."""
    runs: Mapping[str, list[dict[str, float]]] = {name: [] for name in (NONE, "observe", "observe, files")}
    for _ in range(FRESH):
        for name, taken in runs.items():
            taken.append(_start("DDP", name, is_fresh=True)[0].recv())
    medians = {
        name: {key: statistics.median(run[key] for run in taken) for key in taken[0]} for name, taken in runs.items()
    }
    return {
        name: {key: value - medians[NONE][key] for key, value in found.items()}
        for name, found in medians.items()
        if name != NONE
    }


def run() -> list[Section]:
    """What the agent adds to an iteration, to a collective, to memory and to the start, measured from outside."""
    rows, cost_us = [], dict[str, float]()
    for job, (_, modes, _) in JOBS.items():
        sets = [_paired(job) for _ in range(PROCESSES)]
        for mode in modes:
            thread, process, own, plain = (
                [one[mode][name] for one in sets] for name in ("thread_us", "process_us", "own_us", "plain_us")
            )
            cost_us[job] = (cost := _cost(thread)).value
            plain_us, own_us = statistics.median(plain), statistics.median(own)
            rows.append((job, mode, f"{plain_us:.0f}", _text(cost), f"{own_us:.1f}", _text(_cost(process))))
    further_us = (cost_us[f"{COLLECTIVES} all-reduces"] - cost_us["1 all-reduce"]) / (COLLECTIVES - 1)
    columns = ("job", "mode", NONE, "added to the thread", "agent's own figure", "added to the process")
    text = (
        f"Jobs on {'NCCL' if DEVICE == 'cuda' else 'gloo'}. A collective that Python starts adds {further_us:.1f} us: "
        f"the difference between 1 and {COLLECTIVES} of them. Of two ranks the second is measured, which mode active "
        "delays; without the agent it sleeps as long. The process includes the agent's other threads."
    )
    started = [
        (name, *(f"{v[k]:.2f}" for k in ("wall_s", "cpu_s")), *(f"{v[k]:.1f}" for k in ("held_mb", "peak_mb")))
        for name, v in _fresh().items()
    ]
    return [
        Section("The live agent: CPU microseconds per iteration, median [95 % interval]", (text,), columns, rows),
        Section(
            "The live agent: start and memory, beside the same job without it",
            (),
            ("mode", "start, s", "start, CPU s", "memory, MB", "peak, MB"),
            started,
        ),
    ]


if __name__ == "__main__":
    print_sections(run())
