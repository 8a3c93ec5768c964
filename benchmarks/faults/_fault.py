"""What a fault is, and the small training job that it is injected into.

It imports nothing of ``paceenv``, as a user's script does not. What a job prints is all that it computed.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

ITERATIONS, PAUSE_S = 40, 0.03


@dataclass(frozen=True)
class Start:
    """How the processes of a job are started.

    ``flags`` are of the interpreter. ``limits`` are names of ``resource.RLIMIT_*`` without the prefix. ``mounts`` are
    file systems that only the job sees: its place ("live" is the run's folder) and its options, or "ro". ``options``
    are the agent's.
    """

    flags: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """A kind of fault: ``act`` is the job; ``code_only``: what it prints depends on the moment, also without us."""

    kind: str
    act: Callable[[Job], None]
    variants: Mapping[str, Start]
    ranks: int = 1
    attach: bool = False
    code_only: bool = False
    seeds: int = 1


FAULTS: dict[str, Fault] = {}

Act = Callable[["Job"], None]
Break = Callable[["Job", int], object]


def fault(
    kind: str, variants: str | Mapping[str, Start] = "", start: Start = Start(), **more: Any
) -> Callable[[Act], Act]:
    """Register a job as a kind of fault. ``variants``: their names, or how each is started; ``more`` as in Fault."""
    if isinstance(variants, str):
        variants = dict.fromkeys(variants.split() or [""], start)

    def register(act: Act) -> Act:
        FAULTS[kind] = Fault(kind, act, variants, **more)
        return act

    return register


def breaks(
    kind: str, variants: str | Mapping[str, Start], start: Start = Start(), *, pause_s: float = PAUSE_S, **more: Any
) -> Callable[[Break], Break]:
    """Register what is called before every iteration of a plain job as a kind of fault."""

    def register(before: Break) -> Break:
        fault(kind, variants, start, **more)(lambda job: job.train(before=partial(before, job), pause_s=pause_s))
        return before

    return register


class Job:
    """This rank of a job: ``folder`` is its own to write in, ``live`` the run's folder, which only an agent makes."""

    def __init__(self, variant: str, seed: int, folder: Path, *, agent: str) -> None:
        self.variant, self.seed, self.folder, self.live = variant, seed, folder, folder / "live"
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.agent = agent
        """"", "launcher" or "attach"."""
        self.random = random.Random(1000 * seed + self.rank)
        self.kept: list[Any] = []
        """What is to stay until the end."""

    def begin(self, timeout_s: float = 30.0) -> None:
        """Join the job's process group."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))

    def network(self) -> Any:
        """The same weights on every rank."""
        import torch
        from torch import nn

        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def ddp(self, network: Any = None, **options: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(self.network() if network is None else network, **options)

    def optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.SGD(model.parameters(), lr=0.05)

    def inputs(self, iteration: int) -> Any:
        import torch

        return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * iteration + self.rank))

    def train(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        iterations: int = ITERATIONS,
        before: Callable[[int], object] = lambda i: None,
        step: Callable[[int], object] | None = None,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Train and print what came out; ``before`` is called with every iteration, ``step`` replaces its body."""
        self.begin()
        model = self.ddp() if model is None else model
        optimizer = self.optimizer(model) if optimizer is None else optimizer

        def usual(i: int) -> None:
            optimizer.zero_grad()
            model(self.inputs(i)).square().mean().backward()
            optimizer.step()

        for i in range(iterations):
            before(i)
            (step or usual)(i)
            time.sleep(pause_s)
        self.told(model.parameters())

    def told(self, parameters: Iterable[Any]) -> None:
        """Print a digest of the parameters."""
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(bytes(parameter.detach().contiguous().view(-1).numpy().tobytes()))
        print(f"rank {self.rank}: {digest.hexdigest()[:16]}", flush=True)
