"""A job of equal ranks of which one can be made late by a known time; compute is sleeping, so that many fit a core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceenv import live

WORK_S = 0.006


def reducer() -> Callable[[float], None]:
    """A training step under DistributedDataParallel that comes to its reduction late by a given time."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.ones(4, 64)

    def step(late_s: float) -> None:
        time.sleep(WORK_S + late_s)
        model(inputs).sum().backward()
        optimizer.step()

    return step


def all_reduce() -> Callable[[float], None]:
    """Nothing but the reduction: many ranks can do it on few cores without making each other late."""
    payload, optimizer = torch.ones(4096), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    def step(late_s: float) -> None:
        time.sleep(WORK_S + late_s)
        dist.all_reduce(payload)
        optimizer.step()

    return step


KINDS = {"reducer": reducer, "all_reduce": all_reduce}


def skewed(
    *, kind: str, skews_s: Sequence[float], late: int, iterations: int, from_iteration: int = 0, out: str = ""
) -> list[dict[str, Any]]:
    """For each skew the agent's last summary, after rank ``late`` was late by it in every iteration from one on.

    With ``out`` the ranks write their status, in a folder for each skew, and look at that of the others.
    """
    found, step = [], KINDS[kind]()
    for skew_s in skews_s:
        files = {"out": Path(out) / f"{1e3 * skew_s:g}ms"} if out else {}
        agent = live.attach(None, mode="observe", **files)
        for iteration in range(iterations):
            step(skew_s if dist.get_rank() == late and iteration >= from_iteration else 0.0)
        agent.detach()
        dist.barrier()  # all have written their last status
        found.append(agent.summary(compare=True))
    return found
