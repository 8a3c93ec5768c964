"""Links of running operations: what is found after every change is what filling all of them anew finds, and of all
events the first one comes first."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.sim.engine import link_fluid
from paceenv.sim.engine.program_layout import NO_PROGRAM, Program, ProgramScratch, new_program_scratch
from paceenv.sim.reference.flows import Flow, divide

LINKS, OPERATIONS = 8, 12
NO_TENANTS, NONE_LEFT = np.zeros(0), np.zeros(0)


def drawn(rng: np.random.Generator) -> Program:
    """Operations on one to four links each, one of which they can fill."""
    links = [np.sort(rng.choice(LINKS, rng.integers(1, 5), replace=False)) + 1 for _ in range(OPERATIONS)]
    shares = [rng.uniform(0.2, 1.0, len(one)) for one in links]
    return NO_PROGRAM._replace(
        group_O=np.arange(OPERATIONS),
        alone_O=np.ones(OPERATIONS),
        weight_O=rng.choice([1.0, 1.0, 0.5, 2.0], OPERATIONS),
        top_O=np.array([one.max() for one in shares]),
        first_use_O=np.concatenate([[0], np.cumsum([len(one) for one in links])]).astype(np.int64),
        link_U=np.concatenate(links).astype(np.int64),
        share_U=np.concatenate(shares),
        first_handed_O=np.zeros(OPERATIONS + 1, np.int64),
        links=LINKS + 1,
    )


def filled(program: Program, running: list[int]) -> list[float]:
    """Rates of running operations, relative to alone, by the referee's filling."""
    flows = []
    for o in running:
        uses = slice(program.first_use_O[o], program.first_use_O[o + 1])
        shares = dict(zip(program.link_U[uses].tolist(), program.share_U[uses].tolist(), strict=True))
        flows.append(Flow(1.0, shares, lambda now_s: None, program.weight_O[o]))
    divide(flows)
    return [flow.rate for flow in flows]


@pytest.mark.parametrize("seed", range(6))
def test_a_change_leaves_what_filling_all_leaves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    program = drawn(rng)
    s = new_program_scratch(program, 0)
    s.head_L[:] = -1
    s.left_O[:], s.since_O[:] = 1.0, 0.0
    running: list[int] = []
    changed = 0
    for turn in range(200):
        for _ in range(rng.integers(1, 4)):  # several at a time: some leave before their new rate was found
            o = int(rng.integers(OPERATIONS))
            if o in running:
                running.remove(o)
                changed = link_fluid.leave_links(program, s, o, changed)
            else:
                running.append(o)
                changed = link_fluid.join_links(program, s, o, changed)
        if rng.random() < 0.7 and running:
            link_fluid.share_links(program, s, changed, float(turn), NO_TENANTS, NONE_LEFT)
            changed = 0
            assert s.rate_O[running] == pytest.approx(filled(program, running), rel=1e-9)
            assert not s.is_changed_O.any()


def test_an_operation_elsewhere_is_not_looked_at() -> None:
    program = NO_PROGRAM._replace(
        group_O=np.arange(3),
        alone_O=np.ones(3),
        weight_O=np.ones(3),
        top_O=np.ones(3),
        first_use_O=np.array([0, 1, 2, 3]),
        link_U=np.array([1, 2, 2]),
        share_U=np.ones(3),
        first_handed_O=np.zeros(4, np.int64),
        links=3,
    )
    s = new_program_scratch(program, 0)
    s.head_L[:], s.left_O[:], s.since_O[:] = -1, 1.0, 0.0
    join(program, s, [0, 1], 0.0)
    assert s.event_O[:2].tolist() == [1.0, 1.0]
    s.rate_O[0] = 0.125  # a mark that finding it anew would wipe out
    join(program, s, [2], 0.5)
    assert s.rate_O.tolist() == [0.125, 0.5, 0.5]
    assert s.left_O[1] == 0.5
    assert s.event_O[1:].tolist() == [1.5, 2.5]


def join(program: Program, s: ProgramScratch, operations: list[int], now_s: float) -> None:
    """Operations start to run at ``now_s``.

    Args:
        program: of the job.
        s: of the step.
        operations: which.
        now_s: when, seconds.
    """
    changed = 0
    for o in operations:
        s.since_O[o] = now_s
        changed = link_fluid.join_links(program, s, o, changed)
    link_fluid.share_links(program, s, changed, now_s, NO_TENANTS, NONE_LEFT)


EVENTS = 9
TIMES = st.one_of(st.floats(0.0, 10.0), st.sampled_from([1.0, 2.0, math.inf]))
CALLS = st.lists(st.one_of(st.tuples(st.integers(0, EVENTS - 1), TIMES), st.none()), max_size=60)


@given(CALLS)
def test_the_first_event_comes_first(calls: list[tuple[int, float] | None]) -> None:
    """Puts and moves, and None: take the first one."""
    s = new_program_scratch(NO_PROGRAM._replace(group_O=np.zeros(EVENTS, int), first_handed_O=np.zeros(10, int)), 0)
    link_fluid.clear(s)
    expected: dict[int, float] = {}
    for call in [*calls, *[None] * EVENTS]:
        assert link_fluid.first_s(s) == min(expected.values(), default=math.inf)
        if call is not None:
            link_fluid.put(s, *call)
            expected |= dict([call])
        elif expected:
            o = link_fluid.take_first(s)
            assert expected[o] == min(expected.values())
            del expected[o]
        assert s.queued[0] == len(expected)
        assert sorted(s.queue_O[: len(expected)].tolist()) == sorted(expected)
    assert not expected
