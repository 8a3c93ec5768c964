"""Algorithm by seeds: what share of the gap each closes on the validation clusters, against CPU-minutes.

`python -m benchmarks.evidence.learners --out FOLDER` trains every algorithm with every seed on the clusters, inputs and
selection of the config `distilled`, one after the other, and goes on where it was stopped. With `--minutes` every run
gets as many CPU-minutes: two segments tell an algorithm's pace, once for all seeds. `--write` makes
docs/evidence/policies/learners.md and its picture from what the folder holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks._common import machine
from paceenv.core.errors import InputError
from paceenv.trainers.training import multi_seed, training_run
from paceenv.trainers.training.algorithm_configs import SECTIONS
from paceenv.trainers.training.checkpoint import load_checkpoint
from paceenv.trainers.training.train_config import TrainConfig, load_train_config, with_algorithm
from paceenv.ui import config_files, figures, output
from paceenv.ui.output import markdown_table

BASE, RELEASED = "distilled", "ppo"
SEARCHES = ("cma_es", "ars")
"""Algorithms with rollouts that are some twenty times as long."""
PACE, PACE_SEED = "pace.json", 999
MINUTES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""CPU-minutes at which the best score so far is compared."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "policies" / "learners.md"
HEADER = """# Learners

Here you find which algorithm learns pacing best for its time.
`python -m benchmarks.evidence.learners --out FOLDER --write` makes this page.

All train on the same clusters (those of the config `ppo`), with the same inputs (a view, its means over {memory}
control intervals and its mean change), and are scored on the same validation clusters
(`paceenv.trainers.training.selection`), which no training uses.
The policy of a run is that of its best score.
CPU-minutes are of one core and include the evaluations.
`distill` is ours: a student of a teacher that knows the future of the training clusters.
The others are PPO and SAC of Stable-Baselines3, RecurrentPPO, TQC and CrossQ of sb3-contrib, CMA-ES of the package
cmaes, and ARS, which is ours, too: version V2, its networks tried on one native batch as those of CMA-ES are
([why](../../decisions.md)).
RecurrentPPO has the means as inputs, too, and an LSTM after them.
"""


@dataclass(frozen=True)
class Run:
    """A training of one algorithm with one seed, as its folder holds it."""

    algorithm: str
    seed: int
    curve: list[dict[str, float]]
    timesteps: int

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """Rows of the curve with a validation score."""
        return [row for row in self.curve if "score" in row]

    @property
    def best(self) -> dict[str, float]:
        """The evaluation with the highest score."""
        return max(self.evaluations, key=lambda row: row["score"])

    def score_at(self, minutes: float) -> float:
        """The best score within some CPU-minutes, which a run keeps that is over; not-a-number before the first one."""
        rows = [row["score"] for row in self.evaluations if row["cpu_s"] <= 60.0 * minutes]
        return max(rows, default=np.nan)


def config_of(algorithm: str, seed: int, timesteps: int | None) -> TrainConfig:
    """The training of an algorithm: clusters of the base config, hyperparameters of its section.

    Args:
        algorithm: one of the sections.
        seed: of the training.
        timesteps: decisions, instead of the section's.

    Raises:
        InputError: for an unknown algorithm.
    """
    released = load_train_config(RELEASED).model_dump(mode="json")
    data: dict[str, Any] = with_algorithm(load_train_config(BASE).model_dump(mode="json"), algorithm)
    data |= {"name": f"learners-{algorithm}", "seed": seed}
    # not the random ones: every shape of cluster is a batch of its own, and some eighty batches are what PPO would time
    data["environment"] = {**data["environment"], "suites": released["environment"]["suites"]}
    if algorithm != "distill":
        data["constraint"] = released["constraint"]
        data["selection"] = {**data["selection"], "every": 2 if algorithm in SEARCHES else 20, "patience": 20}
    if algorithm in ("ppo", "recurrent_ppo"):
        data[algorithm] = dict(released["ppo"])
    if algorithm == "recurrent_ppo":
        del data[algorithm]["net_arch"]  # its own: fewer layers, after the LSTM
    if timesteps is not None:  # all of it: nobody gets less time for having a plateau
        data["selection"]["patience"] = 10_000
    config = config_files.parse(TrainConfig, data, f"algorithm {algorithm}")
    return config if timesteps is None else config.with_timesteps(timesteps)


def decisions_in(algorithm: str, minutes: float, folder: Path) -> int:
    """How many decisions an algorithm takes in some CPU-minutes, its evaluations included; the pace is measured once.

    Args:
        algorithm: one of the sections.
        minutes: of one core.
        folder: of the algorithm; keeps the pace, so that all seeds and a resumed benchmark have the same schedules.
    """
    kept = folder / PACE
    if not kept.exists():
        run = training_run.Run(config_of(algorithm, PACE_SEED, None))
        run.advance()  # which also compiles, and chooses a teacher's candidates
        decisions, cpu_s = run.timesteps, run.cpu_s
        run.advance()
        folder.mkdir(parents=True, exist_ok=True)
        pace = {"decisions_per_s": (run.timesteps - decisions) / (run.cpu_s - cpu_s), "start_s": cpu_s}
        config_files.write_text(kept, json.dumps(pace))
    return max(int(60.0 * minutes * json.loads(kept.read_text())["decisions_per_s"]), 1)


def read_runs(out: Path) -> list[Run]:
    """The trainings of a folder as far as they went, by algorithm in the order of the configs, then by seed."""
    found = []
    for algorithm in SECTIONS:
        for folder in sorted((out / algorithm).glob("seed-*")):
            if (folder / training_run.POLICY).exists():
                curve = json.loads((folder / "curve.json").read_text())
            elif (folder / training_run.CHECKPOINT).exists():
                curve = load_checkpoint(folder / training_run.CHECKPOINT)[1]["curve"]
            else:
                continue
            found.append(Run(algorithm, int(folder.name[5:]), curve, int(curve[-1]["timesteps"])))
    return found


def table(runs: list[Run]) -> list[str]:
    """One row an algorithm: the median over its seeds, lowest and highest in brackets."""
    rows, columns = [], ("algorithm", "seeds", "gap closed", "worst null", "score", "decisions", "CPU minutes")
    for algorithm in dict.fromkeys(run.algorithm for run in runs):
        own = [run for run in runs if run.algorithm == algorithm]
        closed, null, score = ([run.best[key] for run in own] for key in ("gap_closed", "null_loss", "score"))
        minutes = [run.evaluations[-1]["cpu_s"] / 60.0 for run in own]
        rows.append(
            (
                algorithm,
                str(len(own)),
                f"{np.median(closed):.1%} [{min(closed):.1%}, {max(closed):.1%}]",
                f"{100 * np.median(null):.2f} %",
                f"{np.median(score):.3f} [{min(score):.3f}, {max(score):.3f}]",
                f"{int(np.median([run.timesteps for run in own])):,}",
                f"{np.median(minutes):.1f}",
            )
        )
    return list(markdown_table(columns, rows))


def table_by_minutes(runs: list[Run]) -> list[str]:
    """One row an algorithm: the median over its seeds of the best score after so many CPU-minutes."""
    rows = []
    for algorithm in dict.fromkeys(run.algorithm for run in runs):
        scores = [np.median([r.score_at(m) for r in runs if r.algorithm == algorithm]) for m in MINUTES]
        rows.append((algorithm, *("" if np.isnan(score) else f"{score:.3f}" for score in scores)))
    return list(markdown_table(("algorithm", *(f"{m:g} min" for m in MINUTES)), rows))


def draw(runs: list[Run], path: Path) -> None:
    """Best score so far against CPU-minutes, a line a run."""
    figure, panel = figures.axes("Learning on validation clusters", "CPU minutes", "best score so far")
    for place, algorithm in enumerate(dict.fromkeys(run.algorithm for run in runs)):
        for k, run in enumerate(r for r in runs if r.algorithm == algorithm):
            minutes = [row["cpu_s"] / 60.0 for row in run.evaluations]
            best = np.maximum.accumulate([row["score"] for row in run.evaluations])
            panel.plot(minutes, best, color=f"C{place}", label=algorithm if k == 0 else None, linewidth=1.0)
    panel.set(ylim=(0.0, 1.0))
    panel.legend()
    figure.savefig(path)


def page(runs: list[Run], note: str) -> str:
    """The page's text."""
    memory = ", ".join(map(str, load_train_config(BASE).environment.memory_intervals))  # type: ignore[arg-type]
    parts = [HEADER.format(memory=memory), *([note, ""] if note else []), "## At the end", "", *table(runs), ""]
    parts += [
        "## By time",
        "",
        "The best score so far, which a run keeps once it is over; empty where a seed has no evaluation yet.",
        "",
    ]
    parts += [*table_by_minutes(runs), "", "![Scores against CPU minutes](learners.png)", "", "## Machine", ""]
    parts += markdown_table(("", ""), list(machine().items()))
    return "\n".join(parts) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="Folder of the trainings; what is there is gone on with.")],
    algorithm: Annotated[list[str] | None, typer.Option(help="Only these; default: all.")] = None,
    seeds: Annotated[int, typer.Option(min=0, help="Seeds of each algorithm, from 0 on; 0: train nothing.")] = 3,
    timesteps: Annotated[int | None, typer.Option(min=1, help="Decisions, instead of each section's.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="CPU-minutes of every run, about, instead of decisions.")
    ] = None,
    note: Annotated[str, typer.Option(help="A sentence for the page, such as on a reduced budget.")] = "",
    write: Annotated[bool, typer.Option(help="Write docs/evidence/policies/learners.md.")] = False,
) -> None:
    """Train what is missing, and print or write the tables."""
    if timesteps is not None and minutes is not None:
        raise InputError("--timesteps and --minutes; allowed: one of them")
    for name in algorithm or SECTIONS:
        for seed in range(seeds):
            folder = out / name / f"seed-{seed}"
            if not (folder / training_run.POLICY).exists():
                decisions = timesteps if minutes is None else decisions_in(name, minutes, out / name)
                multi_seed.train_seeds(config_of(name, seed, decisions), 1, folder, resume=True)
    runs = read_runs(out)
    if not runs:
        raise InputError(f"{out}: no training; allowed: a folder with some")
    if write:
        draw(runs, PAGE.with_suffix(".png"))
        config_files.write_text(PAGE, page(runs, note))
    output.say("\n".join([*table(runs), "", *table_by_minutes(runs)]))


if __name__ == "__main__":
    typer.run(main)
