"""Who arrived last in collectives, and by how much: what a trace shows without any model of the job.

A rank's lateness in a collective is the time between its arrival, as the last one, and that of the rank before it: with
an arrival beside the others the collective would have begun that much earlier. It is not longer than since the group's
collective before let the rank go: that the network lets one go later than another is no lateness. Where collectives run
beside work, what the rank before it still computes in between is none either, and one before held nobody who computed.
Time in which several collectives wait for the same rank counts once. Axes: R ranks, T steps, K collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.lateness import watch
from paceenv.core.operation_matrix import Array, Integers, OperationMatrix
from paceenv.core.wording import duration, name_ranks
from paceenv.diagnosis.dependency_graph import Graph

ALWAYS: Final = 0.9
"""Share of the steps; one rank that is the latest in so many is late, whatever else the trace shows."""
_BESIDE: Final = 0.05
"""Share of collectives that begin before the one before them has ended."""
MAX_LISTED: Final = 6
"""Steps whose lateness is listed one by one; of more the mean is said."""


@dataclass(frozen=True)
class LateRank:
    """One rank that others wait for."""

    rank: int  # its number
    iterations: tuple[int, ...]  # the steps in which it was the latest rank by at least LEAST_SHARE of a mean step
    late_s: tuple[float, ...]  # by how much in each of them, summed over their collectives, seconds
    op: str  # the collective to which it was late for longest
    SHOWN: ClassVar[tuple[str, ...]] = ("rank", "iterations", "late_s", "mean_late_s", "op")

    @property
    def mean_late_s(self) -> float:
        return float(np.mean(self.late_s))

    def said(self, steps: int) -> str:
        listed = [duration(s) for s in self.late_s] if len(self.late_s) <= MAX_LISTED else []
        by = ", ".join(listed) or f"{duration(self.mean_late_s)} on average"
        count = len(self.iterations)
        return f"rank {self.rank} arrives last in {count} of {steps} steps, by {by} (mostly at {self.op})"


class Waits(NamedTuple):
    """Waiting for a collective's last rank, ``(W,)`` each: its operation, its step, begin and end, seconds."""

    operation: Integers
    step: Integers
    begin_s: Array
    end_s: Array


@dataclass(frozen=True)
class Arrivals:
    """Where the time of a mean step went, averaged over ranks, and which ranks the others waited for."""

    steps: int  # number of steps
    step_s: float  # mean step, seconds
    waiting_s: float | None  # in collectives before the last member had arrived; None where that cannot be told
    transfer_s: float | None  # in collectives after that; part of it may lie beside compute
    late_RT: Array  # lateness of each rank in each step, summed over collectives, seconds
    late: tuple[LateRank, ...]  # ranks that were the latest in some step, the one with the largest sum first
    waits: Waits  # for whom, collective by collective
    SHOWN: ClassVar = ("steps", "waiting_s", "transfer_s", "late")

    @property
    def text(self) -> str:
        return "; ".join(filter(None, (self.where, self.culprits if len(self.late_RT) > 1 else "")))

    @property
    def where(self) -> str:
        """Where the time of a mean step went, in words."""
        if self.waiting_s is None:
            alone = "waiting for others and transfers cannot be told apart with one rank"
            return alone if len(self.late_RT) == 1 else ""
        return (
            f"of a mean step of {duration(self.step_s)} a rank spends {duration(self.waiting_s)} waiting for others in "
            f"collectives and {duration(self.transfer_s)} in their transfers"
        )

    @property
    def culprits(self) -> str:
        """Who arrives last, in words: one rank, or another one each time."""
        if not self.late:
            return f"nobody arrives last by as much as {watch.LEAST_SHARE:.0%} of a step"
        first, often = self.late[0], sum(len(one.iterations) for one in self.late)
        if len(self.late) > 2 and len(first.iterations) < 0.5 * often:
            lost_s = sum(sum(one.late_s) for one in self.late) / self.steps
            turns = f"ranks take turns to arrive last ({name_ranks([one.rank for one in self.late])})"
            return f"{turns}, by {duration(lost_s)} of a mean step; for longest: {first.said(self.steps)}"
        return "; ".join(one.said(self.steps) for one in self.late[:2])

    @property
    def named(self) -> int | None:
        """The one rank that arrives last in nearly every step."""
        is_one = self.steps >= watch.FIRST_STEPS and self.late and len(self.late[0].iterations) >= ALWAYS * self.steps
        return self.late[0].rank if is_one else None


def measure_arrivals(matrix: OperationMatrix, graph: Graph) -> Arrivals:
    ranks, steps = len(matrix.ranks), matrix.steps
    waiting_s, transfer_s = 0.0, 0.0
    late = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))]
    collective_N = matrix.is_collective_N & graph.meets_N
    left_NT = _left(matrix, collective_N)
    own_N = ~(matrix.is_collective_N | matrix.is_transfer_N)
    # collectives that run beside each other run beside work; an agent's compute may contain the waiting for them
    is_beside = (left_NT > matrix.start_NT).sum() > _BESIDE * np.isfinite(left_NT).sum() and not matrix.counted
    for k in np.unique(graph.task_of_N[collective_N]):
        members = graph.member_N[graph.task_K[k] : graph.task_K[k + 1]]
        start_MT, end_MT = matrix.start_NT[members], matrix.end_NT[members]
        here_T = np.isfinite(start_MT).sum(axis=0) >= 2
        if not here_T.any():
            continue
        start_MT, end_MT = start_MT[:, here_T], end_MT[:, here_T]
        arrival_MT = np.nan_to_num(start_MT, nan=-np.inf)
        last = np.argmax(arrival_MT, axis=0)
        two = np.partition(arrival_MT, len(members) - 2, axis=0)[-2:]
        at_R = matrix.rank_N[members][last]
        left_T = np.clip(left_NT[members][:, here_T][last, np.arange(len(last))], two[0], two[1])
        if is_beside:
            before = matrix.rank_N[members][np.argsort(arrival_MT, axis=0)[-2]]
            left_T -= _work_s(matrix, own_N, at_R, here_T, two[0], left_T)
            left_T += _work_s(matrix, own_N, before, here_T, two[0], two[1])
        two[0] = np.clip(left_T, two[0], two[1])
        late.append((members[last], np.flatnonzero(here_T), two[0], two[1]))
        waited_MT = np.clip(two[1] - start_MT, 0.0, np.maximum(end_MT - start_MT, 0.0))
        waiting_s += float(np.nansum(waited_MT))
        transfer_s += float(np.nansum(np.maximum(end_MT - start_MT, 0.0) - waited_MT))
    step_s = float(matrix.step_s_T.mean())
    waits = Waits(*(np.concatenate(part) for part in zip(*late, strict=True)))
    late_RT = _united(matrix.rank_N[waits.operation], waits, (ranks, steps))
    return Arrivals(
        steps=steps,
        step_s=step_s,
        waiting_s=waiting_s / (ranks * steps) if ranks > 1 else None,
        transfer_s=transfer_s / (ranks * steps) if ranks > 1 else None,
        late_RT=late_RT,
        late=_late(matrix, late_RT, waits, watch.LEAST_SHARE * step_s),
        waits=waits,
    )


def _work_s(
    matrix: OperationMatrix, own_N: NDArray[np.bool_], of_T: Integers, here_T: NDArray[np.bool_], since_T: Array,
    until_T: Array,
) -> Array:  # fmt: skip
    """How long a rank works between two moments of each step, rather than waits, seconds."""
    work_s_T = np.zeros(len(of_T))
    for r in np.unique(of_T).tolist():
        rows, mine = np.flatnonzero(own_N & (matrix.rank_N == r)), of_T == r
        start_NT, end_NT = (x[rows][:, np.flatnonzero(here_T)[mine]] for x in (matrix.start_NT, matrix.end_NT))
        inside_NT = np.minimum(end_NT, until_T[mine]) - np.maximum(start_NT, since_T[mine])
        work_s_T[mine] = np.nansum(np.maximum(inside_NT, 0.0), axis=0)
    return work_s_T


def _left(matrix: OperationMatrix, collective_N: NDArray[np.bool_]) -> Array:
    """When each collective's rank left the one before in its group, ``(N, T)``; minus infinity for a step's first."""
    left_NT = np.full(matrix.start_NT.shape, -np.inf)
    collectives = np.flatnonzero(collective_N)
    of = np.stack([matrix.rank_N, matrix.group_N])[:, collectives]
    for rank, group in np.unique(of, axis=1).T:
        mine = collectives[(of[0] == rank) & (of[1] == group)]
        order = np.argsort(matrix.start_NT[mine], axis=0, kind="stable")
        end_MT = np.take_along_axis(matrix.end_NT[mine], order, axis=0)
        left_NT[mine[order[1:]], np.arange(matrix.steps)] = np.nan_to_num(end_MT[:-1], nan=-np.inf)
    return left_NT


def _united(rank: Integers, waits: Waits, shape: tuple[int, int]) -> Array:
    """Seconds that each rank was waited for in each step."""
    late_RT = np.zeros(shape)
    if not len(rank):
        return late_RT
    _, step, begin_s, end_s = waits
    order = np.lexsort((begin_s, step, rank))
    rank, step, begin_s, end_s = rank[order], step[order], begin_s[order], end_s[order]
    # all rank-steps behind each other on one line, so that one running maximum says how far each is covered
    apart_s = (rank * shape[1] + step) * (2.0 * max(np.abs(begin_s).max(), np.abs(end_s).max()) + 1.0)
    covered_s = np.concatenate([[-np.inf], np.maximum.accumulate(end_s + apart_s)[:-1]]) - apart_s
    np.add.at(late_RT, (rank, step), np.maximum(end_s - np.maximum(begin_s, covered_s), 0.0))
    return late_RT


def _late(matrix: OperationMatrix, late_RT: Array, waits: Waits, least_s: float) -> tuple[LateRank, ...]:
    late_s_N = np.bincount(waits.operation, waits.end_s - waits.begin_s, len(matrix.op_N))
    late_s_N[~matrix.is_collective_N] = -1.0
    latest_T: NDArray[np.int64] = np.argmax(late_RT, axis=0)
    late_ranks = []
    for r in np.unique(latest_T).tolist():
        at = np.flatnonzero((latest_T == r) & (late_RT[r] >= least_s))
        if len(at):
            late_s = tuple(late_RT[r, at].tolist())
            op = matrix.ops[matrix.op_N[np.argmax(np.where(matrix.rank_N == r, late_s_N, -1.0))]]
            late_ranks.append(LateRank(matrix.ranks[r], tuple(matrix.iteration_T[at].tolist()), late_s, op))
    return tuple(sorted(late_ranks, key=lambda one: -sum(one.late_s)))
