"""A small training job of which one rank is slow. It imports nothing of ``paceenv``, as a user's script does not."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, CLASSES, BATCH = 64, 8, 4
BASE_S = 0.006
"""What every rank sleeps in an iteration: compute that needs no core, so that eight ranks fit on two."""
SETTLED = 20
"""Iterations before the job's own figures begin."""

Step = Callable[[int], None]


@dataclass
class Job:
    """This rank of a job: which rank is slow, by how much, and where in an iteration it sleeps: "load", before the
    forward pass, "forward", in it, or "backward"; ``parts`` divides the sleep over calls of an iteration."""

    rank: int
    size: int
    slow: int
    place: str
    slow_s: float
    seed: int
    parts: int = 1
    slept_s: list[float] = field(default_factory=list)
    """What the slow rank really slept, by iteration."""
    _left: int = 0

    def late(self, place: str) -> None:
        """Sleep here, if this is the rank and the place, and not more often than ``parts`` times an iteration."""
        if self._left and place == self.place:
            self._left -= 1
            start_s = time.perf_counter()
            time.sleep(self.slow_s / self.parts)
            self.slept_s[-1] += time.perf_counter() - start_s

    def network(self, inner: int = 1) -> nn.Sequential:
        """The same weights on every rank: layers, with the place of slowness in the midst."""
        torch.manual_seed(self.seed)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(inner)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), SlowHere(self), *blocks, nn.Linear(WIDTH, CLASSES))

    def loss(self, model: nn.Module, iteration: int, part: int = 0, parts: int = 1) -> torch.Tensor:
        """Load this rank's batch and run the forward pass."""
        self.late("load")
        random = torch.Generator().manual_seed(1_000_003 * iteration + 1_009 * part + 31 * self.seed + self.rank)
        inputs, labels = torch.randn(BATCH, WIDTH, generator=random), torch.randint(CLASSES, (BATCH,), generator=random)
        return nn.functional.cross_entropy(model(inputs), labels) / parts

    def group(self, lists: Iterable[Sequence[int]]) -> dist.ProcessGroup:
        """Make all these process groups, as every rank must, and return the one that this rank is in."""
        made = [(ranks, dist.new_group(list(ranks))) for ranks in lists]
        own: dist.ProcessGroup = next(group for ranks, group in made if self.rank in ranks)
        return own

    def run(self, step: Step, iterations: int) -> dict[str, float]:
        """Train; returns what an agent should find."""
        times_s = []
        for iteration in range(iterations):
            start_s = time.perf_counter()
            self._left = self.parts if self.rank == self.slow else 0
            self.slept_s.append(0.0)
            time.sleep(BASE_S)
            step(iteration)
            times_s.append(time.perf_counter() - start_s)
        means = (statistics.fmean(values[SETTLED:]) for values in (times_s, self.slept_s))
        return dict(zip(("iteration_s", "slept_s"), means, strict=True))


class _SlowHere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, job: Job) -> torch.Tensor:
        ctx.job = job
        job.late("forward")
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.job.late("backward")
        return gradients[0], None


class SlowHere(nn.Module):
    """An identity at which the slow rank sleeps, in one pass or the other."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _SlowHere.apply(inputs, self.job)
        return result
