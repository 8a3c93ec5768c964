"""Runs every benchmark; ``--write`` rebuilds ``docs/evidence/benchmarks.md``."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks._common import Report, machine, put, show
from benchmarks.speed import agent_cost, diagnosis_speed, simulation
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile
from paceenv.ui.output import markdown_table

BENCHMARKS = {"simulation": simulation.run, "agent": agent_cost.run, "diagnosis": diagnosis_speed.run}
COMMAND = "python -m benchmarks --write"


def lines(reports: Sequence[Report]) -> list[str]:
    """The targets of all benchmarks, then their tables."""
    rows = [
        (t.what, t.wanted, t.measured, "met" if t.met else "**missed**", t.because) for r in reports for t in r.targets
    ]
    found = markdown_table(("what", "target", "measured", "", "remark"), rows)
    for report in reports:
        found += ["", f"## {report.title}", "", re.sub(r"(?<=[.:]) (?=[A-Z*`])", "\n", report.text)]
        for table in report.tables:
            found += [
                "",
                f"{table.title[:1].upper()}{table.title[1:]}:",
                "",
                *markdown_table(table.columns, table.rows),
            ]
    return found


def main(
    json_: JsonFile = None,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/benchmarks.md from this run.")] = False,
) -> None:
    """Run every benchmark and print its tables; takes about ten minutes."""
    reports = {}
    for name, run in BENCHMARKS.items():
        start = time.perf_counter()
        reports[name] = run()
        output.say(f"{name}: {time.perf_counter() - start:.0f} s")
        if json_ != "-":
            show(reports[name])
    if json_ is not None:
        output.write_json({"machine": machine()} | {name: r.data for name, r in reports.items()}, json_)
    if write:
        put("benchmarks.md", COMMAND, lines(list(reports.values())))


if __name__ == "__main__":
    typer.run(main)
