"""What ``paceenv diagnose`` prints about a text log."""

from __future__ import annotations

import numpy as np

from paceenv.diagnosis.step_times.step_diagnosis import StepDiagnosis
from paceenv.diagnosis.step_times.step_findings import levels_text
from paceenv.importers.step_log import FASTEST
from paceenv.ui import output

PATTERN_HELP = (
    "For text logs of other programs: a regular expression with a named group for the step time, (?P<s>..) or "
    "(?P<ms>..); or for a speed, (?P<steps_per_s>..); or for a running clock, (?P<elapsed_s>..); beside it "
    "(?P<step>..)."
)


def print_steps(found: StepDiagnosis) -> None:
    """Print a diagnosis from step times alone: numbers, what recurs, the verdict, and what to do next."""
    log = found.log
    for note in log.notes:
        output.say(note)
    restarts = f", {found.runs - 1} restart{'s' * (found.runs > 2)}" if found.runs > 1 else ""
    warm_up, what = int(found.ordinary.warm_up_V.sum()), "step times" if log.of == "step" else "speeds"
    title = f"{log.name} ({log.source}): {len(found.steady_s_V)} {what}, steps {log.step_V.min()} to {log.step_V.max()}"
    title += restarts + f"; {warm_up} of the warm-up left out" * (warm_up > 0)
    output.print_table(title, ("what", "value", "meaning"), rows(found))
    output.print_table(output.sentence(found.verdict), (), (), f"Next: {found.next_step}")


def rows(found: StepDiagnosis) -> list[tuple[str, str, str]]:
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
