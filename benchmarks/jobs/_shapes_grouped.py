"""Shapes of jobs that start collectives themselves or in groups: by hand, sharded, tensor and expert parallel, stages.

Libraries that take a while are imported where they are used: eight ranks on two cores import them at once.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs._shape_job import (
    BATCH,
    CLASSES,
    WIDTH,
    Job,
    SlowHere,
    Training,
    flat_gradients,
    set_gradients,
    sgd,
)

PARTS = 4
"""Micro-batches of a pipeline."""


def _by_hand(job: Job, reduce: Callable[[nn.Module], None], model: nn.Module | None = None) -> Training:
    """A step whose gradients ``reduce`` averages."""
    model = model or job.network()
    optimizer = sgd(model)

    def step(iteration: int) -> None:
        job.loss(model, iteration).backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, model.parameters)


def manual(job: Job) -> Training:
    """One all-reduce per parameter, all started before the first is waited for."""

    def reduce(model: nn.Module) -> None:
        for work in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:
            work.wait()

    return _by_hand(job, reduce)


def manual_flat(job: Job) -> Training:
    def reduce(model: nn.Module) -> None:
        flat = flat_gradients(model)
        dist.all_reduce(flat)
        set_gradients(model, flat / job.size)

    return _by_hand(job, reduce)


def small_first(job: Job) -> Training:
    """The norm of the gradients is summed before them, so that this small collective takes the wait."""

    def reduce(model: nn.Module) -> None:
        flat = flat_gradients(model)
        norm = flat.norm()
        dist.all_reduce(norm)
        dist.all_reduce(flat)
        set_gradients(model, flat / job.size / max(float(norm), 1.0))

    return _by_hand(job, reduce)


def coalesced(job: Job) -> Training:
    def reduce(model: nn.Module) -> None:
        with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        manager.wait()

    return _by_hand(job, reduce)


def functional_calls(job: Job) -> Training:
    """What compiled graphs and DTensor call."""
    group = dist.distributed_c10d._get_default_group()

    def reduce(model: nn.Module) -> None:
        summed = functional.all_reduce(flat_gradients(model), "sum", group)
        set_gradients(model, functional.wait_tensor(summed) / job.size)

    return _by_hand(job, reduce)


def parameter_server(job: Job) -> Training:
    """Rank 0 sums the gradients, steps, and broadcasts the parameters."""
    model = job.network()
    optimizer = sgd(model)

    def step(iteration: int) -> None:
        job.loss(model, iteration).backward()
        flat = flat_gradients(model)
        dist.reduce(flat, 0)
        set_gradients(model, flat / job.size)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.broadcast(parameter, 0)

    return Training(step, model.parameters)


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


def experts(job: Job) -> Training:
    """Tokens are exchanged in pairs, gradients reduced over all."""
    pair = job.group([(r, r + 1) for r in range(0, job.size, 2)])

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

    model = Mixture()
    ddp, optimizer = DistributedDataParallel(model), sgd(model)

    def step(iteration: int) -> None:
        job.loss(ddp, iteration).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, ddp.parameters)


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


def tensor_and_data(job: Job) -> Training:
    """Tensor-parallel pairs of neighbours; ranks with the same shard average their gradients."""
    pair = job.group([(r, r + 1) for r in range(0, job.size, 2)])
    data = job.group([range(first, job.size, 2) for first in range(2)])

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)

    return _by_hand(job, reduce, _TensorParallel(job, pair))


def hybrid_sharded(job: Job) -> Training:
    """Gradients are reduced and scattered in pairs and summed across them; parameters are gathered in pairs."""
    pair = job.group([(r, r + 1) for r in range(0, job.size, 2)])
    across = job.group([range(first, job.size, 2) for first in range(2)])
    model = job.network()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    flat = torch.cat([flat, flat.new_zeros(flat.numel() % 2)])
    shard = flat.chunk(2)[job.rank % 2].clone().requires_grad_()
    optimizer = torch.optim.AdamW([shard], lr=1e-3)

    def step(iteration: int) -> None:
        dist.all_gather_into_tensor(flat, shard.detach(), group=pair)
        nn.utils.vector_to_parameters(flat[: sum(p.numel() for p in model.parameters())].clone(), model.parameters())
        model.zero_grad()
        job.loss(model, iteration).backward()
        gradients, shard.grad = torch.zeros_like(flat), torch.empty_like(shard)
        found = flat_gradients(model)
        gradients[: found.numel()] = found
        dist.reduce_scatter_tensor(shard.grad, gradients, group=pair)
        dist.all_reduce(shard.grad, group=across)
        optimizer.step()

    return Training(step, lambda: [shard])


def per_group_steps(job: Job) -> Training:
    """As DeepSpeed ZeRO: no torch optimizer outside, and inside one ``step()`` for each group of parameters."""
    model = job.network()
    weights, rest = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    wanted: list[dict[str, Any]] = [{"params": weights}, {"params": rest, "weight_decay": 0.0}]
    inner = torch.optim.AdamW(wanted, lr=1e-3)
    groups = list(inner.param_groups)

    def step(iteration: int) -> None:
        job.loss(model, iteration).backward()
        flat = flat_gradients(model)
        dist.all_reduce(flat)
        set_gradients(model, flat / job.size)
        for group in groups:
            inner.param_groups = [group]
            inner.step()
        inner.param_groups = groups
        inner.zero_grad()

    return Training(step, model.parameters)


def _local(model: nn.Module) -> Callable[[], Iterable[torch.Tensor]]:
    return lambda: [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


def _fully_sharded(job: Job, shape: tuple[int, ...], names: tuple[str, ...]) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), job.network(inner=2)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(iteration: int) -> None:
        job.loss(model, iteration).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, _local(model))


def fsdp2(job: Job) -> Training:
    return _fully_sharded(job, (job.size,), ("shard",))


def fsdp2_hybrid(job: Job) -> Training:
    return _fully_sharded(job, (job.size // 2, 2), ("replicate", "shard"))


def tensors_distributed(job: Job) -> Training:
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

    return Training(step, _local(model))


def _stage(job: Job) -> nn.Sequential:
    """This rank's stage of a pipeline."""
    torch.manual_seed(job.seed + job.rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), SlowHere(job), nn.Tanh())


def _scheduled(job: Job, schedule: str) -> Training:
    from torch.distributed import pipelining

    job.parts, model = PARTS, _stage(job)
    stage = pipelining.PipelineStage(model, job.rank, job.size, torch.device("cpu"))
    run = getattr(pipelining, schedule)(stage, PARTS, loss_fn=nn.functional.mse_loss)
    optimizer = sgd(model)
    first, last = job.rank == 0, job.rank == job.size - 1

    def step(iteration: int) -> None:
        for _ in range(PARTS):
            job.late("load")
        random = torch.Generator().manual_seed(iteration)
        inputs = torch.randn(PARTS * BATCH, WIDTH, generator=random)
        run.step(*([inputs] if first else []), **({"target": torch.zeros_like(inputs)} if last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, model.parameters)


def pipeline_1f1b(job: Job) -> Training:
    return _scheduled(job, "Schedule1F1B")


def pipeline_gpipe(job: Job) -> Training:
    return _scheduled(job, "ScheduleGPipe")


def _pass_on(
    model: nn.Module, iteration: int, stage: int, before: int | None, after: int | None, shape: tuple[int, int]
) -> None:
    """One micro-batch through this stage and its gradient back, by plain sends and receives."""
    if before is None:
        random = torch.Generator().manual_seed(1009 * iteration + stage)
        inputs = torch.randn(shape, generator=random)
    else:
        dist.recv(inputs := torch.empty(shape), before)
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


def pipeline_by_hand(job: Job) -> Training:
    model = _stage(job)
    optimizer = sgd(model)
    before = job.rank - 1 if job.rank else None
    after = job.rank + 1 if job.rank < job.size - 1 else None

    def step(iteration: int) -> None:
        job.late("load")
        _pass_on(model, iteration, job.rank, before, after, (BATCH, WIDTH))
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, model.parameters)


def three_dimensions(job: Job) -> Training:
    """Megatron's groups: tensor-parallel pairs, two stages, and the rest data parallel."""
    half = job.size // 2
    pair = job.group([(r, r + 1) for r in range(0, job.size, 2)])
    data = job.group([range(half * stage + first, half * (stage + 1), 2) for stage in range(2) for first in range(2)])
    model = _TensorParallel(job, pair, WIDTH)
    optimizer, first = sgd(model), job.rank < half
    before, after = (None, job.rank + half) if first else (job.rank - half, None)

    def step(iteration: int) -> None:
        job.late("load")
        _pass_on(model, iteration, job.rank // 2, before, after, (BATCH, WIDTH))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, model.parameters)
