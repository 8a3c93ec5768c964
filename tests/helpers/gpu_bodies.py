"""Training jobs for the tests on a GPU: streams, coalesced and functional collectives, CUDA graphs, FSDP2, costs.

They run without a GPU, too, where a stream or a graph is nothing: so most of their code is tested where there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_bodies
import torch
import torch.distributed as dist
from live_bodies import WIDTH, Training, batch, device, network, sharded
from torch import nn
from torch.nn import functional

MANY_LAYERS = 36
"""Some 110 collectives: each layer is gathered twice and its gradients are scattered once in every iteration."""


def _averaged(average: Callable[[list[torch.Tensor]], None], *, graphed: bool = False) -> Training:
    """A model whose gradients ``average`` sums up over the ranks, in a graph of the whole step where asked for."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = batch(0)
    steps = _Graphed(lambda: _loss(model, inputs, labels)) if graphed else None

    def step(iteration: int) -> torch.Tensor:
        new_inputs, new_labels = batch(iteration)
        inputs.copy_(new_inputs)
        labels.copy_(new_labels)
        optimizer.zero_grad(set_to_none=False)
        loss = steps() if steps is not None else _loss(model, inputs, labels)
        average([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        return loss.detach()

    return Training(optimizer, step, model.parameters)


def _loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


class _Graphed:
    """Calls a function; from the sixth call on it replays a graph, captured while the agent is at work."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function, self._calls = function, 0
        self._graph: Any = None
        self._result = torch.zeros(())

    def __call__(self) -> torch.Tensor:
        self._calls += 1
        if device() != "cuda" or self._calls < 3:
            return self._function()
        if self._calls < 6:  # as torch.cuda.graph asks for: warmed up on the stream of a capture
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = self._function()
            torch.cuda.current_stream().wait_stream(side)
            return result
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):  # mode "global": a query by any other thread would break it
                self._result = self._function()
        self._graph.replay()
        return self._result


def _reduced(gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient)


def _side_stream() -> Training:
    """Collectives on a stream of their own, as sharded training starts them."""
    side = torch.cuda.Stream() if device() == "cuda" else None

    def average(gradients: list[torch.Tensor]) -> None:
        if side is None:
            _reduced(gradients)
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _reduced(gradients)
        torch.cuda.current_stream().wait_stream(side)
        dist.all_reduce(gradients[0])

    return _averaged(average)


def _coalesced() -> Training:
    """Collectives that are started together: several all-reduces as one, and on NCCL whatever it is."""

    def average(gradients: list[torch.Tensor]) -> None:
        half = len(gradients) // 2
        with dist._coalescing_manager():
            _reduced(gradients[:half])
        with dist._coalescing_manager(async_ops=True) as together:
            _reduced(gradients[half:])
        together.wait()
        if device() == "cuda":
            with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as together:
                for gradient in gradients:
                    dist.broadcast(gradient, src=0, async_op=True)
            together.wait()

    return _averaged(average)


def _functional() -> Training:
    """Functional collectives, as DTensor starts them; and a DTensor that is gathered."""
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    sharded = distribute_tensor(torch.ones(8, 8, device=device()), mesh, [Shard(0)])

    def average(gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            gradient.copy_(collectives.all_reduce(gradient, "sum", dist.group.WORLD))
        gradients[0].mul_(sharded.full_tensor().mean())

    return _averaged(average)


def _graphed() -> Training:
    """Forward and backward pass as a CUDA graph, the reduction outside."""
    return _averaged(_reduced, graphed=True)


def _graphed_collectives() -> Training:
    """A collective inside the graph, which no Python sees when it is replayed, and one outside."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = batch(0)

    def both() -> torch.Tensor:
        loss = _loss(model, inputs, labels)
        _reduced([p.grad for p in model.parameters() if p.grad is not None])
        return loss

    graphed = _Graphed(both)

    def step(iteration: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = graphed().detach().clone()
        dist.all_reduce(loss)
        optimizer.step()
        return loss

    return Training(optimizer, step, model.parameters)


def _many_collectives() -> Training:
    """FSDP2 with hundreds of collectives in an iteration."""
    torch.manual_seed(1)
    return sharded(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(MANY_LAYERS)]).to(device()))


MORE_WAYS: dict[str, Callable[[], Training]] = {"side stream": _side_stream, "coalesced": _coalesced}
MORE_WAYS |= {"functional": _functional, "graph": _graphed, "graph with collectives": _graphed_collectives}
MORE_WAYS |= {"FSDP2, many collectives": _many_collectives}


def train(**parameters: Any) -> list[dict[str, Any]]:
    """:func:`live_bodies.train` for the ways of this module."""
    live_bodies.WAYS.update(MORE_WAYS)
    return live_bodies.train(**parameters)


def planted(*, way: str, late: int, place: str, late_s: float, iterations: int, out: str) -> dict[str, Any]:
    """What the agent says of this rank, of which rank ``late`` is late in each iteration: its loader, or its device."""
    from paceenv import live
    from paceenv.live.record.findings import find, with_verdicts
    from paceenv.live.record.run_folder import RunFolder

    live_bodies.WAYS.update(MORE_WAYS)
    training, mine = live_bodies.WAYS[way](), dist.get_rank() == late
    cycles = int(late_s * _rate_hz()) if device() == "cuda" else 0
    agent = live.attach(training.attached, mode="observe", out=out)
    for iteration in range(iterations):
        if mine and place == "device" and cycles:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        elif mine and place:
            time.sleep(late_s)
        loss = training.step(iteration)
        if place == "loader":
            float(loss)  # as a script that prints it; otherwise a device that is behind its host hides a late loader
    agent.detach()
    dist.barrier()  # all have written their last status
    run = RunFolder(Path(out))
    statuses = run.statuses(run.latest())
    summary = with_verdicts(statuses, find(statuses))[dist.get_rank()]
    return {"arrival": summary["arrival"], "parts": summary["parts"], "overhead": summary["overhead"]}


def held_back() -> tuple[str, int, bool]:
    """A reduction under option ``defer``: its work, how many were held, and whether the result is right."""
    from paceenv import live

    agent = live.attach(defer="all_reduce")
    agent._loop.deferral.hold_s = 1.0
    tensor = torch.ones(1 << 10, device=device())
    work: Any = dist.all_reduce(tensor, async_op=True)
    work.wait()
    agent.detach()
    return type(work).__name__, agent._loop.deferral.late.count, bool((tensor == 1.0).all())


def _rate_hz() -> float:
    """Cycles per second of a spin on this device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)  # type: ignore[no-untyped-call]
    start.record()
    torch.cuda._sleep(10**7)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    return 10**7 / (1e-3 * start.elapsed_time(end))
