"""One tick per iteration, whatever an optimizer does inside its step, and whatever kind of object it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceenv import live
from paceenv.live.agent import Agent

ROUNDS = 6


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = live.attach()
    yield agent
    agent.detach()


def parameter(size: int = 1) -> nn.Parameter:
    made = nn.Parameter(torch.ones(size))
    made.grad = torch.full((size,), 0.5)
    return made


class Subclassed(torch.optim.SGD):
    """An optimizer that makes two steps of another."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


class SharpnessAware(torch.optim.Optimizer):
    """As SAM does it: up, down, and the step of a base optimizer, in one step."""

    def __init__(self, parameters: list[nn.Parameter], base: type[torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = base(self.param_groups, lr=0.1)  # type: ignore[call-arg]
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        for up in (0.01, -0.01):
            for p in self.param_groups[0]["params"]:
                p.data.add_(up)
        self.base.step()


@dataclass(eq=True)
class Unhashable(torch.optim.SGD):  # type: ignore[misc]
    """A dataclass with ``eq``: neither hashable nor comparable, as ``==`` compares tensors."""

    momenta: Any

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.momenta = torch.ones(3)


def iterations(agent: Agent) -> int:
    agent._loop.catch_up()
    return agent._loop.iterations


OPTIMIZERS: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "subclass": lambda: Subclassed([parameter()], lr=0.1),
    "SAM": lambda: SharpnessAware([parameter()], torch.optim.SGD),
    "unhashable": lambda: Unhashable([parameter()]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_one_tick_whatever_is_inside(name: str, agent: Agent) -> None:
    optimizer = OPTIMIZERS[name]()
    optimizer.step()  # the very first tick only finds out where it is
    before = iterations(agent)
    for _ in range(ROUNDS):
        optimizer.step()
    assert iterations(agent) - before == ROUNDS
    assert agent.state == "observe"


def test_an_inner_optimizer_that_was_first_alone_makes_no_ticks_later(agent: Agent) -> None:
    """A warm-up of the base optimizer makes it the owner; then its steps are inside those of the outer one."""
    optimizer = SharpnessAware([parameter()], torch.optim.SGD)
    for _ in range(3):
        optimizer.base.step()
    before = iterations(agent)
    for _ in range(3 * 16):
        optimizer.step()
    assert 48 - 16 <= iterations(agent) - before <= 48


def test_the_largest_of_several_optimizers_makes_the_ticks(agent: Agent) -> None:
    """A small one that only some ranks run, now and then, and first, would have them count apart."""
    small, large = Unhashable([parameter(2)]), Unhashable([parameter(3)])
    for k in range(ROUNDS):
        if k % 4 == 0:
            small.step()
        large.step()
    assert iterations(agent) == ROUNDS


@pytest.mark.parametrize("given", [None, 1])
def test_several_optimizers_make_one_tick_an_iteration(given: int | None) -> None:
    optimizers = [torch.optim.SGD([parameter()], lr=0.1) for _ in range(2)]
    agent = live.attach(None if given is None else optimizers[given])
    for _ in range(1 + ROUNDS):
        optimizers[0].step()
        optimizers[1].step()
    assert iterations(agent) == ROUNDS
    for _ in range(64):
        optimizers[1 - (given or 0)].step()
    # the other takes over after 16 steps without the first, the last round's among them
    assert iterations(agent) - ROUNDS == (50 if given is None else 49)
    agent.detach()


def test_the_agent_keeps_no_optimizer_alive(agent: Agent) -> None:
    optimizers = [torch.optim.SGD([parameter(k)], lr=0.1) for k in (3, 2)]
    for optimizer in optimizers:
        optimizer.step()
    references = [weakref.ref(optimizer) for optimizer in optimizers]
    del optimizer, optimizers
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    torch.optim.SGD([parameter()], lr=0.1).step()
    assert agent.state == "observe"
