"""Parity, contract 3: a live trace replayed through the simulator's compiled code gives the same decisions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import torch.distributed as dist
from laid_out import laid_out
from live_jobs import run_ranks

from paceenv.core import pacing, signals, timing
from paceenv.core.limits import LIMITS
from paceenv.live.observe.step import LEARNING_ITERATIONS
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.segments import read_segment
from paceenv.policies.names import rule
from paceenv.sim.engine.code_cache import numba_cache
from paceenv.sim.engine.compiled import _OPTIONS, cache_directory

POLICY, ITERATIONS, INTERVAL = "static:slack=0.01/0.3", 90, 20
CAP_S, CAP_SHARE = LIMITS.cap_s, LIMITS.cap_share
SKEW_S = 0.03
"""Well above what a loaded machine adds here and there: a rule on slack acts on none that changes by half at a time."""


def skewed_job(out: str) -> dict[str, Any]:
    """Rank 1 comes later than rank 0 by a time that wanders; returns what rank 0's agent decided and saw."""
    from paceenv import live

    agent = live.attach(policy=POLICY, mode="shadow", out=out, quiet_first=0)
    loop, decided, views = agent._loop, [], []
    agent.tick()  # the first one: now the rank is known, and how it decides

    observe = loop.control.observe

    def listen(*arguments: Any) -> None:
        observe(*arguments)
        assert loop.control.pacer is not None
        decided.append(loop.control.pacer.delay_s())
        views.append(loop.control.pacer.view().tolist())

    loop.control.observe = listen  # type: ignore[method-assign]
    tensor = torch.ones(1 << 14)
    for i in range(ITERATIONS):
        time.sleep(0.002 + SKEW_S * (1.0 + 0.3 * np.sin(0.1 * i)) * dist.get_rank() * (i > 20))
        dist.all_reduce(tensor)
        agent.tick()
    agent.detach()
    return {"decided": decided, "views": views}


def _replayed(
    comm_T: Any, step_T: Any, settings: Any, rank: Any, tick: Any, decided_T: Any, views_TO: Any, off: Any
) -> None:
    """What ``paceenv.live.decide.pacer`` does with each iteration."""
    comm_R, wait_R = np.zeros(1, np.float32), np.zeros(1, np.float32)
    for t in range(len(comm_T)):
        if t and t % INTERVAL == 0:
            signals.start_interval(tick)
        comm_R[0] = comm_T[t]
        rank[timing.DELAY_S, 0] = 0.0  # shadow: nothing was delayed
        timing.observe_step(tick, step_T[t])
        timing.observe_ranks(rank, tick, comm_R, wait_R, False)
        cap_s = min(CAP_S, CAP_SHARE * tick[timing.STEP_BASELINE_S])
        settings_M2R, on_M = off if t < INTERVAL else settings
        timing.decide(rank, tick, settings_M2R, on_M, cap_s, 0, 2)
        signals.write_signals(rank, 0, tick, views_TO[t])
        decided_T[t] = rank[timing.DELAY_S, 0]


with numba_cache(cache_directory()) as writable:
    in_machine_code = numba.njit(cache=writable, **{**_OPTIONS, "_nrt": True})(_replayed)


def test_a_live_trace_replays_to_the_same_decisions_bit_for_bit(tmp_path: Path) -> None:
    out = tmp_path / "run"
    [live_rank, _] = run_ranks(skewed_job, 2, tmp_path, out=str(out))
    run = RunFolder(out)
    [path] = run.segments(run.latest())[0]
    operations_N = read_segment(path)[1].operations_N
    start_T, end_T = operations_N["start_s"], operations_N["end_s"]
    comm_T, step_T = (end_T - start_T)[LEARNING_ITERATIONS:], np.diff(end_T)[LEARNING_ITERATIONS - 1 :]
    policy = rule(POLICY)
    assert policy is not None
    settings_M2 = policy.constant()
    assert settings_M2 is not None
    (rank, tick), decided_T = timing.new_state(), np.empty(len(comm_T), np.float64)
    views_TO = np.empty((len(comm_T), signals.SIGNALS), np.float32)
    settings, off = laid_out(settings_M2, 1), laid_out(pacing.off(), 1)
    in_machine_code(comm_T, step_T, settings, rank, tick, decided_T, views_TO, off)
    assert decided_T.max() > 0.0
    assert decided_T.tolist() == live_rank["decided"][-len(decided_T) :]
    assert views_TO.tolist() == live_rank["views"][-len(views_TO) :]
