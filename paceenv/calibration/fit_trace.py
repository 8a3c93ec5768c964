"""A cluster from the trace of a job, in stages, each of which adds its keys and their evidence to one builder.

A trace is read as the diagnosis reads it. Its step is described by one collective (``job_stamps``), by all of its
transfers (``program_stamps``), or by a program that is given (``known_program``): where nobody says otherwise, the
trace decides. From there on each goes through its stages, as :data:`STAGES` lists them.

| stage | adds | in |
| --- | --- | --- |
| structure | ranks, groups, the step | ``structure``, ``step_order``, ``step_phases`` |
| noise | what ranks compute, and how it varies | ``compute_noise``, ``noise_fit``, ``two_state_fit`` |
| work | what groups do behind a collective | ``structure`` |
| links | rates, latencies, losses | ``links``, ``link_replay``, ``program_links`` |
| tenants | another job on the uplink | ``tenants`` |
| program | what only its simulated step shows | ``program_links``, ``known_program`` |
| errors | the record, and a check on unseen steps | ``parameters``, ``heldout``, ``posterior`` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import ClusterBuilder, Stamps, Steps
from paceenv.calibration.compute_noise import add_noise
from paceenv.calibration.heldout import check_fit
from paceenv.calibration.job_stamps import JobStamps, read_job
from paceenv.calibration.known_program import AnchorStamps, add_known, match_known, read_known
from paceenv.calibration.links import add_payload
from paceenv.calibration.parameters import Parameter
from paceenv.calibration.program_links import add_transfers, durations, match_program
from paceenv.calibration.program_stamps import MIN_STEPS, UNKNOWN_PEERS, ProgramStamps, read_program
from paceenv.calibration.step_order import OVERLAPS
from paceenv.calibration.step_stamps import StepStamps
from paceenv.calibration.structure import add_collective, add_post_work, add_program
from paceenv.calibration.tenants import add_tenants
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import BARRIER_OP, OperationMatrix
from paceenv.core.trace import COLLECTIVE_OPS, Trace
from paceenv.core.warm_up import without_warm_up
from paceenv.importers.clocks import matrix_on_one_clock
from paceenv.sim.cluster import STAND_INS, Cluster

STAGES: Final[dict[type[StepStamps], tuple[Callable[[ClusterBuilder[Any]], None], ...]]] = {
    JobStamps: (add_collective, add_noise, add_post_work, add_payload, add_tenants),
    ProgramStamps: (add_program, add_noise, add_transfers, match_program),
    AnchorStamps: (add_known, add_noise, match_known),
}
OFF: Final = 0.05
"""Error of the mean step from which on one collective a step does not describe a job."""
RUNS_APART: Final = 2.0
"""Unless runs differ by more than half as much: beside a tenant each run locks into a phase of its own."""

Array = NDArray[np.float64]
Made = TypeVar("Made")


@dataclass(frozen=True)
class JobFit:
    """A calibrated cluster, its parameters with evidence, and how well it does what the job did.

    ``measured`` are the trace's steps without pacing (all, where too few), ``simulated`` those of the cluster.
    ``steps`` counts the measured ones; ``notes`` say which description was taken and what was left out.
    """

    cluster: Cluster
    parameters: tuple[Parameter, ...]
    measured: Steps
    simulated: Steps
    steps: int = 0
    notes: tuple[str, ...] = ()

    @property
    def mean_error(self) -> float:
        """Of the mean step, relative."""
        return self.simulated.mean_s / self.measured.mean_s - 1.0


def fit_trace(
    trace: Trace,
    *,
    base: Cluster | None = None,
    name: str = "calibrated",
    probe: Trace | None = None,
    job: str | None = None,
    program: bool | None = None,
    check: bool = False,
) -> JobFit:
    """Fit a cluster to a trace: one collective a step, or a program.

    ``check`` compares it with unseen steps, in its record as ``held_out_steps``.
    """
    matrix, notes = _read(trace, job)
    known = base if base is not None and base.program is not None else None
    if probe is not None and (program or known is not None):
        raise InputError("probe: not used where the step is described as a program; allowed: no probe, or no program")
    if known is not None and program is False:
        raise InputError(f"base: {known.name} has a program; allowed: a base without one where none is wanted")

    def fit_as(stamps: StepStamps) -> JobFit:
        if probe is None or not isinstance(stamps, JobStamps):
            return fit_stamps(stamps, base, name)
        return fit_stamps(stamps, base, name, read_job(_read(probe, job)[0]))

    if known is not None:
        fit, held_out = fit_as(read_known(matrix, known)), {"cannot_tell": "the step is that of --base"}
    else:
        stamps, fit, more = _described(matrix, program, fit_as)
        notes += more
        if probe is not None and fit.cluster.program is not None:
            notes.append("the probe is not used: the step is described as a program")
        held_out = check_fit(stamps, lambda part: fit_as(part).cluster) if check else {}
    if check:
        record = fit.cluster.calibration | {"held_out_steps": held_out}
        fit = replace(fit, cluster=fit.cluster.model_copy(update={"calibration": record}))
    return replace(fit, notes=tuple(notes))


def _read(trace: Trace, job: str | None) -> tuple[OperationMatrix, list[str]]:
    """A job's trace without its warm-up and on one clock, and what is to be said of that."""
    whole, clocks = matrix_on_one_clock(trace, job=job)
    matrix, warm_up = without_warm_up(whole)
    said = f"the first {warm_up} iterations are left out as warm-up" if warm_up else ""
    return matrix, [*filter(None, (clocks, said))]


def _described(
    matrix: OperationMatrix, program: bool | None, fit_as: Callable[[StepStamps], JobFit]
) -> tuple[JobStamps | ProgramStamps, JobFit, list[str]]:
    """The description of a step that was asked for, or else the one that the trace calls for, and why."""
    if program:
        asked = read_program(matrix)
        return asked, fit_as(asked), []
    transfers = _or_why(partial(read_program, matrix)) if program is None else ""
    if isinstance(transfers, ProgramStamps) and durations(transfers).overlap_share > OVERLAPS:
        said = "transfers of several communicators overlap: the step is described as a program"
        return transfers, fit_as(transfers), [said]
    try:
        stamps = read_job(matrix)
    except InputError as error:
        if not isinstance(transfers, ProgramStamps):
            raise
        instead = f"from {MIN_STEPS} steps on, paceenv calibrate FILES --program -o program.yaml"
        raise InputError(f"{error}; or, {instead}") from None
    fit, notes = fit_as(stamps), list[str]()
    if isinstance(transfers, str) and UNKNOWN_PEERS in transfers:
        notes.append(f"sends and receives count as compute: {UNKNOWN_PEERS}")
    if program is None and abs(fit.mean_error) > max(OFF, RUNS_APART * fit.simulated.mean_sd / fit.simulated.mean_s):
        off = f"one collective a step leaves the mean step {fit.mean_error:+z.1%} off"
        other = transfers if isinstance(transfers, str) else _or_why(partial(fit_as, transfers))
        if isinstance(transfers, str) or isinstance(other, str):
            notes.append(f"{off}; as a program it cannot be described: {other}")
        elif abs(other.mean_error) < abs(fit.mean_error):
            return transfers, other, [f"{off}: the step is described as a program"]
        else:
            notes.append(f"{off}, and a program {other.mean_error:+z.1%}")
    return stamps, fit, [*notes, *_left_out(matrix, stamps)]


def fit_stamps(
    stamps: Stamps, base: Cluster | None = None, name: str = "calibrated", probed: Stamps | None = None
) -> JobFit:
    """Take the stamps of a job through all stages, its links from a probe; ``base`` stands where they tell nothing."""
    builder = ClusterBuilder(stamps, base, name, probed)
    for stage in STAGES[type(stamps)]:
        stage(builder)
    return _with_record(builder)


def _with_record(builder: ClusterBuilder[Any]) -> JobFit:
    """The cluster, compared with the trace, and where each of its numbers comes from."""
    stamps, cluster, measured, simulated = builder.stamps, builder.cluster(), builder.measured, builder.simulated()
    record: dict[str, Any] = {
        "source": f"{stamps.described}, {len(stamps.step_T)} iterations",
        "fitted": {p.key: p.to_record() for p in builder.parameters if p.is_identified},
        "cannot_tell": {p.key: p.to_record() for p in builder.parameters if not p.is_identified},
        "measured": {"step_mean_s": measured.mean_s, "step_mean_se_s": measured.mean_sd, "step_cv": measured.cv},
        "simulated": {"step_mean_s": simulated.mean_s, "step_cv": simulated.cv},
    }
    ranks = tuple(sorted(stamps.names))
    if cluster.program is not None:
        guesses = [p for p in builder.parameters if p.is_guess and p.key.startswith("fabric.")]
        record[STAND_INS] = {p.key: p.value for p in guesses}
    if ranks != tuple(range(len(ranks))):
        record["ranks"] = list(ranks)
    if builder.slow:
        record["slow_ranks"] = builder.slow
    cluster = cluster.model_copy(update={"calibration": record})
    steps = int(stamps.unpaced_T.sum()) or len(stamps.step_T)
    return JobFit(cluster, tuple(builder.parameters), measured, simulated, steps)


def _or_why(made: Callable[[], Made]) -> Made | str:
    try:
        return made()
    except InputError as error:
        return str(error)


def _left_out(matrix: OperationMatrix, stamps: JobStamps) -> tuple[str, ...]:
    """A note on collectives that one collective a step leaves out, where they take long."""
    some_N = matrix.is_op(*(op for op in COLLECTIVE_OPS if op != BARRIER_OP))
    start_NT, end_NT = matrix.clock_2NT[:, some_N][:, :, np.isin(matrix.iteration_T, stamps.iteration_T)]
    all_s = float(np.nansum(np.minimum(end_NT, stamps.begin_T + stamps.step_T) - start_NT))
    group_R = np.repeat(np.arange(stamps.groups), stamps.ranks // stamps.groups)
    described_s = float((stamps.finish_TG[:, group_R] - stamps.entry_TR).mean())
    share = (all_s / (len(stamps.step_T) * stamps.ranks) - described_s) / float(stamps.step_T.mean())
    if share <= OFF:
        return ()
    return (f"other collectives take {share:.0%} of a step and count as compute, which stays the same at any size",)
