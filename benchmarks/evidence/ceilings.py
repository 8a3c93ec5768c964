"""The ceiling of real systems: what removing every variation of step times could give at most.

`make reality` (or `python -m benchmarks.evidence.ceilings --write`) rebuilds a part of docs/evidence/reality.md from
data that others recorded; their folder is `--data`, or PACEENV_DATA_DIR, or `../shared/data` beside the checkout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks._common import put
from benchmarks.evidence._mlperf import DATA, MIN_VALUES, pooled, systems
from paceenv.core.errors import InputError
from paceenv.diagnosis.operation_matrix import read_matrix
from paceenv.diagnosis.step_times.step_diagnosis import WORTH, StepDiagnosis, diagnose_steps
from paceenv.importers.inputs import read_inputs
from paceenv.importers.step_log import StepLog, read_step_log
from paceenv.ui import output

COMMAND = "python -m benchmarks.evidence.ceilings --write"
LARGEST = 8
"""Rows of the table of systems."""
COLUMNS = (
    "system", "benchmark", "values", "CV", "p99 / median", "ceiling", "95 %", "of it outliers",
)  # fmt: skip


def cells(name: str, benchmark: str, found: StepDiagnosis) -> tuple[str, ...]:
    """A row of the table."""
    ceiling = found.ceiling
    return (
        name,
        benchmark,
        str(len(found.steady_s_V)) + ("" if found.averaged == 1.0 else f" of {found.averaged:.0f} steps"),
        f"{found.plain_cv:.2%}",
        f"{found.p99_over_median:.3f}",
        "" if ceiling is None else f"{ceiling.gain.value:.1%}",
        "" if ceiling is None else f"{ceiling.gain.low:.1%} to {ceiling.gain.high:.1%}",
        "" if ceiling is None else f"{ceiling.from_outliers:.1%}",
    )


def mlperf(data: Path) -> list[tuple[tuple[str, ...], StepDiagnosis]]:
    """Every system with enough values, the largest ceiling first."""
    found = []
    for system in systems(data):
        one = diagnose_steps(pooled(system))
        found.append((cells(system.name, system.benchmark, one), one))
    return sorted(found, key=lambda row: -row[1].ceiling.gain.value if row[1].ceiling else 0.0)


def others(data: Path) -> Iterator[tuple[str, ...]]:
    """The other recordings of step times: production traces, a university's cluster, sockets on one machine."""
    for path in sorted((data / "bytedance-straggler").glob("trace-*.parquet")):
        yield cells(f"ByteDance, production trace {path.stem[-2:]}", "pretraining", diagnose_steps(of_trace(path)))
    for path in sorted((data / "jean-zay").glob("*.out")):
        nodes = int(path.name.partition("_n")[2].partition("_")[0])
        yield cells(f"Jean Zay, V100, {nodes} nodes", "GPT-2-like", diagnose_steps(read_step_log(path)))
    for path in sorted((data / "socket-runs").glob("*-learned.parquet")):
        yield cells("sockets on two cores, testbed", path.stem.removesuffix("-learned"), diagnose_steps(of_trace(path)))


def of_trace(path: Path) -> StepLog:
    """The step times of a trace, as a log would have them."""
    trace = read_inputs([path]).require_trace()
    matrix = read_matrix(trace, job=str(trace.table.column("job")[0].as_py()))
    one, none = np.ones(matrix.steps, np.int64), np.full(matrix.steps, np.nan)
    return StepLog(path.name, matrix.source, matrix.iteration_T, matrix.step_s_T, one, none, 0 * one)


def summary(found: Sequence[StepDiagnosis]) -> list[tuple[str, ...]]:
    """Median, quartiles and largest over systems."""
    kept = [one for one in found if one.ceiling is not None]
    gain = np.array([one.ceiling.gain.value for one in kept if one.ceiling is not None])
    plain = gain - np.array([one.ceiling.from_outliers for one in kept if one.ceiling is not None])
    columns = {
        "CV without outliers": np.array([one.plain_cv for one in kept]),
        "ceiling": gain,
        "ceiling without outliers": plain,
    }
    rows: list[tuple[str, ...]] = []
    for name, values in columns.items():
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        rows.append((name, f"{middle:.1%}", f"{low:.1%} to {high:.1%}", f"{values.max():.1%}"))
    return rows


def lines(data: Path) -> list[str]:
    """What the page says of step times."""
    rows = mlperf(data)
    single = [one for _, one in rows if one.averaged == 1.0]
    above = sum(one.ceiling is not None and one.ceiling.gain.low > WORTH for one in single)
    return [
        f"MLPerf Training v5.1, every system and benchmark with {MIN_VALUES} logged steps or more.",
        "",
        *output.markdown_table((f"{len(single)} systems", "median", "quartiles", "largest"), summary(single)),
        "",
        f"- {above} of {len(single)} ceilings lie above {WORTH:.0%} with their whole interval.",
        "",
        f"The {LARGEST} largest ceilings, and other recordings:",
        "",
        *output.markdown_table(COLUMNS, [*[row for row, one in rows if one.averaged == 1.0][:LARGEST], *others(data)]),
    ]


def main(
    data: Annotated[Path, typer.Option(help="The folder of data that others recorded.")] = DATA,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/reality.md.")] = False,
) -> None:
    """Print the tables, or rebuild the page; says so in a line where the data are missing."""
    try:
        found = lines(data)
    except InputError as error:
        output.say(f"skipped: {error}")
        return
    if write:
        put("reality.md", COMMAND, found)
    else:
        typer.echo("\n".join(found))


if __name__ == "__main__":
    typer.run(main)
