"""How every rank spent its time: a recording as phases that follow each other without gap or overlap.

The operations of ``paceenv.sim.engine.recording``, with waiting split from doing: in an all-reduce nothing moves before
the last member of the group has entered. Legend: T iterations, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.recording import Operation, operations
from paceenv.sim.engine.simulator import JobBatch

_OF_OP = {
    "pace": "delay",
    "compute": "compute",
    "optimizer": "optimizer",
    "barrier": "barrier wait",
    "restart": "restart",
    "checkpoint": "checkpoint",
}


def phases(recording: Recording, batch: JobBatch) -> list[Operation]:
    """The phases of the first environment of a recording, in their order; one may last no time.

    Where ranks do not run ahead, the phases of a rank add up to its step. A rank that runs ahead (bounded staleness) is
    in the collective only while it is blocked, until it starts its next step. What it was blocked for after the last
    iteration of a recording is missing.
    """
    done, all_phases = operations(recording, batch), list[Operation]()
    if batch.jobs[0]["staleness"] > 0:
        pace, compute = (one for one in done if one.op in {"pace", "compute"})
        entry_TR = compute.end_TR
        next_TR = np.maximum(recording.step_ET[0, :-1, None] + pace.start_TR[1:], entry_TR[:-1])
        blocked = Operation("collective", 2, entry_TR, np.concatenate([next_TR, entry_TR[-1:]]))
        return [replace(pace, op="delay"), compute, blocked]
    for one in done:
        if one.op in _OF_OP:
            all_phases.append(replace(one, op=_OF_OP[one.op], end_TR=np.maximum(one.end_TR, one.start_TR)))
        elif one.op == "all_reduce":
            last_TG = one.start_TR.reshape(len(one.start_TR), batch.groups, -1).max(axis=2)
            all_TR = np.minimum(np.repeat(last_TG, batch.ranks // batch.groups, axis=1), one.end_TR)
            all_phases.append(replace(one, op="wait for peers", end_TR=all_TR))
            all_phases.append(replace(one, op="collective", start_TR=all_TR))
        else:  # each sender goes on its own
            all_phases.append(replace(one, op="collective"))
    return all_phases
