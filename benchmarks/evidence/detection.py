"""How fast a rank that turns late is named, and how often wrongly.

`python -m benchmarks.evidence.detection --repeats 3 --seed 2 --write` makes a part of docs/evidence/detection.md: the
watch of
:mod:`paceenv.core.lateness.watch` with its shipped settings on simulated and recorded jobs, healthy ones and ones with
a lateness put in. Seeds are separate from those of the tests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
import typer

from benchmarks._common import put
from benchmarks.evidence import _lateness_jobs as jobs
from benchmarks.evidence._lateness_jobs import Series
from paceenv.core.lateness.watch import (
    LEAST_SHARE,
    STEPS_PER_FALSE_ALARM,
    Findings,
    LateSpan,
    find_late_ranks,
)
from paceenv.ui import output
from paceenv.ui.output import markdown_table

SLOWER: Final = (0.1, 0.2, 0.5)
WINDOW_STEPS: Final = 500
"""Steps after the begin of a lateness in which it must be named in simulated jobs; recorded ones go to their end."""
BEFORE_STEPS: Final = (60, 240)
"""Healthy steps before it in simulated jobs."""
HEALTHY: Final = {8: 24_000, 64: 8_000, 512: 2_000}
"""Steps of healthy simulated jobs for each noise, by number of ranks."""
JOB_STEPS: Final = 2_000
"""A healthy job is watched so long; then the next one begins."""
RESAMPLED_STEPS: Final = 200
NEW_SEED: Final = 76_001
"""Healthy jobs of a campaign have seeds from ``NEW_SEED + 1000 * seed`` on."""


Table = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]


@dataclass(frozen=True)
class Healthy:
    """Wrong names in jobs in which no lateness was put; of a rank that really was late, by drift or else, is right."""

    steps: int
    hours: float
    wrong: int


@dataclass(frozen=True)
class Delay:
    """One lateness put into a job: steps and seconds until it was named (NaN: never), and wrong names beside it."""

    kind: str
    ranks: int
    slower: float
    share: float
    """Lateness over the step."""
    steps: float
    seconds: float
    off: float
    """Steps between the true begin and the one found."""
    wrong: int


def watch(series: Series) -> Findings:
    """What the detector says of a job, with the names as they were when they were given."""
    return find_late_ranks(series.own_TR, series.step_s_T, alike=series.alike)


def is_true(series: Series, span: LateSpan) -> bool:
    """Whether the rank really was later than the least that is named, on average from its begin until it was named."""
    steps = slice(span.first, span.named + 1)
    return bool(series.true_late_TR[steps, span.rank].mean() > LEAST_SHARE * series.step_s_T[steps].mean())


def healthy(series: Series) -> Healthy:
    """Watch a job in which no lateness was put."""
    return Healthy(series.steps, series.hours, sum(not is_true(series, span) for span in watch(series).named))


def healthy_jobs(seed: int) -> Iterator[Series]:
    """Healthy jobs of every kind."""
    for noise in jobs.NOISES:
        for ranks, steps in HEALTHY.items():
            first = NEW_SEED + 1000 * seed
            seeds = range(first, first + math.ceil(steps / JOB_STEPS))
            yield from (jobs.simulated(noise, ranks, JOB_STEPS, one) for one in seeds)
    for series in jobs.production():
        rng = np.random.default_rng([seed, len(series.own_TR[0])])
        yield series
        yield from (jobs.resampled(series, RESAMPLED_STEPS, rng) for _ in range(40))
    yield from jobs.sockets()


def delay(kind: str, series: Series, rank: int, begin: int, slower: float) -> Delay:
    """Slow a rank down from a step on, and see when it is named."""
    slowed = series.slowed(rank, slice(begin, None), slower)
    named = watch(slowed).named
    right = [span for span in named if span.rank == rank and span.named >= begin and is_true(slowed, span)]
    wrong = sum(not is_true(slowed, span) for span in named)
    ranks = series.own_TR.shape[1]
    share = float(slowed.true_late_TR[begin:, rank].mean() / slowed.step_s_T[begin:].mean())
    if not right:
        return Delay(kind, ranks, slower, share, math.nan, math.nan, math.nan, wrong)
    first = right[0]
    seconds = float(slowed.step_s_T[begin : first.named + 1].sum())
    return Delay(kind, ranks, slower, share, first.named - begin + 1, seconds, first.first - begin, wrong)


def delays(seed: int, repeats: int) -> Iterator[Delay]:
    """Lateness put into simulated and recorded jobs; which rank and when is drawn."""
    rng = np.random.default_rng([seed, 1])
    for noise in jobs.NOISES:
        for ranks in HEALTHY:
            for _ in range(repeats):
                begin, rank = int(rng.integers(*BEFORE_STEPS)), int(rng.integers(ranks))
                series = jobs.simulated(noise, ranks, begin + WINDOW_STEPS, int(rng.integers(1 << 30)))
                for slower in SLOWER:
                    yield delay(f"simulated, {noise}", series, rank, begin, slower)
    recorded = [("production traces", s, (12, 24)) for s in jobs.production()]
    recorded += [("recorded socket jobs", s, (60, 400)) for s in jobs.sockets()]
    for kind, series, begins in recorded:
        for _ in range(4 * repeats if kind.startswith("production") else repeats):
            begin, rank = int(rng.integers(*begins)), int(rng.integers(series.own_TR.shape[1]))
            for slower in SLOWER:
                yield delay(kind, series.at(slice(0, begin + WINDOW_STEPS)), rank, begin, slower)


def cost_us() -> dict[int, float]:
    """Microseconds of processor time for a step, by number of ranks."""
    found = {}
    for ranks in (8, 512):
        own_TR = 1.0 + 0.05 * np.random.default_rng(0).normal(size=(2000, ranks))
        begin = time.process_time()
        find_late_ranks(own_TR, 1.0)
        found[ranks] = 1e6 * (time.process_time() - begin) / len(own_TR)
    return found


def delay_table(rows: Sequence[Delay]) -> Table:
    """Delays, precision and recall by kind of job and by how much slower the rank is."""
    kinds = [*dict.fromkeys(row.kind for row in rows)]
    cells = []
    for slower in SLOWER:
        for kind in [*kinds, "**all**"]:
            mine = [row for row in rows if row.slower == slower and kind in (row.kind, "**all**")]
            if mine:
                cells.append((f"{slower:.0%}", kind, *_delay_cells(mine)))
    columns = ("slower by", "job", "cases", "of the step", "named", "steps, median", "90 %", "seconds, median", "90 %")
    return "Until a rank that turns slow is named", (*columns, "precision", "begin off by, median"), cells


def _delay_cells(rows: Sequence[Delay]) -> tuple[str, ...]:
    steps = np.array([row.steps for row in rows])
    seconds, named = np.array([row.seconds for row in rows]), ~np.isnan(steps)
    wrong = sum(row.wrong for row in rows)
    whole = [np.where(named, x, np.inf) for x in (steps, seconds)]

    def quantile(values: np.ndarray, q: float) -> str:
        value = float(np.quantile(values, q, method="higher"))
        return f"{value:.3g}" if math.isfinite(value) else "never"

    precision = f"{named.sum() / (named.sum() + wrong):.3f}" if named.any() or wrong else "-"
    off = f"{np.median(np.abs([row.off for row in rows if not math.isnan(row.off)])):.0f}" if named.any() else "-"
    cells = [quantile(values, q) for values in whole for q in (0.5, 0.9)]
    share = f"{np.median([row.share for row in rows]):.1%}"
    return (str(len(rows)), share, f"{named.mean():.0%}", *cells, precision, off)


def summary_table(rows: Sequence[Delay], calm: Sequence[Healthy], cost: dict[int, float]) -> Table:
    """The numbers beside the published ones."""
    lines = []
    for slower in SLOWER:
        mine = [row for row in rows if row.slower == slower]
        if not mine:
            continue
        cells = _delay_cells(mine)
        lines.append((f"a rank slower by {slower:.0%}: named", cells[2]))
        lines.append(("its steps until then, median and 90 %", f"{cells[3]}, {cells[4]}"))
    named, wrong = sum(not math.isnan(row.steps) for row in rows), sum(row.wrong for row in rows)
    lines.append(("precision over all of them (Minder: 0.904)", f"{named / max(named + wrong, 1):.4f}"))
    lines.append(("recall over all of them", f"{named / max(len(rows), 1):.3f}"))
    steps, alarms = sum(row.steps for row in calm), sum(row.wrong for row in calm)
    lines.append(
        ("wrong names in healthy jobs", f"{alarms} in {steps:,} steps, {sum(r.hours for r in calm):,.0f} hours")
    )
    lines.append(("stated: one wrong name in", f"{STEPS_PER_FALSE_ALARM:,.0f} steps"))
    lines += [(f"processor time of a step, {ranks} ranks", f"{us:.0f} µs") for ranks, us in cost.items()]
    return "In short", ("", ""), lines


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Cases of every noise and size.")] = 3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/detection.md from this run.")] = False,
) -> None:
    """Put lateness into simulated and recorded jobs, and count how soon and how rightly it is named."""
    calm, rows = list[Healthy](), list[Delay]()
    with output.progress("healthy jobs") as done:
        for series in healthy_jobs(seed):
            calm.append(healthy(series))
            done(len(calm))
    cases = len(jobs.NOISES) * len(HEALTHY) * len(SLOWER) * repeats
    with output.progress("late ranks", cases) as done:
        for row in delays(seed, repeats):
            rows.append(row)
            done(min(len(rows), cases))
    (_, columns, short), (_, delay_columns, delay_rows) = tables = (
        summary_table(rows, calm, cost_us()),
        delay_table(rows),
    )
    for title, names, cells in tables:
        output.print_table(title, names, cells)
    if write:
        all_rows = [row for row in delay_rows if "all" in row[1]]
        lines = [*markdown_table(columns, short), "", *markdown_table(delay_columns, all_rows)]
        put("detection.md", f"python -m benchmarks.evidence.detection --repeats {repeats} --seed {seed} --write", lines)


if __name__ == "__main__":
    typer.run(main)
