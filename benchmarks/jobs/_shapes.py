"""Shapes of jobs, one a function: DDP in its variants, sharded, by hand, in groups, in stages; each returns its step.

Libraries that take a while are imported where they are used: eight ranks on two cores import them at once.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs._shape_job import BATCH, CLASSES, WIDTH, Job, SlowHere, Step

EVERY = 4
"""Micro-batches of an accumulated gradient or of a pipeline."""


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _step(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    reduce: Callable[[nn.Module], None] = lambda model: None,
) -> Step:
    """A step; ``reduce`` averages the gradients, where the model does not."""
    stepper = optimizer or _sgd(model)

    def step(iteration: int) -> None:
        loss = job.loss(model, iteration)
        loss.backward()
        reduce(model)
        stepper.step()
        stepper.zero_grad()

    return step


def ddp(job: Job) -> Step:
    return _step(job, DistributedDataParallel(job.network()))


def accumulation(job: Job) -> Step:
    model, job.parts = DistributedDataParallel(job.network()), EVERY
    optimizer = _sgd(model)

    def step(iteration: int) -> None:
        for part in range(EVERY):
            with contextlib.nullcontext() if part == EVERY - 1 else model.no_sync():
                job.loss(model, iteration, part, EVERY).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def small_first(job: Job) -> Step:
    """The norm of the gradients is summed before them, so that this small collective takes the wait."""

    def reduce(model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        norm = flat.norm()
        dist.all_reduce(norm)
        dist.all_reduce(flat)
        flat /= job.size * max(float(norm), 1.0)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    return _step(job, job.network(), reduce=reduce)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(tokens)
        dist.all_to_all_single(received, tokens.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _AllToAll.apply(gradients[0], ctx.group), None


def experts(job: Job) -> Step:
    """Tokens are exchanged in pairs, gradients reduced over all."""
    pair = _pairs(job)

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around, self.expert = job.network(inner=2), nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for place, layer in enumerate(self.around):
                if place == 4:
                    sent = _AllToAll.apply(hidden, pair)
                    hidden = hidden + _AllToAll.apply(self.expert(sent), pair)
                hidden = layer(hidden)
            return hidden

    return _step(job, DistributedDataParallel(Mixture()))


def _pairs(job: Job) -> dist.ProcessGroup:
    """Of neighbours."""
    return job.group([(r, r + 1) for r in range(0, job.size, 2)])


def _across(job: Job) -> dist.ProcessGroup:
    """Every second rank."""
    return job.group([range(first, job.size, 2) for first in range(2)])


class _Summed(torch.autograd.Function):
    """Sums over a tensor-parallel group in the forward pass, or in the backward pass (``back``)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup, back: bool) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        hidden = hidden.clone()
        if not back:
            dist.all_reduce(hidden, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].clone()
        if ctx.back:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class _TensorParallel(nn.Module):
    """Two pairs of a column-wise and a row-wise layer, as Megatron splits them, and a place of slowness between."""

    def __init__(self, job: Job, group: dist.ProcessGroup, last: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(job.seed + dist.get_rank(group))
        share, self.group, self.slow = WIDTH // dist.get_world_size(group), group, SlowHere(job)
        self.columns = nn.ModuleList(nn.Linear(WIDTH, share) for _ in range(2))
        self.rows = nn.ModuleList(nn.Linear(share, width, bias=False) for width in (WIDTH, last))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for place, (column, row) in enumerate(zip(self.columns, self.rows, strict=True)):
            if place:
                hidden = self.slow(hidden)
            whole = _Summed.apply(hidden, self.group, True)
            hidden = _Summed.apply(row(torch.tanh(column(whole))), self.group, False)
        return hidden


def tensor_and_data(job: Job) -> Step:
    """Tensor-parallel pairs of neighbours; ranks with the same shard average their gradients."""
    pair, data = _pairs(job), _across(job)

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)

    return _step(job, _TensorParallel(job, pair), reduce=reduce)


def _fully_sharded(job: Job, shape: tuple[int, ...], names: tuple[str, ...]) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), job.network(inner=2)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(job, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def fsdp2(job: Job) -> Step:
    return _fully_sharded(job, (job.size,), ("shard",))


def fsdp2_hybrid(job: Job) -> Step:
    return _fully_sharded(job, (job.size // 2, 2), ("replicate", "shard"))


def tensors_distributed(job: Job) -> Step:
    """Tensor parallel with DTensor in pairs; more ranks shard the rest with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (job.size // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(job.seed)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], SlowHere(job), layers[2], nn.Tanh(), nn.Linear(WIDTH, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    if job.size > 2:
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(iteration: int) -> None:
        job.late("load")
        random = torch.Generator().manual_seed(1009 * iteration + job.rank // 2)  # a pair has the same batch
        model(torch.randn(BATCH, WIDTH, generator=random)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _stage(job: Job) -> nn.Sequential:
    """This rank's stage of a pipeline."""
    torch.manual_seed(job.seed + job.rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), SlowHere(job), nn.Tanh())


def pipeline_1f1b(job: Job) -> Step:
    from torch.distributed import pipelining

    job.parts, model = EVERY, _stage(job)
    stage = pipelining.PipelineStage(model, job.rank, job.size, torch.device("cpu"))
    run = pipelining.Schedule1F1B(stage, EVERY, loss_fn=nn.functional.mse_loss)
    optimizer = _sgd(model)

    def step(iteration: int) -> None:
        for _ in range(EVERY):
            job.late("load")
        inputs = torch.randn(EVERY * BATCH, WIDTH, generator=torch.Generator().manual_seed(iteration))
        last: Any = {"target": torch.zeros_like(inputs)} if job.rank == job.size - 1 else {}
        run.step(*([] if job.rank else [inputs]), **last)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _passed_on(
    job: Job,
    model: nn.Module,
    before: int | None,
    after: int | None,
    reduce: Callable[[nn.Module], None] = lambda model: None,
) -> Step:
    """One micro-batch through this stage and its gradient back, by plain sends and receives."""
    optimizer = _sgd(model)

    def step(iteration: int) -> None:
        job.late("load")
        if before is None:
            random = torch.Generator().manual_seed(1009 * iteration + job.rank // 2)
            inputs = torch.randn(BATCH, WIDTH, generator=random)
        else:
            dist.recv(inputs := torch.empty(BATCH, WIDTH), before)
        outputs = model(inputs.requires_grad_())
        if after is None:
            outputs.square().mean().backward()
        else:
            dist.send(outputs.detach(), after)
            dist.recv(gradient := torch.empty_like(outputs), after)
            outputs.backward(gradient)
        if before is not None:
            assert inputs.grad is not None
            dist.send(inputs.grad, before)
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline_by_hand(job: Job) -> Step:
    before = job.rank - 1 if job.rank else None
    after = job.rank + 1 if job.rank < job.size - 1 else None
    return _passed_on(job, _stage(job), before, after)


def three_dimensions(job: Job) -> Step:
    """Megatron's groups: tensor-parallel pairs, two stages, and the rest data parallel."""
    half = job.size // 2
    pair = _pairs(job)
    data = job.group([range(half * stage + first, half * (stage + 1), 2) for stage in range(2) for first in range(2)])
    before, after = (None, job.rank + half) if job.rank < half else (job.rank - half, None)

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)

    return _passed_on(job, _TensorParallel(job, pair, WIDTH), before, after, reduce)
