"""The structure of a job as its trace shows it: process groups, the collective with the payload, a barrier, stamps.

The last run of one kind of collective in one process group carries the payload; it may have several buckets.
Everything before counts as compute, everything between it and the barrier as post-collective work. A process group of
one rank has no communication; its time counts as compute. An iteration begins at the end of the one before.

Axes: T iterations, R ranks in the order of their groups, G process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.step_stamps import StepStamps, in_order, moves
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import BARRIER_OP, Integers, OperationMatrix
from paceenv.core.timing import BARRIER_BYTES

MIN_ITERATIONS: Final = 16

Array = NDArray[np.float64]
Collective = Literal["all_reduce", "gather", "all_to_all"]
_KINDS: Final[dict[str, Collective]] = {"gather": "gather", "all_to_all": "all_to_all"}
"""Collectives that the simulator models beyond their volume; it treats the others as an all-reduce."""


@dataclass(frozen=True)
class JobStamps(StepStamps):
    """The stamps of a job with one collective a step, seconds from the end of the iteration before.

    ``members`` are the ranks of each process group, ``names`` all of them in that order. ``entry_TR`` is a rank's start
    of the payload, ``delay_TR`` what it held back by its own choice before, ``finish_TG`` the end of a group's payload,
    ``ready_TG`` when its last rank reached the barrier (or ``finish_TG`` without one).
    """

    members: tuple[tuple[int, ...], ...]
    collective: Collective
    ops: tuple[str, ...]
    payload_bytes: int
    barrier: bool
    entry_TR: Array
    delay_TR: Array
    finish_TG: Array
    ready_TG: Array

    @property
    def groups(self) -> int:
        return len(self.members)

    @property
    def compute_TR(self) -> Array:
        """What a rank did before the payload, its own delay left out, seconds."""
        return self.entry_TR - self.delay_TR

    @property
    def arrival_TG(self) -> Array:
        """When the last member of a group arrived at its payload."""
        return self.of_groups(self.entry_TR)

    @property
    def duration_TG(self) -> Array:
        """From a group's last arrival to the end of its payload."""
        return self.finish_TG - self.arrival_TG

    @property
    def unpaced_T(self) -> NDArray[np.bool_]:
        """Iterations without any delay."""
        return np.asarray((self.delay_TR <= 0.0).all(axis=1))

    def of_groups(self, value_TR: Array) -> Array:
        """The largest value of any member, ``(T, G)``."""
        return np.asarray(value_TR.reshape(len(value_TR), self.groups, -1).max(axis=2))


class _Payload(NamedTuple):
    """One rank's payload, and which collectives its usual iteration has."""

    group: int
    ops: tuple[str, ...]
    op: str
    size: int
    barrier: bool


def read_job(matrix: OperationMatrix) -> JobStamps:
    """The stamps of a job with one collective a step.

    They are not a number where a rank has none or is unusual: ``entry_TR`` is its first entry of the payload,
    ``exit_TR`` its last exit, ``wait_TR`` its entry of the last collective, ``end_TR`` the end of all of them, also of
    an unusual iteration.
    """
    stamps_4TR = np.full((4, matrix.steps, len(matrix.ranks)), np.nan)
    of_group: dict[int, list[int]] = {}
    collective_N, odd_RT = matrix.is_collective_N & ~matrix.is_transfer_N & moves(matrix), matrix.is_interrupted_RT
    payloads = [_read_rank(matrix, r, collective_N, odd_T, stamps_4TR[:, :, r]) for r, odd_T in enumerate(odd_RT)]
    for r, one in enumerate(payloads):  # in the order of ranks, so that groups are in that of their first ones
        of_group.setdefault(one.group, []).append(r)
    sizes = sorted(set(map(len, of_group.values())))
    if len(sizes) > 1:
        raise InputError(f"trace of {matrix.name}: process groups of {sizes} ranks carry the payload; allowed: equal")
    return _stamps(matrix, list(of_group.values()), payloads, stamps_4TR)


def _read_rank(
    matrix: OperationMatrix, r: int, collective_N: NDArray[np.bool_], odd_T: NDArray[np.bool_], stamps_4T: Array
) -> _Payload:
    """Which of a rank's collectives are payload and barrier, from the usual iteration; puts down when they were."""
    n_KT, start_KT, end_KT = in_order(matrix, np.flatnonzero(collective_N & (matrix.rank_N == r)))
    some_T = np.asarray((n_KT >= 0).any(axis=0))
    if not some_T.any():
        raise InputError(f"trace: rank {matrix.ranks[r]} has no collective; allowed: a job whose ranks communicate")
    stamps_4T[3, some_T] = np.nanmax(end_KT[:, some_T], axis=0) + matrix.begin_s_T[some_T]
    plain_T = some_T & ~odd_T
    plain_T = plain_T if plain_T.any() else some_T  # what each one has is not unusual
    kinds, counts = np.unique(n_KT[:, plain_T], axis=1, return_counts=True)
    usual_K = kinds[:, counts.argmax()]
    kept_T = plain_T & (n_KT == usual_K[:, None]).all(axis=0)
    mine = usual_K[usual_K >= 0]
    start_KT, end_KT = (x[: len(mine), kept_T] + matrix.begin_s_T[kept_T] for x in (start_KT, end_KT))
    first, last = _payload(matrix, mine, start_KT, end_KT)
    stamps_4T[:3, kept_T] = start_KT[first], end_KT[last], start_KT[-1]
    ops = tuple(matrix.ops[op] for op in matrix.op_N[mine])
    size, barrier = int(matrix.bytes_N[mine[first : last + 1]].sum()), last + 1 < len(mine)
    return _Payload(int(matrix.group_N[mine[last]]), ops, ops[last], size, barrier)


def _payload(matrix: OperationMatrix, mine: Integers, start_KT: Array, end_KT: Array) -> tuple[int, int]:
    """First and last bucket of the payload among the collectives of the usual iteration."""
    usual, sizes = list(zip(matrix.op_N[mine], matrix.group_N[mine], strict=True)), matrix.bytes_N[mine]
    small_K = (sizes > 0) & (sizes <= BARRIER_BYTES) & (sizes.max() > BARRIER_BYTES)
    carries = np.flatnonzero(~matrix.is_op(BARRIER_OP)[mine] & ~small_K).tolist()
    first = last = carries[-1] if carries else len(usual) - 1  # of nothing but barriers, ranks meet in the last one
    lasts = np.median(end_KT - start_KT, axis=1)
    while first and first - 1 in carries and usual[first - 1] == usual[last]:
        if np.median(start_KT[first] - end_KT[first - 1]) > min(lasts[first], lasts[first - 1]):
            break
        first -= 1
    return first, last


def _stamps(
    matrix: OperationMatrix, groups: list[list[int]], payloads: Sequence[_Payload], stamps_4TR: Array
) -> JobStamps:
    """The stamps of the iterations that are complete and alike on all ranks, which are in the order of their groups."""
    name, order, iteration_T = matrix.name, [r for group in groups for r in group], matrix.iteration_T
    first = payloads[order[0]]
    if len({(one.barrier, one.ops[-1]) for one in payloads}) > 1:
        raise InputError(f"trace of {name}: ranks differ in the collectives of an iteration; allowed: alike on all")
    entry_TR, exit_TR, wait_TR, end_TR = stamps_4TR[:, :, order]
    delay_TR = matrix.seconds_RT(matrix.is_pace_N)[order].T
    first_T = end_TR.reshape(len(end_TR), len(groups), -1).min(axis=2).max(axis=1)
    for end_T in (end_TR.max(axis=1), first_T):  # not a number where a rank has no end
        begin_T = np.concatenate([[np.nan], np.where(np.diff(iteration_T) == 1, end_T[:-1], np.nan)])
        complete_T = np.isfinite(entry_TR).all(axis=1) & np.isfinite(begin_T)
        complete = int(complete_T.sum())
        if complete < MIN_ITERATIONS:
            raise InputError(
                f"trace of {name}: {complete} complete iterations of its usual kind; allowed: at least {MIN_ITERATIONS}"
            )
        use_T = complete_T & (entry_TR - delay_TR > begin_T[:, None]).all(axis=1)
        if use_T.sum() >= max(MIN_ITERATIONS, complete / 2):
            break  # else a rank often gets out so late that others have begun: that counts as what it computes
    else:
        raise InputError(
            f"trace of {name}: in {complete - int(use_T.sum())} of {complete} iterations a rank began its payload "
            "before others ended the iteration before; allowed: a job whose ranks wait for each other"
        )
    step_T = (end_T - begin_T)[use_T]
    entry_TR, exit_TR, wait_TR = (x_TR[use_T] - begin_T[use_T, None] for x_TR in (entry_TR, exit_TR, wait_TR))
    delay_TR = delay_TR[use_T]
    if len(groups) == len(order):
        entry_TR = exit_TR
    arrival_TG, finish_TG, ready_TG = (
        x_TR.reshape(len(x_TR), len(groups), -1).max(axis=2) for x_TR in (entry_TR, exit_TR, wait_TR)
    )
    finish_TG = np.maximum(np.minimum(finish_TG, step_T[:, None]), arrival_TG)
    return JobStamps(
        name=name,
        source=matrix.source,
        names=tuple(matrix.ranks[r] for r in order),
        members=tuple(tuple(matrix.ranks[r] for r in group) for group in groups),
        collective=_KINDS.get(first.op, "all_reduce"),
        ops=first.ops,
        payload_bytes=int(np.median([one.size for one in payloads])),
        barrier=first.barrier,
        iteration_T=iteration_T[use_T],
        begin_T=begin_T[use_T],
        entry_TR=entry_TR,
        delay_TR=np.minimum(delay_TR, np.maximum(entry_TR, 0.0)),
        finish_TG=finish_TG,
        ready_TG=np.maximum(ready_TG, finish_TG) if first.barrier else finish_TG,
        step_T=step_T,
        dropped=matrix.recorded - int(use_T.sum()),
    )
