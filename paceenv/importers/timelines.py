"""What one rank did, step by step on its own clock, from formats with a file per rank.

:mod:`paceenv.importers.merging.merge_ranks` makes one trace of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.importers.profiler.rank_activity import RankActivity

UNNAMED_GROUP: Final = "?"
"""What the name of a process group begins with that the files do not name."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Collective:
    """One collective as one rank saw it; ``group`` is whatever names its process group, "" where it has none.

    ``bytes`` is the whole payload, as nccl-tests counts it: what an all-gather gives each rank, what a reduce-scatter
    takes from each, else a rank's input; 0 where it is unknown. ``peer`` is the rank at the other end of a send or
    receive, -1 where it is unknown.
    """

    op: str
    group: str
    start_s: float
    end_s: float
    bytes: int
    peer: int = -1


@dataclass(frozen=True)
class Step:
    """One step of a rank: its number, when it began and ended on the rank's clock, and what happened in it."""

    iteration: int
    start_s: float
    end_s: float
    collectives: tuple[Collective, ...]
    busy_start_s: Array
    busy_end_s: Array

    def shifted(self, add_s: float) -> Step:
        """The step on a clock that is ahead by ``add_s``."""
        return Step(
            self.iteration,
            self.start_s + add_s,
            self.end_s + add_s,
            tuple(replace(c, start_s=c.start_s + add_s, end_s=c.end_s + add_s) for c in self.collectives),
            self.busy_start_s + add_s,
            self.busy_end_s + add_s,
        )


@dataclass(frozen=True)
class Timeline:
    """One rank. ``about`` goes to the rank's metadata; ``notes`` are lines for the user."""

    rank: int
    path: Path
    steps: tuple[Step, ...]
    about: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    activity: tuple[RankActivity, ...] = ()


def union(start_s: Array, end_s: Array) -> tuple[Array, Array]:
    """The same time in spans that do not overlap, in order: their begins and ends.

    Args:
        start_s: when each span begins, seconds.
        end_s: when each span ends, seconds.
    """
    if not len(start_s):
        return np.empty(0), np.empty(0)
    order = np.argsort(start_s, kind="stable")
    start_s, reach_s = start_s[order], np.maximum.accumulate(end_s[order])
    first = np.concatenate([[True], start_s[1:] > reach_s[:-1]])
    return start_s[first], reach_s[np.append(np.flatnonzero(first)[1:] - 1, len(start_s) - 1)]


def without(spans: tuple[Array, Array], taken: tuple[Array, Array]) -> tuple[Array, Array]:
    """What is left of disjoint spans, in order, when others, likewise, are taken out.

    Args:
        spans: begins and ends.
        taken: begins and ends of what is taken out.
    """
    edges = np.concatenate([*spans, *taken])
    change = np.repeat([1, -1, -2, 2], [len(x) for x in (*spans, *taken)])
    order = np.argsort(edges, kind="stable")
    edges, inside = edges[order], np.cumsum(change[order]) == 1
    kept = np.flatnonzero(inside[:-1] & (edges[1:] > edges[:-1]))
    return union(edges[kept], edges[kept + 1])
