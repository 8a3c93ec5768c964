"""The training script that a testbed's ranks run: iterations of emulated work and real collectives.

It has no code for the agent: the launcher ``-m paceenv.live`` adds it. Its argument is a JSON file from
``paceenv.live.testbed.testbed_run``. After every step a rank appends its monotonic time to its own
file. So step times are known without the agent, and up to the moment in which a job is killed.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceenv.live.testbed.inside import STEP_FILE

TIMEOUT_S = 600.0
"""Of a collective: a rank that is lost ends the job."""

Work = Callable[[int], None]
"""A rank's work in a phase, given the iteration."""
Transfer = Callable[[], Any]
"""Transfers one bucket; returns what to wait for, if it runs in the background."""
Group = dist.ProcessGroup | None
"""A process group of this rank; None is that of all ranks."""


def main(spec_file: str) -> None:
    spec = json.loads(Path(spec_file).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    step, optimizer = emulated_step(spec)
    with (Path(spec["steps"]) / STEP_FILE.format(rank=dist.get_rank())).open("ab", buffering=0) as file:
        for iteration in itertools.count() if spec["iterations"] is None else range(spec["iterations"]):
            step(iteration)
            file.write(np.float64(time.monotonic()).tobytes())
            optimizer.step()  # behind the stamp: an agent takes the next step's delay in here
    dist.barrier()
    dist.destroy_process_group()


class _Nothing(torch.optim.Optimizer):
    """An optimizer with nothing to optimize. PyTorch's own load its compiler first, 2 s of CPU in each rank."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(param_group)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss to return
        """Does nothing; an agent hooks on to it."""


def emulated_step(spec: Mapping[str, Any]) -> tuple[Work, torch.optim.Optimizer]:
    """A step of emulated work, the phases of ``spec["iteration"]`` in order, and the optimizer that ends it."""
    group, background, work = functools.cache(_group), list[Any](), list[Work]()
    for number, phase in enumerate(spec["iteration"]):
        ((kind, given),) = phase.items()
        if kind == "barrier":
            work.append(lambda iteration: dist.barrier())
        elif kind == "compute":
            work.append(_compute(given, [*spec["seed"], number]))
        else:
            of = group(given["group_size"] or dist.get_world_size(), given["communicator"])
            start = functools.partial(_start, _transfer(kind, of, given), background)
            work += [start] * given["buckets"]  # which share one payload, that nobody reads

    def step(iteration: int) -> None:
        for do in work:
            do(iteration)
        for pending in background:
            pending.wait()
        background.clear()

    return step, _Nothing([torch.zeros(1, requires_grad=True)], {})


def _start(transfer: Transfer, background: list[Any], iteration: int) -> None:
    if (pending := transfer()) is not None:
        background.append(pending)


def _group(size: int, communicator: str | None) -> Group:
    """This rank's group of ``size`` neighbours; by ``communicator`` the agent knows what it may hold back."""
    if size == dist.get_world_size() and communicator is None:
        return None
    made: tuple[Group, Any] = dist.new_subgroups(size, group_desc=communicator)  # type: ignore[no-untyped-call]
    return made[0]


def _compute(given: Mapping[str, Any], seed: list[int]) -> Work:
    rank = dist.get_rank()
    if given["ranks"] is not None and rank not in given["ranks"]:
        return lambda iteration: None
    own, common = np.random.default_rng([*seed, 1 + rank]), np.random.default_rng([*seed, 0])
    slow, pause = given["slow"] or {"ranks": []}, given["pause"]

    def work(iteration: int) -> None:
        start_s = time.monotonic()
        seconds = given["mean_s"] * (1.0 + given["jitter_cv"] * own.standard_normal())
        if rank in slow["ranks"] and _is_slow(slow, iteration):
            seconds *= slow["factor"]
        if pause and iteration % pause["every"] == pause["every"] - 1:
            seconds += pause["at_most_s"] * common.random()
        time.sleep(max(start_s + seconds - time.monotonic(), 0.0))

    return work


def _is_slow(slow: Mapping[str, Any], iteration: int) -> bool:
    since = iteration - slow["first"]
    return bool(since >= 0 and (slow["every"] is None or since % slow["every"] < slow["iterations"]))


def _transfer(kind: str, group: Group, given: Mapping[str, Any]) -> Transfer:
    """One bucket: zeros, at least one for each member in an all-to-all."""
    members, beside = dist.get_process_group_ranks(group), given["background"]
    parts = len(members) if kind == "all_to_all" else 1
    payload = torch.zeros(max(int(given["bytes"]) // 4 // given["buckets"] // parts, 1) * parts)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(payload, group=group, async_op=beside)
    if kind == "gather":
        root = members[0]
        gathered = [torch.zeros_like(payload) for _ in members] if dist.get_rank() == root else None
        return lambda: dist.gather(payload, gathered, dst=root, group=group, async_op=beside)
    into = torch.zeros_like(payload)
    return lambda: dist.all_to_all_single(into, payload, group=group, async_op=beside)


if __name__ == "__main__":
    main(*sys.argv[1:])
