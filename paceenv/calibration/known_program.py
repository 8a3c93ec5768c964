"""Times of a program that is known: its phases come from a cluster, compute, noise and the NICs' rate from a trace.

A trace need not show when a transfer in the background was handed over: the live recorder sees only the wait for it. So
its rows are matched with the program, and what lies between them is compute. The rate of the NICs is the one with which
the simulated step is as long as the measured one.

Efficiencies of operations come from how long ranks see each: from when the last of its group entered it, or began to
wait for it, until the last one went on. Speeds are those with which the simulated step shows every operation as long as
the trace does. Only the product of the NICs' rate and an efficiency shows, so the fastest operation has 1.

Axes: T steps, R ranks, J anchors of a rank: rows in the order of the program, and the end of its step; O operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.cluster_builder import ClusterBuilder, JobFit, Matched, StepStamps, simulator_of
from paceenv.calibration.compute_noise import add_noise, fit_ratios, length_cv, put_length
from paceenv.calibration.measurements import MIN_STEPS
from paceenv.calibration.parameters import exact, identified, not_identifiable
from paceenv.calibration.program_links import ALIKE
from paceenv.calibration.program_stamps import Row, plain_op, read_rows
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.program.step_program import StepProgram, Work, flat
from paceenv.sim.engine.program_layout import OPS, START, WAIT, Program

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


class _Anchor(NamedTuple):
    """A row that a trace has of a rank's step: the operation, and the compute phases since the anchor before."""

    op: str
    blocks: bool
    work: tuple[int, ...]


@dataclass(frozen=True)
class AnchorStamps(StepStamps):
    """The steps of a job whose program is known: compute before each anchor of each rank ``(T, J)``, seconds.

    ``rows_R`` are begin and end of each anchor but the last; those in the background begin where a rank handed the
    transfer over if ``handed_over``, or where it began to wait.
    """

    compute_R: list[Array]
    anchors_R: list[list[_Anchor]]
    rows_R: list[tuple[Array, Array]]
    handed_over: bool


def fit_known(stamps: AnchorStamps, base: Cluster, name: str = "calibrated") -> JobFit:
    """Fit compute, noise and the NICs' rate of a known program to a trace."""
    assert base.program is not None
    works = [phase.compute for phase in flat(base.program.step) if phase.compute is not None]
    by_rank = any(one.ranks is not None for one in works)  # phases of their own say how ranks differ
    seconds, ratio_TR, relative = _scaled(stamps, works, by_rank=by_rank)
    said = f"Program of {base.name}, fitted to a trace of {stamps.name}."
    builder = ClusterBuilder(stamps, base, base.model_dump() | {"name": name, "description": said})
    builder.add(exact("job.nodes", base.job.nodes, "from base"))
    length = length_cv(relative)
    compute = fit_ratios(builder, ratio_TR, "from base")
    if compute is not None:
        builder.data["noise"] = {}
        add_noise(builder, compute, ("common_cv", "persistent_cv", "imbalance_cv"), by_rank=by_rank)
        if not by_rank:
            seconds = seconds * compute.noise.mean_compute_s.value  # of healthy ranks
    if length:
        put_length(builder, length, seconds, relative)
    builder.data["program"] = _with_seconds(base.program, seconds, length).model_dump(exclude_defaults=True)
    _put_speeds(builder)
    _put_rate(builder)
    return builder.fit()


def _anchors(program: StepProgram, rank: int, *, handed_over: bool) -> list[_Anchor]:
    """Rows of a rank: transfers in the background where they are handed over, or where they are awaited."""
    anchors, work, works = list[_Anchor](), list[int](), 0
    pending: list[tuple[str | None, str]] = []

    def add(op: str, *, blocks: bool) -> None:
        anchors.append(_Anchor(op, blocks, tuple(work)))
        work.clear()

    for phase in flat(program.step):
        transfer = phase.transfer()
        if phase.compute is not None:
            if phase.compute.ranks is None or rank in phase.compute.ranks:
                work.append(works)
            works += 1
        elif transfer is not None:
            op, one = transfer
            if one.ranks is not None and rank not in one.ranks:
                continue
            if one.background and not handed_over:
                pending.append((one.name, op))
            else:
                add(op, blocks=not one.background)
        else:
            for awaited in [op for name, op in pending if name == phase.wait]:
                add(awaited, blocks=True)
            pending = [item for item in pending if item[0] != phase.wait]
    for _, awaited in pending:
        add(awaited, blocks=True)
    add("", blocks=True)
    return anchors


def read_known(trace: Trace, base: Cluster, *, job: str | None = None) -> AnchorStamps:
    """Steps whose rows are those of a known program."""
    assert base.program is not None
    table = read_rows(trace, job)
    iterations, last_T, ranks = table.iterations, table.end_T, len(table.names)
    if ranks != base.ranks:
        raise InputError(f"trace of {table.name}: {ranks} ranks; allowed: the {base.ranks} of {base.name}")
    rows = [[[row for row in mine if plain_op(row.op)] for mine in step] for step in table.transfers]
    worked_TR = np.full((len(iterations), ranks), -np.inf)
    for r, others in enumerate(table.others):
        for t, _, end_s in others:
            worked_TR[t, r] = max(worked_TR[t, r], end_s)
    for handed_over in (False, True):
        anchors_R = [_anchors(base.program, r, handed_over=handed_over) for r in range(ranks)]
        kept = [
            t
            for t in range(1, len(iterations))
            if iterations[t] - iterations[t - 1] == 1 and all(_ops(rows[t][r], anchors_R[r]) for r in range(ranks))
        ]
        if len(kept) >= MIN_STEPS:
            break
    else:
        seen = ", ".join(str(plain_op(row.op)) for row in rows[-1][0]) if rows else "nothing"
        wanted = ", ".join(one.op for one in anchors_R[0][:-1])
        raise InputError(
            f"trace of {table.name}: rank {table.names[0]} has {seen} in a step; allowed: {wanted}, as the program of "
            f"{base.name} has, in at least {MIN_STEPS} steps"
        )
    compute_R, rows_R = list[Array](), list[tuple[Array, Array]]()
    for r, anchors in enumerate(anchors_R):
        stamps_TJ2 = np.array([[(one.start_s, one.end_s) for one in rows[t][r][: len(anchors) - 1]] for t in kept])
        rows_R.append((stamps_TJ2[..., 0], stamps_TJ2[..., 1]))
        compute_TJ = np.empty((len(kept), len(anchors)))
        for i, t in enumerate(kept):
            cursor_s = float(last_T[t - 1])
            for j, anchor in enumerate(anchors[:-1]):
                row = rows[t][r][j]
                compute_TJ[i, j] = max(row.start_s - cursor_s, 0.0)
                cursor_s = max(row.end_s if anchor.blocks else row.start_s, cursor_s)
            compute_TJ[i, -1] = max(worked_TR[t, r] - cursor_s, 0.0)
        compute_R.append(compute_TJ)
    begin_T = last_T[np.array(kept) - 1]
    return AnchorStamps(
        name=table.name,
        source=trace.metadata.source,
        names=table.names,
        iteration_T=np.array([iterations[t] for t in kept], np.int64),
        begin_T=begin_T,
        step_T=last_T[kept] - begin_T,
        dropped=table.iterations_seen - len(kept),
        compute_R=compute_R,
        anchors_R=anchors_R,
        rows_R=rows_R,
        handed_over=handed_over,
    )


def _ops(rows: Sequence[Row], anchors: Sequence[_Anchor]) -> bool:
    """Whether the rows of a rank are the anchors, but for a barrier at the end."""
    seen, wanted = [plain_op(row.op) for row in rows], [one.op for one in anchors[:-1]]
    return seen[: len(wanted)] == wanted and seen[len(wanted) :] in ([], ["all_reduce"])


def _scaled(stamps: AnchorStamps, works: Sequence[Work], *, by_rank: bool) -> tuple[Array, Array, list[Array]]:
    """Seconds of each compute phase; a rank's compute over a mean ``(T, R)``; compute of each anchor over its mean."""
    nominal = np.array([one.seconds for one in works])
    ratios: list[list[float]] = [[] for _ in works]
    total_R, relative = list[Array](), list[Array]()
    for anchors, compute_TJ in zip(stamps.anchors_R, stamps.compute_R, strict=True):
        used = [j for j, anchor in enumerate(anchors) if nominal[list(anchor.work)].sum() > 0.0]
        for j in used:
            ratio = float(compute_TJ[:, j].mean() / nominal[list(anchors[j].work)].sum())
            for number in anchors[j].work:
                ratios[number].append(ratio)
        total_R.append(compute_TJ[:, used].sum(axis=1))
        relative.append(compute_TJ[:, used] / np.maximum(compute_TJ[:, used].mean(axis=0), 1e-300))
    seconds = np.array([s * (float(np.mean(r)) if r else 1.0) for s, r in zip(nominal, ratios, strict=True)])
    total_TR = np.stack(total_R, axis=1)
    mean_R = total_TR.mean(axis=0) if by_rank else np.full(total_TR.shape[1], total_TR.mean())
    ratio_TR = total_TR / np.maximum(mean_R, 1e-300)
    return seconds, ratio_TR, relative


def _with_seconds(program: StepProgram, seconds: Array, length: float) -> StepProgram:
    """The program with other compute times, each phase with a length of its own where those vary."""
    left, step = iter(enumerate(seconds.tolist())), list[dict[str, Any]]()
    for phase in flat(program.step):
        step.append(phase.model_dump(exclude_none=True, exclude_defaults=True))
        if phase.compute is not None:
            number, value = next(left)
            step[-1]["compute"]["seconds"] = float(f"{value:.6g}")
            if length and phase.compute.micro_batch < 0:
                step[-1]["compute"]["micro_batch"] = number
    data = program.model_dump(exclude_defaults=True) | {"step": step}
    return StepProgram.model_validate(data | ({"length_cv": float(f"{length:.4g}")} if length else {}))


def _put_speeds(builder: ClusterBuilder[AnchorStamps]) -> None:
    """Efficiencies of operations below 1; none where the base has them or the trace does not tell them apart."""
    stamps, fabric, step_s = builder.stamps, builder.data["fabric"], builder.measured.mean_s
    program = simulator_of(builder.parse(builder.data | {"noise": {}})).batch.program
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


def _put_rate(builder: ClusterBuilder[AnchorStamps]) -> None:
    """The NICs' rate that makes the simulated step as long as the measured one."""
    key = "fabric.nic_gbps"
    matched = builder.match_step([key], 0.3, 2.0)
    if isinstance(matched, Matched):
        said = "the rate with which the simulated step is as long as the measured one; latency is in it"
        builder.put(identified(key, matched.gbps[key], matched.gbps[key] * matched.relative_se, said))
    else:
        builder.add(not_identifiable(key, builder.data["fabric"]["nic_gbps"], matched, "from base"))


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
