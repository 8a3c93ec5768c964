"""How fast each operation of a known program is next to the fastest one: its efficiency, from how long ranks see it.

Ranks see an operation from when the last of its group entered it, or began to wait for it, until the last one went on.
Speeds are those with which the simulated step shows every operation as long as the trace does. Where the trace does not
show an operation at all, because nobody waits for it, nothing tells speeds apart.

Only the product of the NICs' rate and an efficiency shows. So the fastest operation has an efficiency of 1.

Axes: T steps, R ranks, J rows of a rank, O operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.job_steps import simulator_of
from paceenv.calibration.parameters import Parameter, identified
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine.program_layout import OPS, START, WAIT, Program

MIN_SEEN: Final = 0.02
"""Share of the step that ranks must see of an operation."""
ALIKE: Final = 0.05
"""Efficiencies that differ by less are the same."""
MISFIT: Final = 0.01
"""Error, as a share of the step, above which no speeds explain what is seen."""
MIN_SLOPE: Final = 0.02
"""What is seen, as a share of the step, must change by so much with the logarithm of any mix of speeds."""
SLOW_START: Final = 0.4
"""Speed of one operation, as a share of the others', from which a second search starts."""
SLOWEST, FASTEST = 0.1, 2.0
"""Speeds that are tried, as shares of the known rate of the NICs."""

Array = NDArray[np.float64]
Rows = Sequence[tuple[Array, Array]]
"""Begin and end of the rows of each rank, ``(T, J)``, seconds."""


def fit_speeds(
    made: Callable[[dict[str, float]], Cluster], rows_R: Rows, step_s: float, *, handed_over: bool
) -> tuple[dict[str, float], list[Parameter]]:
    """Efficiencies of operations below 1, by operation; none where the trace does not tell them apart.

    Args:
        handed_over: whether a row in the background begins where the rank handed the transfer over.
    """
    cluster = made({})
    simulator = simulator_of(cluster)
    program = simulator.batch.program
    kinds = sorted({OPS[op] for op, size in zip(program.op_O, program.bytes_O, strict=True) if size > 0.0})
    if len(kinds) < 2:
        return {}, []
    seen_TK = _seen(program, rows_R, kinds, handed_over=handed_over)
    wanted_K = seen_TK.mean(axis=0)
    if wanted_K.min() < MIN_SEEN * step_s:
        return {}, []

    def error_K(log_speed_K: Array) -> Array:
        speeds = dict(zip(kinds, np.exp(log_speed_K).tolist(), strict=True))
        error: Array = (_simulated_K(made(speeds), kinds, handed_over=handed_over) - wanted_K) / step_s
        return error

    limits = np.log(SLOWEST), np.log(FASTEST)
    starts = [*np.log(np.where(np.eye(len(kinds)) > 0.0, SLOW_START, 1.0)), np.zeros(len(kinds))]
    for start_K in reversed(starts):  # an operation that only others slow down does not show its own speed
        found = optimize.least_squares(error_K, start_K - 0.1, bounds=limits, diff_step=0.02, xtol=1e-4)
        if np.abs(found.fun).max() <= MISFIT:
            break
    least_slope = np.linalg.svd(found.jac, compute_uv=False).min()
    if np.abs(found.fun).max() > MISFIT or least_slope < MIN_SLOPE:
        return {}, []
    speed_K = np.exp(found.x)
    ratio_K = speed_K / speed_K.max()
    se_K = _relative_se(found.jac, seen_TK / step_s)
    efficiency, parameters = dict[str, float](), list[Parameter]()
    for kind, ratio, se in zip(kinds, ratio_K.tolist(), se_K.tolist(), strict=True):
        if ratio < 1.0 - ALIKE:
            efficiency[kind] = float(f"{ratio:.4g}")
            said = f"how long ranks see it beside {kinds[int(speed_K.argmax())]}, which is the fastest"
            parameters.append(identified(f"fabric.efficiency.{kind}", efficiency[kind], ratio * se, said))
    return efficiency, parameters


def _relative_se(slope_KK: Array, seen_TK: Array) -> Array:
    """Standard errors of logarithms of speeds."""
    inverse_KK = np.linalg.pinv(slope_KK)
    covariance_KK = np.atleast_2d(np.cov(seen_TK, rowvar=False)) / len(seen_TK)
    se_K: Array = np.sqrt(np.diag(inverse_KK @ covariance_KK @ inverse_KK.T))
    return se_K


def _simulated_K(cluster: Cluster, kinds: Sequence[str], *, handed_over: bool) -> Array:
    """What ranks see of each operation in a simulated step, seconds."""
    simulator = simulator_of(cluster)
    program, recording = simulator.batch.program, simulator.record(simulator.off(), 1)
    end_I, through_O = recording.end_ETI[0, 0], recording.through_ETO[0, 0]
    rows: list[tuple[Array, Array]] = []
    for first, last in zip(program.first_R[:-1].tolist(), program.first_R[1:].tolist(), strict=True):
        begin, end = list[float](), list[float]()
        for i in range(first, last):
            o = program.operation_I[i]
            if handed_over and program.kind_I[i] == START:
                begin.append(end_I[i])
                end.append(through_O[o])
            elif not handed_over and program.kind_I[i] == WAIT:
                begin.append(end_I[i - 1])
                end.append(end_I[i])
        rows.append((np.array([begin]), np.array([end])))
    seen_K: Array = _seen(program, rows, kinds, handed_over=handed_over)[0]
    return seen_K


def _seen(program: Program, rows_R: Rows, kinds: Sequence[str], *, handed_over: bool) -> Array:
    """What ranks see of each kind of operation in each step, seconds ``(T, K)``, the mean over ranks."""
    steps, ranks = rows_R[0][0].shape[0], len(rows_R)
    count = len(program.op_O)
    begin_TO, end_TO = np.full((steps, count), -np.inf), np.full((steps, count), -np.inf)
    members_O = np.zeros(count)
    for r, (begin_TJ, end_TJ) in enumerate(rows_R):
        mine = slice(int(program.first_R[r]), int(program.first_R[r + 1]))
        chosen = program.kind_I[mine] == (START if handed_over else WAIT)
        for j, o in enumerate(program.operation_I[mine][chosen].tolist()):
            begin_TO[:, o] = np.maximum(begin_TO[:, o], begin_TJ[:, j])
            end_TO[:, o] = np.maximum(end_TO[:, o], end_TJ[:, j])
            members_O[o] += 1.0
    for o in range(1, count):  # it cannot run before the one before it on its communicator is through
        if program.group_O[o] == program.group_O[o - 1]:
            begin_TO[:, o] = np.maximum(begin_TO[:, o], end_TO[:, o - 1])
    share_O = np.where(members_O > 0.0, members_O / ranks, 0.0)
    seen_TO = np.maximum(np.where(members_O > 0.0, end_TO - begin_TO, 0.0), 0.0) * share_O
    return np.stack([seen_TO[:, program.op_O == OPS.index(kind)].sum(axis=1) for kind in kinds], axis=1)
