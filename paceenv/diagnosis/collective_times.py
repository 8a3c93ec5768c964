"""What NCCL Inspector's logs show without time stamps: who arrives last.

A collective that needs all its members ends everywhere at about the same time, so on the rank that arrives last it
takes least, and on the others longer by as much as they wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.lateness.watch import COMMON_END, find_late_ranks
from paceenv.importers.collective_names import op_name
from paceenv.importers.nccl_inspector import InspectorLog

MIN_SHARED: Final = 20
"""Collectives that all members of a communicator must have recorded."""


@dataclass(frozen=True)
class LastArrival:
    """Who arrives last at the collectives of a communicator."""

    communicator: str  # its id and name
    members: int  # how many ranks it has
    ranks: int  # how many of them have a log
    shared: int  # collectives that all of those recorded
    rank: int  # the late rank, else the one that is last most often, by its number in the communicator
    process: str  # its host and process
    share: float  # share of the shared collectives in which it is
    late_s: float  # by how much it is the last, seconds, at the median
    waited_share: float  # share of the others' time in these collectives that they wait for it
    is_late: bool  # whether the detector of late ranks names it

    def text(self) -> str:
        """One line."""
        where = f"communicator {self.communicator} ({self.ranks} of {self.members} ranks, {self.shared} collectives)"
        if not self.is_late:
            return f"{where}: no rank is usually the last"
        late = f"in {self.share:.0%}, by {self.late_s * 1e3:.3g} ms at the median"
        return (
            f"{where}: rank {self.rank} ({self.process}) arrives last {late}; "
            f"the others wait for it in {self.waited_share:.0%} of their time there"
        )


@dataclass(frozen=True)
class CollectiveTimes:
    """What the logs show."""

    processes: int  # how many logs
    last_arrivals: tuple[LastArrival, ...]  # for each communicator with enough shared collectives
    notes: tuple[str, ...]  # why something cannot be said
    SHOWN: ClassVar = ("processes", "verdict", "last_arrivals", "notes")

    @property
    def verdict(self) -> str:
        """The answer in a sentence or a few."""
        late = [one.text() for one in self.last_arrivals if one.is_late]
        if late:
            return "; ".join(late[:4])
        if self.last_arrivals:
            shared, of = sum(one.shared for one in self.last_arrivals), f"{len(self.last_arrivals)} communicators"
            return f"no rank is usually the last to arrive in {shared} collectives of {of}"
        return "; ".join(["who arrives last cannot be determined", *self.notes])


def measure_times(logs: Sequence[InspectorLog]) -> CollectiveTimes:
    """What the logs of a job's processes show."""
    parts: dict[str, list[tuple[int, InspectorLog, NDArray[np.int64]]]] = defaultdict(list)
    names: dict[str, str] = {}
    members: dict[str, int] = {}
    for log in logs:
        for k, comm in enumerate(log.communicators):
            parts[comm.id].append((comm.rank, log, np.flatnonzero(log.comm_V == k)))
            names[comm.id] = f"{comm.id} {comm.name}".strip()
            members[comm.id] = max(members.get(comm.id, 0), comm.ranks)
    arrivals, notes = [], []
    for key, records in parts.items():
        if len(records) > 1:
            arrival = _last(names[key], members[key], records)
            if isinstance(arrival, str):
                notes.append(arrival)
            else:
                arrivals.append(arrival)
    if all(len(records) == 1 for records in parts.values()):
        notes.append("no communicator has logs of two ranks")
    if not all(log.is_gpu_timed for log in logs):
        notes.append("some times are those of the host, not of the device")
    arrivals.sort(key=lambda one: (not one.is_late, -one.waited_share * one.shared))
    return CollectiveTimes(len(logs), tuple(arrivals), tuple(notes))


def _last(name: str, members: int, records: list[tuple[int, InspectorLog, NDArray[np.int64]]]) -> LastArrival | str:
    """Who arrives last, or why that cannot be said."""
    ops = sorted({op for _, log, _ in records for op in log.ops if op_name(op) in COMMON_END})
    tables = [_shared_s(op, records) for op in ops]
    time_RC = np.concatenate([np.empty((len(records), 0)), *tables], axis=1)
    order = np.concatenate([np.empty(0), *((np.arange(t.shape[1]) + 0.5) / max(t.shape[1], 1) for t in tables)])
    time_RC = time_RC[:, np.argsort(order, kind="stable")]  # the operations take turns, as they do in a step
    shared = time_RC.shape[1]
    if shared < MIN_SHARED:
        few = f"{shared} collectives that all its {len(records)} logs have"
        return f"communicator {name}: {few}; {MIN_SHARED} are needed"
    often = np.bincount(time_RC.argmin(axis=0), minlength=len(records))
    late = find_late_ranks(-time_RC.T, np.median(time_RC, axis=0)).late
    k = late[0].rank if late else int(often.argmax())
    others_RC = np.delete(time_RC, k, axis=0)
    late_C = others_RC.min(axis=0) - time_RC[k]
    rank, log = records[k][:2]
    waited = float(np.maximum(others_RC - time_RC[k], 0.0).sum() / others_RC.sum())
    return LastArrival(
        name, members, len(records), shared, rank, log.process, float(often[k] / shared),
        float(np.median(late_C)), waited, bool(late),
    )  # fmt: skip


def _shared_s(op: str, records: list[tuple[int, InspectorLog, NDArray[np.int64]]]) -> NDArray[np.float64]:
    """How long those collectives of an operation took that all ranks recorded, s, ``(ranks, collectives)``.

    NCCL counts each operation of a communicator apart.
    """
    kept = []
    for _, log, chosen in records:
        mine = chosen[np.array([name == op for name in log.ops], bool)[log.op_V[chosen]]]
        number, first = np.unique(log.sn_V[mine], return_index=True)
        kept.append((number, log.time_s_V[mine[first]]))
    shared = reduce(np.intersect1d, [number for number, _ in kept])
    return np.stack([time_s[np.searchsorted(number, shared)] for number, time_s in kept])
