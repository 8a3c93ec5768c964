"""The end of every iteration, of whatever kind: each rank takes in what it measured and sets its next delay.

Scalar loops that the kernel compiles. Legend: R ranks, M mechanisms, S ranks with settings of their own (1: one setting
for all, or R).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import limits, timing
from paceenv.sim.engine.imperfections import blur
from paceenv.sim.engine.layout import Scratch, View


def take_in(
    view: View,
    scratch: Scratch,
    settings_SM2: NDArray[np.float64],
    limits_4: NDArray[np.float64],
    step_s: float,
    extra_s: float,
) -> None:
    """Every rank takes in its own timing and sets the delay of its next iteration.

    Args:
        view: the job; its estimator and its delays are updated.
        scratch: ``comm_R`` and ``wait_R`` are what the ranks measure.
        settings_SM2: (threshold, window) of each mechanism, for all ranks (S = 1) or for each (S = R); ratios.
        limits_4: of every delay, as ``paceenv.core.limits.Limits.numbers``.
        step_s: how long the step took, seconds.
        extra_s: what a checkpoint or a restart adds to that, seconds.
    """
    job, rank, tick, comm_R, wait_R = view.job, view.rank, view.tick, scratch.comm_R, scratch.wait_R
    ranks = comm_R.shape[0]
    per_group, delay_R = ranks // scratch.finish_G.shape[0], rank[timing.DELAY_S]
    if job["stamp_noise_s"] > 0.0:
        blur(job, view.clock["key"], view.clock["iteration"], view.normal, comm_R, wait_R)
    timing.observe_step(tick, step_s + extra_s)
    timing.observe_ranks(rank, tick, comm_R, wait_R, job["has_barrier"])
    cap_s = limits.capped_s(limits_4[limits.CAP_S], limits_4[limits.CAP_SHARE], tick[timing.STEP_BASELINE_S])
    if settings_SM2.shape[0] == 1:
        timing.decide(rank, tick, 0, ranks, settings_SM2[0], cap_s, 0, per_group)
    else:
        for r in range(ranks):
            timing.decide(rank, tick, r, r + 1, settings_SM2[r], cap_s, 0, per_group)
    elapsed_s, burst_s, fill = step_s + extra_s, limits_4[limits.BURST_S], limits_4[limits.FILL]
    timing.spend(rank[timing.BUDGET_S], delay_R, ranks, elapsed_s, burst_s, fill)


def total(value_R: Any, ranks: int) -> float:
    """Sum over ranks, in any order: only reported, never fed back, so it may be re-associated into vector registers.

    Args:
        value_R: one value a rank.
        ranks: how many of them count.
    """
    result = 0.0
    for r in range(ranks):
        result += value_R[r]
    return result
