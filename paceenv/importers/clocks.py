"""Ranks whose clocks are apart, found by the ends of collectives that nobody can leave before everybody has entered.

Such a collective ends for all members together, up to what the network takes to let them go. A rank whose ends are
always off by as much has another clock. Axes: N operations, R ranks, T steps.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.lateness.watch import COMMON_END
from paceenv.core.operation_matrix import Array, OperationMatrix, meetings, read_matrix
from paceenv.core.trace import Trace
from paceenv.core.wording import duration, name_ranks
from paceenv.importers.collective_names import op_name

LEAST_SHARE: Final = 0.05
"""Share of a mean step; ranks may leave a collective apart by less without having other clocks."""
STEADY: Final = 0.2
"""Share of an offset by which it may vary; what varies by more is no clock."""
_PASSES: Final = 32


def is_closed(matrix: OperationMatrix) -> NDArray[np.bool_]:
    """Which operations are collectives that nobody can leave before everybody has entered, ``(N,)``."""
    return matrix.is_collective_N & matrix.is_op(*(op for op in matrix.ops if op_name(op) in COMMON_END))


def matrix_on_one_clock(trace: Trace, *, job: str | None = None) -> tuple[OperationMatrix, str]:
    """The matrix of a job with clocks that differ set right, and a note on them, or ""."""
    matrix = read_matrix(trace, job=job)
    offset_R = clock_offsets(matrix)
    if not offset_R.any():
        return matrix, ""
    worst_s = float(offset_R[np.argmax(np.abs(offset_R))])
    ranks = name_ranks([matrix.ranks[r] for r in np.flatnonzero(offset_R).tolist()])
    by = f"{duration(abs(worst_s))} {'ahead' if worst_s > 0.0 else 'behind'}"
    note = f"clocks differ and were set right by the ends of collectives: {ranks}, at most {by}"
    return matrix.set_back(offset_R), note


def clock_offsets(matrix: OperationMatrix) -> Array:
    """By how much each rank's clock is ahead of the others' ``(R,)``, seconds; 0 where that is not seen clearly.

    Where groups connect ranks only by way of others, offsets are found from group to group.
    """
    ranks, step_s, closed_N = len(matrix.ranks), float(matrix.step_s_T.mean()), is_closed(matrix)
    apart_N, varies_N, meets_N = (np.zeros(len(closed_N)) for _ in range(3))
    sets = [np.array(members) for members in meetings(matrix) if closed_N[members[0]]]
    for members in sets:
        meets_N[members] = 1.0
        end_MT = matrix.end_NT[members]
        end_MT = end_MT[:, np.isfinite(end_MT).all(axis=0)]
        if end_MT.size:
            away_MT = end_MT - np.median(end_MT, axis=0)
            apart_N[members] = np.median(away_MT, axis=1)
            varies_N[members] = np.median(np.abs(away_MT - apart_N[members, None]), axis=1)
    counts_R = np.maximum(np.bincount(matrix.rank_N, meets_N, ranks), 1.0)
    offset_R = np.zeros(ranks)

    def left() -> Array:
        """What the offsets leave of how far operations are apart from those that they meet."""
        left_N = meets_N * (apart_N - offset_R[matrix.rank_N])
        for members in sets:
            left_N[members] -= np.median(left_N[members])
        return left_N

    for _ in range(_PASSES):
        more_R = np.bincount(matrix.rank_N, left(), ranks) / counts_R
        offset_R += more_R
        if np.abs(more_R).max(initial=0.0) < 1e-3 * LEAST_SHARE * step_s:
            break
    offset_R -= np.median(offset_R)
    # a clock is ahead by as much in every operation; who merely looks late is not
    varies_R = np.bincount(matrix.rank_N, varies_N + np.abs(left()), ranks) / counts_R
    return np.where(np.abs(offset_R) > np.maximum(LEAST_SHARE * step_s, varies_R / STEADY), offset_R, 0.0)
