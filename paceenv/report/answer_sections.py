"""An answer in sections: hangs, causes, late ranks, where time went on devices, step times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from paceenv.core.wording import duration
from paceenv.diagnosis.answer import Answer
from paceenv.diagnosis.host_activity import LateHost
from paceenv.diagnosis.step_times.step_findings import levels_text
from paceenv.diagnosis.verdict import Diagnosis, Verdict
from paceenv.importers.step_log import FASTEST
from paceenv.importers.timelines import RankActivity
from paceenv.report.section import Section
from paceenv.ui.output import sentence

if TYPE_CHECKING:  # what few need brings libraries that take a second to import
    from paceenv.diagnosis.hang import Hang, LastSeen
    from paceenv.diagnosis.step_times.step_diagnosis import StepDiagnosis

_SHOWN: Final = (
    ("kernels", "compute_s"),
    ("copies to it", "to_device_s"),
    ("other copies", "other_copies_s"),
    ("collectives exposed", "exposed_s"),
    ("hidden", "hidden_s"),
    ("waiting for its host", "host_wait_s"),
    ("idle", "idle_s"),
    ("host in data loader", "loader_s"),
)


def answer_sections(
    found: Answer, verdict: Verdict | None, activity: Sequence[RankActivity], name: str
) -> list[Section]:
    """All that was found."""
    sections = [section for hang in found.hangs for section in _hang(hang)]
    if found.ended:
        sections.append(Section("What else the logs say", list(map(sentence, found.ended))))
    if found.times is not None:
        title = f"NCCL Inspector: logs of {found.times.processes} processes"
        sections.append(Section(title, verdict=sentence(found.times.verdict)))
    if found.diagnosis is not None and verdict is not None:
        sections.append(_causes(found.diagnosis, verdict, name))
    if found.lateness is not None and not found.lateness.why_not:
        sections.append(Section("When which rank was late", found.lateness.text))
    if activity:
        columns, rows = _activity(activity, found.late_hosts)
        why = _late_sentences(found.late_hosts, found.diagnosis)
        sections.append(Section("Where a step's time went on each device", why, columns, rows))
    return [*sections, *map(_steps, found.steps)]


def headline(verdict: Verdict) -> str:
    """A verdict as sentences."""
    return " ".join(map(sentence, (verdict.lost, verdict.said, *verdict.checks)))


def _activity(activity: Sequence[RankActivity], late: Sequence[LateHost]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of where a mean step's time went on each rank's device, those that are late first."""
    of_rank: dict[int, list[RankActivity]] = defaultdict(list)
    for one in activity:
        of_rank[one.rank].append(one)
    first = [one.rank for one in late]
    ranks = [*first, *(rank for rank in sorted(of_rank) if rank not in first)]
    shown = [(title, key) for title, key in _SHOWN if any(getattr(one, key) > 0.0 for one in activity)]
    rows = [[str(rank)] for rank in ranks]
    for row, rank in zip(rows, ranks, strict=True):
        means_s = [float(np.mean([getattr(one, key) for one in of_rank[rank]])) for _, key in shown]
        row += [duration(mean_s) if np.isfinite(mean_s) else "unknown" for mean_s in means_s]
    return ["rank", *(title for title, _ in shown)], rows


def _late_sentences(late: Sequence[LateHost], found: Diagnosis | None) -> list[str]:
    """Why ranks are late; how late is said only once, in the headline where no causes can be named."""
    said = {one.rank for one in found.arrivals.late} if found is not None and found.refused else set()
    return [sentence(one.why if one.rank in said else one.text) for one in late]


def _causes(found: Diagnosis, verdict: Verdict, name: str) -> Section:
    """Causes with what to do, and the headline."""
    rows = [(c.cause, f"{c.share:.0%}", f"{c.lost_s:.4g}", c.evidence, verdict.advice(c)) for c in found.causes]
    known = found.bare_step_s is not None and found.causes
    bare = f" ({found.bare_step_s:.4g} s without any cause)" if known else ""
    ideal = ""
    if found.ideal_step_time_s is not None:
        ideal = (
            f"{bare}, with all ranks equal {found.ideal_step_time_s:.4g} s (slowdown {found.slowdown:.3f}; "
            f"replayed within {max(abs(found.replay_error), 1e-3):.1%})"
        )
    title = f"{name}: mean step {found.step_time_s:.4g} s{ideal}"
    columns = ("cause", "of lost time", "s a step", "evidence", "advice")
    return Section(title, (), columns, rows, verdict=headline(verdict))


def _hang(hang: Hang) -> list[Section]:
    """The verdict, what each rank waits for, and what the ranks behind it were last seen doing."""
    dumps, silent = len(hang.job.dumps), len(hang.job.silent)
    what = "lines of the watchdog" if hang.of_watchdog else "Flight Recorder dumps"
    of = f"{dumps} of {dumps + silent} ranks" if silent or not hang.of_watchdog else f"{dumps} rank{'s' * (dumps > 1)}"
    sections = [Section(f"{hang.name}: {what} of {of}", verdict=sentence(hang.verdict))]
    if hang.hangs and not hang.apart:
        columns = ("ranks", "wait in", "of the group", "for", "in the end for")
        sections.append(Section("What the ranks wait for", (), columns, hang.waiting_rows()))
        if hang.last_seen:
            columns = ("rank", "last recorded", "behind", "did not enter", "called from")
            sections.append(Section("Last seen", (), columns, [_last_seen(one) for one in hang.last_seen]))
    return sections


def _last_seen(seen: LastSeen) -> tuple[str, ...]:
    last = seen.last
    if last is None:
        did = "nothing unfinished" + (f"; {seen.finished} was its last collective there" if seen.finished >= 0 else "")
    else:
        at = time.strftime(", at %H:%M:%S UTC", time.gmtime(last.created_s)) if last.created_s > 0.0 else ""
        number = last.p2p_seq if last.is_p2p else last.collective_seq
        did = f"{last.op} {number} of {seen.last_group}, {last.state}{at}"
    if seen.blind:
        did += f"; {seen.blind} ends never seen"
    behind = f"{seen.behind} collectives" if seen.behind else "-"
    following = f"{seen.next_op} of {seen.next_group}" if seen.next_op else "-"
    return str(seen.rank), did, behind, following, "; ".join(seen.frames) or "not recorded"


def _steps(found: StepDiagnosis) -> Section:
    """A diagnosis from step times alone: numbers, what recurs, the verdict, and what to do next."""
    log, warm_up = found.log, int(found.ordinary.warm_up_V.sum())
    restarts = f", {found.runs - 1} restart{'s' * (found.runs > 2)}" if found.runs > 1 else ""
    what = "step times" if log.of == "step" else "speeds"
    title = f"{log.name} ({log.source}): {len(found.steady_s_V)} {what}, steps {log.step_V.min()} to {log.step_V.max()}"
    title += restarts + f"; {warm_up} of the warm-up left out" * (warm_up > 0)
    columns = ("what", "value", "meaning")
    return Section(title, [f"Next: {found.next_step}"], columns, step_rows(found), verdict=sentence(found.verdict))


def step_rows(found: StepDiagnosis) -> list[tuple[str, str, str]]:
    """Name, value and meaning of every number."""
    outliers, period, top = int(found.ordinary.outlier_V.sum()), found.outlier_period, found.ceiling
    averages = "the log does not tell; averaging would hide variation"
    if found.averaged:
        averages = "single steps" if found.averaged == 1.0 else "averaging hides how single steps vary"
    recur = "no period" if outliers else ""
    if period:
        recur = f"every {period.steps} steps: evaluation or a checkpoint, say"
    table = [
        ("steps a value averages over", f"{found.averaged:.0f}" if found.averaged else "unknown", averages),
        ("mean, median", f"{found.log.said(found.mean_s)}, {found.log.said(found.median_s)}", ""),
        ("CV", f"{found.cv:.2%}", ""),
        ("99th percentile / median", f"{found.p99_over_median:.3f}", ""),
        ("outliers", str(outliers), recur),
    ]
    if found.rounding_share > 0.1:
        table.append(("of the variance, rounding", f"{found.rounding_share:.0%}", "the log has too few digits"))
    if found.pattern is not None:
        explains = f"explains {found.pattern.share:.0%} of the variance"
        table.append(("ordinary steps recur", f"every {found.pattern.steps}", explains))
    if len(found.ordinary.levels) > 1:
        at_v = found.log.step_V[found.ordinary.steady_V]
        table.append(("changes of level", str(len(found.ordinary.levels) - 1), levels_text(found.ordinary, at_v)))
    if found.drift is not None:
        table.append(("drift", f"{found.drift.change:+.1%}", f"from beginning to end, +-{found.drift.half_width:.1%}"))
    if top is not None:
        meaning = f"95 %: {top.low:.2%} to {top.high:.2%}"
        meaning += f"; of it from outliers {found.from_outliers:.2%}" * (outliers > 0)
        table.append(("ceiling: all that removing variation gains", f"{top.value:.2%}", meaning))
    table += [(one.kind, f"explains {one.explains:.0%}", one.text) for one in found.findings[1:]]
    for name, part_V in [part for part in found.log.phases.items() if not part[0].endswith(FASTEST)][:12]:
        part_s = float(np.nanmedian(part_V[found.ordinary.steady_V]))
        table.append((f"part {name!r}", found.log.said(part_s), f"{part_s / found.median_s:.0%} of a step"))
    if found.log.others:
        logs = sorted((found.log, *found.log.others), key=lambda one: -float(np.median(one.step_s_V)))
        said = ", ".join(f"{one.rank}: {found.log.said(float(np.median(one.step_s_V)))}" for one in logs[:8])
        table.append(("ranks, slowest first", str(len(logs)), said + (" ..." if len(logs) > 8 else "")))
    return table
