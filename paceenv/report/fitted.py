"""The cluster behind recordings, and what pacing policies gain on it: on clusters drawn from the calibration's errors.

For a policy the mean effect matters, not that of a single run: its interval is the range in which 95 % of such clusters
have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from paceenv.calibration.bandwidth import fit_table
from paceenv.calibration.compute_noise import fit_stage
from paceenv.calibration.fit_trace import JobFit, fit_trace
from paceenv.core.errors import InputError, needs
from paceenv.core.trace import Trace
from paceenv.diagnosis.causes import TENANT
from paceenv.diagnosis.verdict import Diagnosis, Paced, Pacing
from paceenv.report.recordings import find_recordings, read_trace
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import output
from paceenv.whatif.baseline import Baseline, check_ranks, is_config, of_config, of_trace
from paceenv.whatif.change import Change
from paceenv.whatif.predictions import one_more
from paceenv.whatif.simulated import drawn, simulate

SEEDS: Final = 4
ITERATIONS: Final = 800
MANY_RANKS: Final = 256
"""From here on a run is long enough to do with one seed a cluster."""
GOOD_MEAN: Final = 0.1
"""A fitted cluster whose mean step is further off than this share predicts little."""
HOLDS: Final = ("static:defer=0/0.02", "static:defer=0/0.1")
"""Policies that hold back transfers that can wait, for a fixed share of a step."""
_FIRST_SEED = 5_000_000
BASE: Final = "null-jitter"
"""Of a pipeline's first stage, where nobody gives one."""


def fit_recordings(
    source: Sequence[str], base: Cluster | None, name: str, probe: Path | None, program: bool | None
) -> tuple[Cluster, list[str]]:
    """The cluster of a job's trace, of a pipeline's first stage or of nccl-tests output, and what to say of it."""
    inputs = find_recordings(source).read()
    for note in inputs.notes:
        output.say(note)
    is_table = inputs.trace is None and bool(inputs.tables)
    is_pipeline = inputs.trace is not None and len(set(inputs.trace.metadata.of_ranks("stage", 0).values())) > 1
    for option, value in (("--probe", probe), ("--program", program)):
        if value is not None and (is_pipeline or is_table):
            kind = "a trace of pipeline stages" if is_pipeline else "nccl-tests output"
            raise InputError(f"{option} {value}: {source[0]} is {kind}; allowed: the trace of a job")
    with output.progress(f"fit {name}"):
        if is_table:
            return fit_table(inputs.tables, base, name)
        if is_pipeline:
            cluster, note = fit_stage(inputs.require_trace(), base or load_cluster(BASE), name)
            return cluster, [note]
        probed = None if probe is None else find_recordings([probe]).read().require_trace()
        fit = fit_trace(inputs.require_trace(), base=base, name=name, probe=probed, program=program, check=True)
        return fit.cluster, list(fit.notes)


def baseline_of(source: Sequence[str], changes: Sequence[Change], base: str | None, job: str | None) -> Baseline:
    """The job of a cluster config or of a trace, whose ranks are those of the changes."""
    if is_config(source):
        for option, value in (("--base", base), ("--job", job)):
            if value is not None:
                raise InputError(f"{option} {value}: {source[0]} is a cluster config; allowed: only with a trace")
        return of_config(source[0])
    trace = read_trace(source)
    has = frozenset(trace.column("rank")[trace.isin("job", trace.job_name(job))].tolist())
    for change in changes:  # before a calibration, which takes its time
        check_ranks(change, has, source[0])
    with output.progress(f"calibrate {Path(source[0]).name}", 1):
        return of_trace(trace, source[0], base, job)


def try_policies(
    trace: Trace,
    source: str,
    job: str | None,
    diagnosis: Diagnosis,
    policies: Sequence[str],
    on_done: Callable[[float], None] = lambda done: None,
) -> tuple[Baseline | None, Pacing]:
    """The cluster of a trace, and policies against no pacing on the same noise; or why there is none.

    Where transfers can wait, windows of the rule defer are tried too.
    """
    try:
        baseline = of_trace(trace, source, None, job)
        clusters = drawn(baseline)
    except InputError as error:
        return None, Pacing(why_not=_reason(error, source))
    assert baseline.fit is not None
    doubt, cluster = _doubt(baseline.fit, diagnosis), baseline.fit.cluster
    changes = [Change(pacing=policy) for policy in dict.fromkeys([*policies, *(HOLDS if cluster.can_defer else ())])]
    seeds_S = _FIRST_SEED + np.arange(SEEDS if cluster.ranks < MANY_RANKS else 1)
    seeds_DS = np.broadcast_to(seeds_S, (len(clusters), len(seeds_S)))
    try:
        baseline.check(changes)
    except InputError as error:
        return baseline, Pacing(why_not=_reason(error, source), doubt=doubt)
    try:
        runs = simulate(baseline, clusters, [Change(), *changes], seeds_DS, ITERATIONS, on_done)
    except ModuleNotFoundError as error:  # the released policy's file needs a library that it does not
        return baseline, Pacing(why_not=str(needs("the comparison", error.name, "train")), doubt=doubt)
    rows, passive = [], runs[Change()]
    for change in changes:
        paced = runs[change]
        gain_D = (np.array(passive.step_s) / np.array(paced.step_s)).mean(axis=1) - 1.0
        cv, cv_passive, delay = (float(np.mean(x)) for x in (paced.cv, passive.cv, paced.delay_share))
        rows.append(Paced(change.pacing, one_more(gain_D), cv, cv_passive, delay, str(paced.outside or "")))
    return baseline, Pacing(tuple(rows), doubt=doubt, clusters=len(clusters))


def _reason(error: InputError, source: str) -> str:
    """Without the source, which the page names, and without another one that would be allowed in its place."""
    return str(error).removeprefix(f"{source}: ").partition("; allowed: a ")[0]


def _doubt(fit: JobFit, diagnosis: Diagnosis) -> str:
    """Why the fitted clusters may not be the job; "" if nothing shows that."""
    said = []
    if abs(fit.mean_error) > GOOD_MEAN:
        said.append(f"the fitted cluster's mean step is {fit.mean_error:+z.0%} off")
    if TENANT in {cause.cause for cause in diagnosis.causes} and not fit.cluster.tenants:
        said.append("the fitted cluster lacks the other job among the causes")
    return ", and ".join(said)
