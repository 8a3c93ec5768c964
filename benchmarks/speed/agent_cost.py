"""What the live agent costs the training thread, per iteration and per collective, beside the same job without it."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._common import Report, Table, Target, command
from paceenv import live

TURNS, WARM, TIMED = 15, 40, 160
"""Turns, and iterations of each contestant in a turn: untimed and timed."""
WIDTH, LAYERS, BATCH = 256, 4, 16
COLLECTIVES = 20
TARGET_US = 50.0
NONE = "no agent"
MODES = ("observe", "shadow", "active")
POLICY = "static:mechanism=slack,threshold=0.02,window=0.4"


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A gloo group of this process alone, so that nothing is measured but the host's own work."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        distributed.destroy_process_group()


def data_parallel() -> Callable[[], None]:
    """One iteration of a small DDP model."""
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(BATCH, WIDTH)

    def iteration() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return iteration


def many_collectives() -> Callable[[], None]:
    """One iteration of a job that calls many collectives by itself, as sharded and tensor-parallel jobs do."""
    parameter = nn.Parameter(torch.ones(8))
    optimizer, tensor = torch.optim.SGD([parameter], lr=0.01), torch.ones(1 << 14)

    def iteration() -> None:
        for _ in range(COLLECTIVES):
            distributed.all_reduce(tensor)
        parameter.grad = torch.zeros(8)
        optimizer.step()

    return iteration


def times_us(iteration: Callable[[], None]) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """CPU microseconds of the training thread per iteration, by contestant, one number a turn."""
    found = {name: np.empty(TURNS) for name in (NONE, *MODES)}
    for turn in range(TURNS):
        for name in found:
            agent = None if name == NONE else live.attach(policy=POLICY, mode=name)
            for _ in range(WARM):
                iteration()
            start_s = time.thread_time()
            for _ in range(TIMED):
                iteration()
            found[name][turn] = 1e6 * (time.thread_time() - start_s) / TIMED
            if agent is not None:
                with contextlib.redirect_stderr(io.StringIO()):
                    agent.detach()
    return found


def run() -> Report:
    """Host microseconds that the agent adds to an iteration, by mode, and to a collective."""
    torch.set_num_threads(1)
    logging.getLogger("paceenv.live").addHandler(logging.NullHandler())
    with process_group():
        by_job = {"DDP": times_us(data_parallel()), f"{COLLECTIVES} collectives": times_us(many_collectives())}
    added = {
        (job, mode): float(np.median(times[mode] - times[NONE])) for job, times in by_job.items() for mode in MODES
    }
    observe_us = added["DDP", "observe"]
    per_collective_us = (added[f"{COLLECTIVES} collectives", "observe"] - observe_us) / (COLLECTIVES - 1)
    data = {f"us_added_{job.split()[-1].lower()}_{mode}": us for (job, mode), us in added.items()} | {
        "us_per_further_collective": per_collective_us
    }
    rows = [
        (job, f"{np.median(times[NONE]):.0f}", *(f"{added[job, mode]:.1f}" for mode in MODES))
        for job, times in by_job.items()
    ]
    text = (
        "A job of one rank on gloo, so nothing waits. CPU time of the training thread, median of the differences "
        f"within a turn. A collective that Python starts adds some {per_collective_us:.1f} us more. The training step "
        "evicts the code from the processor's caches each time, so it is a few times slower than alone."
    )
    table = Table("microseconds of the training thread per iteration", ("job", NONE, *(f"+ {m}" for m in MODES)), rows)
    target = Target(
        "observing costs a DDP iteration", f"at most {TARGET_US:g} us", f"{observe_us:.0f} us", observe_us <= TARGET_US
    )
    return Report("The live agent", text, data, (table,), (target,))


if __name__ == "__main__":
    command(run)
