"""Training jobs for the tests of the live agent: small models, real communication, each supported way of training.

:func:`train` runs one way of training several times in the same processes, without an agent and under it, and returns
what must not differ. The functions run on every rank of ``live_jobs.run_ranks``.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, BATCH = 48, 4, 8
ITERATIONS = 48
SHORT = {"quiet_first": 4, "block_iterations": 8, "seed": 1, "cap_share": 0.5}
"""Options of an agent that shall go through all it does within a few dozen iterations."""


@dataclass
class Training:
    """One way of training: what the agent is attached to, one iteration, and the parameters that come out."""

    attached: Any
    step: Callable[[int], torch.Tensor]
    parameters: Callable[[], Iterator[torch.Tensor]]


def device() -> str:
    """Where the job computes: on the GPU under NCCL."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def network() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(1)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(*layers).to(device())


def batch(iteration: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the data of an iteration."""
    random = torch.Generator().manual_seed(1_000_003 * iteration + 1_009 * part + dist.get_rank())
    inputs, labels = torch.randn(BATCH, WIDTH, generator=random), torch.randint(CLASSES, (BATCH,), generator=random)
    return inputs.to(device()), labels.to(device())


def _data_parallel(
    wrap: Callable[[DistributedDataParallel], nn.Module] = lambda model: model,
    *,
    bucket_mb: float = 0.01,
    parts: int = 1,
    optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]] | None = None,
) -> Training:
    """DistributedDataParallel; ``wrap`` puts something around it or into it, ``parts`` accumulates gradients."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=bucket_mb)
    model = wrap(ddp)
    make = optimizers or (lambda module: [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)])
    steppers = make(ddp)

    def step(iteration: int) -> torch.Tensor:
        for optimizer in steppers:
            optimizer.zero_grad()
        loss = torch.zeros(())
        for part in range(parts):
            with ddp.no_sync() if part < parts - 1 else contextlib.nullcontext():
                inputs, labels = batch(iteration, part)
                loss = functional.cross_entropy(model(inputs), labels) / parts
                loss.backward()
        for optimizer in steppers:
            optimizer.step()
        return loss.detach()

    return Training(ddp, step, ddp.parameters)


def _slow() -> Training:
    """Steps that last: a probe is a share of the step, and less than a tenth of a millisecond is left out."""

    def wrap(ddp: DistributedDataParallel) -> nn.Module:
        ddp.register_forward_pre_hook(lambda *_: time.sleep(0.015))
        return ddp

    return _data_parallel(wrap)


def _hooked(hook: Any, state: Any = None, *, bucket_mb: float = 0.01) -> Training:
    def wrap(ddp: DistributedDataParallel) -> nn.Module:
        ddp.register_comm_hook(state, hook)
        return ddp

    return _data_parallel(wrap, bucket_mb=bucket_mb)


def _compressed() -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return _hooked(fp16_compress_hook)


def _power_sgd() -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    # one bucket: the hook's later collectives start in callbacks, which gloo runs in another order on another rank
    return _hooked(powerSGD_hook, state, bucket_mb=1.0)


def _two_optimizers() -> Training:
    def make(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim == 1]
        return torch.optim.AdamW(weights, lr=0.01), torch.optim.SGD(biases, lr=0.1)

    return _data_parallel(optimizers=make)


def _scaled() -> Training:
    """A gradient scaler that skips the steps whose gradients are not finite, as some are made here."""
    ddp = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device(), init_scale=256.0, growth_interval=5)

    def step(iteration: int) -> torch.Tensor:
        optimizer.zero_grad()
        inputs, labels = batch(iteration)
        loss = functional.cross_entropy(ddp(inputs), labels)
        scaler.scale(loss * float("inf") if iteration % 11 == 3 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(ddp, step, ddp.parameters)


def _compiled() -> Training:
    torch._dynamo.reset()
    return _data_parallel(lambda ddp: torch.compile(ddp, backend="aot_eager"), bucket_mb=1.0)


def sharded(model: nn.Sequential | None = None) -> Training:
    """FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = model or network(), init_device_mesh(device(), (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(iteration: int) -> torch.Tensor:
        optimizer.zero_grad()
        inputs, labels = batch(iteration)
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step, lambda: (p.to_local() for p in model.parameters()))


def _plain() -> Training:
    """No wrapper, as in Megatron: activations summed in tensor-parallel pairs, gradients in data-parallel groups."""
    world, rank = dist.get_world_size(), dist.get_rank()
    width = 2 if world % 2 == 0 else 1
    tensor_groups = [dist.new_group(list(range(i, i + width))) for i in range(0, world, width)]
    data_groups = [dist.new_group(list(range(i, world, width))) for i in range(width)]
    tensor_group, data_group = tensor_groups[rank // width], data_groups[rank % width]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(iteration: int) -> torch.Tensor:
        optimizer.zero_grad()
        inputs, labels = batch(iteration)
        hidden = model[:2](inputs)
        shared = hidden.detach().clone()
        dist.all_reduce(shared, group=tensor_group)
        loss = functional.cross_entropy(model[2:](hidden + shared), labels)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        works = [dist.all_reduce(gradient, group=data_group, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()
        optimizer.step()
        dist.barrier()
        return loss.detach()

    return Training(None, step, model.parameters)


WAYS: dict[str, Callable[[], Training]] = {"ddp": _data_parallel, "slow": _slow, "fp16 hook": _compressed}
WAYS |= {"PowerSGD hook": _power_sgd, "accumulation": lambda: _data_parallel(parts=3)}
WAYS |= {"two optimizers": _two_optimizers, "gradient scaler": _scaled, "compiled": _compiled, "fsdp": sharded}
WAYS |= {"plain": _plain}


def digest(training: Training) -> str:
    """A hash of every bit of this rank's parameters."""
    hashed = hashlib.sha256()
    for parameter in training.parameters():
        hashed.update(parameter.detach().contiguous().cpu().numpy().tobytes())
    return hashed.hexdigest()


def delaying_policy() -> Any:
    """Delays every rank but a group's first in every iteration, by up to half the step."""
    from paceenv.policies.rules import Static

    policy = Static({"stagger": (0.0, 0.5)}, "delaying")
    policy.interval_iterations = 4
    return policy


def train(*, way: str, modes: Sequence[str], iterations: int = ITERATIONS, **options: Any) -> list[dict[str, Any]]:
    """Train once for each of ``modes`` from the same start; "" is without an agent, and without importing it.

    Returns the losses, a digest of the final parameters and the agent's summary of each.
    """
    runs = []
    for mode in modes:
        training, agent = WAYS[way](), None
        if mode:
            from paceenv import live

            agent = live.attach(training.attached, policy=delaying_policy(), mode=mode, **SHORT | options)
        losses = [float(training.step(i)) for i in range(iterations)]
        summary = None if agent is None else agent.summary()
        if agent is not None:
            agent.detach()
        runs.append({"mode": mode, "losses": losses, "digest": digest(training), "summary": summary})
    return runs


def attach_and_train(*, without: Sequence[int], iterations: int = 120) -> dict[str, Any] | None:
    """Train with an active agent on every rank but ``without``; returns the agent's summary, if there is one."""
    import paceenv.live as live

    rank = dist.get_rank()
    training = _slow()
    options: dict[str, Any] = SHORT | {"mode": "active", "policy": delaying_policy()}
    agent = None if rank in without else live.attach(training.attached, **options)
    for iteration in range(iterations):
        training.step(iteration)
    if agent is None:
        return None
    agent.detach()
    return agent.summary()
