"""How every rank spent its time: a recording as phases that follow each other without gap or overlap.

The operations of ``paceenv.sim.engine.recording``, with waiting split from doing: in an all-reduce nothing moves before
the last member of the group has entered. Legend: T iterations, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Phase:
    """One phase of every rank and iteration, seconds from the end of the step before; it may last no time."""

    name: str
    start_TR: NDArray[np.float64]
    end_TR: NDArray[np.float64]

    @property
    def length_TR(self) -> NDArray[np.float64]:
        """How long it lasted, seconds."""
        return np.asarray(self.end_TR - self.start_TR)


def phases(recording: Recording, batch: JobBatch) -> list[Phase]:
    """The phases of the first environment of a recording, in their order.

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
            all_phases.append(Phase(_OF_OP[one.op], one.start_TR, np.maximum(one.end_TR, one.start_TR)))
        else:
            all_phases += _in_collective(one.op, one.start_TR, one.end_TR, batch.ranks // batch.groups)
    return all_phases


def _ahead(step_T: NDArray[np.float64], pace: Operation, compute: Operation) -> list[Phase]:
    entry_TR = compute.end_TR
    next_TR = np.maximum(step_T[:-1, None] + pace.start_TR[1:], entry_TR[:-1])
    return [
        Phase("delay", pace.start_TR, pace.end_TR),
        Phase("compute", compute.start_TR, entry_TR),
        Phase("collective", entry_TR, np.concatenate([next_TR, entry_TR[-1:]])),
    ]


def _in_collective(op: str, entry_TR: NDArray[np.float64], end_TR: NDArray[np.float64], members: int) -> list[Phase]:
    if op != "all_reduce":  # each sender goes on its own
        return [Phase("collective", entry_TR, end_TR)]
    last_TG = entry_TR.reshape(len(entry_TR), -1, members).max(axis=2)
    all_TR = np.minimum(np.repeat(last_TG, members, axis=1), end_TR)
    return [Phase("wait for peers", entry_TR, all_TR), Phase("collective", all_TR, end_TR)]
