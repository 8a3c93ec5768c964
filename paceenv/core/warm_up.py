"""Which steps at the beginning of a run are warm-up: unlike those that follow. Axes: V values, T iterations."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.operation_matrix import OperationMatrix

UNLIKE: Final = 5.0
"""So many robust deviations from the values that follow the beginning."""
COMPARED: Final = 200
"""Values after the beginning that tell what is usual."""
LATE: Final = 10
"""Of a trace all iterations up to the last unlike one of so many first ones are warm-up: connections and kernels are
also made after ordinary ones. One stop of 60 ms among 117 steps of a job doubled the noise that was fitted."""
RARE: Final = 0.02
"""Where more of the values that follow are as unlike, long steps are the job's own, such as every eighth."""
MIN_ITERATIONS: Final = 20
"""Without pacing that must remain; of a shorter trace nothing is taken for warm-up."""

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


def unlike_values(step_s_V: Array, first: int) -> Flags:
    """Which step times are unlike those that follow the ``first`` ones, ``(V,)``."""
    after = step_s_V[first : first + COMPARED]
    usual = float(np.median(after))
    # Of all values after: in a small sample the quantiles of their spread are themselves uncertain.
    deviation = max(1.4826 * float(np.median(np.abs(after - usual))), 1e-3 * usual)
    unlike: Flags = np.abs(step_s_V - usual) > UNLIKE * deviation
    return unlike


def without_warm_up(matrix: OperationMatrix) -> tuple[OperationMatrix, int]:
    """A job without its warm-up, and how many iterations that are.

    Only iterations before the first one with pacing are compared, and none that a checkpoint or the like interrupts.
    A trace that does not begin with the job has no warm-up.
    """
    number_T, odd_T = matrix.iteration_T, np.asarray(matrix.is_interrupted_RT.any(axis=0))
    paced_T = (matrix.seconds_RT(matrix.is_pace_N) > 0.0).any(axis=0)
    use_T = (np.diff(number_T, prepend=number_T[0] - 2) == 1) & ~odd_T & ~np.maximum.accumulate(paced_T)
    use_T &= ~np.append(False, odd_T[:-1])  # some work of an interruption is done in the next iteration
    step_s = matrix.step_s_T[use_T]
    if number_T[0] > LATE or len(step_s) < MIN_ITERATIONS + LATE:
        return matrix, 0
    unlike = unlike_values(step_s, LATE)
    warm_up = np.flatnonzero(unlike[:LATE])
    if not len(warm_up) or unlike[LATE : LATE + COMPARED].mean() > RARE:
        return matrix, 0
    last = int(np.flatnonzero(use_T)[warm_up[-1]])
    return matrix.of_steps(np.arange(last + 1, matrix.steps)), last + 1
