"""A job of equal ranks of which one can be made late by a known time; compute is sleeping, so that many fit a core."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceenv import live

WORK_S = 0.006


def skewed(*, skews_s: Sequence[float], late: int, iterations: int, out: str) -> list[dict[str, Any]]:
    """For each skew the agent's last summary, after rank ``late`` was late by it in every iteration.

    The ranks write their status, in a folder for each skew, and look at that of the others.
    """
    found, payload = [], torch.ones(4096)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for skew_s in skews_s:
        agent = live.attach(None, mode="observe", out=Path(out) / f"{1e3 * skew_s:g}ms")
        for _ in range(iterations):
            time.sleep(WORK_S + skew_s * (dist.get_rank() == late))
            dist.all_reduce(payload)
            optimizer.step()
        agent.detach()
        dist.barrier()  # all have written their last status
        found.append(agent.summary(compare=True))
    return found
