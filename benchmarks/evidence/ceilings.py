"""The ceiling of real systems: what removing every variation of step times could give at most.

`make reality` (or `python -m benchmarks.evidence.ceilings --write`) rebuilds docs/evidence/reality.md from data that
others recorded; their folder is `--data`, or PACEENV_DATA_DIR, or `../shared/data` beside the checkout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.evidence._mlperf import DATA, FOLDER, MIN_VALUES, family, pooled, systems
from paceenv.core.errors import InputError
from paceenv.diagnosis.operation_matrix import read_matrix
from paceenv.diagnosis.step_times.larger_sizes import SPREAD, TAIL_SPREAD, predict_sizes
from paceenv.diagnosis.step_times.step_diagnosis import WORTH, StepDiagnosis, diagnose_steps
from paceenv.diagnosis.step_times.step_model import check_model
from paceenv.importers.inputs import read_inputs
from paceenv.importers.step_log import StepLog, join_logs, read_step_log
from paceenv.ui import config_files, output

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "reality.md"
HEAD = """# Reality: how much is there to win?

After reading this page you know how much step times of real systems vary, and what making them even wins at most.
`make reality` rebuilds it from the recordings of others; for your own job it is `paceenv diagnose log.txt`.

The **ceiling** is the mean step over its first percentile, less one: the throughput that is won if every step takes as
long as the fastest hundredth.
It bounds everything that only makes steps more even: pacing against jitter, better data loaders and schedulers.
It does not bound what is won where every step is equally slow, by contention or one late rank: that needs a trace.
Variation with a ceiling below {worth:.0%} is not worth a second look.

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


def doubled(data: Path) -> list[tuple[str, str, int, StepDiagnosis, StepDiagnosis]]:
    """Pairs of systems of a family and a benchmark, one with twice the nodes of the other."""
    found: dict[tuple[str, str], dict[int, StepDiagnosis]] = {}
    for system in systems(data):
        name, size = family(system)
        if size:
            found.setdefault((name, system.benchmark), {})[size] = diagnose_steps(pooled(system))
    return [
        (*key, size, by_size[size], by_size[2 * size])
        for key, by_size in found.items()
        for size in sorted(by_size)
        if 2 * size in by_size
    ]


def doubling(data: Path) -> list[str]:
    """How variation changes with twice the nodes, and how often the prediction's interval holds."""
    pairs = doubled(data)
    rows, logs, tails, held = [], [], [], []
    for name, benchmark, size, one, two in pairs:
        predicted = predict_sizes([size], [one], [2 * size]).sizes[0]
        plain_s = two.log.step_s_V[two.ordinary.plain_V]
        tail = float(np.quantile(plain_s, 0.99) / np.median(plain_s))
        inside = two.plain_cv in predicted.cv, tail in predicted.p99_over_median
        held.append(inside)
        logs.append(math.log(two.plain_cv / one.plain_cv))
        tails.append(math.log((tail - 1.0) / (predicted.p99_over_median.value - 1.0)))
        said = ["in" if good else "out" for good in inside]
        rows.append(
            (name, benchmark, f"{size} to {2 * size}", f"{one.plain_cv:.2%}", f"{two.plain_cv:.2%}", said[0],
             f"{predicted.p99_over_median.value:.4f}", f"{tail:.4f}", said[1])
        )  # fmt: skip
    spread, tail_spread = (math.sqrt(float(np.mean(np.square(values)))) for values in (logs, tails))
    cv_held, tail_held = (sum(one[i] for one in held) for i in (0, 1))
    columns = ("family", "benchmark", "size", "CV", "CV at twice", "95 %", "p99 / median", "at twice", "95 %")
    return [
        "## Twice the nodes",
        "",
        "`paceenv diagnose log.txt --sizes N --predict 2N` predicts the CV and the 99th percentile at twice the nodes: "
        "as at N, within an interval from the pairs below and from the number of values.",
        f"The logarithm of the ratio of CVs has a standard deviation of {spread:.2f}, that of the tails "
        f"{tail_spread:.2f} (used: {SPREAD:.2f} and {TAIL_SPREAD:.2f}, with Student's t).",
        f"Intervals of 95 % hold for {cv_held} of {len(pairs)} CVs and {tail_held} of {len(pairs)} tails; the pairs "
        "are those that the spread comes from, so this is no test on unseen ones.",
        "A mean at 2N cannot be predicted from N alone: these systems keep, halve or double the batch.",
        "",
        *output.markdown_table(columns, rows),
        "",
    ]


def unseen(data: Path) -> list[str]:
    """Kolmogorov-Smirnov distances of the model of step times on runs that it has not seen."""
    rows, distances = [], []
    for system in systems(data):
        log = join_logs(list(system.logs), lambda note: None)
        check = check_model(log)
        if isinstance(check, str) or float(np.median(log.steps_V)) != 1.0:
            continue
        model, normal = check.model, check.normal
        distances.append((model.distance, normal.distance))
        row = (system.name, system.benchmark, str(model.values), f"{model.distance:.1%}", f"{model.chance:.1%}")
        rows.append((*row, f"{normal.distance:.1%}", "half the runs" if "runs" in check.held_out else "second half"))
    rows.sort(key=lambda row: float(row[3].rstrip("%")))
    model_n, normal_n = (sum(d[i] <= 0.1 for d in distances) for i in (0, 1))
    columns = ("system", "benchmark", "values", "model", "chance alone", "a normal", "held out")
    return [
        "## Distributions on unseen runs",
        "",
        "Kolmogorov-Smirnov distance between the model of `paceenv calibrate log.txt`, fitted to the first half of the "
        "runs, and the other half, in seconds; systems that log single steps.",
        f"The median is {np.median([d[0] for d in distances]):.1%}; {model_n} of {len(distances)} are at 10 % or "
        f"less, with a normal of the same mean and deviation {normal_n}. The best published is 20.8 % (PRISM, 2025).",
        "Chance alone exceeds its column in 5 % of cases. Beyond it, runs differ in level: the scheduler chose other "
        "nodes, or a run drifts; a log cannot know that of a run to come.",
        "",
        *output.markdown_table(columns, rows),
        "",
    ]


def page(data: Path) -> str:
    """docs/evidence/reality.md."""
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
        *unseen(data),
        *doubling(data),
        "## Means of blocks",
        "",
        *output.markdown_table(COLUMNS, [row for row, one in rows if one.averaged != 1.0]),
        "",
    ]
    return "\n".join(lines)


def main(
    data: Annotated[Path, typer.Option(help="The folder of data that others recorded.")] = DATA,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/reality.md.")] = False,
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
