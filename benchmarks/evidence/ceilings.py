"""The ceiling of real systems: what removing every variation of step times could give at most.

`make reality` (or `python -m benchmarks.evidence.ceilings --write`) rebuilds docs/reality.md from data that others
recorded; their folder is `--data`, or PACEENV_DATA_DIR, or `../shared/data` beside the checkout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.evidence._mlperf import DATA, FOLDER, MIN_VALUES, pooled, systems
from paceenv.core.errors import InputError
from paceenv.diagnosis.operation_matrix import read_matrix
from paceenv.diagnosis.step_times.step_diagnosis import WORTH, StepDiagnosis, diagnose_steps
from paceenv.importers.inputs import read_inputs
from paceenv.importers.step_log import StepLog, read_step_log
from paceenv.ui import config_files, output

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reality.md"
HEAD = """# Reality: how much is there to win?

After reading this page you know how much the step times of real systems vary, and how much pacing could win at most.
`make reality` rebuilds it from the recordings of others; for your own job it is `paceenv diagnose log.txt`.

The **ceiling** is the mean step over its first percentile, less one: the throughput that is won if every step takes as
long as the fastest hundredth.
It bounds everything that only removes variation: pacing, and also better data loaders, schedulers and networks.
Pacing gets a part of it, less what its delays cost.
A ceiling below {worth:.0%} is not worth a second look.

"""
COLUMNS = (
    "system", "nodes", "benchmark", "values", "CV", "p99 / median", "lag 1", "predictable", "ceiling", "95 %",
    "of it outliers",
)  # fmt: skip


def cells(name: str, nodes: int, benchmark: str, found: StepDiagnosis) -> tuple[str, ...]:
    """A row of the table."""
    ceiling, past = found.ceiling, found.predictable
    return (
        name,
        str(nodes) if nodes else "",
        benchmark,
        str(len(found.steady_s_V)) + ("" if found.averaged == 1.0 else f" of {found.averaged:.0f} steps"),
        f"{found.plain_cv:.2%}",
        f"{found.p99_over_median:.3f}",
        f"{found.autocorrelation[0]:.2f}" if found.autocorrelation else "",
        "" if past is None else f"{past.value:.0%}",
        "" if ceiling is None else f"{ceiling.gain.value:.1%}",
        "" if ceiling is None else f"{ceiling.gain.low:.1%} to {ceiling.gain.high:.1%}",
        "" if ceiling is None else f"{ceiling.from_outliers:.1%}",
    )


def mlperf(data: Path) -> list[tuple[tuple[str, ...], StepDiagnosis]]:
    """Every system with enough values, the largest ceiling first."""
    found = []
    for system in systems(data):
        one = diagnose_steps(pooled(system))
        found.append((cells(system.name, system.nodes, system.benchmark, one), one))
    return sorted(found, key=lambda row: -row[1].ceiling.gain.value if row[1].ceiling else 0.0)


def others(data: Path) -> Iterator[tuple[str, ...]]:
    """The other recordings of step times: production traces, a university's cluster, sockets on one machine."""
    for path in sorted((data / "bytedance-straggler").glob("trace-*.parquet")):
        yield cells(f"ByteDance, production trace {path.stem[-2:]}", 0, "pretraining", diagnose_steps(of_trace(path)))
    for path in sorted((data / "jean-zay").glob("*.out")):
        nodes = int(path.name.partition("_n")[2].partition("_")[0])
        yield cells("Jean Zay, V100", nodes, "GPT-2-like", diagnose_steps(read_step_log(path)))
    for path in sorted((data / "socket-runs").glob("*-learned.parquet")):
        yield cells(
            "sockets on two cores, testbed", 1, path.stem.removesuffix("-learned"), diagnose_steps(of_trace(path))
        )


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


def page(data: Path) -> str:
    """docs/reality.md."""
    rows = mlperf(data)
    single = [one for _, one in rows if one.averaged == 1.0]
    blocks = [one for _, one in rows if one.averaged != 1.0]
    above = sum(one.ceiling is not None and one.ceiling.gain.low > WORTH for one in single)
    predictable = [one.predictable.value for one in single if one.predictable is not None]
    lines = [
        HEAD.format(worth=WORTH),
        "## Tuned, dedicated clusters",
        "",
        f"MLPerf Training v5.1, every system and benchmark with {MIN_VALUES} logged values or more: "
        f"{len(single)} that log single steps, {len(blocks)} that log means of blocks.",
        "Runs are compared with themselves: each is relative to its own median, warm-up left out.",
        "",
        f"| single steps, {len(single)} systems | median | quartiles | largest |",
        "| --- | ---: | ---: | ---: |",
        *("| " + " | ".join(row) + " |" for row in summary(single)),
        "",
        f"- {above} of {len(single)} ceilings lie above {WORTH:.0%} with their whole interval.",
        f"- The past predicts {np.median(predictable):.0%} of the variance in the median system, and more than a tenth "
        f"in {sum(x > 0.1 for x in predictable)} of {len(predictable)}.",
        "- Systems of NeMo log every 32nd step. Their time stamps show that a value is the time of one step, not the "
        "mean of 32: the mean step between two stamps varies three to five times less than the values, and does not "
        "follow them. So averaging hides nothing in them.",
        "- Means of blocks (the last table) hide what single steps do; their ceilings are no upper limits.",
        "",
        *output.markdown_table(COLUMNS, [row for row, one in rows if one.averaged == 1.0]),
        "",
        "## Other recordings",
        "",
        *output.markdown_table(COLUMNS, list(others(data))),
        "",
        "The ceilings of production traces include imbalance of stages and data that recurs, which pacing does not "
        "remove; `paceenv diagnose` on the trace names it.",
        "Published measurements of shared fabrics (Crux, SIGCOMM 2024; CASSINI, NSDI 2024) find 8 to 60 % to win for "
        "jobs that meet others on the same links: these clusters have no such jobs.",
        "",
        "## Means of blocks",
        "",
        *output.markdown_table(COLUMNS, [row for row, one in rows if one.averaged != 1.0]),
        "",
    ]
    return "\n".join(lines)


def main(
    data: Annotated[Path, typer.Option(help="The folder of data that others recorded.")] = DATA,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/reality.md.")] = False,
) -> None:
    """Print the tables, or rebuild the page; says so in a line where the data are missing."""
    try:
        text = page(data)
    except InputError as error:
        output.say(f"skipped: {error}")
        return
    if write:
        config_files.write_text(PAGE, text)
        output.say(f"wrote {PAGE} from {data / FOLDER}")
    else:
        typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
