"""What NCCL Inspector's logs show without time stamps: who arrives last.

A collective that needs all its members ends everywhere at about the same time, so on the rank that arrives last it
takes least, and on the others longer by as much as they wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np

from paceenv.core.lateness.watch import COMMON_END, find_late_ranks
from paceenv.importers.collective_names import op_name
from paceenv.importers.nccl_inspector import Communicator, InspectorLog

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
    parts: dict[str, list[_Part]] = defaultdict(list)
    for log in logs:
        times_s = {comm: defaultdict[str, dict[int, float]](dict) for comm in log.communicators}
        for one in log.records:
            times_s[one.comm][one.op].setdefault(one.number, one.time_s)
        for comm, of_op in times_s.items():
            parts[comm.id].append(_Part(comm, log.process, of_op))
    arrivals, notes = [], []
    for records in parts.values():
        if len(records) > 1:
            arrival = _last(records)
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


class _Part(NamedTuple):
    """What one process says of a communicator: how long collectives took, seconds, by operation and number.

    NCCL counts each operation of a communicator apart.
    """

    comm: Communicator
    process: str
    time_s: Mapping[str, Mapping[int, float]]


def _last(parts: list[_Part]) -> LastArrival | str:
    """Who arrives last, or why that cannot be said."""
    name = f"{parts[-1].comm.id} {parts[-1].comm.name}".strip()
    tables = [
        [[part.time_s[op][number] for number in numbers] for part in parts]
        for op in sorted({op for part in parts for op in part.time_s if op_name(op) in COMMON_END})
        if (numbers := sorted(set.intersection(*(set(part.time_s.get(op, ())) for part in parts))))
    ]
    time_RC = np.concatenate([np.empty((len(parts), 0)), *map(np.array, tables)], axis=1)
    order = np.concatenate([np.empty(0), *((np.arange(len(t[0])) + 0.5) / len(t[0]) for t in tables)])
    time_RC = time_RC[:, np.argsort(order, kind="stable")]  # the operations take turns, as they do in a step
    shared = time_RC.shape[1]
    if shared < MIN_SHARED:
        few = f"{shared} collectives that all its {len(parts)} logs have"
        return f"communicator {name}: {few}; {MIN_SHARED} are needed"
    often = np.bincount(time_RC.argmin(axis=0), minlength=len(parts))
    late = find_late_ranks(-time_RC.T, np.median(time_RC, axis=0)).late
    k = late[0].rank if late else int(often.argmax())
    others_RC = np.delete(time_RC, k, axis=0)
    return LastArrival(
        communicator=name,
        members=max(part.comm.ranks for part in parts),
        ranks=len(parts),
        shared=shared,
        rank=parts[k].comm.rank,
        process=parts[k].process,
        share=float(often[k] / shared),
        late_s=float(np.median(others_RC.min(axis=0) - time_RC[k])),
        waited_share=float(np.maximum(others_RC - time_RC[k], 0.0).sum() / others_RC.sum()),
        is_late=bool(late),
    )
