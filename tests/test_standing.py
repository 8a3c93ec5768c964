"""Blocks without pacing: a policy sees one unbroken paced history, at the one interval that is its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceenv.core import signals
from paceenv.live.decide.blocks import Plan, block_plan
from paceenv.live.decide.pacer import RankPacer
from paceenv.policies import names
from paceenv.policies.base import Policy
from paceenv.policies.learned import Learned
from paceenv.policies.names import rule

QUIET, PACED = 60, 480


def named(text: str) -> Policy:
    found = rule(text)
    return found if found is not None else names.find(text)[1].policy


def network(mechanisms: tuple[str, ...] = ("slack",), **more: Any) -> Learned:
    inputs = signals.SIGNALS * (2 if more.get("memory_intervals") else 1)
    layers = [(np.zeros((2 * len(mechanisms), inputs), np.float32), np.zeros(2 * len(mechanisms), np.float32))]
    return Learned(layers, mechanisms, **more)


def fed(block: int | None, *, odd: bool = False) -> tuple[list[float], list[list[float]]]:
    """Delays and views of one rank's pacer in paced iterations; the job is the same without pacing, but slower."""
    random, pacer = np.random.default_rng(1), RankPacer(named("adaptive"), cap_s=0.1, has_barrier=True)
    stamps = zip(random.normal(0.02, 1e-4, PACED), random.normal(0.03, 1e-3, PACED), strict=True)
    for _ in range(QUIET):
        pacer.iteration(0.02, 0.03, 0.3, acting=None)
    delays, views = [], []
    for i, (comm_s, barrier_s) in enumerate(stamps):
        if block and i % block == 0 and i:
            for _ in range(block + odd):
                pacer.iteration(0.05, 0.09, 0.5, delay_s=0.0, acting=None)
        delays.append(pacer.iteration(comm_s, barrier_s, 0.2 + barrier_s))
        views.append(pacer.view().tolist())
    return delays, views


@pytest.mark.parametrize("block", [20, 37])
def test_nothing_but_the_baselines_remembers_a_block_without_pacing(block: int) -> None:
    """Every view and every delay; the baselines may rise by a hair meanwhile."""
    for odd in (False, True):
        (delays, views), (delays_without, views_without) = fed(block, odd=odd), fed(None)
        assert max(delays_without) > 0.0
        np.testing.assert_allclose(delays, delays_without, rtol=0.1, atol=5e-4)
        delay = signals.NAMES.index("delay_share")
        np.testing.assert_allclose(np.array(views)[:, delay], np.array(views_without)[:, delay], rtol=0.1, atol=5e-3)


def test_the_delay_is_back_at_once_and_several_policies_do_not_disturb_each_other() -> None:
    policies = [named("static:slack=0.0/0.4"), named("static:stagger=0/0.2")]
    pacer = RankPacer(policies, cap_s=0.1, has_barrier=True, member=1, members=2)
    alone = RankPacer(named("static:slack=0.0/0.4"), cap_s=0.1, has_barrier=True, member=1, members=2)
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
    blocks = block_plan(network(memory_intervals=12))
    plan = Plan(3, [blocks], begin=7)
    turns = [plan.turn(i) for i in range(plan.after(1) + 1)]
    first = next(i for i, turn in enumerate(turns) if turn.pair == (0, 0))
    assert [turn.arm for turn in turns[:first]] == 7 * [None] + 300 * [0]
    assert turns[plan.after(1) - 1].pair == (0, 0)
    assert turns[plan.after(1)].pair == (1, 0)
