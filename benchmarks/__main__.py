"""Runs every benchmark; ``--write`` rebuilds ``docs/evidence/benchmarks.md``."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks._common import Report, machine, show
from benchmarks.speed import (
    agent_cost,
    control_cost,
    diagnosis_speed,
    engine_speed,
    env_speed,
    policy_speed,
    ppo,
    program_speed,
    simgrid,
)
from paceenv.ui import output
from paceenv.ui.config_files import write_text
from paceenv.ui.output import markdown_table

BENCHMARKS = {
    "engine": engine_speed.run,
    "simgrid": simgrid.run,
    "programs": program_speed.run,
    "env": env_speed.run,
    "ppo": ppo.run,
    "policy": policy_speed.run,
    "control": control_cost.run,
    "agent": agent_cost.run,
    "diagnosis": diagnosis_speed.run,
}
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "benchmarks.md"

HEAD = """# Benchmarks

With these tables you can judge the speed of simulator, training and live agent, and compare another machine.

| task | command |
| --- | --- |
| print the same tables | `make bench` |
| run one benchmark | `python -m benchmarks.speed.{names} --json -` |
| rebuild this page | `python -m benchmarks --write` |

Times are CPU seconds of one process on one core.
Contestants take turns, and every number is the median of the turns.
Compare ratios: they come from the same run.
Absolute values change with the machine and with its other work.
"""


def document(reports: Sequence[Report]) -> str:
    """``docs/evidence/benchmarks.md``."""
    lines = [
        HEAD.format(names="{" + ",".join(run.__module__.rpartition(".")[2] for run in BENCHMARKS.values()) + "}"),
        "## Machine",
        "",
    ]
    lines += markdown_table(("", ""), list(machine().items()))
    lines += ["", "## Targets", ""]
    targets = [t for r in reports for t in r.targets]
    rows = [(t.what, t.wanted, t.measured, "met" if t.met else "**missed**", t.because) for t in targets]
    lines += markdown_table(("what", "target", "measured", "", "remark"), rows)
    for report in reports:
        lines += ["", f"## {report.title}", "", re.sub(r"(?<=[.:]) (?=[A-Z*`])", "\n", report.text)]
        for table in report.tables:
            lines += [
                "",
                f"### {table.title[:1].upper()}{table.title[1:]}",
                "",
                *markdown_table(table.columns, table.rows),
            ]
    return "\n".join(lines) + "\n"


def main(
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/benchmarks.md from this run.")] = False,
) -> None:
    """Run every benchmark and print its tables; takes about four minutes."""
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
        write_text(DOCUMENT, document(list(reports.values())))


if __name__ == "__main__":
    typer.run(main)
