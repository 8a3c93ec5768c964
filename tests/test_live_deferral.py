"""Transfers that are held back, in real jobs on gloo: the order of each group, the results, and that nothing hangs."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from laid_out import laid_out
from live_jobs import run_ranks
from torch.distributed import Work

from paceenv import live
from paceenv.core import timing
from paceenv.core.pacing import DEFER, WINDOW, off
from paceenv.live.agent import Agent
from paceenv.live.decide.pacer import RankPacer
from paceenv.live.identity import Identity
from paceenv.policies.rules import Static

LONG_S = 60.0
"""A hold that nobody waits out: who needs the transfer earlier must get it."""
SOON_S = 20.0
CALLS = 40
HOLDING = ("canary", "shadow", "observe")
BREAKS = ("_can_wait", "_hold", "_check")
"""Functions of ours that are made to raise."""
METHODS = {"allreduce", "broadcast", "allgather", "all_to_all_single", "alltoall_base"} & set(vars(dist.ProcessGroup))


def _group() -> Any:
    return dist.new_group(list(range(dist.get_world_size())), group_desc="gradients")


def _attached(hold_s: float, **options: Any) -> Agent:
    agent = live.attach(defer="gradients", **options)
    agent._loop.deferral.hold_s = hold_s
    return agent


def _reduced(group: Any, value: float = 1.0) -> tuple[torch.Tensor, Any]:
    tensor = torch.full((3,), value)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return tensor, work


def random_calls(seed: int, hold: bool) -> dict[str, Any]:
    """The same random calls on every rank, at each rank's own pace; results, asked and real order by group."""
    common, own = np.random.default_rng(seed), np.random.default_rng([seed, dist.get_rank()])
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(world)), group_desc=name) for name in ("gradients", "shards", "experts")]
    started: dict[str, list[int]] = {group.group_desc: [] for group in groups}
    asked: dict[str, list[int]] = {group.group_desc: [] for group in groups}
    plain = {name: vars(dist.ProcessGroup)[name] for name in METHODS}

    def spied(name: str) -> Any:
        original = getattr(dist.ProcessGroup, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            if args[0].group_desc in started:
                started[args[0].group_desc].append(_size(args[1]))
            return original(*args, **kwargs)

        return spy

    for name in plain:
        setattr(dist.ProcessGroup, name, spied(name))
    agent = live.attach(defer="gradients,shards,broadcast" if hold else "")
    deferral = agent._loop.deferral
    pending, outputs = list[Any](), list[torch.Tensor]()
    for i in range(CALLS):
        if hold:
            deferral.hold_s = float(own.choice([0.0, 0.002, 0.02, 0.05]))
        group, kind = groups[common.integers(3)], common.integers(4)
        later, size = bool(common.random() < 0.75), int(common.integers(1, 400)) * 4 + i % 4
        time.sleep(float(own.choice([0.0, 0.0, 0.003])))
        given = torch.full((size * (world if kind == 3 else 1),), float(rank + i))
        if kind == 0:
            work, got = dist.all_reduce(given, group=group, async_op=later), given
        elif kind == 1:
            work, got = dist.broadcast(given, src=i % world, group=group, async_op=later), given
        elif kind == 2:
            into = [torch.zeros_like(given) for _ in range(world)]
            work, got = dist.all_gather(into, given, group=group, async_op=later), into[i % world]
        else:
            got = torch.zeros_like(given)
            work = dist.all_to_all_single(got, given, group=group, async_op=later)
        asked[group.group_desc].append(given.numel())
        outputs.append(got)
        if work is not None:
            assert isinstance(work, Work)
            pending.append(work)
        while pending and own.random() < 0.3:
            pending.pop(int(own.integers(len(pending)))).wait()
        if i % 20 == 19:
            agent.tick()
    for work in pending:
        work.wait()
    held = deferral.late.count
    agent.detach()
    for name, found in plain.items():
        setattr(dist.ProcessGroup, name, found)
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in outputs)).hexdigest()
    return {"digest": digest, "asked": asked, "started": started, "held": held, "reason": agent.reason}


def _size(arguments: Any) -> int:
    while isinstance(arguments, (list, tuple)):
        arguments = arguments[-1]
    return int(arguments.numel()) if isinstance(arguments, torch.Tensor) else 0


@pytest.mark.slow
def test_order_and_results_are_those_of_a_job_without_holding(tmp_path: Path) -> None:
    alone, holding = (run_ranks(random_calls, 3, tmp_path, seed=3, hold=hold) for hold in (False, True))
    for without, with_ in zip(alone, holding, strict=True):
        assert with_["reason"] == ""
        assert with_["held"] > 5
        assert without["held"] == 0
        assert with_["digest"] == without["digest"]
        for name, asked in with_["asked"].items():
            assert with_["started"][name] == without["started"][name] == asked


def asked_for() -> dict[str, float]:
    """How long each way to ask for a transfer takes on rank 0, which would hold it for a minute."""
    group, took_s = _group(), {}
    agent = _attached(0.0)

    def completed(work: Any) -> None:
        while not work.is_completed():
            time.sleep(0.001)

    ways: dict[str, Callable[[Any], Any]] = {
        "wait": lambda work: work.wait(),
        "future": lambda work: work.get_future().wait(),
        "completed": completed,
        "result": lambda work: work.synchronize(),
        "next call": lambda work: dist.all_reduce(torch.ones(1), group=group),
        "tick": lambda work: agent.tick(),
    }
    for way, ask in ways.items():
        agent._loop.deferral.hold_s = LONG_S if dist.get_rank() == 0 else 0.0
        dist.barrier()
        start_s = time.monotonic()
        tensor, work = _reduced(group)
        ask(work)
        took_s[way] = time.monotonic() - start_s
        work.wait()
        assert tensor.tolist() == [2.0] * 3
    agent.detach()
    return took_s


def test_whoever_asks_for_a_held_transfer_gets_it_at_once(together: Together) -> None:
    for took_s in together["asked_for"]:
        assert max(took_s.values()) < SOON_S


def timed() -> dict[str, Any]:
    """Rank 0 holds for a moment, and nobody there asks; rank 1 waits for it."""
    group, rank = _group(), dist.get_rank()
    agent = _attached(0.3 if rank == 0 else 0.0)
    dist.barrier()
    start_s = time.monotonic()
    tensor, work = _reduced(group)
    if rank == 1:
        work.wait()
    took_s, deferral = time.monotonic() - start_s, agent._loop.deferral
    while rank == 0 and not deferral.late.count:
        time.sleep(0.01)
    work.wait()
    agent.detach()
    return {"took_s": took_s, "held_s": deferral.late.total_s, "kind": type(work).__name__, "sum": tensor.tolist()}


def test_the_timer_starts_what_nobody_asks_for(together: Together) -> None:
    holding, plain = together["timed"]
    assert holding["took_s"] < 0.2
    assert 0.3 <= holding["held_s"] < SOON_S
    assert plain["took_s"] > 0.25
    assert (holding["kind"], plain["kind"]) == ("HeldWork", "Work")
    assert holding["sum"] == plain["sum"] == [2.0] * 3


def failing() -> list[str]:
    """A gather that gloo refuses: the error comes to who waits, and the group works on."""
    group, said = _group(), []
    for hold_s in (0.0, LONG_S):
        agent = _attached(hold_s)
        try:
            work = dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(3), group, async_op=True)
            assert hold_s > 0.0, "gloo's own call raises at once"
            assert work is not None
            work.wait()
        except Exception as error:
            said.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        tensor, work = _reduced(group)
        work.wait()
        assert tensor.tolist() == [2.0] * 3
        assert agent.reason == ""
        agent.detach()
    return said


def test_an_error_of_the_start_reaches_who_waits(together: Together) -> None:
    for plain, held in together["failing"]:
        assert plain == held


def broken(where: str) -> dict[str, Any]:
    """A function of ours raises on rank 0 while something is held."""
    group, rank = _group(), dist.get_rank()
    agent = _attached(LONG_S if rank == 0 else 0.0)
    deferral = agent._loop.deferral
    first = _reduced(group)

    def raises(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    if rank == 0:
        setattr(deferral, where, raises)
    second = _reduced(group, 2.0)
    dist.all_reduce(torch.ones(1), group=group)
    for _, work in (first, second):
        work.wait()
    third = _reduced(group)
    third[1].wait()
    sums = [tensor.tolist() for tensor, _ in (first, second, third)]
    kind, reason = type(third[1]).__name__, agent.reason
    agent.detach()
    return {"sums": sums, "kind": kind, "reason": reason}


@pytest.mark.parametrize("where", BREAKS)
def test_an_error_of_ours_starts_everything_and_ends_the_holding(where: str, together: Together) -> None:
    ours, other = together[where]
    assert ours["sums"] == other["sums"] == [[2.0] * 3, [4.0] * 3, [2.0] * 3]
    assert "broken on purpose" in ours["reason"]
    assert ours["kind"] == other["kind"] == "Work"


def killed(kill_file: str) -> dict[str, Any]:
    """Rank 0 holds for a minute and is stopped; rank 1 waits for what is held."""
    group, rank = _group(), dist.get_rank()
    agent = _attached(0.0, kill_file=kill_file)
    agent.tick()  # the kill file is looked at from the first tick on
    dist.barrier()
    agent._loop.deferral.hold_s = LONG_S if rank == 0 else 0.0
    start_s = time.monotonic()
    tensor, work = _reduced(group)
    if rank == 1:
        work.wait()
    else:
        Path(kill_file).touch()
        while not agent._loop.deferral.late.count:
            time.sleep(0.01)
    took_s = time.monotonic() - start_s
    work.wait()
    after = type(_reduced(group)[1]).__name__
    agent.detach()
    return {"took_s": took_s, "sum": tensor.tolist(), "after": after}


def test_the_kill_file_starts_what_is_held(together: Together) -> None:
    for rank in together["killed"]:
        assert rank["took_s"] < SOON_S
        assert rank["sum"] == [2.0] * 3
        assert rank["after"] == "Work"


def detached_elsewhere() -> list[list[int]]:
    """The real order of two calls, the first of them held, where a thread of the script detaches in between."""
    group, orders = _group(), list[list[int]]()
    plain = dist.ProcessGroup.allreduce

    def spy(*args: Any, **kwargs: Any) -> Any:
        orders[-1].append(_size(args[1]))
        return plain(*args, **kwargs)

    def run() -> None:
        orders.append([])
        agent = _attached(LONG_S)
        tensor, work = _reduced(group)
        agent.detach()
        dist.all_reduce(torch.ones(1), group=group)
        work.wait()
        assert tensor.tolist() == [2.0] * 3

    setattr(dist.ProcessGroup, "allreduce", spy)  # noqa: B010 a method of C++
    for _ in range(20):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    setattr(dist.ProcessGroup, "allreduce", plain)  # noqa: B010
    return orders


def test_a_detach_on_any_thread_starts_what_is_held_before_the_next_call(together: Together) -> None:
    assert together["detached_elsewhere"] == [[[3, 1]] * 20] * 2


def leaving() -> list[float] | None:
    """Rank 0 destroys a group, and then ends, with a transfer that nobody there waits for; rank 1 needs both."""
    rank, agent, got = dist.get_rank(), live.attach(defer="gradients"), list[float]()
    for last in (False, True):
        group = _group()
        agent._loop.deferral.hold_s = LONG_S if rank == 0 else 0.0
        dist.barrier()
        tensor, work = _reduced(group)
        if rank == 1:
            work.wait()
            got += tensor.tolist()
        elif not last:
            del work
            dist.destroy_process_group(group)
    return got if rank == 1 else None


def test_a_process_ends_with_something_held_and_the_others_get_it(tmp_path: Path) -> None:
    start_s = time.monotonic()
    assert run_ranks(leaving, 2, tmp_path)[1] == [2.0] * 6
    assert time.monotonic() - start_s < LONG_S


def forking() -> dict[str, Any]:
    """A child is forked while something is held: it has no agent, starts nothing and ends; the parent goes on."""
    group, rank = _group(), dist.get_rank()
    agent = _attached(LONG_S if rank == 0 else 0.0)
    tensor, work = _reduced(group)
    child = os.fork()
    if child == 0:
        deferral = agent._loop.deferral
        clean = not deferral._held and deferral._off and deferral._lock.acquire(timeout=1.0)
        os._exit(0 if clean and agent.state == "off" else 1)
    _, status = os.waitpid(child, 0)
    work.wait()
    state = agent.state
    agent.detach()
    return {"status": status, "sum": tensor.tolist(), "state": state}


def test_a_forked_child_has_no_agent_and_starts_nothing(together: Together) -> None:
    for rank in together["forking"]:
        assert rank == {"status": 0, "sum": [2.0] * 3, "state": "observe"}


def not_held() -> dict[str, Any]:
    """Calls that are never held, and a group in which PyTorch's C++ starts collectives."""
    group, plain = _group(), dist.new_group(list(range(dist.get_world_size())))
    agent = _attached(LONG_S)
    kinds = {"other group": type(_reduced(plain)[1]).__name__}
    dist.all_reduce(torch.ones(1), group=group)
    with torch.inference_mode():
        tensor = torch.ones(1)
        kinds["inference"] = type(dist.all_reduce(tensor, group=group, async_op=True)).__name__
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    work = _reduced(group)[1]
    kinds["reducer"] = type(work).__name__
    work.wait()
    said = [event["text"] for event in agent._loop.messages.events]
    counted = agent._loop.deferral.late.count
    agent.detach()
    return {"kinds": kinds, "said": said, "count": counted}


def test_what_is_never_held(together: Together) -> None:
    for rank in together["not_held"]:
        assert set(rank["kinds"].values()) == {"Work"}
        assert rank["count"] == 0
        assert any("PyTorch's C++ starts collectives there" in text for text in rank["said"])


def test_a_live_rank_holds_as_long_as_the_simulated_one() -> None:
    """The same steps through ``paceenv.core.timing`` with four columns, as the engine has them, and a pacer."""
    random, policy = np.random.default_rng(5), Static({"defer": (0.02, 0.1)})
    settings = np.asarray(policy.act(np.zeros((1, 1), np.float32))[0], np.float64)
    pacer = RankPacer(policy, cap_s=10.0, has_barrier=False, cap_share=0.5)
    rank, tick = timing.new_state(4)
    holds, simulated = [], []
    for i in range(400):
        step_s = float((0.1 if pacer.hold_s() > 0.0 else 0.12) * (1.0 + 0.01 * random.standard_normal()))
        comm_s = 0.02 * (1.0 + 0.1 * random.random())
        pacer.iteration(comm_s, 0.0, step_s)
        timing.observe_step(tick, step_s)
        timing.observe_ranks(rank, tick, np.full(4, comm_s, np.float32), np.zeros(4, np.float32), False)
        cap_s = min(10.0, 0.5 * tick[timing.STEP_BASELINE_S])
        timing.decide(rank, tick, *laid_out(off() if i < 20 else settings, 4), cap_s)
        holds.append(pacer.hold_s())
        simulated.append(float(rank[timing.DEFER_S, 3]))
    assert settings[DEFER, WINDOW] == 0.1
    assert holds == simulated
    assert max(holds) > 0.0
    assert pacer.delay_s() == 0.0


def in_one_job(place: str) -> dict[str, Any]:
    """What each of these bodies returns, one after the other in one job."""
    found: dict[str, Any] = {where: broken(where) for where in BREAKS}
    found["killed"] = killed(f"{place}/kill")
    for body in (asked_for, timed, failing, detached_elsewhere, not_held, forking):
        found[body.__name__] = body()
    return found | {mode: in_mode(mode) for mode in HOLDING}


Together = dict[str, list[Any]]
"""By body: the results of all ranks."""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    folder = tmp_path_factory.mktemp("job")
    ranks = run_ranks(in_one_job, 2, folder, place=str(folder))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.slow
def test_a_wait_that_blocked_starts_what_made_room_for_it(tmp_path: Path) -> None:
    waited, late = run_ranks(made_room, 2, tmp_path)
    assert waited == [True, False]
    assert late == [True, True], "it was not blocked itself"


@pytest.mark.parametrize("mode", HOLDING)
def test_the_mode_decides_when_transfers_are_held(mode: str, together: Together) -> None:
    for rank in together[mode]:
        assert (rank["held"] > 0, rank["holds"] > 0) == (mode == "canary", mode != "observe")
        assert (rank["asked_s"] > 0.0) == (mode == "canary")
        assert rank["asked_s"] <= rank["most_s"]


def made_room() -> list[bool]:
    """Whether a transfer is held after waits for another one: one that returns at once, and one that blocks."""
    gradients, experts = dist.new_group([0, 1], group_desc="gradients"), dist.new_group([0, 1], group_desc="experts")
    agent = live.attach(defer="gradients")
    deferral = agent._loop.deferral
    deferral.hold_s = 8.0
    given = torch.ones(8)
    needed = dist.all_reduce(torch.ones(8), group=experts, async_op=True)
    time.sleep(1.0)
    work = dist.all_reduce(given, group=gradients, async_op=True)
    needed.wait()
    found = [bool(deferral._held)]
    if dist.get_rank() == 1:
        time.sleep(1.5)
    dist.all_reduce(torch.ones(8), group=experts)
    found.append(bool(deferral._held))
    deferral.release()
    work.wait()
    agent.detach()
    return found


def in_mode(mode: str) -> dict[str, Any]:
    """What a policy of the rule held in a job, and the longest that it may ask for."""
    group, policy, asked_s = _group(), Static({"defer": (0.0, 0.3)}), list[float]()
    policy.interval_iterations = 4
    options = {"quiet_first": 10, "block_iterations": 12, "seed": 1, "cap_share": 0.2}
    agent = live.attach(policy=policy, mode=mode, defer="gradients", **options)
    agent._loop.identity = Identity(agents=2)
    for _ in range(60):
        dist.barrier()
        _, work = _reduced(group)
        time.sleep(0.01)
        work.wait()
        dist.barrier()
        agent.tick()
        asked_s.append(agent._loop.deferral.hold_s)
    found = agent.summary()
    agent.detach()
    return found["pacing"] | {"most_s": 0.2 * 3.0 * found["step"]["newest_s"], "asked_s": max(asked_s)}
