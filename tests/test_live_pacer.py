"""Parity, contract 2: a live rank that replays a simulated job takes the simulator's decisions, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceenv.core import pacing, signals
from paceenv.core.limits import LIMITS, MAX_BUDGET_S
from paceenv.live.decide.pacer import RankPacer
from paceenv.policies import names
from paceenv.policies.base import Policy
from paceenv.policies.learned import Learned
from paceenv.policies.rules import Adaptive, Static
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.simulator import Simulator

INTERVAL, INTERVALS = 20, 12
CAPS = {"cap_s": LIMITS.cap_s, "cap_share": LIMITS.cap_share}
NO_BUDGET = replace(LIMITS, budget_s_per_minute=MAX_BUDGET_S)
"""The guard keeps the budget."""


def _learned(**arguments: Any) -> Policy:
    random = np.random.default_rng(3)
    layers = [(signals.SIGNALS, 32), (32, 2 * len(pacing.MECHANISMS))]
    return Learned(
        [(random.normal(0, 0.6, (b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in layers],
        pacing.MECHANISMS,
        **arguments,
    )


def _held() -> Policy:
    """Goes passive: two-jobs leaves its range half-way."""
    return _learned(calibrated_range={"step_inflation": (-1.0, 0.12)})


def _released() -> Policy:
    """With memory and preference, and a calibrated range that it was trained in."""
    return names.find("learned")[1].policy


def _record(simulator: Simulator, policy: Policy) -> list[tuple[np.ndarray, ...]]:
    """Stamps (step, comm, barrier, delay) of every rank and iteration, ``(R,)`` each, under a decentralised policy."""
    ranks, groups = simulator.batch.ranks, simulator.batch.groups
    policy.reset(ranks)
    settings, stamps = simulator.off(), []
    for _ in range(INTERVALS):
        r = simulator.record(settings, INTERVAL)
        for t in range(INTERVAL):
            finish, ready = (np.repeat(x[0, t], ranks // groups) for x in (r.finish_ETG, r.ready_ETG))
            step_s = r.step_ET[0, t]
            stamps.append((np.full(ranks, step_s), finish - r.entry_ETR[0, t], step_s - ready, r.delay_ETR[0, t]))
        settings = policy.act(simulator.observe(every_rank=True)[0])[None]
    return stamps


@pytest.mark.parametrize("policy", [_learned, _held, _released, Adaptive, lambda: Static({"slack": (0.0, 0.3)})])
@pytest.mark.parametrize("cluster", ["two-jobs", "when-scaling-fails"])
def test_a_live_rank_decides_as_the_simulated_one(cluster: str, policy: type[Policy]) -> None:
    simulator = start(load_cluster(cluster).with_nodes(8), np.array([5]), limits=NO_BUDGET)
    has_barrier = bool(simulator.batch.jobs["has_barrier"][0])
    stamps, per_group = _record(simulator, policy()), simulator.batch.ranks // simulator.batch.groups
    for rank in range(simulator.batch.ranks):
        place = {"member": rank % per_group, "members": per_group}
        pacer = RankPacer(policy(), has_barrier=has_barrier, **CAPS, **place)
        decided = [pacer.iteration(comm[rank], barrier[rank], step[rank]) for step, comm, barrier, _ in stamps]
        assert decided[:-1] == [delay[rank] for *_, delay in stamps[1:]]
