"""Which description fits the trace of a job: one collective a step, or a step as a program."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.heldout import HeldOutCheck, check_job, check_steps
from paceenv.calibration.job_fit import JobFit, calibrate_stamps
from paceenv.calibration.job_stamps import JobStamps, read_job
from paceenv.calibration.known_program import fit_known
from paceenv.calibration.program_fit import fit_program
from paceenv.calibration.program_stamps import MIN_STEPS, UNKNOWN_PEERS, ProgramStamps, read_program
from paceenv.calibration.step_order import OVERLAPS
from paceenv.core.errors import InputError
from paceenv.core.trace import COLLECTIVE_OPS, Trace
from paceenv.core.warm_up import without_warm_up
from paceenv.sim.cluster import Cluster

OFF: Final = 0.05
"""Error of the mean step from which on one collective a step does not describe a job."""
FITTED_SHARE: Final = 2.0 / 3.0
MIN_PART: Final = 16
"""Steps that a part of a trace must have for a check on unseen steps."""
NOT_ASKED: Final = "not asked for"

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TraceFit:
    """A fit, its check on unseen steps or why there is none, and notes on which description was taken.

    ``step_T`` are the steps that it was fitted to, seconds, empty where the program was known; ``ranks`` the trace's
    numbers of the ranks.
    """

    fit: JobFit
    check: HeldOutCheck | str
    notes: tuple[str, ...] = ()
    step_T: Array = field(default_factory=lambda: np.empty(0))
    ranks: tuple[int, ...] = ()


def calibrate_trace(trace: Trace, **options: Any) -> JobFit:
    """A cluster fitted to a trace, as by :func:`fit_trace`, without a check on unseen steps."""
    return fit_trace(trace, **options, check=False).fit


def fit_trace(
    trace: Trace,
    *,
    base: Cluster | None = None,
    name: str = "calibrated",
    probe: Trace | None = None,
    job: str | None = None,
    program: bool | None = None,
    check: bool = True,
) -> TraceFit:
    """Fit a cluster to a trace: one collective a step, or a program.

    Raises:
        InputError: the trace holds no job that can be described.
    """
    trace, warm_up = without_warm_up(trace, job)
    notes: tuple[str, ...] = (f"the first {warm_up} iterations are left out as warm-up",) if warm_up else ()
    if base is not None and base.program is not None:
        if program is False:
            raise InputError(f"base: {base.name} has a program; allowed: a base without one where none is wanted")
        if probe is not None:
            raise InputError(f"probe: not used with a program, which {base.name} has; allowed: a base without one")
        ranks = tuple(np.unique(trace.column("rank")[trace.isin("job", trace.job_name(job))]).tolist())
        fit = _with_ranks(fit_known(trace, base, name, job=job), ranks)
        return TraceFit(fit, "the step is that of --base", notes, ranks=ranks)
    if program:
        if probe is not None:
            raise InputError(
                "probe: not used where the step is described as a program; allowed: no probe, or no program"
            )
        return replace(_of_program(read_program(trace, job=job), base, name, check=check), notes=notes)
    unused = ("the probe is not used: the step is described as a program",) if probe is not None else ()
    stamps: ProgramStamps | None = None
    if program is None:
        stamps, unknown = _program_stamps(trace, job)
        notes += unknown
        if stamps is not None and overlapping(stamps):
            note = "transfers of several communicators overlap: the step is described as a program (--no-program)"
            found = _of_program(stamps, base, name, check=check)
            return replace(found, notes=(*notes, note, *unused))
    try:
        job_stamps = read_job(trace, job=job)
    except InputError as error:
        if stamps is None:
            raise
        raise InputError(f"{error}; --program describes its step as a program, which {MIN_STEPS} steps allow") from None
    probed = None if probe is None else read_job(without_warm_up(probe, job)[0], job=job)
    left_out = _left_out(trace, job_stamps)
    fit = calibrate_stamps(job_stamps, probed, base, name)
    if program is None and abs(fit.mean_error) > OFF:
        better = _better(trace, fit, base, name, job, check=check)
        if isinstance(better, TraceFit):
            return replace(better, notes=(*notes, *better.notes, *unused))
        notes += (better,)
    step_T = job_stamps.step_T[job_stamps.unpaced_T] if job_stamps.unpaced_T.any() else job_stamps.step_T
    ranks = tuple(sorted(job_stamps.order_R))
    verdict = check_job(job_stamps, probed, base) if check else NOT_ASKED
    return TraceFit(_with_ranks(fit, ranks), verdict, (*notes, *left_out), step_T, ranks)


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


def _program_stamps(trace: Trace, job: str | None) -> tuple[ProgramStamps | None, tuple[str, ...]]:
    """The trace's transfers as those of a program, where they are, and a note on messages that have no known end."""
    try:
        return read_program(trace, job=job), ()
    except InputError as error:
        if UNKNOWN_PEERS not in str(error):
            return None, ()
        note = f"sends and receives count as compute: {UNKNOWN_PEERS} (--base with a typed program settles it)"
        return None, (note,)


def _better(
    trace: Trace, fit: JobFit, base: Cluster | None, name: str, job: str | None, *, check: bool
) -> TraceFit | str:
    """The fit of a program where that is nearer to the measured step, or in words why there is none."""
    off = f"one collective a step leaves the mean step {fit.mean_error:+.1%} off"
    try:
        found = _of_program(read_program(trace, job=job), base, name, check=check)
    except InputError as error:
        return f"{off}; as a program it cannot be described: {error}"
    if abs(found.fit.mean_error) >= abs(fit.mean_error):
        return f"{off}, and a program {found.fit.mean_error:+.1%} (--program takes it)"
    return replace(found, notes=(f"{off}: the step is described as a program (--no-program)",))


def _with_ranks(fit: JobFit, ranks: tuple[int, ...]) -> JobFit:
    """The fit with the trace's numbers of the ranks in its record, where they are not 0, 1, 2 and so on."""
    if ranks == tuple(range(len(ranks))):
        return fit
    record = fit.cluster.calibration | {"ranks": list(ranks)}
    return replace(fit, cluster=fit.cluster.model_copy(update={"calibration": record}))


def _of_program(stamps: ProgramStamps, base: Cluster | None, name: str, *, check: bool) -> TraceFit:
    fit = _with_ranks(fit_program(stamps, base, name), stamps.names)
    found = TraceFit(fit, NOT_ASKED, (), stamps.step_T, stamps.names)
    if not check:
        return found
    steps = len(stamps.step_T)
    cut = int(FITTED_SHARE * steps)
    if steps - cut < MIN_PART:
        return replace(found, check=f"{steps} steps, {steps - cut} of them held out; needed: {3 * MIN_PART}")
    first = fit_program(stamps.part(cut), base, "held-out check")
    return replace(found, check=check_steps(cut, stamps.step_T[cut:], first.cluster))
