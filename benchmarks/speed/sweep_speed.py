"""Sweeps: candidates a minute, what Ray costs against a plain loop over the same trials, and Optuna against the grid.

Wall-clock time, as Ray's cost is waiting as much as computing; the contestants take turns.
``python -m benchmarks.speed.sweep_speed --write`` puts the numbers into ``docs/evidence/sweeps.md``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks._common import Report, Table, Target, machine, tell
from paceenv.core import metrics
from paceenv.trainers.sweep import tune
from paceenv.trainers.sweep.ledger import Ledger
from paceenv.trainers.sweep.outcome.sweep_results import Results
from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.trainers.sweep.sweep_run import Sweep, make_task, open_sweep, run_here
from paceenv.ui import output
from paceenv.ui.config_files import write_text, write_yaml

CLUSTER, RANKS, SEEDS, ITERATIONS = "when-scaling-fails", 64, 8, 1600
CANDIDATES, PER_TRIAL, TURNS = 8192, 64, 3
MIN_PER_MINUTE, MAX_OVERHEAD = 500.0, 0.10
FRONT_SUITE, FRONT_SEEDS, FRONT_BUDGET = "mixed", 5, 109
SAMPLERS = ("tpe", "nsga2")
Array = NDArray[np.float64]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "sweeps.md"
MARK = "<!-- what follows is made by python -m benchmarks.speed.sweep_speed --write -->"


@contextlib.contextmanager
def begun(static: dict[str, Any], seed: int = 0) -> Iterator[Sweep]:
    """A sweep in a folder that goes away."""
    with tempfile.TemporaryDirectory() as folder:
        config = SweepConfig.model_validate({"name": "benchmark", "seed": seed, "static": static, "robustness": None})
        yield open_sweep(config, make_task(config, Path(folder)), Path(folder))


def many(folder: Path, candidates: int) -> dict[str, Any]:
    """A grid of so many candidates on one cluster of 64 ranks."""
    suite = {"name": "one", "cases": [{"cluster": CLUSTER, "set": {"job.nodes": RANKS}}]}
    write_yaml(folder / "one.yaml", suite)
    thresholds = np.linspace(0.0, 0.2, candidates // 64).tolist()
    slack = {"threshold": thresholds, "window": np.linspace(0.01, 0.6, 64).tolist()}
    common = {"suite": str(folder / "one.yaml"), "splits": ["held-out"], "mechanisms": ["slack"]}
    sizes = {"candidates_per_trial": PER_TRIAL, "seeds": SEEDS, "iterations": ITERATIONS}
    return {**common, **sizes, "grid": {"values": {"slack": slack}, "combine": 0}}


def race(candidates: int, turns: int) -> dict[str, list[float]]:
    """Seconds of wall-clock time of the plain loop on all cores, and of Ray's start, trials and end."""
    cores = len(os.sched_getaffinity(0))
    seconds: dict[str, list[float]] = {"plain": [], "start": [], "trials": [], "end": []}
    with tempfile.TemporaryDirectory() as folder:
        static = many(Path(folder), candidates)
        for _ in range(turns):
            with begun(static) as sweep:
                clock = time.perf_counter()
                run_here(sweep, threads=cores)
                seconds["plain"].append(time.perf_counter() - clock)
                expected = results_of(sweep.ledger)
            with begun(static) as sweep:
                clock = time.perf_counter()
                with tune.connected(None) as cpus:
                    seconds["start"].append(time.perf_counter() - clock)
                    clock = time.perf_counter()
                    tune.run_on_ray(sweep, cpus)
                    seconds["trials"].append(time.perf_counter() - clock)
                    clock = time.perf_counter()
                seconds["end"].append(time.perf_counter() - clock)
                assert results_of(sweep.ledger) == expected, "Ray and the plain loop come to the same"
    return seconds


def results_of(ledger: Ledger) -> dict[int, Any]:
    return {number: row["result"] for number, row in ledger.rows.items()}


def front(search: dict[str, Any], seed: int = 0) -> float:
    """Hypervolume of a search's front over the corner of no gain and passive's CV, in points of gain times CV."""
    common = {
        "suite": FRONT_SUITE,
        "splits": ["held-out"],
        "seeds": SEEDS,
        "iterations": 800,
        "candidates_per_trial": 8,
    }
    with begun({**common, **search}, seed) as sweep:
        run_here(sweep, threads=len(os.sched_getaffinity(0)))
        found = Results.of(sweep.ledger).candidates
        assert len(found) == FRONT_BUDGET
        task = sweep.task
        weight_C = task.weight_C / task.weight_C.sum()  # type: ignore[union-attr]
        passive_cv_C = np.array([np.median(of_one[1]) for of_one in task.problem.passive])  # type: ignore[union-attr]
        gain_N = np.array([100.0 * candidate.values["throughput"] for candidate in found])
        cv_N = np.array([candidate.values["cv"] for candidate in found])
        return metrics.hypervolume(gain_N, cv_N, float(weight_C @ passive_cv_C))


def fronts() -> tuple[float, dict[str, list[float]]]:
    """Hypervolumes of the grid's front and, by sampler and seed, of Optuna's, with as many settings each."""
    optuna = {"candidates": FRONT_BUDGET, "first_random": 24, "open": 2}
    found = {s: [front({"optuna": {**optuna, "sampler": s}}, seed) for seed in range(FRONT_SEEDS)] for s in SAMPLERS}
    return front({"grid": {}}), found


def run(candidates: int = CANDIDATES, turns: int = TURNS) -> Report:
    """Candidates a minute, Ray's overhead, hypervolume of Optuna's fronts and the grid's."""
    seconds = race(candidates, turns)
    of_grid, of_optuna = fronts()
    text = (
        f"{candidates} candidates x {SEEDS} seeds x {ITERATIONS} iterations on {RANKS} ranks, {PER_TRIAL} to a trial, "
        f"{turns} turns; wall-clock time on {len(os.sched_getaffinity(0))} cores.\nFronts are on suite {FRONT_SUITE}, "
        f"with three mechanisms and {FRONT_BUDGET} settings each.\nHypervolume is the area between a front and the "
        "corner of no gain and passive's CV, gain in percent."
    )
    plain, trials = (np.array(seconds[name]) for name in ("plain", "trials"))
    around = np.array(seconds["start"]) + np.array(seconds["end"])
    named = {"plain loop, all cores as threads": plain, "Ray: start and end": around, "Ray: trials": trials}
    rows = [(what, f"{np.median(s):.1f} s", f"{s.min():.1f} to {s.max():.1f} s") for what, s in named.items()]
    areas = [("grid", f"{of_grid:.4f}", "")]
    areas += [
        (f"Optuna, {sampler}", f"{np.median(found):.4f}", f"{min(found):.4f} to {max(found):.4f}")
        for sampler, found in of_optuna.items()
    ]
    tables = [
        Table("time", ("what", "median", "range"), rows),
        Table("hypervolume at equal budget", ("search", "median", "range over seeds"), areas),
    ]
    data = {"seconds": seconds, "candidates": candidates, "grid": of_grid, "optuna": of_optuna}
    return Report("Sweeps", text, data, tables, targets(candidates, plain, trials, around, of_grid, of_optuna))


def targets(
    candidates: int, plain: Array, trials: Array, around: Array, of_grid: float, of_optuna: dict[str, list[float]]
) -> list[Target]:
    """Measured numbers beside what was promised.

    Args:
        candidates: settings tried in a turn.
        plain: seconds of the plain loop, by turn.
        trials: seconds of the trials on Ray, by turn.
        around: seconds of Ray's start and end, by turn.
        of_grid: hypervolume of the grid's front.
        of_optuna: hypervolumes of Optuna's fronts by sampler, one per seed.
    """
    rate = candidates / float(np.median(trials)) * 60.0
    overhead, whole = (float(np.median(t / plain - 1.0)) for t in (trials, trials + around))
    fixed_s, most = float(np.median(around)), f"< {MAX_OVERHEAD:.0%}"
    because = f"{fixed_s:.1f} s, however long a sweep is: less than 10 % of {fixed_s / MAX_OVERHEAD:.0f} s"
    found = [
        Target("candidates a minute on Ray", f">= {MIN_PER_MINUTE:.0f}", f"{rate:.0f}", rate >= MIN_PER_MINUTE),
        Target("Ray's overhead on trials", most, f"{overhead:+.1%}", overhead < MAX_OVERHEAD),
        Target("the same with its start and end", most, f"{whole:+.1%}", whole < MAX_OVERHEAD, because),
    ]
    for sampler, areas in of_optuna.items():
        wins = sum(area > of_grid for area in areas)
        what = f"Optuna's front ({sampler}) has the larger hypervolume"
        found.append(Target(what, f"{FRONT_SEEDS} of {FRONT_SEEDS} seeds", f"{wins}", wins == FRONT_SEEDS))
    return found


def document(report: Report) -> str:
    """The part of ``docs/evidence/sweeps.md`` that is measured."""
    rows = [(t.what, t.wanted, t.measured, "met" if t.met else "**missed**", t.because) for t in report.targets]
    lines = [MARK, "", report.text, "", *output.markdown_table(("what", "target", "measured", "", "remark"), rows)]
    for table in report.tables:
        lines += ["", *output.markdown_table(table.columns, table.rows)]
    return "\n".join([*lines, "", *output.markdown_table(("", ""), list(machine().items())), ""])


def main(
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the numbers into docs/evidence/sweeps.md.")] = False,
    candidates: Annotated[int, typer.Option(min=128, help="Of the race; by 64.")] = CANDIDATES,
    turns: Annotated[int, typer.Option(min=1, help="Of the race.")] = TURNS,
) -> None:
    """Race Ray against a plain loop, and Optuna against the grid; about five minutes on two free cores."""
    report = run(candidates, turns)
    tell(lambda: report, json_)
    if write:
        head = DOCUMENT.read_text(encoding="utf-8").partition(MARK)[0]
        write_text(DOCUMENT, head + document(report))


if __name__ == "__main__":
    typer.run(main)
