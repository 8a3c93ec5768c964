"""``paceenv report``: read a trace, diagnose it, fit a cluster to it, and write the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.policies.select import POLICY_HELP, select_policy
from paceenv.report.examination import POLICIES, examine
from paceenv.report.report_page import page_of
from paceenv.report.section import print_sections
from paceenv.sim.cluster import load_cluster
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile


def report(
    traces: Annotated[
        list[Path], typer.Argument(help="A trace as paceenv diagnose reads it: files, folders, patterns.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write (HTML).")] = Path("report.html"),
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help=f"Compare this one, too: {POLICY_HELP}.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Which job, where the trace holds several.")] = None,
    json_: JsonFile = None,
) -> None:
    """Write one page about a traced job: why its steps take so long, which ranks are slow, and what would help.

    Verdict and causes first; then pictures: where the time goes, a timeline of ranks, late arrivals, step times; and
    the job with pacing on a cluster fitted to the trace, or why that cannot be predicted. Numbers are below every
    picture. The page is one file without scripts that needs no network.

    Examples: paceenv report trace.parquet -o report.html -- paceenv report rank*.json.gz --policy adaptive
    """
    names = list(dict.fromkeys([*POLICIES, *(name for name in policy or [] if name != "passive")]))
    if out.suffix.lower() not in {".html", ".htm"} or out.is_dir():
        raise InputError(f"--out {out}: allowed: a file that ends in .html")
    for name in names:
        select_policy(name, load_cluster("null-jitter"))
    examination = examine(traces, job=job, policies=names)
    if examination.verdict is None:
        examination.inputs.require_trace()
        raise InputError("; ".join(examination.notes))
    atomic_write(out, page_of(examination))
    fit, pacing = examination.baseline and examination.baseline.fit, examination.pacing
    found = {"calibration": fit.cluster.calibration, "doubt": pacing.doubt} if fit else {"why_not": pacing.why_not}
    if output.write_json(examination.to_json() | {"fitted": found}, json_):
        print_sections(examination.sections())
        output.say(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
