"""When the operations of a program start or have moved their bytes: a binary heap, in which each can be moved.

Scalar loops that the kernel compiles. The legend is that of ``paceenv.sim.engine.program_layout``.
"""

from __future__ import annotations

import math

from paceenv.sim.engine.program_layout import ProgramScratch

_ABSENT = -1


def clear(s: ProgramScratch) -> None:
    """Start a step: no operation is in the queue."""
    s.queued[0] = 0
    for o in range(s.place_O.shape[0]):
        s.place_O[o] = _ABSENT


def first_s(s: ProgramScratch) -> float:
    """When the first event is, seconds as ``event_O``; infinite without one."""
    return s.event_O[s.queue_O[0]] if s.queued[0] > 0 else math.inf


def put(s: ProgramScratch, o: int, at_s: float) -> None:
    """The next event of operation ``o`` is at ``at_s``, whether it is in the queue or not.

    Args:
        s: of the step.
        o: the operation.
        at_s: seconds from the end of the step before.
    """
    s.event_O[o] = at_s
    if s.place_O[o] == _ABSENT:
        s.place_O[o] = s.queued[0]
        s.queue_O[s.queued[0]] = o
        s.queued[0] += 1
    _settle(s, o)


def take_first(s: ProgramScratch) -> int:
    """Take the operation with the first event out of the queue, which must not be empty."""
    o, s.queued[0] = s.queue_O[0], s.queued[0] - 1
    s.place_O[o] = _ABSENT
    if s.queued[0] > 0:
        last = s.queue_O[s.queued[0]]
        s.place_O[last], s.queue_O[0] = 0, last
        _settle(s, last)
    return int(o)


def _settle(s: ProgramScratch, o: int) -> None:
    """Move operation ``o`` up or down until its event is after its parent's and before its children's."""
    at_s, here = s.event_O[o], s.place_O[o]
    while here > 0:
        up = (here - 1) // 2
        other = s.queue_O[up]
        if s.event_O[other] <= at_s:
            break
        s.queue_O[here], s.place_O[other] = other, here
        here = up
    while True:
        down = 2 * here + 1
        if down >= s.queued[0]:
            break
        if down + 1 < s.queued[0] and s.event_O[s.queue_O[down + 1]] < s.event_O[s.queue_O[down]]:
            down += 1
        other = s.queue_O[down]
        if s.event_O[other] >= at_s:
            break
        s.queue_O[here], s.place_O[other] = other, here
        here = down
    s.queue_O[here], s.place_O[o] = o, here
