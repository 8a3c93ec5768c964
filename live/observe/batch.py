"""Iterations that are over, as records: what the history and the trace take in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

POINT_TO_POINT = ("send", "recv")
THREAD, STREAM = 1, 2
STANDSTILL = "stream wait"
"""In place of an operation: the compute stream waits for another stream. Part of no batch."""
_TIMES: Final = ("start_s", "end_s", "pace_start_s", "pace_end_s", "barrier_s", "still_s")
ITERATION: Final = np.dtype(
    [("iteration", "<i8"), *((name, "<f8") for name in _TIMES), ("ticks", "<u4"), ("mark", "<u2"), ("regular", "<u2")]
)
"""An iteration, 64 bytes: as :class:`paceenv.live.observe.step.Step`; ``mark`` is a place in the marks, 0 for none."""
OPERATION: Final = np.dtype([("place", "<u4"), ("kind", "<u4"), ("start_s", "<f8"), ("end_s", "<f8")])
"""An operation, 24 bytes: the place of its iteration, the place of its kind in the kinds, and its times."""

Records = NDArray[np.void]


class Kind(NamedTuple):
    """What an operation is. Kinds are numbered in the order in which a rank first meets them.

    Attributes:
        op: ``all_reduce`` and so on.
        group: number of its process group, the same on all its ranks; -1 for a group without a name.
        bytes: its payload, bytes.
        side: 0; :data:`THREAD`, another thread than the training thread waited for it, and the step may not;
            :data:`STREAM`, it ran on another CUDA stream than the compute, where it tells who arrives when.
    """

    op: str
    group: int
    bytes: int
    side: int = 0


class Batch(NamedTuple):
    """T iterations and their N operations, both in order of time; seconds on the rank's monotonic clock.

    ``kinds`` are those met so far: they grow, and never change their order. So do the names of irregular events in
    ``marks``, the first of which is "".
    """

    iterations_T: Records
    operations_N: Records
    kinds: Sequence[Kind]
    marks: Sequence[str]

    @property
    def nbytes(self) -> int:
        return self.iterations_T.nbytes + self.operations_N.nbytes
