"""What one rank did, step by step on its own clock, from formats with a file per rank.

:mod:`paceenv.importers.merge_ranks` makes one trace of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

UNNAMED_GROUP: Final = "?"
"""What the name of a process group begins with that the files do not name."""

Array = NDArray[np.float64]


@dataclass
class Collective:
    """One collective as one rank saw it; ``group`` is whatever names its process group, "" where it has none.

    ``bytes`` is the whole payload, as nccl-tests counts it: what an all-gather gives each rank, what a reduce-scatter
    takes from each, else a rank's input; 0 where it is unknown. ``peer`` is the rank at the other end of a send or
    receive, -1 where it is unknown.

    Of a device, too: ``launched_s`` (not a number where unknown) is on the host's side of the same clock. Since the
    begin of the collective before (or of the profile): ``compute_s`` of kernels, ``copy_s`` of copies only,
    ``host_wait_s`` that the device idled because its next operation had not been launched; and on the host, since the
    launch of the collective before, ``host_s`` by what it was in.
    """

    op: str
    group: str
    start_s: float
    end_s: float
    bytes: int
    peer: int = -1
    launched_s: float = np.nan
    compute_s: float = 0.0
    copy_s: float = 0.0
    host_wait_s: float = 0.0
    host_s: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Step:
    """One step of a rank: its number, when it began and ended on the rank's clock, and what happened in it.

    Its collectives are in the order of their begin.
    """

    iteration: int
    start_s: float
    end_s: float
    collectives: list[Collective]
    busy_start_s: Array
    busy_end_s: Array

    def placed(self) -> Iterator[tuple[tuple[str, str, int], Collective]]:
        """Its collectives, each with its group, operation, and place among its like."""
        seen: Counter[tuple[str, str]] = Counter()
        for c in self.collectives:
            yield (c.group, c.op, seen[c.group, c.op]), c
            seen[c.group, c.op] += 1

    def shift(self, add_s: float) -> None:
        """Put it on a clock that is ahead by ``add_s``."""
        self.start_s, self.end_s = self.start_s + add_s, self.end_s + add_s
        self.busy_start_s, self.busy_end_s = self.busy_start_s + add_s, self.busy_end_s + add_s
        for c in self.collectives:
            c.start_s, c.end_s, c.launched_s = c.start_s + add_s, c.end_s + add_s, c.launched_s + add_s


@dataclass(frozen=True)
class Timeline:
    """One rank, 0 where it is not known. ``about`` goes to its metadata; ``notes`` are lines for the user."""

    rank: int
    path: Path
    steps: tuple[Step, ...]
    about: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_rank_known: bool = True


def union(start_s: Array, end_s: Array) -> tuple[Array, Array]:
    """The same time in spans that do not overlap, in order: their begins and ends."""
    if not len(start_s):
        return np.empty(0), np.empty(0)
    order = np.argsort(start_s, kind="stable")
    start_s, reach_s = start_s[order], np.maximum.accumulate(end_s[order])
    first = np.concatenate([[True], start_s[1:] > reach_s[:-1]])
    return start_s[first], reach_s[np.append(np.flatnonzero(first)[1:] - 1, len(start_s) - 1)]


def without(spans: tuple[Array, Array], taken: tuple[Array, Array]) -> tuple[Array, Array]:
    """What is left of disjoint spans, in order, when others, likewise, are taken out."""
    edges = np.concatenate([*spans, *taken])
    change = np.repeat([1, -1, -2, 2], [len(x) for x in (*spans, *taken)])
    order = np.argsort(edges, kind="stable")
    edges, inside = edges[order], np.cumsum(change[order]) == 1
    kept = np.flatnonzero(inside[:-1] & (edges[1:] > edges[:-1]))
    return union(edges[kept], edges[kept + 1])


def inside_of(spans: tuple[Array, Array], begin_s: float, end_s: float) -> tuple[Array, Array]:
    """Those of disjoint spans, in order, that lie at least in part between two moments."""
    first, last = np.searchsorted(spans[1], begin_s, side="right"), np.searchsorted(spans[0], end_s, side="left")
    return spans[0][first:last], spans[1][first:last]


OUTSIDE = "no recorded operation"
"""What a host does where none of its launching threads is inside a recorded range: Python, or nothing."""


@dataclass(kw_only=True)
class RankActivity(Step):
    """A step of a device; all times s. Kernels come before copies, these before collectives, then waiting."""

    rank: int
    compute_s: float
    to_device_s: float  # only copies from the host to the device ran
    other_copies_s: float  # only other copies and memory sets ran
    exposed_s: float  # only collectives ran
    hidden_s: float
    host_wait_s: float  # nothing ran as the host had not launched the next operation yet; nan without any launch
    idle_s: float
    loader_s: float  # the host was in the data loader's ``__next__``
