"""A training script for torchrun, as a user's: DistributedDataParallel on gloo, nothing of ours in it.

``live_train.py FOLDER [--fail-first]``; every rank writes its losses to FOLDER. With ``--fail-first`` rank 1 raises in
the middle of the first attempt.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ITERATIONS = 20


def train(fails: bool) -> list[float]:
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for iteration in range(ITERATIONS):
        if fails and iteration == ITERATIONS // 2:
            raise RuntimeError("as asked for")
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8, generator=random)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    folder, *options = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    losses = train(fails="--fail-first" in options and rank == 1 and attempt == "0")
    agent = "paceenv.live.agent" in sys.modules
    gc.collect()  # the model must be gone before its process group
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps({"losses": losses, "agent": agent, "attempt": attempt}))


if __name__ == "__main__":
    main()
