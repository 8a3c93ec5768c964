"""``paceenv report``: read a trace, diagnose it, fit a cluster to it, and write the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceenv.cli.activity_text import activity_table, late_sentences, sentence
from paceenv.cli.step_log_output import PATTERN_HELP, rows
from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.diagnosis.answer import find_answer
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.diagnose import Diagnosis
from paceenv.diagnosis.sources import MAX_ROWS
from paceenv.diagnosis.step_times.step_diagnosis import diagnose_steps
from paceenv.importers.inputs import Inputs, read_inputs
from paceenv.importers.step_log import StepLog
from paceenv.policies.select import POLICY_HELP, select_policy
from paceenv.sim.cluster import load_cluster
from paceenv.trainers.report import log_page
from paceenv.trainers.report.arrivals import arrivals, heat_map
from paceenv.trainers.report.conclusion import NO_FLOPS, POLICIES, Conclusion, Flops, conclude_answer
from paceenv.trainers.report.diagnose_command import FLOPS_HELP, PEAK_HELP
from paceenv.trainers.report.document import Report, say
from paceenv.trainers.report.fitted import sizes
from paceenv.trainers.report.spans import spans
from paceenv.trainers.report.step_times import course, spread
from paceenv.trainers.report.timeline import timeline, write_steps
from paceenv.trainers.report.waterfall import slowdowns, waterfall
from paceenv.ui import output


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
    chrome_trace: Annotated[
        Path | None,
        typer.Option(help="Also write what the ranks did for ui.perfetto.dev or chrome://tracing (.json, .json.gz)."),
    ] = None,
    flops_per_step: Annotated[float | None, typer.Option(help=FLOPS_HELP)] = None,
    peak_flops: Annotated[float | None, typer.Option(help=PEAK_HELP)] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Write one page about a traced job: why its steps take so long, which ranks are slow, and what would help.

    Verdict and causes first; then pictures: where the time goes, a timeline of ranks, late arrivals, the distribution
    of step times; and, from a cluster fitted to the trace, the job at other sizes and with pacing, or why they cannot
    be predicted. Numbers are below every picture. The page is one file without scripts that needs no network.

    From a text log of a training program: its step times in order, their distribution, and how much there is to win.

    Examples: paceenv report trace.parquet -o report.html -- paceenv report rank*.json.gz --chrome-trace ranks.json.gz
    -- paceenv report log.txt
    """
    names = list(dict.fromkeys([*POLICIES, *(name for name in policy or [] if name != "passive")]))
    _check(out, chrome_trace, names)
    inputs = read_inputs(traces, pattern=pattern, max_rows=MAX_ROWS)
    if inputs.trace is None and (log := inputs.one_log()) is not None:
        given: dict[str, object] = {"--chrome-trace": chrome_trace, "--policy": policy or None, "--job": job}
        given |= {"--flops-per-step": flops_per_step, "--peak-flops": peak_flops}
        for option, value in given.items():
            if value is not None:
                raise InputError(f"{option} {value}: {traces[0]} holds step times alone; allowed: with a trace")
        _report_log(log, inputs.notes, out, json_)
        return
    found = make_report(inputs, traces, names, job, Flops(flops_per_step, peak_flops), chrome_trace)
    atomic_write(out, found.html(out.parent).encode())
    if json_ is not None:
        output.write_json(found.as_json(), json_)
    if json_ != "-":
        say(found, out)


def make_report(
    inputs: Inputs,
    files: Sequence[Path],
    policies: Sequence[str] = POLICIES,
    job: str | None = None,
    flops: Flops = NO_FLOPS,
    chrome_trace: Path | None = None,
    conclusion: Conclusion | None = None,
) -> Report:
    """Diagnose, draw and predict.

    Args:
        inputs: what was read; it holds a trace.
        files: what the user named.
        policies: to simulate.
        job: which job, where the trace holds several.
        flops: for the share of the peak.
        chrome_trace: also write what the ranks did here.
        conclusion: where it is known already.

    Raises:
        InputError: there is no such trace, or its steps take no time.
    """
    trace = inputs.require_trace()
    with output.progress("diagnose, draw, simulate", 4 + len(policies)) as done:
        answer = find_answer(replace(inputs, dumps=(), inspected=(), steps=()), job)
        matrix, diagnosis, late = answer.matrix, answer.diagnosis, answer.late_hosts
        assert matrix is not None, "there is a trace"
        assert diagnosis is not None, "there is a trace"
        if not matrix.step_s_T.max() > 0.0:
            raise InputError(f"trace of {matrix.name}: steps that take no time; allowed: a job that takes some")
        graph = build_graph(matrix)
        done(1)
        kinds, met = spans(matrix, graph), arrivals(matrix, graph)
        drawn = [waterfall(diagnosis), slowdowns(diagnosis), timeline(matrix, kinds, _by_rank(diagnosis))]
        drawn += [heat_map(matrix, met) if met else None, course(matrix), spread(matrix)]
        done(2)
        conclusion = conclusion or conclude_answer(
            answer, trace, str(files[0]), job, policies=policies, tables=inputs.tables, flops=flops,
            on_done=lambda n: done(2 + n),
        )  # fmt: skip
        found = Report(files, answer.notes, matrix, diagnosis, conclusion)
        over_time = answer.lateness.text() if answer.lateness and not answer.lateness.why_not else ()
        found.lateness = [*map(sentence, over_time), *late_sentences(late, diagnosis)]
        found.activity = activity_table(inputs.activity, late) if inputs.activity else None
        found.pictures = [picture for picture in drawn if picture is not None]
        if not isinstance(conclusion.fitted, str):
            found.sizes = sizes(conclusion.fitted, lambda part: done(2 + len(policies) + part))
    if chrome_trace is not None:
        found.viewer, found.viewer_steps = chrome_trace, write_steps(matrix, kinds, chrome_trace)
    return found


def _report_log(log: StepLog, notes: tuple[str, ...], out: Path, json_: str | None) -> None:
    """Write the page of a text log."""
    found = diagnose_steps(log)
    atomic_write(out, log_page.page(found, rows(found), notes).encode())
    if json_ is not None:
        output.write_json(log_page.as_json(found, notes), json_)
    if json_ != "-":
        output.say(f"{found.verdict[:1].upper()}{found.verdict[1:]}.")
        output.say(f"wrote {out}")


def _by_rank(diagnosis: Diagnosis) -> dict[int, float]:
    """How bad each rank is, for the choice of those to draw: its slowdown, else the sum of its lateness."""
    if diagnosis.attribution is not None:
        return dict(diagnosis.attribution.rank)
    return {one.rank: sum(one.late_s) for one in diagnosis.arrivals.late}


def _check(out: Path, chrome_trace: Path | None, policies: list[str]) -> None:
    """Refuse outputs that cannot be written, and unknown policies, before the work."""
    if out.suffix.lower() not in {".html", ".htm"} or out.is_dir():
        raise InputError(f"--out {out}: allowed: a file that ends in .html")
    if chrome_trace is not None and not chrome_trace.name.endswith((".json", ".json.gz")):
        raise InputError(f"--chrome-trace {chrome_trace}: allowed: a file that ends in .json or .json.gz")
    for name in policies:
        if name != "projection":  # which would simulate
            select_policy(name, load_cluster("null-jitter"))
