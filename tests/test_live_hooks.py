"""Nothing of the agent raises into the job: one guarded way in, and every function inside may raise."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import io
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from paceenv import live
from paceenv.live.observe.hooks import Hooks
from paceenv.policies.rules import Static

LIVE = Path(__file__).parent.parent / "live"
INSIDE = (
    *("loop", "record.history"),
    *(f"observe.{n}" for n in ("backward", "collective_calls", "step", "log", "optimizer_steps", "stamps", "steps")),
    *(f"decide.{n}" for n in ("actuator", "blocks", "control", "deferral", "experiment", "guard", "modes", "pacer")),
)
"""Modules whose functions run in the job's way, or on the thread beside it."""
EXEMPT = {"__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__"}


def _functions() -> Iterator[tuple[str, Any, str]]:
    """Every function of those modules: its name, its owner, and the owner's attribute."""
    for name in INSIDE:
        module = importlib.import_module(f"paceenv.live.{name}")
        for key, thing in vars(module).items():
            if getattr(thing, "__module__", "") != module.__name__:
                continue
            if isinstance(thing, FunctionType):
                yield f"{name}.{key}", module, key
            elif inspect.isclass(thing) and not getattr(thing, "_is_protocol", False):
                for method, function in vars(thing).items():
                    if isinstance(function, (FunctionType, property)) and method not in EXEMPT:
                        yield f"{name}.{key}.{method}", thing, method


FUNCTIONS = {name: (owner, attribute) for name, owner, attribute in _functions()}
DRAWN = random.Random(0).sample(list(FUNCTIONS), len(FUNCTIONS) // 5)
"""Those of the quick tests; the slow ones have the rest."""


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@functools.cache
def _plain() -> str:
    return _job(None)


def _job(mode: str | None) -> str:
    """Train a little of everything; the hash of the parameters."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.0))
    options: dict[str, Any] = {"quiet_first": 0, "block_iterations": 6}
    agent = None
    if mode is not None:
        policy = Static({"slack": (0.0, 0.4)})
        policy.interval_iterations = 2
        agent = live.attach(optimizer, mode=mode, policy=policy, **options)
    for i in range(6):
        optimizer.zero_grad()
        model(torch.ones(3, 8) * i).sum().backward()
        tensor = torch.ones(4)
        distributed.all_reduce(tensor)
        work = distributed.all_gather([torch.empty(4)], tensor, async_op=True)
        assert work is not None
        work.wait()
        assert functional.all_reduce(tensor, "sum", distributed.group.WORLD).tolist() == [1.0] * 4
        distributed.barrier()
        if i == 3:
            torch.save(model.state_dict(), io.BytesIO())
        other.step()
        optimizer.step()
        if agent is not None and i == 4:
            with agent.mark("evaluation"):
                agent.tick()
            agent.summary()
    if agent is not None:
        agent.detach()
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    "name", [name if name in DRAWN else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS]
)
def test_any_function_of_ours_may_raise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute = FUNCTIONS[name]
    plain = _plain()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"broken on purpose: {name}")

    monkeypatch.setattr(owner, attribute, property(broken) if isinstance(vars(owner)[attribute], property) else broken)
    assert [_job(mode) for mode in ("observe", "active")] == [plain] * 2


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_wrapped_function_returns_and_raises_what_it_did(place: str) -> None:
    class Owner:
        def method(self, value: int) -> int:
            if value < 0:
                raise KeyError(value)
            return 2 * value

    def broken(*_: Any) -> Any:
        raise RuntimeError("ours")

    errors: list[BaseException] = []
    hooks = Hooks(errors.append)
    hooks.active = True
    before = broken if place == "before" else lambda args, kwargs: args
    hooks.around(Owner, "method", before, broken, broken)
    assert Owner().method(3) == 6
    with pytest.raises(KeyError):
        Owner().method(-1)
    assert len(errors) == 2
    hooks.restore()
    assert Owner.method.__name__ == "method"
    assert not hasattr(Owner.method, "__wrapped__")


def test_a_wrapped_function_of_a_module_can_be_pickled() -> None:
    """A script gives ``torch.save`` to another process, which finds its own by the name."""
    import torch.distributed.checkpoint as checkpoint

    agent = live.attach()
    owners = {(owner, name) for owner, name, *_ in agent._loop.hooks._replaced if inspect.ismodule(owner)}
    assert {(torch, "save"), (checkpoint, "save"), (functional, "wait_tensor")} <= owners
    pickled = {(owner, name): pickle.dumps(getattr(owner, name)) for owner, name in owners}
    agent.detach()
    for (owner, name), content in pickled.items():
        assert pickle.loads(content) is getattr(owner, name)


def test_only_the_hooks_touch_what_belongs_to_others() -> None:
    """No other module registers a hook, or sets an attribute by name: by construction, every entry is guarded."""
    guilty = []
    for path in sorted(LIVE.rglob("*.py")):
        if path.name == "hooks.py" or "testbed" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "setattr" or (name.startswith("register_") and name != "register_at_fork"):
                guilty.append(f"{path.name}:{node.lineno}: {name}")
    assert guilty == []


def test_what_only_watches_is_taken_out_while_nothing_is_watched() -> None:
    class Owner:
        def method(self) -> int:
            return 3

    plain, seen = vars(Owner)["method"], list[str]()
    hooks, registered = Hooks(pytest.fail), dict[int, Any]()
    handle = type("Handle", (), {"remove": lambda self: registered.clear()})
    hooks.active = True
    hooks.around(Owner, "method", lambda args, kwargs: args, lambda token, result: seen.append("call"), always=False)
    hooks.register(lambda entry: registered.update({0: entry}) or handle(), lambda: seen.append("node"), always=False)
    for watching in (False, True, False):
        hooks.watch(watching)
        Owner().method()
        assert bool(registered) == watching
    assert seen == ["call"], "the first call that was passed on told that there are any"
    assert vars(Owner)["method"] is plain
    other = Owner.method = lambda self: 4  # another library comes meanwhile
    for watching in (True, False):
        hooks.watch(watching)
        assert vars(Owner)["method"] is other
    hooks.restore()
    assert Owner().method() == 4
    assert not registered
