"""The reduction of a DDP model as one operation, from the end of this rank's gradients to its own end, one process.

A communication hook makes the reduction last: its future is done some time after the last bucket is ready.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paceenv import live
from paceenv.live.agent import Agent

LASTS_S = 0.15
BACKWARD_S = 0.03


@pytest.fixture
def agent() -> Iterator[Agent]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    agent = live.attach(quiet_first=0)
    yield agent
    agent.detach()
    gc.collect()  # a reducer that outlives its process group aborts the process
    distributed.destroy_process_group()


class Slow(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(BACKWARD_S)
        return gradient


class Model(nn.Module):
    """Three layers, each slow in the backward pass; of two heads one is used."""

    def __init__(self, *, reentrant: bool | None = None, heads: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(heads))
        self.reentrant, self.head = reentrant, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = Slow.apply(layer(x))
            else:
                x = checkpoint(lambda x, layer=layer: Slow.apply(layer(x)), x, use_reentrant=self.reentrant)
        return self.heads[self.head](x)


def slow_reduction(state: dict[str, float], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A bucket that is reduced ``LASTS_S`` after it was ready."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def done() -> None:
        time.sleep(LASTS_S)
        future.set_result(bucket.buffer())

    state["ready_s"] = time.perf_counter()
    threading.Thread(target=done).start()
    return future


def reductions(agent: Agent) -> list[tuple[float, float]]:
    """Entry and exit of all reductions since the last call, after what is inside another one was left out."""
    loop = agent._loop
    loop.log.tick()
    rows = [
        (kind, start, end)
        for kind, start, end in loop.log.over.popleft()[1] or ()
        if loop.log.kinds[kind].op == "all_reduce"
    ]
    return [(start, end) for _, start, end in loop.steps._from_outside(rows)]


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "reentrant checkpointing": ({"reentrant": True}, {}),
    "reentrant checkpointing, static graph": ({"reentrant": True}, {"static_graph": True}),
    "unused parameters, the other head": ({"heads": 2}, {"find_unused_parameters": True}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reduction_is_one_operation_with_the_right_end(shape: str, agent: Agent) -> None:
    of_model, of_ddp = SHAPES[shape]
    module = Model(**of_model)
    module.head = int("other head" in shape)
    model, state = DistributedDataParallel(module, **of_ddp), dict[str, float]()
    model.register_comm_hook(state, lambda state, bucket: slow_reduction(state, bucket))
    inputs = torch.ones(3, 8, requires_grad=True)  # reentrant checkpointing needs one
    if model.static_graph:  # whose first pass only finds out what is used, and reduces afterwards, before our callback
        model(inputs).sum().backward()
    for _ in range(2):
        reductions(agent)
        model(inputs).sum().backward()
        ended_s = time.perf_counter()
        found = reductions(agent)
        blocking = [(start, end) for start, end in found if end - start > 0.2 * LASTS_S]
        assert len(blocking) == 1, found
        [(start, end)] = blocking
        assert start >= state["ready_s"] - 0.5 * BACKWARD_S  # with all gradients of this rank
        assert end - start >= 0.8 * LASTS_S
        assert end >= state["ready_s"] + LASTS_S
        assert end <= ended_s
        assert sum(end - start for start, end in found) < end - start + 0.2 * LASTS_S
    assert agent.state == "observe"
