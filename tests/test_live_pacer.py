"""Parity, contract 2: a live rank decides as the simulated one; and blocks without pacing leave no trace in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceenv.core import pacing, signals
from paceenv.core.limits import LIMITS, MAX_BUDGET_S
from paceenv.live.decide.blocks import Plan, block_plan
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


# Blocks without pacing: a policy sees one unbroken paced history, at the one interval that is its own


def fed(block: int | None, *, odd: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Delays and delay shares of one rank in paced iterations; the job is the same without pacing, but slower."""
    random, pacer = np.random.default_rng(1), RankPacer(Adaptive(), cap_s=0.1, has_barrier=True)
    stamps = zip(random.normal(0.02, 1e-4, 480), random.normal(0.03, 1e-3, 480), strict=True)
    for _ in range(60):
        pacer.iteration(0.02, 0.03, 0.3, acting=None)
    delays, shares = [], []
    for i, (comm_s, barrier_s) in enumerate(stamps):
        if block and i % block == 0 and i:
            for _ in range(block + odd):
                pacer.iteration(0.05, 0.09, 0.5, delay_s=0.0, acting=None)
        delays.append(pacer.iteration(comm_s, barrier_s, 0.2 + barrier_s))
        shares.append(pacer.view()[signals.NAMES.index("delay_share")])
    return np.array(delays), np.array(shares)


@pytest.mark.parametrize("block", [20, 37])
def test_nothing_but_the_baselines_remembers_a_block_without_pacing(block: int) -> None:
    """Every view and every delay; the baselines may rise by a hair meanwhile."""
    delays_without, shares_without = fed(None)
    assert delays_without.max() > 0.0
    for odd in (False, True):
        delays, shares = fed(block, odd=odd)
        np.testing.assert_allclose(delays, delays_without, rtol=0.1, atol=5e-4)
        np.testing.assert_allclose(shares, shares_without, rtol=0.1, atol=5e-3)


def test_the_delay_is_back_at_once_and_several_policies_do_not_disturb_each_other() -> None:
    policies = [Static({"slack": (0.0, 0.4)}), Static({"stagger": (0.0, 0.2)})]
    pacer, alone = (
        RankPacer(given, cap_s=0.1, has_barrier=True, member=1, members=2)
        for given in (policies, Static({"slack": (0.0, 0.4)}))
    )
    for one in (pacer, alone):
        for _ in range(40):
            one.iteration(0.02, 0.05, 0.3, acting=None)
    expected = [alone.iteration(0.02, 0.05, 0.3) for _ in range(120)]
    found: list[float] = []
    for _ in range(6):
        found += [pacer.iteration(0.02, 0.05, 0.3, acting=0) for _ in range(20)]
        left_s = pacer.delay_s(0)
        for _ in range(30):
            pacer.iteration(0.02, 0.05, 0.3, acting=1)
        for _ in range(10):
            pacer.iteration(0.02, 0.05, 0.3, acting=None)
        assert pacer.delay_s(0) == left_s
    assert pacer.delay_s(1) == pytest.approx(0.06, rel=1e-4)
    assert found == expected
    assert expected[-1] > 0.0


def test_the_first_compared_block_comes_after_the_memory_is_full() -> None:
    layers = [(np.zeros((2, 2 * signals.SIGNALS), np.float32), np.zeros(2, np.float32))]
    plan = Plan(3, [block_plan(Learned(layers, ("slack",), memory_intervals=12))], begin=7)
    turns = [plan.turn(i) for i in range(plan.after(1) + 1)]
    first = next(i for i, turn in enumerate(turns) if turn.pair == (0, 0))
    assert [turn.arm for turn in turns[:first]] == 7 * [None] + 300 * [0]
    assert turns[plan.after(1) - 1].pair == (0, 0)
    assert turns[plan.after(1)].pair == (1, 0)
