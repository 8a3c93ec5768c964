"""How fast a rank that turns late is named, and how often wrongly.

`python -m benchmarks.evidence.detection --repeats 3 --seed 2 --write` makes a part of docs/evidence/detection.md: the
watch of
:mod:`paceenv.core.lateness.watch` with its shipped settings on simulated and recorded jobs, healthy ones and ones with
a lateness put in. Seeds are separate from those of the tests.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class Healthy:
    """Wrong names in jobs in which no lateness was put; of a rank that really was late, by drift or else, is right."""

    steps: int
    hours: float
    wrong: int


@dataclass(frozen=True)
class Delay:
    """One lateness put into a job: steps until it was named (infinite: never), and wrong names beside it."""

    slower: float
    steps: float
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


def delay(series: Series, rank: int, begin: int, slower: float) -> Delay:
    """Slow a rank down from a step on, and see when it is named."""
    slowed = series.slowed(rank, slice(begin, None), slower)
    named = watch(slowed).named
    right = [span.named for span in named if span.rank == rank and span.named >= begin and is_true(slowed, span)]
    wrong = sum(not is_true(slowed, span) for span in named)
    return Delay(slower, right[0] - begin + 1 if right else math.inf, wrong)


def delays(seed: int, repeats: int) -> Iterator[Delay]:
    """Lateness put into simulated and recorded jobs; which rank and when is drawn."""
    rng = np.random.default_rng([seed, 1])
    for noise in jobs.NOISES:
        for ranks in HEALTHY:
            for _ in range(repeats):
                begin, rank = int(rng.integers(*BEFORE_STEPS)), int(rng.integers(ranks))
                series = jobs.simulated(noise, ranks, begin + WINDOW_STEPS, int(rng.integers(1 << 30)))
                for slower in SLOWER:
                    yield delay(series, rank, begin, slower)
    recorded = [(s, (12, 24), 4 * repeats) for s in jobs.production()]
    recorded += [(s, (60, 400), repeats) for s in jobs.sockets()]
    for series, begins, times in recorded:
        for _ in range(times):
            begin, rank = int(rng.integers(*begins)), int(rng.integers(series.own_TR.shape[1]))
            for slower in SLOWER:
                yield delay(series.at(slice(0, begin + WINDOW_STEPS)), rank, begin, slower)


def summary(rows: Sequence[Delay], calm: Sequence[Healthy]) -> list[tuple[str, str]]:
    """The numbers beside the published ones."""
    lines = []
    for slower in SLOWER:
        steps = [row.steps for row in rows if row.slower == slower]
        if steps:
            median, late = (float(np.quantile(steps, q, method="higher")) for q in (0.5, 0.9))
            lines.append((f"a rank slower by {slower:.0%}: named", f"{np.mean(np.isfinite(steps)):.0%}"))
            lines.append(("its steps until then, median and 90 %", f"{median:.3g}, {late:.3g}".replace("inf", "never")))
    named, wrong = sum(math.isfinite(row.steps) for row in rows), sum(row.wrong for row in rows)
    lines.append(("precision over all of them (Minder: 0.904)", f"{named / max(named + wrong, 1):.4f}"))
    lines.append(("recall over all of them", f"{named / max(len(rows), 1):.3f}"))
    healthy_steps, alarms = sum(row.steps for row in calm), sum(row.wrong for row in calm)
    hours = sum(row.hours for row in calm)
    lines.append(("wrong names in healthy jobs", f"{alarms} in {healthy_steps:,} steps, {hours:,.0f} hours"))
    lines.append(("stated: one wrong name in", f"{STEPS_PER_FALSE_ALARM:,.0f} steps"))
    return lines


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
    lines = summary(rows, calm)
    output.print_table("Until a rank that turns slow is named", ("", ""), lines)
    if write:
        command = f"python -m benchmarks.evidence.detection --repeats {repeats} --seed {seed} --write"
        put("detection.md", command, markdown_table(("in short", ""), lines))


if __name__ == "__main__":
    typer.run(main)
