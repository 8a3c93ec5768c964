"""``python -m benchmarks.jobs._train SHAPE --told DIR`` trains one job, under torchrun or starting its own processes.

Each rank tells what it did in one JSON file.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.multiprocessing.spawn import spawn as spawn_ranks

from benchmarks.jobs import _shapes
from benchmarks.jobs._shape_job import Job

TIMEOUT_S = 60.0


def train(
    rank: int, size: int, shape: str, slow: int, place: str, slow_s: float, iterations: int, seed: int, told: Path
) -> None:
    """This process's part of a job; the group is made from the environment."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
    job = Job(rank, size, slow, place, slow_s, seed)
    figures = job.run(getattr(_shapes, shape)(job), iterations)
    (told / f"rank{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def main(
    shape: str,
    told: Annotated[Path, typer.Option(help="Folder for the job's own figures.")],
    slow: int = -1,
    place: str = "load",
    slow_s: float = 0.02,
    iterations: int = 150,
    seed: int = 0,
    spawn: Annotated[int, typer.Option(help="Start so many ranks by multiprocessing; 0: under torchrun.")] = 0,
) -> None:
    """Train."""
    rest = (shape, slow, place, slow_s, iterations, seed, told)
    if spawn:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        spawn_ranks(train, (spawn, *rest), nprocs=spawn)
    else:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *rest)


if __name__ == "__main__":
    typer.run(main)
