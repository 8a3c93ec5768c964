"""Runs every benchmark; ``--write`` rebuilds ``docs/evidence/benchmarks.md``."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from benchmarks._common import put
from benchmarks.speed import agent_cost, diagnosis_speed, simulation
from paceenv.report.section import print_sections
from paceenv.ui.output import markdown_table


def main(
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/benchmarks.md from this run.")] = False,
) -> None:
    """Run every benchmark and print its tables; takes about ten minutes."""
    lines = list[str]()
    for run in (simulation.run, agent_cost.run, diagnosis_speed.run):
        print_sections(found := run())
        for one in found:
            text = [re.sub(r"(?<=[.:]) (?=[A-Z*`])", "\n", paragraph) for paragraph in one.text]
            lines += [f"## {one.title}", "", *markdown_table(one.columns, one.rows), ""]
            lines += [*text, ""] if text else []
    if write:
        put("benchmarks.md", "python -m benchmarks --write", lines[:-1])


if __name__ == "__main__":
    typer.run(main)
