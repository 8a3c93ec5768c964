"""``paceenv report``: read a trace, diagnose it, fit a cluster to it, and write the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.diagnosis.answer import MAX_ROWS
from paceenv.diagnosis.step_times.step_diagnosis import diagnose_steps
from paceenv.importers.step_log import StepLog
from paceenv.policies.select import POLICY_HELP, select_policy
from paceenv.report import log_page
from paceenv.report.answer_text import headline
from paceenv.report.conclusion import POLICIES
from paceenv.report.fitted import Paced
from paceenv.report.pictures import Unit
from paceenv.report.recordings import find_recordings
from paceenv.report.step_log_output import PATTERN_HELP
from paceenv.report.trace_page import Report, make_report
from paceenv.sim.cluster import load_cluster
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile
from paceenv.ui.output import sentence


def report(
    traces: Annotated[
        list[Path], typer.Argument(help="A trace as paceenv diagnose reads it: files, folders, patterns.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write (HTML).")] = Path("report.html"),
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help=f"Compare this one, too: {POLICY_HELP}.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Which job, where the trace holds several.")] = None,
    pattern: Annotated[str | None, typer.Option(help=PATTERN_HELP)] = None,
    json_: JsonFile = None,
) -> None:
    """Write one page about a traced job: why its steps take so long, which ranks are slow, and what would help.

    Verdict and causes first; then pictures: where the time goes, a timeline of ranks, late arrivals, the distribution
    of step times; and, from a cluster fitted to the trace, the job at other sizes and with pacing, or why they cannot
    be predicted. Numbers are below every picture. The page is one file without scripts that needs no network.

    From a text log of a training program: its step times in order, their distribution, and how much there is to win.

    Examples: paceenv report trace.parquet -o report.html -- paceenv report rank*.json.gz --policy adaptive --
    paceenv report log.txt
    """
    names = list(dict.fromkeys([*POLICIES, *(name for name in policy or [] if name != "passive")]))
    _check(out, names)
    inputs = find_recordings(traces).read(pattern, MAX_ROWS)
    if inputs.trace is None and (log := inputs.one_log()) is not None:
        for option, value in (("--policy", policy or None), ("--job", job)):
            if value is not None:
                raise InputError(f"{option} {value}: {traces[0]} holds step times alone; allowed: with a trace")
        _report_log(log, inputs.notes, out, json_)
        return
    found = make_report(inputs, traces, names, job)
    atomic_write(out, found.html().encode())
    if json_ is not None:
        output.write_json(found.as_json(), json_)
    if json_ != "-":
        _say(found, out)


def _check(out: Path, policies: list[str]) -> None:
    """Refuse outputs that cannot be written, and unknown policies, before the work."""
    if out.suffix.lower() not in {".html", ".htm"} or out.is_dir():
        raise InputError(f"--out {out}: allowed: a file that ends in .html")
    for name in policies:
        select_policy(name, load_cluster("null-jitter"))


def _report_log(log: StepLog, notes: tuple[str, ...], out: Path, json_: str | None) -> None:
    """Write the page of a text log."""
    found = diagnose_steps(log)
    atomic_write(out, log_page.page(found, notes).encode())
    if json_ is not None:
        output.write_json(found.to_json() | {"reading": list(notes)}, json_)
    if json_ != "-":
        output.say(sentence(found.verdict))
        output.say(f"wrote {out}")


def _say(report: Report, out: Path) -> None:
    """Print a summary for people."""
    d, unit = report.diagnosis, Unit.of(report.diagnosis.step_time_s)
    rows = [("mean step", unit.text(d.step_time_s), "")]
    if d.slowdown is not None:
        rows.append(("slowdown", f"{d.slowdown:.3f}", ""))
    verdict = report.conclusion.verdict
    rows += [(c.cause, f"{c.lost_s / d.step_time_s:.0%} of the step", verdict.advice(c)) for c in d.causes]
    rows += [
        (f"throughput with {one.policy}", f"{one.gain[0]:+.1%}", one.verdict)
        for one in report.conclusion.policies
        if isinstance(one, Paced)
    ]
    title = f"{report.matrix.name}: {len(report.matrix.ranks)} ranks, {report.matrix.steps} steps"
    output.print_table(title, ("", "", ""), rows)
    output.say(headline(verdict))
    fitted = report.conclusion.fitted
    if isinstance(fitted, str):
        output.say(f"not predicted: {fitted}")
    elif fitted.doubt:
        output.say(sentence(fitted.doubt))
    output.say(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
