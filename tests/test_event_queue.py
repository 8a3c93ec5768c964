"""The queue of a program's events: whatever is put, moved and taken, the first one comes first."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceenv.sim.engine.iteration import event_queue
from paceenv.sim.engine.program_layout import NO_PROGRAM, new_program_scratch

OPERATIONS = 9
TIMES = st.one_of(st.floats(0.0, 10.0), st.sampled_from([1.0, 2.0, math.inf]))
CALLS = st.lists(st.one_of(st.tuples(st.integers(0, OPERATIONS - 1), TIMES), st.none()), max_size=60)


@given(CALLS)
def test_the_first_event_comes_first(calls: list[tuple[int, float] | None]) -> None:
    """Puts and moves, and None: take the first one."""
    s = new_program_scratch(NO_PROGRAM._replace(group_O=np.zeros(OPERATIONS, int), first_handed_O=np.zeros(10, int)), 0)
    event_queue.clear(s)
    expected: dict[int, float] = {}
    for call in [*calls, *[None] * OPERATIONS]:
        assert event_queue.first_s(s) == min(expected.values(), default=math.inf)
        if call is not None:
            event_queue.put(s, *call)
            expected |= dict([call])
        elif expected:
            o = event_queue.take_first(s)
            assert expected[o] == min(expected.values())
            del expected[o]
        assert s.queued[0] == len(expected)
        assert sorted(s.queue_O[: len(expected)].tolist()) == sorted(expected)
    assert not expected
