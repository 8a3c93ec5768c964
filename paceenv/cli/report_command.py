"""``paceenv report``: read a trace, diagnose it, fit a cluster to it, and write the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.policies.select import POLICY_HELP, select_policy
from paceenv.report.examination import POLICIES, examine
from paceenv.report.fitted import sizes
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

    Verdict and causes first; then pictures: where the time goes, a timeline of ranks, late arrivals, the distribution
    of step times; and, from a cluster fitted to the trace, the job at other sizes and with pacing, or why they cannot
    be predicted. Numbers are below every picture. The page is one file without scripts that needs no network.

    Examples: paceenv report trace.parquet -o report.html -- paceenv report rank*.json.gz --policy adaptive
    """
    names = list(dict.fromkeys([*POLICIES, *(name for name in policy or [] if name != "passive")]))
    if out.suffix.lower() not in {".html", ".htm"} or out.is_dir():
        raise InputError(f"--out {out}: allowed: a file that ends in .html")
    for name in names:
        select_policy(name, load_cluster("null-jitter"))
    examination = examine(traces, job=job, policies=names)
    if examination.conclusion is None:
        examination.inputs.require_trace()
        raise InputError("; ".join(examination.notes))
    fitted = examination.conclusion.fitted
    with output.progress("predict other sizes", 1, shown=not isinstance(fitted, str)) as done:
        at_sizes = fitted if isinstance(fitted, str) else sizes(fitted, done)
    atomic_write(out, page_of(examination, at_sizes).encode())
    more = {"fitted": fitted, "sizes": at_sizes}
    why_not = {name: {"why_not": one} for name, one in more.items() if isinstance(one, str)}
    if output.write_json(examination.to_json() | more | why_not, json_):
        print_sections(examination.sections())
        output.say(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
