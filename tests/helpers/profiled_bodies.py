"""A small job under PyTorch's profiler, for the tests of its importer; for ``live_jobs.run_ranks``."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule


def profiled(out: str, slow_rank: int, slow_s: float, steps: int) -> int:
    """Train under the profiler, one rank slow; writes ``rank<n>.json`` into ``out``."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = schedule(wait=0, warmup=1, active=steps)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=lambda p: p.export_chrome_trace(str(Path(out, f"rank{rank}.json"))),
    ) as profiler:
        for _ in range(steps + 1):
            time.sleep(0.02 + (slow_s if rank == slow_rank else 0.0))
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            profiler.step()
    return rank
