"""The page of a trace: what ``paceenv diagnose`` finds, pictures, and policies on the fitted cluster."""

from __future__ import annotations

from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import OperationMatrix
from paceenv.diagnosis.lateness_over_time import lateness
from paceenv.diagnosis.verdict import Diagnosis, Pacing
from paceenv.report import pictures
from paceenv.report.examination import Examination
from paceenv.report.fit_sections import fit_sections
from paceenv.report.rank_pictures import heat_map, spans, timeline
from paceenv.report.section import Section, page
from paceenv.ui.output import sentence
from paceenv.whatif.baseline import Baseline


def page_of(examination: Examination) -> str:
    """The page of a trace that was diagnosed."""
    answer = examination.answer
    assert answer.matrix is not None
    assert answer.diagnosis is not None
    matrix, names = answer.matrix, [path.name for path in examination.paths]
    if not matrix.step_s_T.max() > 0.0:
        raise InputError(f"trace of {matrix.name}: steps that take no time; allowed: a job that takes some")
    files = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    read = f"Read from {files} ({matrix.source}): {len(matrix.ranks)} ranks, {matrix.steps} steps"
    sections = [*examination.sections(), *_drawn(matrix, answer.diagnosis)]
    if (paced := answer.diagnosis.paced_steps) is not None:
        said = f"{sentence(paced.text)} Other settings of pacing may do better or worse."
        sections.append(Section("What the delays in this trace did", [said]))
    sections += _predicted(examination.baseline, examination.pacing)
    title = f"Why the steps of {matrix.name} take as long as they do"
    return page(title, "; ".join([read, *examination.notes]) + ".", sections)


def _drawn(matrix: OperationMatrix, diagnosis: Diagnosis) -> list[Section]:
    late_RT = lateness(matrix)
    sections = [
        pictures.waterfall(diagnosis),
        timeline(matrix, spans(matrix), diagnosis.arrivals.late_RT.sum(axis=1)),
        heat_map(matrix, late_RT) if (late_RT > 0.0).any() else None,
        pictures.course(matrix.step_s_T, matrix.iteration_T),
    ]
    return [picture for picture in sections if picture is not None]


def _predicted(baseline: Baseline | None, pacing: Pacing) -> list[Section]:
    """The fitted cluster and what policies gain on it, or why there is none."""
    if baseline is None or baseline.fit is None:
        said = f"This trace gives no cluster to simulate: {pacing.why_not}."
        return [Section("Would pacing help?", [said])]
    sections = fit_sections(baseline.fit.cluster)
    if pacing.doubt:
        sections.append(Section("How far to trust it", [f"{sentence(pacing.doubt)} What is predicted is a sketch."]))
    if pacing.why_not:
        return [*sections, Section("Would pacing help?", [f"Not predicted: {pacing.why_not}."])]
    columns = (
        "policy", "throughput gain", "low", "high", "CV", "CV without pacing", "mean delay / step", "so it",
        "outside its range",
    )  # fmt: skip
    rows = [
        (
            one.policy, *(f"{x:+z.2%}" for x in one.gain), f"{one.cv:.4f}", f"{one.cv_passive:.4f}",
            f"{one.delay_share:.4f}", one.verdict, one.outside,
        )
        for one in pacing.policies
    ]  # fmt: skip
    caption = (
        f"Pacing policies on {pacing.clusters} clusters that may be the one behind this trace, each with "
        f"{baseline.fit.cluster.job.nodes} nodes, paired with no pacing on the same noise; 95 % of such clusters lie "
        "between low and high. A simulation: on the job itself a canary (paceenv live) decides."
    )
    return [*sections, Section("Would pacing help?", [caption], columns, rows)]
