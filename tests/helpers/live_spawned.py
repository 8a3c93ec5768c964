"""A training script that starts its two ranks by itself, as a user's: DDP on gloo, nothing of ours in it.

``live_spawned.py ITERATIONS``; it ends before where a file ``over`` is in the current folder.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, port: int, iterations: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, over = DistributedDataParallel(torch.nn.Linear(8, 8)), torch.zeros(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while not over.item() and iterations:
        iterations -= 1
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.01)
        over.fill_(float(os.path.exists("over")))
        dist.all_reduce(over)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(work, (port, int(sys.argv[1])), 2)  # type: ignore[no-untyped-call]
