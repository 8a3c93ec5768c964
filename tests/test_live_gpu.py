"""The agent on a GPU, with NCCL: the same results, no synchronisation of its own, delays on the GPU's timeline.

Run by ``make test-gpu``. World size 1 always; two ranks on one card with NCCL told that they sit on different hosts.
The run ends with a page for ``docs/evidence/gpu.md``: every check, and what it measured.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_bodies
import pytest
import torch
from live_bodies import BATCH, WAYS, WIDTH, network, train
from live_jobs import run_ranks

pytestmark = pytest.mark.gpu

EVERY_MODE = ("", "observe", "shadow", "canary", "active")
ITERATIONS, LATE_S = 96, 0.03
DEADLINE_S = 180.0
"""The first use of a GPU in a process takes seconds."""
run_on_gpu = functools.partial(run_ranks, backend="nccl", deadline_s=DEADLINE_S)
Record = Callable[[str, object], None]
"""Pytest's ``record_property``: what it gets is on the page."""
ONE_CARD = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def _differing(ranks: list[list[dict[str, Any]]], iterations: int = ITERATIONS) -> list[str]:
    """The modes in which a rank's results were not those without an agent, or the agent did not do its work."""
    return [
        f"{run['mode']}: {'same' if (run['losses'], run['digest']) == (alone['losses'], alone['digest']) else 'other'} "
        f"results, {run['summary']['state']}, {run['summary']['regular']} regular, {run['summary']['irregular']} not, "
        f"{run['summary']['reason']}"
        for alone, *runs in ranks
        for run in runs
        if (run["losses"], run["digest"]) != (alone["losses"], alone["digest"])
        or (run["summary"]["state"] != run["mode"] and "rolled back" not in run["summary"]["reason"])
        or run["summary"]["regular"] <= iterations / 2
        or not run["summary"]["locality"]["device"].startswith("cuda")
    ]


@pytest.mark.parametrize("way", WAYS)
def test_results_do_not_depend_on_the_agent(way: str, tmp_path: Path) -> None:
    job = {"way": way, "modes": EVERY_MODE, "iterations": ITERATIONS}
    assert _differing(run_on_gpu(train, 1, tmp_path, **job)) == []


@pytest.mark.parametrize("way", gpu_bodies.MORE_WAYS)
def test_streams_graphs_and_many_collectives_change_no_result(
    way: str, tmp_path: Path, record_property: Record
) -> None:
    job = {"way": way, "modes": EVERY_MODE, "iterations": ITERATIONS, "out": str(tmp_path / "run")}  # all threads run
    [runs] = run_on_gpu(gpu_bodies.train, 1, tmp_path, **job)
    assert _differing([runs]) == []
    observed = next(run["summary"] for run in runs if run["mode"] == "observe")
    seen = [f"{c['op']} {c['per_step']:.3g}" for c in observed["collectives"]]
    seen.append(f"{1e3 * (observed['side']['streams_s'] or 0.0):.3g} ms on other streams")
    record_property("seen", f"in a step: {', '.join(seen)}; {observed['stamps']['dropped']} stamps dropped")
    if not way.startswith("FSDP2"):  # in a world of one, PyTorch 2.11 starts none of its collectives
        assert len(seen) > 1
    if way == "graph with collectives":
        assert observed["stamps"]["dropped"] > 0, "those of the capture cannot be recorded"
    else:
        assert observed["stamps"]["dropped"] == 0


def two_on_one_card(**parameters: Any) -> Any:
    """:func:`train` on the only card, which each rank takes for its own host's: ``run_ranks`` gives them host names."""
    torch.cuda.set_device(0)
    return train(**parameters)


def _on_one_card(body: Callable[..., Any], ranks: int, tmp_path: Path, **job: Any) -> list[Any]:
    try:
        return run_on_gpu(body, ranks, tmp_path, environ=ONE_CARD, **job)
    except AssertionError as error:
        if "Duplicate GPU" in str(error):
            pytest.skip("this NCCL does not put two ranks on one card, workaround or not")
        raise


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_ranks_on_one_card(way: str, tmp_path: Path) -> None:
    job = {"way": way, "modes": EVERY_MODE, "iterations": ITERATIONS}
    assert _differing(_on_one_card(two_on_one_card, 2, tmp_path, **job)) == []


def planted_on_one_card(**parameters: Any) -> Any:
    torch.cuda.set_device(0)
    return gpu_bodies.planted(**parameters)


@pytest.mark.parametrize("place", ["loader", "device", ""])
@pytest.mark.parametrize("way", ["ddp", "FSDP2, many collectives"])
def test_a_late_rank_is_named_and_nobody_where_none_is(
    way: str, place: str, tmp_path: Path, record_property: Record
) -> None:
    iterations = 320 if way == "ddp" else 120
    job = {"way": way, "late": 1, "place": place, "late_s": LATE_S, "iterations": iterations}
    job["out"] = str(tmp_path / "run")
    ranks = _on_one_card(planted_on_one_card, 2, tmp_path, **job)
    said = [f"{rank['arrival']['verdict']} {1e3 * rank['arrival'].get('late_s', 0.0):.1f} ms" for rank in ranks]
    cost_us = max(1e6 * (rank["overhead"]["mean_s"] or 0.0) for rank in ranks)
    record_property("late", f"{', '.join(said)}; the agent's own figure {cost_us:.0f} µs an iteration")
    assert [rank["arrival"]["verdict"] == "late" for rank in ranks] == [False, bool(place)]
    if place:  # two processes take turns on the card, so 30 ms planted make a step 32 ms longer
        assert ranks[1]["arrival"]["late_s"] == pytest.approx(LATE_S, rel=0.25)


def watched(mode: str, iterations: int) -> dict[str, Any]:
    """Train with PyTorch told to raise wherever anything synchronises with the device."""
    from paceenv import live

    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(BATCH, WIDTH, device="cuda")
    agent = live.attach(model, policy="static:stagger=0/0.1", mode=mode, quiet_first=4)
    for i in range(iterations):
        if i == 3:  # the first iterations build and warm up
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    summary = agent.summary()
    agent.detach()
    return summary


@pytest.mark.parametrize("mode", ["observe", "shadow", "active"])
def test_the_agent_never_synchronises_with_the_device(mode: str, tmp_path: Path) -> None:
    [summary] = run_on_gpu(watched, 1, tmp_path, mode=mode, iterations=200)
    assert summary["state"] == mode, summary["reason"]
    assert summary["regular"] > 100


def delayed(backlog: bool) -> list[float]:
    """Effective seconds of twenty delays of 5 ms, on a device that is idle or has 50 ms of work queued."""
    from paceenv.live.decide.actuator import DeviceActuator
    from paceenv.live.observe.stamps import cuda_stamps

    stamps = cuda_stamps(torch.cuda.current_device())
    made = DeviceActuator(stamps, cap_s=0.1)
    effects = []
    for _ in range(20):
        if backlog:
            torch.cuda._sleep(100_000_000)
        delay = made.delay(0.005)
        torch.cuda.synchronize()
        time.sleep(0.001)
        if delay is not None:
            effect = made.settle(delay)
            assert effect is not None
            effects.append(effect)
    return effects


def test_nothing_is_held_on_nccl(tmp_path: Path) -> None:
    [held] = run_on_gpu(gpu_bodies.held_back, 1, tmp_path)
    assert held == ["Work", 0, True]


@pytest.mark.parametrize("backlog", [False, True])
def test_a_device_delay_reaches_it_always(backlog: bool, tmp_path: Path, record_property: Record) -> None:
    [effects] = run_on_gpu(delayed, 1, tmp_path, backlog=backlog)
    record_property("delay", f"of 5 ms {1e3 * statistics.median(effects[-5:]):.2f} ms")
    assert all(0.004 < effect < 0.006 for effect in effects[-5:])  # by then the clock's rate is known
