"""Iterations that are over, as arrays: what the observation hands to accounting, findings and trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

POINT_TO_POINT = ("send", "recv")
THREAD, STREAM = 1, 2
STANDSTILL = "stream wait"
"""In place of an operation: the compute stream waits for another stream. Part of no batch."""


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

    Columns of iterations are as in :class:`paceenv.live.observe.step.Step`.

    Attributes:
        mark_T: index into ``marks``, 0 for none.
        place_N: the iteration of an operation, as an index into T.
        kind_N: index into ``kinds``.
        kinds: the kinds met so far; it grows, and never changes its order.
        marks: names of irregular events, the first is "".
    """

    iteration_T: NDArray[np.int64]
    start_s_T: NDArray[np.float64]
    end_s_T: NDArray[np.float64]
    pace_start_s_T: NDArray[np.float64]
    pace_end_s_T: NDArray[np.float64]
    regular_T: NDArray[np.bool_]
    mark_T: NDArray[np.uint8]
    place_N: NDArray[np.int64]
    kind_N: NDArray[np.uint16]
    start_s_N: NDArray[np.float64]
    end_s_N: NDArray[np.float64]
    kinds: Sequence[Kind]
    marks: Sequence[str]
