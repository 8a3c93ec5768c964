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
from typing import Final, Literal, NamedTuple

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


class _Rank(NamedTuple):
    """One rank's payload, and stamps by iteration ``(T,)``, seconds: not a number where it has none or is unusual.

    ``entry_T`` is its first entry of the payload, ``exit_T`` its last exit, ``wait_T`` its entry of the last
    collective, ``end_T`` the end of all of them, also of an unusual iteration.
    """

    group: int
    ops: tuple[str, ...]
    payload_op: str
    payload_bytes: int
    barrier: bool
    entry_T: Array
    exit_T: Array
    wait_T: Array
    end_T: Array
    delay_T: Array


def read_job(trace: Trace, *, job: str | None = None) -> JobStamps:
    """The stamps of one job of a trace; ``job`` must be named where the trace holds several."""
    name = trace.job_name(job)
    mine = trace.isin("job", name)
    order = np.lexsort((trace.column("seq"), trace.column("iteration"), trace.column("rank")))
    order = order[mine[order]]
    rank = trace.column("rank")[order]
    columns = [trace.column(n)[order] for n in ("op", "group", "bytes", "start_s", "end_s")]
    iterations, at = np.unique(trace.column("iteration")[order], return_inverse=True)
    parts = np.split(np.arange(len(order)), np.flatnonzero(np.diff(rank)) + 1)
    ranks = {
        int(rank[part[0]]): _read_rank(int(rank[part[0]]), len(iterations), at[part], *(c[part] for c in columns))
        for part in parts
    }
    of_group: dict[int, list[int]] = {}
    for number, one in ranks.items():  # in the order of ranks, so that groups are in that of their first ones
        of_group.setdefault(one.group, []).append(number)
    members = tuple(map(tuple, of_group.values()))
    sizes = sorted(set(map(len, members)))
    if len(sizes) > 1:
        raise InputError(f"trace of {name}: process groups of {sizes} ranks carry the payload; allowed: equal")
    return _stamps(name, trace.metadata.source, members, iterations, [ranks[r] for group in members for r in group])


def _read_rank(rank: int, iterations: int, at: NDArray[np.int64], *columns: NDArray[np.int64]) -> _Rank:
    """Which of its collectives are payload and barrier, from the usual iteration, and when they were."""
    iteration, (op, group, size, start_s, end_s) = at.tolist(), (column.tolist() for column in columns)
    collectives: dict[int, list[int]] = {}
    delay_T = np.zeros(iterations)
    unusual: set[int] = set()
    for i, kind in enumerate(op):
        if kind in COLLECTIVE_OPS or (group[i] >= 0 and kind not in _NOT_COLLECTIVE):
            collectives.setdefault(iteration[i], []).append(i)
        elif kind == PACE_OP:
            delay_T[iteration[i]] += end_s[i] - start_s[i]
        elif kind in _ENDS_USE or kind == "evaluation":
            unusual.add(iteration[i])
    signatures = {t: tuple((op[i], group[i]) for i in places) for t, places in collectives.items()}
    if not signatures:
        raise InputError(f"trace: rank {rank} has no collective; allowed: a job whose ranks communicate")
    plain = sorted(signatures.keys() - unusual) or sorted(signatures)  # what every iteration has is not unusual
    usual = Counter(signatures[t] for t in plain).most_common(1)[0][0]
    kept = [t for t in plain if signatures[t] == usual]
    rows_TK = np.array([collectives[t] for t in kept])
    starts, ends = np.asarray(start_s)[rows_TK], np.asarray(end_s)[rows_TK]
    usual_bytes = np.median(np.asarray(size)[rows_TK], axis=0).astype(np.int64).tolist()
    first, last = _payload(usual, usual_bytes, starts, ends)
    entry_T, exit_T, wait_T, end_T = np.full((4, iterations), np.nan)
    entry_T[kept], exit_T[kept], wait_T[kept] = starts[:, first], ends[:, last], starts[:, -1]
    end_T[list(collectives)] = [max(end_s[i] for i in places) for places in collectives.values()]
    return _Rank(
        group=int(usual[last][1]),
        ops=tuple(kind for kind, _ in usual),
        payload_op=usual[last][0],
        payload_bytes=sum(usual_bytes[first : last + 1]),
        barrier=last + 1 < len(usual),
        entry_T=entry_T,
        exit_T=exit_T,
        wait_T=wait_T,
        end_T=end_T,
        delay_T=delay_T,
    )


def _payload(usual: tuple[tuple[str, int], ...], sizes: list[int], starts: Array, ends: Array) -> tuple[int, int]:
    """First and last bucket of the payload among the collectives of the usual iteration."""
    small = [0 < size <= SYNCHRONISES_BYTES < max(sizes) for size in sizes]
    carries = [k for k, (kind, _) in enumerate(usual) if kind != "barrier" and not small[k]]
    first = last = carries[-1] if carries else len(usual) - 1  # of nothing but barriers, ranks meet in the last one
    lasts = np.median(ends - starts, axis=0)
    while first and first - 1 in carries and usual[first - 1] == usual[last]:
        if np.median(starts[:, first] - ends[:, first - 1]) > min(lasts[first], lasts[first - 1]):
            break
        first -= 1
    return first, last


def _stamps(
    name: str, source: str, members: tuple[tuple[int, ...], ...], iterations: NDArray[np.int64], ranks: list[_Rank]
) -> JobStamps:
    """The stamps of the iterations that are complete and alike on all ranks."""
    first = ranks[0]
    if len({(one.barrier, one.ops[-1]) for one in ranks}) > 1:
        raise InputError(f"trace of {name}: ranks differ in the collectives of an iteration; allowed: alike on all")
    keys = ("entry_T", "exit_T", "wait_T", "end_T", "delay_T")
    entry_TR, exit_TR, wait_TR, end_TR, delay_TR = (np.stack([getattr(r, key) for r in ranks], axis=1) for key in keys)
    end_T = end_TR.max(axis=1)  # not a number where a rank has no end
    begin_T = np.concatenate([[np.nan], np.where(np.diff(iterations) == 1, end_T[:-1], np.nan)])
    use_T = np.isfinite(entry_TR).all(axis=1) & np.isfinite(begin_T)
    seen, complete = int(np.isfinite(end_TR).any(axis=1).sum()), int(use_T.sum())
    if complete < MIN_ITERATIONS:
        raise InputError(
            f"trace of {name}: {complete} complete iterations of its most usual kind; "
            f"allowed: at least {MIN_ITERATIONS}"
        )
    entry_TR, exit_TR, wait_TR = (x_TR - begin_T[:, None] for x_TR in (entry_TR, exit_TR, wait_TR))
    use_T &= (entry_TR > delay_TR).all(axis=1)  # else a rank got out of the barrier much later than another
    if use_T.sum() < max(MIN_ITERATIONS, complete / 2):
        raise InputError(
            f"trace of {name}: in {complete - int(use_T.sum())} of {complete} iterations a rank began its payload "
            "before others ended the iteration before; allowed: a job whose ranks wait for each other"
        )
    entry_TR, exit_TR, wait_TR, delay_TR = (x_TR[use_T] for x_TR in (entry_TR, exit_TR, wait_TR, delay_TR))
    if len(members) == len(ranks):
        entry_TR = exit_TR
    arrival_TG, finish_TG, ready_TG = (
        x_TR.reshape(len(x_TR), len(members), -1).max(axis=2) for x_TR in (entry_TR, exit_TR, wait_TR)
    )
    finish_TG = np.maximum(finish_TG, arrival_TG)
    return JobStamps(
        name=name,
        source=source,
        names=tuple(rank for group in members for rank in group),
        members=members,
        collective=_KINDS.get(first.payload_op, "all_reduce"),
        ops=first.ops,
        payload_bytes=int(np.median([one.payload_bytes for one in ranks])),
        barrier=first.barrier,
        iteration_T=iterations[use_T].astype(np.int64),
        begin_T=begin_T[use_T],
        entry_TR=entry_TR,
        delay_TR=np.minimum(delay_TR, np.maximum(entry_TR, 0.0)),
        finish_TG=finish_TG,
        ready_TG=np.maximum(ready_TG, finish_TG) if first.barrier else finish_TG,
        step_T=(end_T - begin_T)[use_T],
        dropped=seen - int(use_T.sum()),
    )
