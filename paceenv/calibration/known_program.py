"""The steps of a job whose program is known: its phases come from a cluster, what ranks compute in them from a trace.

A trace need not show when a transfer in the background was handed over: the live recorder sees only the wait for it. So
its rows are matched with the program, and what lies between them is compute.

Axes: T steps, R ranks, J anchors of a rank: rows in the order of the program, and the end of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import ClusterBuilder, Matched, RankCompute
from paceenv.calibration.compute_noise import put_lengths
from paceenv.calibration.noise_fit import MIN_STEPS
from paceenv.calibration.parameters import FROM_BASE, exact, identified, not_identifiable
from paceenv.calibration.step_stamps import PLAIN_OPS, StepStamps, in_order, moves, usual_steps
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import Integers, OperationMatrix
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, Wait
from paceenv.sim.cluster.program.step_program import StepProgram, flat

RATE: Final = "fabric.nic_gbps"

Array = NDArray[np.float64]


class _Anchor(NamedTuple):
    """A row that a trace has of a rank's step: the operation, and the compute phases since the anchor before."""

    op: str
    blocks: bool
    work: tuple[int, ...]


@dataclass(frozen=True)
class AnchorStamps(StepStamps):
    """The steps of a job whose program is known: compute before each anchor of each rank ``(T, J)``, seconds."""

    base: Cluster
    compute_R: list[Array]
    anchors_R: list[list[_Anchor]]


def _anchors(program: StepProgram, role: Sequence[Instruction], rank: int, *, handed_over: bool) -> list[_Anchor]:
    """Rows of a rank: transfers in the background where they are handed over, or where they are awaited."""
    anchors, work = list[_Anchor](), list[int]()
    phases = [phase.compute for phase in flat(program.step) if phase.compute is not None]
    mine = (number for number, one in enumerate(phases) if one.ranks is None or rank in one.ranks)

    def add(op: str, *, blocks: bool) -> None:
        anchors.append(_Anchor(op, blocks, tuple(work)))
        work.clear()

    for at, one in enumerate(role):
        if isinstance(one, Compute):
            work.append(next(mine))
        elif isinstance(one, Start):
            if handed_over:
                add(one.op, blocks=role[at + 1] == Wait(at))
        elif not handed_over and isinstance(begin := role[one.start], Start):
            add(begin.op, blocks=True)
    add("", blocks=True)
    return anchors


def read_known(whole: OperationMatrix, base: Cluster) -> AnchorStamps:
    """Steps whose rows are those of a known program, from all steps of a job."""
    assert base.program is not None
    matrix, plan = usual_steps(whole), base.plan()
    if len(matrix.ranks) != base.ranks:
        raise InputError(f"trace of {matrix.name}: {len(matrix.ranks)} ranks; allowed: the {base.ranks} of {base.name}")
    move_N = matrix.is_op(*PLAIN_OPS)
    rows_R = [in_order(matrix, np.flatnonzero(move_N & (matrix.rank_N == r))) for r in range(base.ranks)]
    for handed_over in (False, True):
        anchors_R = [
            _anchors(base.program, plan.roles[role], r, handed_over=handed_over) for r, role in enumerate(plan.role_R)
        ]
        kept = [
            t
            for t in (np.flatnonzero(np.diff(matrix.iteration_T) == 1) + 1).tolist()
            if all(_fit(matrix, n_JT[:, t], anchors) for (n_JT, *_), anchors in zip(rows_R, anchors_R, strict=True))
        ]
        if len(kept) >= MIN_STEPS:
            break
    else:
        seen = ", ".join(_ops(matrix, rows_R[0][0][:, -1])) if matrix.steps else "nothing"
        wanted = ", ".join(one.op for one in anchors_R[0][:-1])
        raise InputError(
            f"trace of {matrix.name}: rank {matrix.ranks[0]} has {seen} in a step; allowed: {wanted}, as the program "
            f"of {base.name} has, in at least {MIN_STEPS} steps"
        )
    compute_R, worked_N = list[Array](), ~moves(matrix)
    for r, ((_, start_JT, end_JT), anchors) in enumerate(zip(rows_R, anchors_R, strict=True)):
        compute_TJ, cursor_T = np.empty((len(kept), len(anchors))), np.zeros(len(kept))
        for j, anchor in enumerate(anchors[:-1]):
            compute_TJ[:, j] = np.maximum(start_JT[j, kept] - cursor_T, 0.0)
            cursor_T = np.maximum((end_JT if anchor.blocks else start_JT)[j, kept], cursor_T)
        worked_NT = matrix.end_NT[worked_N & (matrix.rank_N == r)][:, kept]
        compute_TJ[:, -1] = np.maximum(np.fmax.reduce(worked_NT, axis=0, initial=0.0) - cursor_T, 0.0)
        compute_R.append(compute_TJ)
    return AnchorStamps(
        name=matrix.name,
        source=matrix.source,
        names=matrix.ranks,
        iteration_T=matrix.iteration_T[kept],
        begin_T=matrix.begin_s_T[kept],
        step_T=matrix.step_s_T[kept],
        dropped=matrix.recorded - len(kept),
        base=base,
        compute_R=compute_R,
        anchors_R=anchors_R,
    )


def _ops(matrix: OperationMatrix, n_J: Integers) -> list[str]:
    return [PLAIN_OPS[matrix.ops[op]] for op in matrix.op_N[n_J[n_J >= 0]]]


def _fit(matrix: OperationMatrix, n_J: Integers, anchors: Sequence[_Anchor]) -> bool:
    """Whether the rows of a rank are the anchors, but for a barrier at the end."""
    seen, wanted = _ops(matrix, n_J), [one.op for one in anchors[:-1]]
    return seen[: len(wanted)] == wanted and seen[len(wanted) :] in ([], ["all_reduce"])


def add_known(builder: ClusterBuilder[AnchorStamps]) -> None:
    """The base itself, with the seconds that ranks compute before the anchors of its program."""
    stamps, base = builder.stamps, builder.stamps.base
    assert base.program is not None
    phases = [phase.model_dump(exclude_none=True, exclude_defaults=True) for phase in flat(base.program.step)]
    works = [one["compute"] for one in phases if "compute" in one]
    nominal = np.array([one["seconds"] for one in works])
    ratios: list[list[float]] = [[] for _ in works]
    total_R, relative_R = list[Array](), list[Array]()
    for anchors, compute_TJ in zip(stamps.anchors_R, stamps.compute_R, strict=True):
        used = [j for j, anchor in enumerate(anchors) if nominal[list(anchor.work)].sum() > 0.0]
        for j in used:
            ratio = float(compute_TJ[:, j].mean() / nominal[list(anchors[j].work)].sum())
            for number in anchors[j].work:
                ratios[number].append(ratio)
        total_R.append(compute_TJ[:, used].sum(axis=1))
        relative_R.append(compute_TJ[:, used] / np.maximum(compute_TJ[:, used].mean(axis=0), 1e-300))
    for one, ratio_N in zip(works, ratios, strict=True):
        one["seconds"] = float(f"{one['seconds'] * (np.mean(ratio_N) if ratio_N else 1.0):.6g}")
    total_TR = np.stack(total_R, axis=1)
    by_rank = any("ranks" in one for one in works)  # phases of their own say how ranks differ
    mean_R = total_TR.mean(axis=0) if by_rank else np.full(total_TR.shape[1], total_TR.mean())
    builder.compute = RankCompute(total_TR / np.maximum(mean_R, 1e-300), by_rank, relative_R)
    said = f"Program of {base.name}, fitted to a trace of {stamps.name}."
    builder.data = base.model_dump() | builder.data | {"description": said}
    builder.data["program"]["step"] = phases
    builder.add(exact("job.nodes", base.job.nodes, FROM_BASE))


def match_known(builder: ClusterBuilder[AnchorStamps]) -> None:
    """Lengths of a given program's phases, and the rate of the NICs."""
    put_lengths(builder)
    matched = builder.match_step([RATE], 0.3, 2.0)
    if isinstance(matched, Matched):
        said = "the rate with which the simulated step is as long as the measured one; latency is in it"
        builder.put(identified(RATE, matched.gbps[RATE], matched.gbps[RATE] * matched.relative_se, said))
    else:
        builder.add(not_identifiable(RATE, builder.data["fabric"]["nic_gbps"], matched, FROM_BASE))
