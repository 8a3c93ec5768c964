"""The sources on real PyTorch, one process: what they see, and that PyTorch is as before once they are gone."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, on_device
from live_samples import ATTEMPT, snapshot
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from paceenv import live
from paceenv.live.agent import Agent
from paceenv.live.identity import Identity
from paceenv.live.log_once import described
from paceenv.live.observe.stamps import DeviceStamps
from paceenv.live.record.course import Course, Standstill
from paceenv.live.record.run_folder import write_status


@pytest.fixture(scope="module", autouse=True)
def _old_objects_stay() -> Iterator[None]:
    """What was there before is not looked at whenever :func:`group` collects garbage, which it does a hundred times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # a reducer that outlives its process group aborts the process
    distributed.destroy_process_group()


@pytest.fixture
def agent(group: None) -> Iterator[Agent]:
    agent = live.attach(quiet_first=0)
    yield agent
    agent.detach()


def test_an_exit_is_noted_and_void_once_the_script_goes_on(agent: Agent) -> None:
    agent.tick()
    try:
        raise ValueError("of the script")
    except ValueError:
        with pytest.raises(SystemExit):
            sys.exit(3)
    noted, ticks = agent._exit
    assert (noted.code, ticks) == (3, agent._loop.log.count)
    assert isinstance(noted.__context__, ValueError)
    assert described(noted, of_script=True).startswith("SystemExit: 3 (test_live_sources.py:")
    agent.tick()
    assert agent._loop.log.count == ticks + 1
    agent.detach()
    assert not hasattr(sys.exit, "__wrapped__")


def _taken(agent: Agent) -> tuple[list[tuple[str, int]], str]:
    """What was seen since the last call, as an iteration that ends now: kinds with bytes, and its mark."""
    loop = agent._loop
    loop.log.tick()
    _, rows, mark, *_ = loop.log.over.popleft()
    kinds = [loop.log.kinds[kind] for kind, _, _ in rows or ()]
    assert all(end >= start for _, start, end in rows or ())
    return [(kind.op, kind.bytes) for kind in kinds], mark


def _seen(agent: Agent) -> list[tuple[str, int]]:
    return _taken(agent)[0]


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)))


GRADIENT_BYTES = 4 * (8 * 4 + 4 + 4 * 2 + 2)


def test_detach_restores_everything(group: None) -> None:
    hooks, agent = len(_global_optimizer_post_hooks), live.attach()
    # some are replaced twice: what was there before the first time
    replaced = {(owner, name): before for owner, name, before, _ in reversed(agent._loop.hooks._replaced)}
    assert {(distributed.ProcessGroup, "allreduce"), (distributed.Work, "wait")} < set(replaced)
    assert not any(vars(owner)[name] is before for (owner, name), before in replaced.items())
    agent.detach()
    assert all(vars(owner)[name] is before for (owner, name), before in replaced.items())
    assert len(_global_optimizer_post_hooks) == hooks


def test_collectives_are_seen_with_kind_and_bytes(agent: Agent) -> None:
    tensor = torch.ones(16)
    distributed.all_reduce(tensor)
    distributed.barrier()
    distributed.all_gather([torch.empty(16)], tensor)
    work = distributed.broadcast(tensor, 0, async_op=True)
    assert _seen(agent) == [("all_reduce", 64), ("barrier", 0), ("all_gather", 64)]
    assert work is not None
    work.wait()
    assert _seen(agent) == [("broadcast", 64)]


@pytest.mark.parametrize("hook", [None, fp16_compress_hook])
@pytest.mark.parametrize("first", ["model", "agent"])
def test_the_reduction_of_a_ddp_model_is_one_operation(group: None, hook: Any, first: str) -> None:
    model = _model() if first == "model" else None
    agent = live.attach(quiet_first=0)
    model = model or _model()
    if hook is not None:
        model.register_comm_hook(None, hook)
    _seen(agent)
    model(torch.ones(3, 8)).sum().backward()
    assert _seen(agent) == [("all_reduce", GRADIENT_BYTES)]
    assert len(model._comm_hooks) == (hook is not None)
    agent.detach()
    model(torch.ones(3, 8)).sum().backward()
    assert _seen(agent) == []
    del model


def test_steps_that_nobody_accounts_for_are_bounded_and_counted(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The housekeeping thread hangs in a file system, and the training thread takes iterations in."""
    monkeypatch.setattr("paceenv.live.record.history.MAX_WAITING", 10)
    loop = agent._loop
    with loop.taking:
        for _ in range(30):
            distributed.all_reduce(torch.ones(1))
            agent.tick()
        loop._read()
        assert 0 < len(loop.history.waiting) <= 10
        assert loop.history.left_out > 10
    assert agent.summary()["trace"]["dropped"] == loop.history.left_out


def test_steps_have_stopped_only_for_an_agent_that_sees_them(
    group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agent = live.attach(mode="observe")
    told: list[str] = []
    monkeypatch.setattr("paceenv.live.reporting.background", lambda name, tell: told.append(tell.args[0]))
    try:
        for _ in range(3):
            distributed.all_reduce(torch.ones(1))
            agent.tick()
        assert agent.summary()["groups"]["0"]["started"] == 2, "since the first tick"  # and meets the newest iteration
        time.sleep(0.02)
        assert agent.summary()["still_s"] >= 0.02
        write_status(tmp_path, snapshot(0))
        own = agent.summary() | {"attempt": ATTEMPT}
        stands = lambda course: Standstill(31.0, [], f"no step has ended for {len(told)} s")  # noqa: E731
        monkeypatch.setattr(Course, "_find_standstill", stands)
        for iterations, still_s in ((4, 41.0), (4, 43.0), (5, 0.0), (5, 41.0)):
            agent._output._tell_standstill(tmp_path, own | {"iterations": iterations, "still_s": still_s})
        assert [said[-11:] for said in told] == ["ded for 0 s", "steps go on", "ded for 2 s"], (
            "once for each standstill"
        )
        distributed.all_reduce(torch.ones(1))
        assert agent.summary()["still_s"] < 0.02, "an evaluation, perhaps"
        distributed.monitored_barrier()
        assert agent.summary()["groups"]["0"]["started"] is None, "it counts otherwise on the first rank"
        agent._loop.detach("stopped by the kill file")
        assert agent.summary()["still_s"] == 0.0
    finally:
        agent.detach()


def test_a_check_that_hangs_delays_nothing_and_holds_up_no_other_check(
    group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    over, live_at, files = threading.Event(), "paceenv.live", {"out": tmp_path / "out", "kill_file": tmp_path / "kill"}
    monkeypatch.setattr(f"{live_at}.reporting.KILL_FILE_S", 0.05)
    monkeypatch.setattr(f"{live_at}.reporting.poll_s", lambda ranks: 0.05)
    monkeypatch.setattr(f"{live_at}.control_file.ControlReader.look", lambda self, final: over.wait(60.0))
    agent = live.attach(mode="canary", policy="static:slack=0.02/0.4", **files)
    loop = agent._loop

    def comes(what: Callable[[], bool]) -> bool:
        until_s = time.monotonic() + 60.0
        while not what() and time.monotonic() < until_s:
            agent.tick()
            time.sleep(0.01)
        return what()

    try:
        agent.tick()
        loop.identity = Identity(agents=1)
        monkeypatch.setattr(f"{live_at}.loop.MAX_SILENCE_S", 60.0)
        assert loop._may_delay()
        monkeypatch.setattr(f"{live_at}.loop.MAX_SILENCE_S", 1.0)
        said = "the check of control.json is overdue; nothing is delayed until it succeeds"
        assert comes(lambda: not loop._may_delay() and any(said == e["text"] for e in loop.messages.events))
        files["kill_file"].touch()
        assert comes(lambda: agent.state == "off")
        assert "stopped by the kill file" in agent.reason
        over.set()
        assert comes(loop._may_delay)
    finally:
        over.set()
        agent.detach()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_optimizer_ticks_and_a_compiled_model_is_followed(agent: Agent) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def reduced(x: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x)
        return x + 1.0

    assert reduced(torch.ones(4)).tolist() == [2.0] * 4
    plain = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(3, 8)).sum().backward()
    compiled_step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        compiled_step()
    agent._loop.catch_up()
    assert agent._loop.iterations == 2  # the very first tick only finds out where it is
    model = torch.compile(_model(), backend="eager")
    model(torch.ones(3, 8)).sum().backward()
    assert _seen(agent)[-1] == ("all_reduce", GRADIENT_BYTES)
    assert agent.state == "observe"


def test_evaluation_and_checkpoints_mark_the_iteration_that_they_lengthen(agent: Agent) -> None:
    model = _model()

    def ended() -> str:
        """The mark of an iteration that ends with a collective now."""
        distributed.all_reduce(torch.ones(1))
        return _taken(agent)[1]

    assert ended() == ""
    model.eval()
    with torch.no_grad():
        model(torch.ones(3, 8))
    assert ended() == "evaluation"
    distributed.all_reduce(torch.ones(1))
    torch.save({"a": torch.ones(1)}, io.BytesIO())  # behind the last collective, with whose exit the iteration ended
    assert _taken(agent)[1] == ""
    assert agent._loop.log.marked
    assert [ended(), ended()] == ["checkpoint", ""]
    with agent.mark("evaluation"):
        distributed.all_reduce(torch.ones(1))
    assert [_taken(agent)[1], ended(), ended()] == ["evaluation", "evaluation", ""]


def _optimizer(size: int = 1) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(size))
    parameter.grad = torch.zeros(size)
    return torch.optim.SGD([parameter], lr=0.1)


@pytest.mark.parametrize("end", ["stop", "fail", "detach"])
def test_the_agent_may_end_while_pytorch_walks_through_its_hooks(group: None, end: str) -> None:
    agent, optimizer = live.attach(), _optimizer()
    ends = {
        "stop": lambda: agent._loop.stop("enough"),
        "fail": lambda: agent._loop.fail(RuntimeError("broken")),
        "detach": agent.detach,
    }
    order: list[str] = []
    first = optimizer.register_step_post_hook(lambda *_: ends[end]() if order else None)
    later = register_optimizer_step_post_hook(lambda *_: order.append("later"))
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        first.remove()
        later.remove()
        agent.detach()
    assert order == ["later"] * 3


def test_a_step_before_the_job_is_up_is_not_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    agent, optimizer = live.attach(), _optimizer()
    optimizer.step()
    assert not agent._loop.begun
    agent.detach()


class Preempted(Exception):
    """What a script's signal handler may raise."""


def test_what_a_signal_handler_of_the_script_raises_is_the_script_s(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: Any) -> None:
        raise Preempted

    before = signal.signal(signal.SIGUSR1, leave)
    monkeypatch.setattr(agent._loop._optimizer, "tick", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        with pytest.raises(Preempted):
            _optimizer().step()
        assert agent.state == "observe"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_every_stamp_comes_back(agent: Agent) -> None:
    device, tensor = FakeCuda(), torch.ones(4)
    stamps = DeviceStamps(device.event, device.record, pool_events=256, max_events=256)
    optimizer, model = _optimizer(100), _model()
    optimizer.step()
    on_device(agent._loop, stamps)
    for i in range(200):
        device.now_s += 0.1
        distributed.all_reduce(tensor)
        works = [distributed.all_reduce(tensor, async_op=True) for _ in range(2)]
        if i % 2:
            for work in works:
                work.wait()
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    agent.summary()
    assert stamps.dropped == 0
    assert len(stamps._pool) == 255  # one is the base
