"""Runs every benchmark; ``--write`` rebuilds ``docs/evidence/benchmarks.md``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks._common import Report, put, show
from benchmarks.speed import agent_cost, diagnosis_speed, simulation
from paceenv.ui.output import markdown_table

COMMAND = "python -m benchmarks --write"


def lines(reports: Sequence[Report]) -> list[str]:
    """What all benchmarks found."""
    found = list[str]()
    for report in reports:
        found += ["", f"## {report.title}", "", re.sub(r"(?<=[.:]) (?=[A-Z*`])", "\n", report.text)]
        for table in report.tables:
            found += [
                "",
                f"{table.title[:1].upper()}{table.title[1:]}:",
                "",
                *markdown_table(table.columns, table.rows),
            ]
    return found[1:]


def main(
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/benchmarks.md from this run.")] = False,
) -> None:
    """Run every benchmark and print its tables; takes about ten minutes."""
    reports = []
    for run in (simulation.run, agent_cost.run, diagnosis_speed.run):
        reports.append(run())
        show(reports[-1])
    if write:
        put("benchmarks.md", COMMAND, lines(reports))


if __name__ == "__main__":
    typer.run(main)
