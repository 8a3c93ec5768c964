"""What the live agent costs a training job, measured from outside: thread CPU, process CPU, memory and start-up.

Jobs on gloo, or on NCCL where there is a GPU, train with and without the agent in turn, inside one process group. Each
block with the agent lies between two blocks without it, and its cost is its mean less theirs: a drift of the machine
cancels. Where the agent delays a rank, the blocks without it sleep as long: what a sleep does to caches is no cost of
the agent. The agent is used through ``attach``, ``summary`` and ``detach`` only, so that a number means the same for
every version of it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import math
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from paceenv.core.intervals import Interval
from paceenv.report.section import Section, print_sections

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TURNS, WARM, BATCHES, TIMED = 6, 4096 if DEVICE == "cuda" else 1088, 8, 64
"""Turns; of a block untimed iterations, after which the agent watches as few as it ever does; batches that are timed;
iterations of each, so that each batch holds as many that are watched."""
ONE_CARD = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks that share a GPU talk through sockets: NCCL is told that they sit on different hosts."""
OWN_S = 20.0
"""Seconds in which the agent measures its own cost: it does so now and then."""
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


class _Sleep:
    """Sleeps as the agent did in an earlier block: so often, and so long."""

    share = seconds = due = 0.0

    def __call__(self) -> None:
        self.due += self.share
        if self.due >= 1.0:
            self.due -= 1.0
            time.sleep(self.seconds)


def _block(iteration: Iteration, sleep: Iteration = lambda: None) -> tuple[float, float]:
    """CPU microseconds of this thread and of the whole process per iteration: the lower quartile of the batches.

    Other work on the machine makes some batches dearer, never cheaper. A GPU ends what it was given before the clock
    runs again: a thread that waits for it spins.
    """
    gc.collect()
    taken_s = np.zeros((BATCHES + 1, 2))
    for batch in range(-1, BATCHES):
        for _ in range(WARM if batch < 0 else TIMED):
            taken_s[batch] -= time.thread_time(), time.process_time()
            iteration()
            sleep()
            taken_s[batch] += time.thread_time(), time.process_time()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    thread_us, process_us = 1e6 / TIMED * np.quantile(taken_s[:-1], 0.25, axis=0)
    return float(thread_us), float(process_us)


@contextlib.contextmanager
def _agent(mode: str) -> Iterator[dict[str, Any]]:
    """The agent in a mode; the value becomes its summary."""
    from paceenv import live

    agent, summary = live.attach(**MODES[mode]), dict[str, Any]()
    try:
        yield summary
        summary |= agent.summary()
        assert summary["state"] == MODES[mode]["mode"], summary["reason"]
    finally:
        with contextlib.redirect_stderr(io.StringIO()):  # the page
            agent.detach()


def _paired(iteration: Iteration, modes: Sequence[str]) -> dict[str, Any]:
    """What each mode adds, one number a turn: a block with the agent less the mean of the two blocks beside it."""
    columns = ("thread_us", "process_us", "plain_us")
    found: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in columns} for mode in modes}
    sleep, before = _Sleep(), (0.0, 0.0)
    for turn in range(-1, TURNS):  # the first finds out how long the agent sleeps, and warms up
        for mode in (*modes[turn % len(modes) :], *modes[: turn % len(modes)]):
            with _agent(mode) as summary:
                under = _block(iteration)
            pacing = summary["pacing"]
            sleep.share, sleep.seconds = pacing["taken"] / (WARM + BATCHES * TIMED), pacing["mean_s"] or 0.0
            after = _block(iteration, sleep)
            if turn >= 0:
                added = [u - 0.5 * (b + a) for u, b, a in zip(under, before, after, strict=True)]
                for name, value in zip(columns, (*added, after[0]), strict=True):
                    found[mode][name].append(value)
            before = after
    for mode, turns in found.items():
        turns["own_us"] = [_own_us(iteration, mode, statistics.median(turns["plain_us"]))]
    return found


def _own_us(iteration: Iteration, mode: str, plain_us: float) -> float:
    """The agent's own figure, microseconds per iteration; not a number if it has none."""
    count = torch.tensor([int(1e6 * OWN_S / plain_us)], device=DEVICE)
    if distributed.is_initialized():
        distributed.broadcast(count, 0)  # as many on every rank
    with _agent(mode) as summary:
        for _ in range(int(count)):
            iteration()
    own_s = summary["overhead"]["mean_s"]
    return math.nan if own_s is None else 1e6 * float(own_s)


def _rank(rank: int, ranks: int, port: int, folder: str, job: str, fresh: str) -> None:
    """One rank of a job, in a process of its own: its result is a JSON file."""
    os.chdir(folder)  # where the agent may write
    torch.set_num_threads(1)
    logging.getLogger("paceenv.live").addHandler(logging.NullHandler())
    make, modes, _ = JOBS[job]
    if ranks:
        settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in settings.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= ONE_CARD | {"NCCL_HOSTID": f"rank{rank}"}
        distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    iteration = make()
    result = _started(iteration, fresh) if fresh else _paired(iteration, modes)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    if ranks:
        distributed.barrier()
    os._exit(0)  # gloo's threads and the reducer need no orderly end


def _run(job: str, fresh: str = "") -> list[dict[str, Any]]:
    """A job in fresh processes; what each rank found."""
    ranks, processes = JOBS[job][2], max(JOBS[job][2], 1)
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start_processes(_rank, (ranks, port, folder, job, fresh), nprocs=processes)  # type: ignore[no-untyped-call]
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(processes)]


def _started(iteration: Iteration, mode: str) -> dict[str, float]:
    """Start-up and memory in a process that never had an agent; ``mode`` may be none at all."""
    for _ in range(WARM):
        iteration()
    one_s = _block(iteration)[1] * 1e-6
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before_mb, wall_s, cpu_s = _memory_mb("VmRSS"), time.perf_counter(), time.process_time()
    with contextlib.nullcontext() if mode == NONE else _agent(mode):
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
            taken.append(_run("DDP", name)[0])
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
    for job in JOBS:
        for mode, turns in _run(job)[-1].items():  # of two ranks the one that is delayed
            cost, process = _cost(turns["thread_us"]), _cost(turns["process_us"])
            plain_us, own_us = (statistics.median(turns[name]) for name in ("plain_us", "own_us"))
            cost_us[job] = cost.value
            rows.append((job, mode, f"{plain_us:.0f}", _text(cost), f"{own_us:.1f}", _text(process)))
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
