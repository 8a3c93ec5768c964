"""A job of which only one collective a step was measured, as a program: compute, all-reduce, and the last gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceenv.sim.cluster.program.footprint import UPLINK, Use
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, Wait

TAIL = "tail"
"""The communicator of the last gradients."""
NO_WORK = 1e-12
"""Share of the uplink below which a collective meets nobody."""
_ANY_BYTES = math.inf


def one_collective(job: Any, ranks: int, groups: int) -> tuple[StepPlan, Callable[[Start, Sequence[int]], Use]]:
    """What every rank does, and what its transfers take of the uplink.

    With overlap the collective may start when all have their first gradients, ``overlap_share`` of the compute before
    its end. The last gradients are reduced after it, however early the first ones went.
    """
    overlap, members = float(job["overlap_share"]), ranks // groups
    begin, end = [Start("gradients", "all_reduce", _ANY_BYTES)], [Wait("gradients", 0)]
    role: list[Instruction] = [Compute(1.0), *begin, *end]
    if overlap > 0.0:
        tail = Start(TAIL, "all_reduce", _ANY_BYTES)
        role = [Compute(1.0 - overlap), *begin, Compute(overlap), tail, Wait(TAIL, 0), *end]
    parts = [list(range(g * members, (g + 1) * members)) for g in range(groups)]
    plan = StepPlan([0] * ranks, [role], {"gradients": parts, TAIL: parts}, [0] * ranks)

    def use(start: Start, members: Sequence[int]) -> Use:
        if start.communicator == TAIL:
            return Use(0.0, float(job["tail_s"]), np.zeros(0, np.int64), np.zeros(0))
        alone_s, work_s = float(job["transfer_alone_s"]), float(job["uplink_work_s"])
        links = [UPLINK] if work_s > NO_WORK * alone_s else []
        alone_s = max(alone_s, work_s if links else 0.0)
        return Use(
            alone_s, float(job["latency_s"]), np.array(links, np.int64), np.full(len(links), work_s / (alone_s or 1.0))
        )

    return plan, use
