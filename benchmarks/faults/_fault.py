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
from pathlib import Path
from typing import Any

ITERATIONS, PAUSE_S = 40, 0.01


@dataclass(frozen=True)
class Start:
    """How the processes of a job are started.

    ``fresh`` is a new interpreter, with ``flags``; otherwise a fork of one that has imported PyTorch. ``limits`` are
    names of ``resource.RLIMIT_*`` without the prefix. ``mounts`` are file systems that only the job sees: its place
    ("live" is the run's folder) and its options, or "ro". ``nobody`` runs it as a user without any right.
    """

    fresh: bool = False
    flags: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    environ: Mapping[str, str | None] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    nobody: bool = False


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


def fault(
    kind: str, variants: str | Mapping[str, Start] = "", start: Start | None = None, **more: Any
) -> Callable[[Act], Act]:
    """Register a job as a kind of fault. ``variants``: their names, or how each is started; ``more`` as in Fault."""
    if isinstance(variants, str):
        variants = {name: start or Start() for name in variants.split() or [""]}

    def register(act: Act) -> Act:
        FAULTS[kind] = Fault(kind, act, variants, **more)
        return act

    return register


class Job:
    """This rank of a job: ``folder`` is its own to write in, ``live`` the run's folder, which only an agent makes."""

    def __init__(self, variant: str, seed: int, folder: Path, *, agent: str) -> None:
        self.variant, self.seed, self.folder, self.live = variant, seed, folder, folder / "live"
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.agent = agent
        """"", "launcher" or "attach"."""
        self.random = random.Random(1000 * seed + self.rank)

    def begin(self, timeout_s: float = 60.0) -> None:
        """Join the job's process group."""
        import torch
        import torch.distributed as dist

        torch.manual_seed(self.seed)
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))

    def network(self, hidden: int = 32) -> Any:
        """The same weights on every rank."""
        import torch
        from torch import nn

        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, 4))

    def ddp(self, network: Any = None, **options: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(self.network() if network is None else network, **options)

    def optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.SGD(model.parameters(), lr=0.05)

    def attach(self, model: Any = None, **options: Any) -> Any:
        """The agent, where the job is run with one that it attaches itself."""
        if self.agent != "attach":
            return None
        from paceenv import live

        return live.attach(model, out=str(self.live), **options)

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
