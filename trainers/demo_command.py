"""``paceenv demo``: train, compare, draw; one folder of results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from paceenv.policies.policy_file import save_policy
from paceenv.sim.cluster import load_cluster
from paceenv.trainers.evaluation import result_plots, score_table
from paceenv.trainers.evaluation.evaluate import SuiteResult, evaluate
from paceenv.trainers.evaluation.static_search import search_static
from paceenv.trainers.evaluation.suites import Case, Suite, load_suite
from paceenv.trainers.training.train_config import load_train_config
from paceenv.trainers.training.training_run import train
from paceenv.ui import figures, output
from paceenv.ui.run_directory import prepare_folder

EXPLAINED = "unequal-slack"
"""Shows at a glance what pacing does: two ranks have work after their collective, and the others let them go first."""


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("runs/demo"),
    timesteps: Annotated[int | None, typer.Option(min=1, help="Shorter or longer training, in decisions.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0,
) -> None:
    """The guided tour: train a policy, compare it with its baselines, draw the pictures.

    It takes 1 to 5 minutes on two cores. The output folder has the tables that it prints as JSON.
    """
    started = time.monotonic()
    config = load_train_config("demo").model_copy(update={"seed": seed})
    config = config if timesteps is None else config.model_copy(update={"total_timesteps": timesteps})
    suite = load_suite("demo")
    output.say(f"training {config.algorithm} on {config.total_timesteps:,} decisions")
    policy = str(prepare_folder(out) / "trained.safetensors")  # `learned` is the policy that ships
    with output.progress(f"train {config.name}", config.total_timesteps) as done:
        run = train(config, done)
    digest = save_policy(policy, run.result())
    result_plots.learning_curve(run.curve.rows, out / "learning-curve.png")
    output.say(f"wrote {policy}, sha256 {digest[:16]}")
    static = search_static(suite, "best static setting").best()
    result = evaluate([static, "paper", "adaptive", policy, "clairvoyant"], suite, "compare")
    nulls = _compare_nulls(policy, static)
    with output.progress("draw"):
        drawn = result_plots.ranks_over_time(load_cluster(EXPLAINED), ["passive", "learned"])
        figures.save(drawn, out / "ranks-over-time.png")
    for one in (result, nulls):
        score_table.show(one, [policy, static])
    output.write_json([score_table.as_json(one, [policy, static]) for one in (result, nulls)], str(out / "scores.json"))
    gains = [f"{one:+z.2%}" for one in (result.total(policy).gain, result.total(static).gain, nulls.total(policy).gain)]
    output.say(
        f"trained gains {gains[0]} throughput, the best constant {gains[1]}; where nothing is to gain {gains[2]}"
    )
    output.say(
        f"{out}/ranks-over-time.png shows the ranks of {EXPLAINED} without pacing and with `learned`, which ships"
    )
    output.say(f"All of it, with pictures and the policy file, is in {out}/ ({time.monotonic() - started:.0f} s)")


def _compare_nulls(policy: str, static: str) -> SuiteResult:
    """Where pacing has nothing to exploit: plain barrier jobs, one with the imbalance of a production trace."""
    cases = [Case(cluster="null-jitter", null_case=True), Case(cluster="straggler-se", null_case=True)]
    suite = Suite(
        name="nulls",
        description="Plain barrier jobs: independent jitter, and the data imbalance calibrated from the SE trace.",
        cases=cases,
        seeds=32,
    )
    return evaluate([static, "paper", "adaptive", policy], suite, "compare where pacing cannot help")
