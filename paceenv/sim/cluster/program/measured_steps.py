"""A job that is described by times as a program: compute, one collective of each group, and what some do after it."""

from __future__ import annotations

from paceenv.sim.cluster.environment import Job, PostCollectiveWork
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, Wait

GROUP = "group"
"""The communicator."""


def measured_plan(job: Job, after: PostCollectiveWork) -> StepPlan:
    """What every rank does. Episodes of post-collective work are not part of the plan: they come and go."""
    values = {"job.compute_s": job.compute_s, "job.gradient_bytes": job.gradient_bytes, "job.overlap": job.overlap,
              "job.tail_bytes": job.tail_bytes, "post_collective_work.work_s": after.work_s}  # fmt: skip
    for key, value in values.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{key}: a number, not drawn, for a plan of the step")
    compute_s, payload_bytes, overlap, tail_bytes, work_s = map(float, values.values())  # type: ignore[arg-type]
    tail_bytes = min(tail_bytes, payload_bytes)
    first = Start(GROUP, job.collective, payload_bytes - tail_bytes)
    rows: list[Instruction] = [Compute(compute_s * (1.0 - overlap)), first, Compute(compute_s * overlap)]
    if tail_bytes > 0.0:
        rows.append(Start(GROUP, job.collective, tail_bytes))
    rows += [Wait(GROUP, number) for number in range(1 + (tail_bytes > 0.0))]
    roles = [rows, [*rows, Compute(work_s)]] if after.groups and work_s > 0.0 else [rows]
    size = job.ranks // job.groups
    groups = [list(range(n * size, (n + 1) * size)) for n in range(job.groups)]
    role_R = [int(len(roles) > 1 and n < after.groups) for n in range(job.groups) for _ in range(size)]
    return StepPlan(role_R, roles, {GROUP: groups}, list(range(job.ranks)))
