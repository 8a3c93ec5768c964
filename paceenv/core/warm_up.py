"""Which steps at the beginning of a run are warm-up: unlike those that follow. Axes: V values, T iterations."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from paceenv.core.trace import PACE_OP, Trace

UNLIKE: Final = 5.0
"""A value at the beginning of a run is warm-up while it is so many robust deviations from the values after it."""
MAX_SHARE: Final = 0.1
"""Share of a run that can be warm-up, beyond its first three values; and at most 100 values."""
LATE: Final = 10
"""Of a trace all iterations up to the last unlike one among so many first ones are warm-up: connections and kernels are
also made after some that were ordinary. One of 60 ms among 117 steps of a job doubled the noise that was fitted."""
MIN_ITERATIONS: Final = 20
"""Of a shorter trace nothing is taken for warm-up."""

Array = NDArray[np.float64]


def warm_up_values(step_s_V: Array, late: int = 0) -> int:
    """How many values at the beginning of a run are unlike those that follow.

    Args:
        step_s_V: step times of one run, seconds.
        late: among so many first values also those before the last unlike one count, alike or not.
    """
    most = min(max(3, int(MAX_SHARE * len(step_s_V))), 100, len(step_s_V) // 3)
    if most < 1:
        return 0
    after = step_s_V[most : most + 200]
    usual = float(np.median(after))
    # Of all values after: the first estimate tells the spread, but in a small sample its quantiles are uncertain.
    deviation = max(1.4826 * float(np.median(np.abs(after - usual))), 1e-3 * usual)
    unlike = np.abs(step_s_V[:most] - usual) > UNLIKE * deviation
    leading = most if unlike.all() else int(np.argmin(unlike))
    return max(leading, int(np.flatnonzero(unlike[:late]).max(initial=-1)) + 1)


def without_warm_up(trace: Trace, job: str | None = None) -> tuple[Trace, int]:
    """A trace without the warm-up of a job, and how many iterations that are. Only those without pacing are compared.

    The last iteration of the warm-up stays: its end is where the first ordinary iteration begins.

    Args:
        trace: of one job or of several.
        job: which job; must be named where the trace holds several.
    """
    mine = trace.isin("job", trace.job_name(job))
    iteration, start_s, end_s = (trace.column(name)[mine] for name in ("iteration", "start_s", "end_s"))
    number_T, place = np.unique(iteration, return_inverse=True)
    end_T = np.full(len(number_T), -np.inf)
    np.maximum.at(end_T, place, end_s)
    paced = iteration[trace.isin("op", PACE_OP)[mine] & (end_s > start_s)]
    use_T = (np.diff(number_T, prepend=number_T[:1] - 2) == 1) & ~np.isin(number_T, paced)
    warm_up = warm_up_values(np.diff(end_T, prepend=-np.inf)[use_T], LATE) if use_T.sum() >= MIN_ITERATIONS else 0
    if not warm_up:
        return trace, 0
    last = int(np.flatnonzero(use_T)[warm_up - 1])
    before = mine & (trace.column("iteration") < number_T[last])
    return Trace(trace.table.filter(pa.array(~before)).combine_chunks(), trace.metadata), last + 1
