"""Shapes of jobs in which every rank has the whole model: DDP in its variants, optimizers in theirs, local SGD."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.jobs._shape_job import Job, Training, flat_gradients, set_gradients, sgd

Optimizers = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]
EVERY = 4
"""Iterations between two averages of local SGD, and micro-batches of an accumulated gradient."""


def _ddp(
    job: Job,
    model: nn.Module,
    optimizers: Optimizers = lambda model: [sgd(model)],
    *,
    after: Callable[[torch.Tensor], None] = lambda loss: None,
    **settings: Any,
) -> Training:
    """A step under DistributedDataParallel; ``after`` is done with the loss behind the optimizer's step."""
    ddp = DistributedDataParallel(model, **settings)
    steppers = optimizers(ddp)

    def step(iteration: int) -> None:
        loss = job.loss(ddp, iteration)
        loss.backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        after(loss.detach())

    return Training(step, ddp.parameters)


def ddp(job: Job) -> Training:
    return _ddp(job, job.network())


def ddp_buckets(job: Job) -> Training:
    return _ddp(job, job.network(inner=4), bucket_cap_mb=0.02)


def ddp_buffers(job: Job) -> Training:
    return _ddp(job, job.network(normed=True))


def bf16_hook(job: Job) -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def make(ddp: nn.Module) -> Sequence[torch.optim.Optimizer]:
        assert isinstance(ddp, DistributedDataParallel)
        # A hook of that name is refused on CPUs.
        ddp.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        return [sgd(ddp)]

    return _ddp(job, job.network(), make)


def ddp_unused(job: Job) -> Training:
    """Each layer within is left out in a third of the iterations, the same one on every rank."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.random = job.network(inner=3), torch.Generator().manual_seed(job.seed)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for place, layer in enumerate(self.layers):
                if place in (3, 4, 5) and torch.rand((), generator=self.random) < 1 / 3:
                    continue
                hidden = layer(hidden)
            return hidden

    return _ddp(job, Skipping(), find_unused_parameters=True)


def _checkpointed(job: Job, reentrant: bool) -> Training:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = job.network(inner=3)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.requires_grad_()
            for layer in self.layers:
                kept = isinstance(layer, nn.Sequential)
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant) if kept else layer(hidden)
            return hidden

    return _ddp(job, Checkpointed())


def reentrant(job: Job) -> Training:
    return _checkpointed(job, True)


def checkpointed(job: Job) -> Training:
    return _checkpointed(job, False)


def _accumulating(job: Job, synchronised: bool) -> Training:
    ddp, job.parts = DistributedDataParallel(job.network()), EVERY
    optimizer = sgd(ddp)

    def step(iteration: int) -> None:
        for part in range(EVERY):
            with contextlib.nullcontext() if synchronised or part == EVERY - 1 else ddp.no_sync():
                job.loss(ddp, iteration, part, EVERY).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, ddp.parameters)


def accumulation(job: Job) -> Training:
    return _accumulating(job, False)


def accumulation_synced(job: Job) -> Training:
    return _accumulating(job, True)


def metrics_after(job: Job) -> Training:
    """The losses of all ranks are gathered after the optimizer's step."""
    gathered = [torch.zeros(()) for _ in range(job.size)]
    return _ddp(job, job.network(), after=lambda loss: dist.all_gather(gathered, loss))


def objects_after(job: Job) -> Training:
    """As trainers' metrics do: pickled dictionaries, which take two collectives."""
    gathered: list[Any] = [None] * job.size
    return _ddp(job, job.network(), after=lambda loss: dist.all_gather_object(gathered, {"loss": float(loss)}))


def barrier_after(job: Job) -> Training:
    return _ddp(job, job.network(), after=lambda loss: dist.barrier())


def several_optimizers(job: Job) -> Training:
    """One of them cannot be hashed."""

    @dataclass
    class Unhashable(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.01)

    def make(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        weights = [p for p in model.parameters() if p.ndim > 1]
        return torch.optim.AdamW(weights, lr=1e-3), Unhashable([p for p in model.parameters() if p.ndim == 1])

    return _ddp(job, job.network(), make)


def super_step(job: Job) -> Training:
    class Noisy(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] *= 0.999
            return super().step(closure)

    return _ddp(job, job.network(), lambda model: [Noisy(model.parameters(), lr=1e-3)])


def zero_redundancy(job: Job) -> Training:
    """Its step broadcasts every rank's share of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)]

    return _ddp(job, job.network(), make)


def nested(job: Job) -> Training:
    """As in SAM: a climb, a second backward pass, and an inner optimizer that steps."""

    class Climbing(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.inner, self.moved = torch.optim.SGD(self.param_groups, lr=0.01), dict[torch.Tensor, torch.Tensor]()

        @torch.no_grad()
        def climb(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.moved[parameter] = 0.05 * parameter.grad
                parameter.add_(self.moved[parameter])
                parameter.grad = None

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter, by in self.moved.items():
                parameter.sub_(by)
            return self.inner.step()

    ddp = DistributedDataParallel(job.network())
    optimizer = Climbing(ddp.parameters())

    def step(iteration: int) -> None:
        job.loss(ddp, iteration).backward()
        optimizer.climb()
        job.loss(ddp, iteration).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, ddp.parameters)


def gan(job: Job) -> Training:
    """Two models, each with its optimizer, one step of each in an iteration."""
    generator, critic = (DistributedDataParallel(job.network(inner=inner)) for inner in (2, 1))
    of_generator, of_critic = sgd(generator), sgd(critic)
    pad = nn.ConstantPad1d((0, 56), 0.0)

    def step(iteration: int) -> None:
        job.late("load")
        inputs, _ = job.batch(iteration)
        made = pad(generator(inputs))
        (critic(made.detach()).mean() - critic(inputs).mean()).backward()
        of_critic.step()
        of_critic.zero_grad()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        (-critic.module(made).mean()).backward()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        of_generator.step()
        of_generator.zero_grad()

    return Training(step, lambda: [*generator.parameters(), *critic.parameters()])


def local_sgd(job: Job) -> Training:
    """Averages the parameters in every fourth iteration only."""
    model = job.network()
    optimizer = sgd(model)

    def step(iteration: int) -> None:
        job.loss(model, iteration).backward()
        optimizer.step()
        optimizer.zero_grad()
        if iteration % EVERY == EVERY - 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter)
                    parameter.div_(job.size)

    return Training(step, model.parameters)


def diloco(job: Job) -> Training:
    """An outer optimizer takes the mean difference of every fourth iteration as its gradient."""
    model, outer = job.network(), job.network()
    inner_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer_optimizer = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def step(iteration: int) -> None:
        job.loss(model, iteration).backward()
        inner_optimizer.step()
        inner_optimizer.zero_grad()
        if iteration % EVERY == EVERY - 1:
            for ours, theirs in zip(outer.parameters(), model.parameters(), strict=True):
                ours.grad = (ours - theirs).detach()
            difference = flat_gradients(outer)
            dist.all_reduce(difference)
            set_gradients(outer, difference / job.size)
            outer_optimizer.step()
            model.load_state_dict(outer.state_dict())

    return Training(step, outer.parameters)


def second_thread(job: Job) -> Training:
    """Another thread sums metrics in a group of its own, beside the training."""
    group, waiting = dist.new_group(), queue.SimpleQueue[torch.Tensor | None]()

    def work() -> None:
        while (metric := waiting.get()) is not None:
            dist.all_reduce(metric, group=group)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    training = _ddp(job, job.network(), after=lambda loss: waiting.put(loss.clone()))

    def finish() -> None:
        waiting.put(None)
        thread.join()

    return Training(training.step, training.parameters, finish)


def nameless(job: Job) -> Training:
    """As torchft does: a process group that PyTorch has no name for, around a backend made by hand."""
    store = dist.distributed_c10d._get_default_store()
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(dist.distributed_c10d.PrefixStore("own", store), job.rank, job.size)
    group._set_default_backend(kind)
    within = dist.distributed_c10d.PrefixStore("gloo", store)
    backend = dist.ProcessGroupGloo(within, job.rank, job.size, timedelta(seconds=60.0))
    group._register_backend(torch.device("cpu"), kind, backend)

    class Managed(dist.ProcessGroup):
        def allreduce(self, tensors: Any, options: Any) -> dist.Work:  # type: ignore[override]
            return group.allreduce(tensors, options)

    managed, model = Managed(job.rank, job.size), job.network()  # type: ignore[call-arg]
    optimizer = sgd(model)

    def step(iteration: int) -> None:
        job.loss(model, iteration).backward()
        flat = flat_gradients(model)
        managed.allreduce([flat], dist.AllreduceOptions()).wait()
        set_gradients(model, flat / job.size)
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, model.parameters)
