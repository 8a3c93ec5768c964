"""The shapes of jobs by name, and the program that trains one: under torchrun, or starting its own processes."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.multiprocessing.spawn import spawn as spawn_ranks

from benchmarks.jobs import _shapes_grouped as grouped
from benchmarks.jobs import _shapes_replicated as replicated
from benchmarks.jobs._shape_job import Job, Training, tell

SHAPES: dict[str, Callable[[Job], Training]] = {
    name: shape
    for module in (replicated, grouped)
    for name, shape in inspect.getmembers(module, inspect.isfunction)
    if shape.__module__ == module.__name__ and not name.startswith("_")
}
"""Every public function of the two modules."""
TIMEOUT_S = 60.0


def train(
    rank: int, size: int, shape: str, slow: int, place: str, slow_s: float, iterations: int, seed: int, told: Path
) -> None:
    """This process's part of a job; the group is made from the environment."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
    job = Job(rank, size, slow, place, slow_s, seed)
    tell(told, job.run(SHAPES[shape](job), iterations))
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
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(main)
    application()
