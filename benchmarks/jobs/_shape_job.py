"""The frame of a small training job of which one rank is slow: what the shapes of jobs share, and the loop.

It imports nothing of ``paceenv``, as a user's script does not, and tells what it did in one JSON file per rank.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PLACES = ("load", "forward", "backward")
"""Where in an iteration the slow rank sleeps: before the forward pass, in it, or in the backward pass."""
WIDTH, CLASSES, BATCH = 64, 8, 4
BASE_S = 0.006
"""What every rank sleeps in an iteration: compute that needs no core, so that eight ranks fit on two."""
SETTLED = 20
"""Iterations before the job's own figures begin."""


@dataclass
class Training:
    """One way of training: an iteration, and the parameters that come out; ``wait`` ends what runs beside it."""

    step: Callable[[int], None]
    parameters: Callable[[], Iterable[torch.Tensor]]
    finish: Callable[[], None] = lambda: None


@dataclass
class Job:
    """This rank of a job: which rank is slow, where, by how much; ``parts`` divides it over calls of an iteration."""

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

    def begin(self) -> None:
        """The next iteration."""
        self._left = self.parts if self.rank == self.slow and self.slow_s else 0
        self.slept_s.append(0.0)

    def late(self, place: str) -> None:
        """Sleep here, if this is the rank and the place, and not more often than ``parts`` times an iteration."""
        if self._left and place == self.place:
            self._left -= 1
            start_s = time.perf_counter()
            time.sleep(self.slow_s / self.parts)
            self.slept_s[-1] += time.perf_counter() - start_s

    def network(self, *, normed: bool = False, inner: int = 1) -> nn.Sequential:
        """The same weights on every rank: layers, with the place of slowness in the midst."""
        torch.manual_seed(self.seed)
        norm: list[nn.Module] = [nn.BatchNorm1d(WIDTH)] if normed else []
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), *norm, nn.Tanh()) for _ in range(inner)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), SlowHere(self), *blocks, nn.Linear(WIDTH, CLASSES))

    def batch(self, iteration: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the data."""
        random = torch.Generator().manual_seed(1_000_003 * iteration + 1_009 * part + 31 * self.seed + self.rank)
        return torch.randn(BATCH, WIDTH, generator=random), torch.randint(CLASSES, (BATCH,), generator=random)

    def loss(self, model: nn.Module, iteration: int, part: int = 0, parts: int = 1) -> torch.Tensor:
        """Load a batch and run the forward pass."""
        self.late("load")
        inputs, labels = self.batch(iteration, part)
        return nn.functional.cross_entropy(model(inputs), labels) / parts

    def group(self, lists: Iterable[Sequence[int]]) -> dist.ProcessGroup:
        """Make all these process groups, as every rank must, and return the one that this rank is in."""
        made = [(ranks, dist.new_group(list(ranks))) for ranks in lists]
        own: dist.ProcessGroup = next(group for ranks, group in made if self.rank in ranks)
        return own

    def run(self, training: Training, iterations: int) -> dict[str, Any]:
        """Train; returns what must not differ with an agent, and what an agent should find."""
        times_s = []
        for iteration in range(iterations):
            start_s = time.perf_counter()
            self.begin()
            time.sleep(BASE_S)
            training.step(iteration)
            times_s.append(time.perf_counter() - start_s)
        training.finish()
        hashed = hashlib.sha256()
        for parameter in training.parameters():
            hashed.update(parameter.detach().contiguous().numpy().tobytes())
        return {
            "rank": self.rank,
            "hash": hashed.hexdigest(),
            "iteration_s": statistics.fmean(times_s[SETTLED:]),
            "slept_s": statistics.fmean(self.slept_s[SETTLED:]),
        }


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


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def set_gradients(model: nn.Module, flat: torch.Tensor) -> None:
    """The reverse of :func:`flat_gradients`."""
    at = 0
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def tell(folder: Path, found: dict[str, Any]) -> None:
    (folder / f"rank{found['rank']}.json").write_text(json.dumps(found))
