"""Which programs are of the simple kind: all ranks compute the same and then reduce, each in one process group.

The engine runs those in its vector loop, as one compute time and one collective a step, and all others event by event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceenv.sim.cluster.program.footprint import Use
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, Wait
from paceenv.sim.engine.program_layout import UPLINK

_REDUCTIONS = ("all_reduce", "reduce_scatter", "all_gather")


class Folded(NamedTuple):
    """A step of the simple kind, seconds, with nothing in its way."""

    compute_s: float
    overlap_s: float
    """How long before the end of compute the first transfer begins."""
    reduce_s: float
    """All transfers, one after the other."""
    uplink_work_s: float
    """In seconds of the whole tier above the leaves."""
    tail_s: float
    """Those of them that cannot begin before compute ends."""
    groups: int
    """Process groups, side by side."""


def fold(plan: StepPlan, use: Callable[[Start, Sequence[int]], Use]) -> Folded | None:
    """A program as the vector loop runs it; None if it is not of the simple kind.

    Nothing is waited for before the last gradients are handed over, so what follows (the optimizer, the weights that
    ZeRO gathers) may as well come before: the step is as long.
    """
    if len(plan.roles) != 1 or len(plan.communicators) > 1:
        return None
    role = plan.roles[0]
    starts = [one for one in role if isinstance(one, Start)]
    if any(one.op not in _REDUCTIONS or one.every > 1 for one in starts):
        return None
    first_wait = next((k for k, one in enumerate(role) if isinstance(one, Wait)), len(role))
    backward = [k for k in range(first_wait) if isinstance(role[k], Compute)]
    if not backward or first_wait == len(role):
        return None
    ahead = [one for one in role[:first_wait] if isinstance(one, Start)]
    if len({one.can_wait for one in ahead}) > 1 or any(one.can_wait for one in starts[len(ahead) :]):
        return None
    groups = next(iter(plan.communicators.values()), [[0]])
    uses = {one: use(one, groups[0]) for one in starts}
    cost_s = {one: usage.alone_s + usage.latency_s for one, usage in uses.items()}
    seconds = [one.seconds if isinstance(one, Compute) else 0.0 for one in role]
    first_start = next((k for k, one in enumerate(role) if isinstance(one, Start)), len(role))
    compute_s, overlap_s = sum(seconds), sum(seconds[first_start:first_wait])
    reduce_s, last = sum(cost_s[one] for one in starts), max(backward, default=-1)
    tail_s = sum(cost_s[one] for k, one in enumerate(role) if isinstance(one, Start) and k > last)
    step_s = _run(role, cost_s)
    if overlap_s > 0.0 and step_s > compute_s + tail_s:  # busy to the end with gaps before: as if they began later
        overlap_s = max(compute_s + reduce_s - step_s, 0.0)
    taken = [uses[one] for one in starts]
    uplink_work_s = sum(float(one.share_U[one.link_U == UPLINK].sum()) * one.alone_s for one in taken)
    return Folded(compute_s, overlap_s, reduce_s, uplink_work_s, tail_s, len(groups))


def _run(role: Sequence[Instruction], cost_s: dict[Start, float]) -> float:
    """How long a role takes with nothing in its way; its transfers follow each other."""
    now_s = free_s = 0.0
    ends_s = dict[int, float]()
    for place, one in enumerate(role):
        if isinstance(one, Compute):
            now_s += one.seconds
        elif isinstance(one, Start):
            ends_s[place] = free_s = max(now_s, free_s) + cost_s[one]
        else:
            now_s = max(now_s, ends_s[one.start])
    return now_s
