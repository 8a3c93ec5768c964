"""An answer in sections: hangs, causes, late ranks, where time went on devices, step times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceenv.core.wording import duration
from paceenv.diagnosis.answer import Answer
from paceenv.diagnosis.hang import LAST_SEEN, NEXT, WAITS, Hang
from paceenv.diagnosis.host_activity import PARTS, LateHost
from paceenv.diagnosis.verdict import Diagnosis, Verdict
from paceenv.importers.timelines import RankActivity
from paceenv.report.section import Section
from paceenv.ui.output import sentence

if TYPE_CHECKING:  # what few need brings libraries that take a second to import
    from paceenv.diagnosis.step_times.step_diagnosis import StepDiagnosis


def answer_sections(
    answer: Answer, verdict: Verdict | None, activity: Sequence[RankActivity], name: str
) -> list[Section]:
    sections = [section for hang in answer.hangs for section in _hang(hang)]
    if answer.ended:
        sections.append(Section("What else the logs say", list(map(sentence, answer.ended))))
    if answer.diagnosis is not None and verdict is not None:
        sections.append(_causes(answer.diagnosis, verdict, name))
    if answer.lateness is not None and not answer.lateness.why_not:
        sections.append(Section("Late ranks over time", answer.lateness.text))
    if activity:
        columns, rows = _activity(activity, answer.late_hosts)
        told = answer.diagnosis.arrivals.late if answer.diagnosis is not None and answer.diagnosis.refused else ()
        said = {one.rank for one in told}  # by the headline, how late
        why = [sentence(one.why if one.rank in said else one.text) for one in answer.late_hosts]
        count = len({one.iteration for one in activity})
        title = f"Where a step's time went on each device, mean of {count} steps"
        sections.append(Section(title, why, columns, rows))
    stands = any(hang.hangs for hang in answer.hangs)
    sections += [_steps(steps, [] if stands else [f"Next: {steps.next_step}"]) for steps in answer.steps]
    if stands:
        sections[-1] = replace(sections[-1], text=[*sections[-1].text, NEXT])
    return sections


def headline(verdict: Verdict) -> str:
    return " ".join(map(sentence, filter(None, (verdict.lost, verdict.said, verdict.unseen))))


def _activity(activity: Sequence[RankActivity], late: Sequence[LateHost]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of where a mean step's time went on each rank's device, those that are late first."""
    of_rank: dict[int, list[RankActivity]] = defaultdict(list)
    for one in activity:
        of_rank[one.rank].append(one)
    first = [one.rank for one in late]
    ranks = [*first, *(rank for rank in sorted(of_rank) if rank not in first)]
    shown = [(title, key) for title, key in PARTS if any(getattr(one, key) > 0.0 for one in activity)]
    rows = [[str(rank)] for rank in ranks]
    for row, rank in zip(rows, ranks, strict=True):
        means_s = [float(np.mean([getattr(one, key) for one in of_rank[rank]])) for _, key in shown]
        row += [duration(mean_s) if np.isfinite(mean_s) else "unknown" for mean_s in means_s]
    return ["rank", *(title for title, _ in shown)], rows


def _causes(diagnosis: Diagnosis, verdict: Verdict, name: str) -> Section:
    rows = [(c.cause, f"{c.share:.0%}", duration(c.lost_s), c.evidence, verdict.advice(c)) for c in diagnosis.causes]
    best_s, what = diagnosis.ideal_step_time_s, "with all ranks equal"
    if diagnosis.bare_step_s is not None and diagnosis.causes:
        best_s, what = diagnosis.bare_step_s, "without any cause"
    title = f"{name}: mean step {duration(diagnosis.step_time_s)}"
    if best_s is not None:
        title += f", {duration(best_s)} {what} (replayed within {max(abs(diagnosis.replay_error), 1e-3):.1%})"
    columns = ("cause", "of lost time", "cost", "evidence", "advice")
    return Section(title, (), columns, rows, verdict=headline(verdict))


def _hang(hang: Hang) -> list[Section]:
    """The verdict, what each rank waits for, and what the ranks behind it were last seen doing."""
    dumps, silent = len(hang.job.dumps), len(hang.job.silent)
    what = "lines of the watchdog" if hang.of_watchdog else "Flight Recorder dumps"
    of = f"{dumps} of {dumps + silent} ranks" if silent or not hang.of_watchdog else f"{dumps} rank{'s' * (dumps > 1)}"
    sections = [Section(f"{hang.name}: {what} of {of}", verdict=sentence(hang.verdict))]
    if hang.hangs and not hang.apart:
        sections.append(Section("What the ranks wait for", (), WAITS, hang.waiting_rows()))
        if rows := hang.last_seen():
            sections.append(Section("Last seen", (), LAST_SEEN, rows))
    return sections


def _steps(steps: StepDiagnosis, following: Sequence[str]) -> Section:
    """A diagnosis from step times alone: numbers, what recurs, the verdict, and what to do next."""
    log, warm_up = steps.log, int(steps.ordinary.warm_up_V.sum())
    restarts = f", {steps.runs - 1} restart{'s' * (steps.runs > 2)}" if steps.runs > 1 else ""
    what = "step times" if log.of == "step" else "speeds"
    title = f"{log.name} ({log.source}): {len(steps.steady_s_V)} {what}, "
    title += f"steps {log.step_V.min()} to {log.step_V.max()}{restarts}"
    title += f"; {warm_up} of the warm-up left out" * (warm_up > 0)
    columns = ("what", "value", "meaning")
    return Section(title, following, columns, _step_rows(steps), verdict=sentence(steps.verdict))


def _step_rows(steps: StepDiagnosis) -> list[tuple[str, str, str]]:
    averages = "the log does not tell; averaging would hide variation"
    if steps.averaged:
        averages = "single steps" if steps.averaged == 1.0 else "averaging hides how single steps vary"
    table = [
        ("steps a value averages over", f"{steps.averaged:.0f}" if steps.averaged else "unknown", averages),
        ("mean, median", f"{steps.log.said(steps.mean_s)}, {steps.log.said(steps.median_s)}", ""),
        ("CV", f"{steps.cv:.2%}", ""),
        ("99th percentile / median", f"{steps.p99_over_median:.3f}", ""),
    ]
    if steps.rounding_share > 0.1:
        table.append(("of the variance, rounding", f"{steps.rounding_share:.0%}", "the log has too few digits"))
    if (top := steps.ceiling) is not None:
        meaning = f"95 %: {top.low:.2%} to {top.high:.2%}"
        meaning += f"; of it from outliers {steps.from_outliers:.2%}" * bool(steps.ordinary.outlier_V.any())
        table.append(("ceiling: all that removing variation gains", f"{top.value:.2%}", meaning))
    for one in (*steps.findings[1:], *steps.minor):
        table.append((one.kind, f"{one.explains:.0%} of the variation" if one.explains > 0.0 else "", one.text))
    for name, part_V in [*steps.log.phases.items()][:12]:
        part_s = float(np.nanmean(part_V[steps.ordinary.steady_V]))
        table.append((f"part {name!r}", steps.log.said(part_s), f"{part_s / steps.mean_s:.0%} of all time"))
    if steps.log.others:
        logs = sorted((steps.log, *steps.log.others), key=lambda one: -float(np.median(one.step_s_V)))
        said = ", ".join(f"{one.rank}: {steps.log.said(float(np.median(one.step_s_V)))}" for one in logs[:8])
        table.append(("ranks, slowest first", str(len(logs)), said + (" ..." if len(logs) > 8 else "")))
    return table
