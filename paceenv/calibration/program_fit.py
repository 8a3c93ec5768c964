"""What only a simulated step shows of a program: how phases vary, speeds, and rates that no transfer shows.

A rate is put so that the simulated step is as long as the measured one. Efficiencies of a given program's operations
come from how long ranks see each: from when the last of its group entered it, or began to wait for it, until the last
one went on. Speeds are those with which the simulated step shows every operation as long as the trace does. Only the
product of the NICs' rate and an efficiency shows, so the fastest operation has 1.

Axes: T steps, R ranks, K kinds of operations, O operations, J anchors of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.cluster_builder import ClusterBuilder, Matched
from paceenv.calibration.compute_noise import length_cv, put_lengths
from paceenv.calibration.known_program import AnchorStamps
from paceenv.calibration.parameters import FROM_BASE, identified, not_identifiable
from paceenv.calibration.program_links import NONE_ALONE, SETTLES
from paceenv.calibration.program_stamps import ProgramStamps
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.program_layout import OPS, START, WAIT, Program

ALIKE: Final = 0.05
"""Efficiencies that differ by less are the same."""
CLOSE: Final = 0.01
"""Error of the simulated mean step from which on single phases may vary by themselves."""
MAX_MICRO_BATCHES: Final = 4096
RATE: Final = "fabric.nic_gbps"
MIN_SEEN: Final = 0.02
"""Share of the step that ranks must see of an operation."""
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


def add_program(builder: ClusterBuilder[Any]) -> None:
    """Lengths of phases and rates of links with which the simulated step is as long as the measured one."""
    if isinstance(builder.stamps, AnchorStamps):
        _add_known(builder)
    elif isinstance(builder.stamps, ProgramStamps):
        if abs(builder.mean_error) > CLOSE:
            _try_lengths(builder)
        _put_unseen(builder)


def _try_lengths(builder: ClusterBuilder[ProgramStamps]) -> None:
    """Let single phases vary by themselves, where they do and the mean step is nearer then."""
    length = length_cv(builder.compute.relative_R)
    if not length or sum("compute" in one for one in builder.compute.phases) > MAX_MICRO_BATCHES:
        return
    was, kept = abs(builder.mean_error), (deepcopy(builder.data), list(builder.parameters))
    put_lengths(builder, length)
    if abs(builder.mean_error) >= was:
        builder.data, builder.parameters = kept


def _put_unseen(builder: ClusterBuilder[ProgramStamps]) -> None:
    """Rates that nobody knows and none shows, so that the step takes as long as measured."""
    matched = builder.match_step(builder.unseen, 0.5, 8.0) if builder.unseen else ""
    if isinstance(matched, Matched):
        builder.drop(builder.unseen)
        for key, gbps in matched.gbps.items():
            builder.stand_in(key, gbps, NONE_ALONE, f"put so that the step takes as long as measured; {SETTLES}")


def _add_known(builder: ClusterBuilder[AnchorStamps]) -> None:
    """Seconds of a given program's phases, speeds of its operations, and the rate of the NICs."""
    for one in [phase["compute"] for phase in builder.compute.phases if "compute" in phase]:
        one["seconds"] = float(f"{builder.healthy * one['seconds']:.6g}")
    builder.data["program"]["step"] = builder.compute.phases
    length = length_cv(builder.compute.relative_R)
    if length:
        put_lengths(builder, length)
    _put_speeds(builder)
    matched = builder.match_step([RATE], 0.3, 2.0)
    if isinstance(matched, Matched):
        said = "the rate with which the simulated step is as long as the measured one; latency is in it"
        builder.put(identified(RATE, matched.gbps[RATE], matched.gbps[RATE] * matched.relative_se, said))
    else:
        builder.add(not_identifiable(RATE, builder.data["fabric"]["nic_gbps"], matched, FROM_BASE))


def _put_speeds(builder: ClusterBuilder[AnchorStamps]) -> None:
    """Efficiencies of operations below 1; none where the base has them or the trace does not tell them apart."""
    stamps, fabric, step_s = builder.stamps, builder.data["fabric"], builder.measured.mean_s
    program = start(builder.parse(builder.data | {"noise": {}}), np.arange(1)).batch.program
    kinds = sorted({OPS[op] for op, size in zip(program.op_O, program.bytes_O, strict=True) if size > 0.0})
    if fabric["efficiency"] or len(kinds) < 2:
        return
    seen_TK = _seen(program, stamps.rows_R, kinds, handed_over=stamps.handed_over)
    wanted_K = seen_TK.mean(axis=0)
    if wanted_K.min() < MIN_SEEN * step_s:
        return

    def error_K(log_speed_K: Array) -> Array:
        speed_K = np.exp(log_speed_K)
        shares = dict(zip(kinds, (speed_K / speed_K.max()).tolist(), strict=True))
        changed = fabric | {"nic_gbps": fabric["nic_gbps"] * float(speed_K.max()), "efficiency": shares}
        cluster = builder.parse(builder.data | {"fabric": changed, "noise": {}})
        error: Array = (_simulated_K(cluster, kinds, handed_over=stamps.handed_over) - wanted_K) / step_s
        return error

    limits = np.log(SLOWEST), np.log(FASTEST)
    starts = [*np.log(np.where(np.eye(len(kinds)) > 0.0, SLOW_START, 1.0)), np.zeros(len(kinds))]
    for start_K in reversed(starts):  # an operation that only others slow down does not show its own speed
        parameters = optimize.least_squares(error_K, start_K - 0.1, bounds=limits, diff_step=0.02, xtol=1e-4)
        if np.abs(parameters.fun).max() <= MISFIT:
            break
    least_slope = np.linalg.svd(parameters.jac, compute_uv=False).min()
    if np.abs(parameters.fun).max() > MISFIT or least_slope < MIN_SLOPE:
        return
    speed_K = np.exp(parameters.x)
    ratio_K = speed_K / speed_K.max()
    inverse_KK = np.linalg.pinv(parameters.jac)
    covariance_KK = np.atleast_2d(np.cov(seen_TK / step_s, rowvar=False)) / len(seen_TK)
    se_K = np.sqrt(np.diag(inverse_KK @ covariance_KK @ inverse_KK.T))  # of logarithms of speeds
    said = f"how long ranks see it beside {kinds[int(speed_K.argmax())]}, which is the fastest"
    for kind, ratio, se in zip(kinds, ratio_K.tolist(), se_K.tolist(), strict=True):
        if ratio < 1.0 - ALIKE:
            fabric["efficiency"] = fabric["efficiency"] | {kind: float(f"{ratio:.4g}")}
            builder.add(identified(f"fabric.efficiency.{kind}", fabric["efficiency"][kind], ratio * se, said))


def _simulated_K(cluster: Cluster, kinds: Sequence[str], *, handed_over: bool) -> Array:
    """What ranks see of each operation in a simulated step, seconds."""
    simulator = start(cluster, np.arange(1))
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
