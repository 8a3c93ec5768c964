"""``python -m benchmarks.jobs._train SHAPE --told DIR`` trains one rank of a job, under torchrun.

Each rank tells what it did in one JSON file.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.jobs import _shapes
from benchmarks.jobs._shape_job import Job

TIMEOUT_S = 60.0


def main(
    shape: str,
    told: Annotated[Path, typer.Option(help="Folder for the job's own figures.")],
    slow: int = -1,
    place: str = "load",
    slow_s: float = 0.02,
    iterations: int = 150,
    seed: int = 0,
) -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    job = Job(dist.get_rank(), dist.get_world_size(), slow, place, slow_s, seed)
    figures = job.run(getattr(_shapes, shape)(job), iterations)
    (told / f"rank{job.rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
