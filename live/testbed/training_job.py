"""The training script that a testbed's ranks run: iterations of emulated work and real collectives.

It has no code for the agent: the launcher ``-m paceenv.live`` adds it. Its argument is a JSON file from
``paceenv.live.testbed.testbed_run``. After every step a rank appends its monotonic time to its own
file. So step times are known without the agent, and up to the moment in which a job is killed.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceenv.live.testbed.inside import STEP_FILE

Group = dist.ProcessGroup | None
"""A process group of this rank; None is that of all ranks."""


def main(spec_file: str) -> None:
    spec = json.loads(Path(spec_file).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10.0))  # of a collective: a lost rank ends the job
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


def emulated_step(spec: Mapping[str, Any]) -> tuple[Callable[[int], None], torch.optim.Optimizer]:
    """A step of this rank, given its number: what its program says, in order. And the optimizer that ends it."""
    rank, slow, pause = dist.get_rank(), spec["slow"], spec["pause"]
    role = spec["roles"][spec["role_R"][rank]]
    groups = {name: _group(name, listed) for name, listed in spec["communicators"].items()}
    own, common = (np.random.default_rng([*spec["seed"], stream]) for stream in (1 + rank, 0))
    micro_batches = 1 + max((one["micro_batch"] for kind, one in role if kind == "Compute"), default=-1)
    transfers = {
        at: _transfer(one, groups.get(one["communicator"]), beside=role[at + 1] != ["Wait", {"start": at}])
        for at, (kind, one) in enumerate(role)
        if kind == "Start"
    }

    def step(iteration: int) -> None:
        length = [*(1.0 + spec["length_cv"] * own.standard_normal(micro_batches)), 1.0]  # the last is of none
        since = iteration - slow["first"] if slow and rank in slow["ranks"] else -1
        times = slow["factor"] if since >= 0 and since % slow["every"] < slow["iterations"] else 1.0
        if pause and iteration % pause["every"] == pause["every"] - 1:
            time.sleep(pause["at_most_s"] * common.random())
        started = dict[int, Any]()
        for at, (kind, one) in enumerate(role):
            if kind == "Compute":
                time.sleep(max(times * length[one["micro_batch"]] * one["seconds"], 0.0))
            elif kind == "Start":
                started[at] = transfers[at]() if (iteration + 1) % one["every"] == 0 else None
            elif started[one["start"]] is not None:
                started[one["start"]].wait()

    return step, _Nothing([torch.zeros(1, requires_grad=True)], {})


def _group(name: str, listed: Sequence[list[int]]) -> Group:
    """This rank's group of a communicator, by whose name the agent knows what it may hold back."""
    made = {tuple(ranks): dist.new_group(ranks, group_desc=name) for ranks in listed}  # every rank makes all of them
    return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)


def _transfer(given: Mapping[str, Any], group: Group, *, beside: bool) -> Callable[[], Any]:
    """Starts a transfer of zeros, at least one for each member in an all-to-all; an all-reduce of none is a barrier.

    It returns what to wait for, if it runs in the background.
    """
    members, op = dist.get_process_group_ranks(group), given["op"]
    parts = len(members) if op == "all_to_all" else 1
    payload = torch.zeros(max(int(given["payload_bytes"]) // 4 // parts, 1) * parts)
    if op == "all_reduce" and not given["payload_bytes"]:
        return lambda: dist.barrier(group=group, async_op=beside)
    if op == "all_reduce":
        return lambda: dist.all_reduce(payload, group=group, async_op=beside)
    if op == "gather":
        root = members[0]
        gathered = [torch.zeros_like(payload) for _ in members] if dist.get_rank() == root else None
        return lambda: dist.gather(payload, gathered, dst=root, group=group, async_op=beside)
    into = torch.zeros_like(payload)
    return lambda: dist.all_to_all_single(into, payload, group=group, async_op=beside)


if __name__ == "__main__":
    main(*sys.argv[1:])
