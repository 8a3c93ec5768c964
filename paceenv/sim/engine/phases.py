"""How every rank spent its time: a recording as phases that follow each other without gap or overlap.

The operations of ``paceenv.sim.engine.recording``, with waiting split from doing: in an all-reduce nothing moves before
the last member of the group has entered. Legend: T iterations, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.recording import Operation, operations
from paceenv.sim.engine.simulator import JobBatch

_OF_OP = {
    "pace": "delay",
    "compute": "compute",
    "optimizer": "post-collective work",
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
    done = operations(recording, batch)
    if batch.jobs[0]["staleness"] > 0:
        return _ahead(recording.step_ET[0], *(op for op in done if op.op in {"pace", "compute"}))
    all_phases = []
    for one in done:
        if one.op in _OF_OP:
            all_phases.append(Operation(_OF_OP[one.op], one.seq, one.start_TR, np.maximum(one.end_TR, one.start_TR)))
        else:
            all_phases += _in_collective(one, batch.ranks // batch.groups)
    return all_phases


def _ahead(step_T: NDArray[np.float64], pace: Operation, compute: Operation) -> list[Operation]:
    entry_TR = compute.end_TR
    next_TR = np.maximum(step_T[:-1, None] + pace.start_TR[1:], entry_TR[:-1])
    return [
        replace(pace, op="delay"),
        compute,
        Operation("collective", 2, entry_TR, np.concatenate([next_TR, entry_TR[-1:]])),
    ]


def _in_collective(one: Operation, members: int) -> list[Operation]:
    if one.op != "all_reduce":  # each sender goes on its own
        return [replace(one, op="collective")]
    last_TG = one.start_TR.reshape(len(one.start_TR), -1, members).max(axis=2)
    all_TR = np.minimum(np.repeat(last_TG, members, axis=1), one.end_TR)
    return [replace(one, op="wait for peers", end_TR=all_TR), replace(one, op="collective", start_TR=all_TR)]
