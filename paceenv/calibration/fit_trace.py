"""A cluster from the trace of a job, in stages, each of which adds its keys and their evidence to one builder.

| stage | one collective a step | a program |
| --- | --- | --- |
| stamps | ``job_stamps`` | ``program_stamps``, ``known_program`` |
| noise | ``compute_noise`` | the same |
| links | ``links``, ``incast_fit`` | ``program_links`` |
| tenants | ``tenants`` | |
| program | ``collective_fit`` | ``step_order``, ``step_phases``, ``program_fit`` |
| errors | ``parameters``, ``heldout``, ``posterior`` | the same |

Where nobody says otherwise, the trace decides between one collective a step and a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import JobFit, StepStamps
from paceenv.calibration.collective_fit import fit_collective
from paceenv.calibration.heldout import check_fit
from paceenv.calibration.job_stamps import JobStamps, read_job
from paceenv.calibration.known_program import fit_known, read_known
from paceenv.calibration.program_fit import fit_program
from paceenv.calibration.program_stamps import MIN_STEPS, UNKNOWN_PEERS, ProgramStamps, read_program
from paceenv.calibration.step_order import OVERLAPS
from paceenv.core.errors import InputError
from paceenv.core.trace import COLLECTIVE_OPS, Trace
from paceenv.core.warm_up import without_warm_up
from paceenv.sim.cluster import Cluster

OFF: Final = 0.05
"""Error of the mean step from which on one collective a step does not describe a job."""
RUNS_APART: Final = 2.0
"""Unless runs differ by more than half as much: beside a tenant each run locks into a phase of its own."""

Array = NDArray[np.float64]
Stamps = TypeVar("Stamps", bound=StepStamps)
Made = TypeVar("Made")


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
    """Fit a cluster to a trace: one collective a step, or a program; ``check`` compares it with unseen steps."""
    trace, warm_up = without_warm_up(trace, job)
    notes = [f"the first {warm_up} iterations are left out as warm-up"] if warm_up else []
    unused = ["the probe is not used: the step is described as a program"] if probe is not None else []
    known = base if base is not None and base.program is not None else None
    if probe is not None and (program or known is not None):
        raise InputError("probe: not used where the step is described as a program; allowed: no probe, or no program")
    if known is not None and program is False:
        raise InputError(f"base: {known.name} has a program; allowed: a base without one where none is wanted")
    if known is not None:
        fit = fit_known(read_known(trace, known, job=job), known, name)
        return replace(fit, check="the step is that of --base", notes=tuple(notes))

    def as_program(stamps: ProgramStamps, *more: str, fit: JobFit | None = None) -> JobFit:
        fit = _checked(stamps, lambda part: fit_program(part, base, name), check=check, fit=fit)
        return replace(fit, notes=(*notes, *more, *unused))

    if program:
        return as_program(read_program(trace, job=job))
    transfers = _or_why(lambda: read_program(trace, job=job)) if program is None else ""
    if isinstance(transfers, ProgramStamps) and overlapping(transfers):
        said = "transfers of several communicators overlap: the step is described as a program (--no-program)"
        return as_program(transfers, said)
    if isinstance(transfers, str) and UNKNOWN_PEERS in transfers:
        notes.append(f"sends and receives count as compute: {UNKNOWN_PEERS} (--base with a typed program settles it)")
    try:
        stamps = read_job(trace, job=job)
    except InputError as error:
        if not isinstance(transfers, ProgramStamps):
            raise
        raise InputError(f"{error}; --program describes its step as a program, which {MIN_STEPS} steps allow") from None
    probed = None if probe is None else read_job(without_warm_up(probe, job)[0], job=job)
    fit = fit_collective(stamps, base, name, probed)
    if program is None and abs(fit.mean_error) > max(OFF, RUNS_APART * fit.simulated.mean_sd / fit.simulated.mean_s):
        off = f"one collective a step leaves the mean step {fit.mean_error:+.1%} off"
        said = f"{off}: the step is described as a program (--no-program)"
        other = transfers if isinstance(transfers, str) else _or_why(partial(fit_program, transfers, base, name))
        if isinstance(transfers, str) or isinstance(other, str):
            notes.append(f"{off}; as a program it cannot be described: {other}")
        elif abs(other.mean_error) < abs(fit.mean_error):
            return as_program(transfers, said, fit=other)
        else:
            notes.append(f"{off}, and a program {other.mean_error:+.1%} (--program takes it)")
    fit = _checked(stamps, lambda part: fit_collective(part, base, name, probed), check=check, fit=fit)
    return replace(fit, notes=(*notes, *_left_out(trace, stamps)))


def _checked(
    stamps: Stamps, fit_stamps: Callable[[Stamps], JobFit], *, check: bool, fit: JobFit | None = None
) -> JobFit:
    """The fit to all steps, with a second fit to the first of them held against the others."""
    fit = fit_stamps(stamps) if fit is None else fit
    return replace(fit, check=check_fit(stamps, lambda part: fit_stamps(part).cluster)) if check else fit


def _or_why(made: Callable[[], Made]) -> Made | str:
    """What is made, or why it cannot be."""
    try:
        return made()
    except InputError as error:
        return str(error)


def _left_out(trace: Trace, stamps: JobStamps) -> tuple[str, ...]:
    """A note on collectives that one collective a step leaves out, where they take long."""
    mine = trace.isin("job", stamps.name) & np.isin(trace.column("iteration"), stamps.iteration_T)
    is_collective = trace.isin("op", *COLLECTIVE_OPS) & ~trace.isin("op", "barrier") & mine
    lasts_s = (trace.column("end_s") - trace.column("start_s"))[is_collective]
    group_R = np.repeat(np.arange(stamps.groups), [len(members) for members in stamps.members])
    described_s = float((stamps.finish_TG[:, group_R] - stamps.entry_TR).mean())
    share = (lasts_s.sum() / (len(stamps.step_T) * stamps.ranks) - described_s) / float(stamps.step_T.mean())
    if share <= OFF:
        return ()
    return (
        f"other collectives take {share:.0%} of a step and count as compute, which stays the same at any size "
        "(--program, or --base with a typed program, describes them)",
    )


def overlapping(stamps: ProgramStamps) -> bool:
    """Whether transfers of several communicators of a rank often run at the same time."""
    names = np.array([one.communicator for one in stamps.transfers])
    if len(set(names.tolist())) < 2:
        return False
    for r in range(stamps.ranks):
        start_TK, end_TK = stamps.start_TRK[:, r], stamps.end_TRK[:, r]
        for name in set(names.tolist()):
            mine, others = names == name, names != name
            lasts_TK = np.maximum(end_TK - start_TK, 0.0)
            low = np.maximum(start_TK[:, mine, None], start_TK[:, None, others])
            high = np.minimum(end_TK[:, mine, None], end_TK[:, None, others])
            shorter = np.minimum(lasts_TK[:, mine, None], lasts_TK[:, None, others])
            meet_T = np.any((high - low > OVERLAPS * shorter) & (shorter > 0.0), axis=(1, 2))
            if meet_T.mean() > OVERLAPS:
                return True
    return False
