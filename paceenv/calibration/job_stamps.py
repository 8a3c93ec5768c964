"""The structure of a job as its trace shows it: process groups, the collective with the payload, a barrier, stamps.

Reads :mod:`paceenv.core.trace`, from the simulator or from a live job. The last run of one kind of collective in one
process group carries the payload; it may have several buckets. Everything before counts as compute, everything between
it and the barrier as post-collective work. A process group of one rank has no communication; its time counts as
compute. An iteration begins at the end of the one before.

Axes: T iterations, R ranks in the order of their groups, G process groups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import StepStamps
from paceenv.core.errors import InputError
from paceenv.core.trace import COLLECTIVE_OPS, COMPUTE_OPS, OTHER_OPS, PACE_OP, POINT_TO_POINT_OPS, Trace

MIN_ITERATIONS: Final = 16
SYNCHRONISES_BYTES: Final = 4096
"""A collective of at most this size beside a larger one only synchronises."""
POST_COLLECTIVE_OP: Final = "optimizer"
"""The simulator's name for work after the payload; it does not make an iteration unusual."""
_ENDS_USE = tuple(op for op in OTHER_OPS if op != POST_COLLECTIVE_OP)
_NOT_COLLECTIVE = frozenset((*COMPUTE_OPS, *POINT_TO_POINT_OPS, *OTHER_OPS, PACE_OP, "evaluation"))

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
    def group_delay_TG(self) -> Array:
        """The longest delay that a member of the group took."""
        return self.of_groups(self.delay_TR)

    @property
    def unpaced_T(self) -> NDArray[np.bool_]:
        """Iterations without any delay."""
        return np.asarray((self.delay_TR <= 0.0).all(axis=1))

    def of_groups(self, value_TR: Array) -> Array:
        """The largest value of any member, ``(T, G)``."""
        return np.asarray(value_TR.reshape(len(value_TR), self.groups, -1).max(axis=2))


@dataclass(frozen=True)
class _Rank:
    """One rank's iterations: for the payload first entry and last exit, for the barrier likewise."""

    group: int
    ops: tuple[str, ...]
    payload_op: str
    payload_bytes: int
    barrier: bool
    entry_s: dict[int, float]
    exit_s: dict[int, float]
    wait_s: dict[int, float]
    end_s: dict[int, float]
    delay_s: dict[int, float]


def read_job(trace: Trace, *, job: str | None = None) -> JobStamps:
    """The stamps of one job of a trace; ``job`` must be named where the trace holds several."""
    name, rows = _rows_of(trace, job)
    per_rank = {rank: _read_rank(rank, *part) for rank, part in rows.items()}
    sizes = Counter(rank.group for rank in per_rank.values())
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"trace of {name}: process groups of {sorted(set(sizes.values()))} ranks carry the payload; allowed: equal"
        )
    first_of = {number: min(r for r in per_rank if per_rank[r].group == number) for number in sizes}
    numbers = sorted(sizes, key=lambda number: first_of[number])
    members = tuple(tuple(r for r in sorted(per_rank) if per_rank[r].group == number) for number in numbers)
    return _stamps(name, trace.metadata.source, members, per_rank)


def _rows_of(trace: Trace, job: str | None) -> tuple[str, dict[int, tuple[NDArray[np.int64], ...]]]:
    """The job's name, and by rank its rows in the order of iteration and seq, as columns."""
    job = trace.job_name(job)
    columns = [trace.column(n) for n in ("iteration", "op", "group", "bytes", "start_s", "end_s")]
    rank, seq, mine = trace.column("rank"), trace.column("seq"), trace.isin("job", job)
    order = np.lexsort((seq, columns[0], rank))
    order = order[mine[order]]
    bounds = np.flatnonzero(np.diff(rank[order])) + 1
    return job, {int(rank[part[0]]): tuple(c[part] for c in columns) for part in np.split(order, bounds)}


def _read_rank(rank: int, *columns: NDArray[np.int64]) -> _Rank:
    """Which of its collectives are payload and barrier, from the usual iteration, and when they were."""
    iteration, op, group, size, start_s, end_s = (column.tolist() for column in columns)
    collectives: dict[int, list[int]] = {}
    delay_s: dict[int, float] = {}
    unusual: set[int] = set()
    for i, kind in enumerate(op):
        if kind in COLLECTIVE_OPS or (group[i] >= 0 and kind not in _NOT_COLLECTIVE):
            collectives.setdefault(iteration[i], []).append(i)
        elif kind == PACE_OP:
            delay_s[iteration[i]] = delay_s.get(iteration[i], 0.0) + end_s[i] - start_s[i]
        elif kind in _ENDS_USE or kind == "evaluation":
            unusual.add(iteration[i])
    signatures = {t: tuple((op[i], group[i]) for i in at) for t, at in collectives.items()}
    if not signatures:
        raise InputError(f"trace: rank {rank} has no collective; allowed: a job whose ranks communicate")
    plain = sorted(signatures.keys() - unusual) or sorted(signatures)  # what every iteration has is not unusual
    usual = Counter(signatures[t] for t in plain).most_common(1)[0][0]
    kept = [t for t in plain if signatures[t] == usual]
    usual_bytes = [int(np.median([size[collectives[t][k]] for t in kept])) for k in range(len(usual))]
    carries = _carries(usual, usual_bytes)
    if not carries:  # nothing but barriers: the last one is what ranks meet in
        carries = [len(usual) - 1]
    last = carries[-1]
    first = last
    at_T = np.array([collectives[t] for t in kept])
    starts, ends = np.asarray(start_s)[at_T], np.asarray(end_s)[at_T]
    lasts = np.median(ends - starts, axis=0)
    while first and first - 1 in carries and usual[first - 1] == usual[last]:
        if np.median(starts[:, first] - ends[:, first - 1]) > min(lasts[first], lasts[first - 1]):
            break
        first -= 1
    barrier = last + 1 < len(usual)
    return _Rank(
        group=int(usual[last][1]),
        ops=tuple(kind for kind, _ in usual),
        payload_op=usual[last][0],
        payload_bytes=sum(usual_bytes[first : last + 1]),
        barrier=barrier,
        entry_s=dict(zip(kept, starts[:, first].tolist(), strict=True)),
        exit_s=dict(zip(kept, ends[:, last].tolist(), strict=True)),
        wait_s=dict(zip(kept, starts[:, -1].tolist(), strict=True)) if barrier else {},
        end_s={t: max(end_s[i] for i in at) for t, at in collectives.items()},
        delay_s=delay_s,
    )


def _carries(usual: tuple[tuple[str, int], ...], usual_bytes: list[int]) -> list[int]:
    """Which collectives of the usual iteration carry something."""
    largest = max(usual_bytes)
    small = [0 < size <= SYNCHRONISES_BYTES < largest for size in usual_bytes]
    return [k for k, (kind, _) in enumerate(usual) if kind != "barrier" and not small[k]]


def _stamps(
    name: str,
    source: str,
    members: tuple[tuple[int, ...], ...],
    ranks: dict[int, _Rank],
    only: set[int] | None = None,
) -> JobStamps:
    """The stamps of the iterations that are complete and alike on all ranks, of those in ``only`` if given."""
    order = [rank for group in members for rank in group]
    if len({ranks[r].barrier for r in order}) > 1 or len({ranks[r].ops[-1] for r in order}) > 1:
        raise InputError(f"trace of {name}: ranks differ in the collectives of an iteration; allowed: alike on all")
    seen = set.union(*(set(ranks[r].end_s) for r in order))
    ended = set.intersection(*(set(ranks[r].end_s) for r in order))
    kept = set.intersection(*(set(ranks[r].entry_s) for r in order))
    use = np.array(sorted(t for t in kept if t - 1 in ended and (only is None or t in only)), np.int64)
    if len(use) < MIN_ITERATIONS:
        raise InputError(
            f"trace of {name}: {len(use)} complete iterations of its most usual kind; "
            f"allowed: at least {MIN_ITERATIONS}"
        )

    def matrix(values: list[dict[int, float]], shift: int = 0) -> Array:
        return np.array([[value[t + shift] for value in values] for t in use.tolist()])

    chosen = [ranks[r] for r in order]
    begin_T = matrix([r.end_s for r in chosen], -1).max(axis=1)
    end_T = matrix([r.end_s for r in chosen]).max(axis=1)
    delay_TR = np.array([[r.delay_s.get(t, 0.0) for r in chosen] for t in use.tolist()])
    entry_TR = matrix([r.entry_s for r in chosen]) - begin_T[:, None]
    waits_T = (entry_TR > delay_TR).all(axis=1)
    if not waits_T.all():  # a rank got out of the barrier much later than another: nothing to say about that iteration
        if waits_T.sum() < max(MIN_ITERATIONS, len(use) / 2):
            raise InputError(
                f"trace of {name}: in {int((~waits_T).sum())} of {len(use)} iterations a rank began its payload before "
                "others ended the iteration before; allowed: a job whose ranks wait for each other"
            )
        return _stamps(name, source, members, ranks, set(use[waits_T].tolist()))
    exit_TR = matrix([r.exit_s for r in chosen]) - begin_T[:, None]
    if len(members) == len(order):
        entry_TR = exit_TR
    shape = (len(use), len(members), -1)
    finish_TG = exit_TR.reshape(shape).max(axis=2)
    ready_TG, barrier = finish_TG, chosen[0].barrier
    if barrier:
        ready_TG = (matrix([r.wait_s for r in chosen]) - begin_T[:, None]).reshape(shape).max(axis=2)
    return JobStamps(
        name=name,
        source=source,
        names=tuple(order),
        members=members,
        collective=_KINDS.get(chosen[0].payload_op, "all_reduce"),
        ops=chosen[0].ops,
        payload_bytes=int(np.median([r.payload_bytes for r in chosen])),
        barrier=barrier,
        iteration_T=use,
        begin_T=begin_T,
        entry_TR=entry_TR,
        delay_TR=np.minimum(delay_TR, np.maximum(entry_TR, 0.0)),
        finish_TG=np.maximum(finish_TG, entry_TR.reshape(shape).max(axis=2)),
        ready_TG=np.maximum(ready_TG, finish_TG),
        step_T=end_T - begin_T,
        dropped=len(seen) - len(use),
    )
