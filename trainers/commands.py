"""``paceenv train``, ``evaluate``, ``demo``, ``scores``: the commands of the top floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceenv import configs, output
from paceenv.errors import InputError
from policies.file import save_policy
from policies.select import POLICY_HELP
from trainers import report
from trainers.config import TrainConfig, load_suite
from trainers.evaluate import best_static, search_size
from trainers.evaluate import evaluate as compare


def train(
    config: Annotated[str, typer.Argument(help="A training config: a file, or a name in configs/train.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for policy.safetensors, curve and resolved config.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the config's.")] = None,
    timesteps: Annotated[
        int | None, typer.Option(min=1, help="Decisions to train on, instead of the config's.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: ppo.gamma=0.9")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Train a pacing policy on the simulator with Stable-Baselines3's PPO.

    Writes the policy file, the learning curve (JSON and picture) and the resolved config. The same config and seed give
    the same file, digest and all, on one machine.
    """
    from trainers import plots, sb3

    path = configs.find("train", config)
    data = configs.read_yaml(path)
    changes = [("seed", seed), ("ppo.total_timesteps", timesteps)]
    for assignment in [*(f"{key}={value}" for key, value in changes if value is not None), *(set_ or [])]:
        configs.set_value(data, assignment)
    resolved = configs.parse(TrainConfig, data, str(path))
    prepare_folder(out)
    with output.progress(f"train {resolved.name}", resolved.ppo.total_timesteps) as done:
        trained = sb3.train(resolved, on_progress=done)
    configs.write_text(out / "config.yaml", configs.to_yaml(resolved.model_dump()))
    configs.write_text(out / "curve.json", json.dumps(trained.curve))
    plots.learning_curve(trained.curve, out / "learning-curve.png", paired=resolved.environment.paired)
    digest = save_policy(out / "policy.safetensors", trained.file)
    summary = {
        "policy": str(out / "policy.safetensors"),
        "sha256": digest,
        "timesteps": trained.curve[-1]["timesteps"],
        "final_reward": trained.file.provenance["final_reward"],
    }
    if json_ is not None:
        output.write_json(summary, json_)
    if json_ != "-":
        output.print_table(f"trained {resolved.name}", ("", ""), [(k, str(v)) for k, v in summary.items()])


def evaluate(
    policies: Annotated[list[str], typer.Argument(metavar="POLICY...", help=f"{POLICY_HELP}; or best-static.")],
    suite: Annotated[str, typer.Option(help="A suite: a file, or a name in configs/suites.")] = "demo",
    seeds: Annotated[int | None, typer.Option(min=2, help="Seeds per cluster, instead of the suite's.")] = None,
    iterations: Annotated[
        int | None, typer.Option("--iterations", "-i", min=40, help="Instead of the suite's.")
    ] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Compare policies on a suite of clusters against passive, paired on the same noise, with 95 % intervals.

    best-static searches the single static setting that is best for the whole suite (on other seeds).
    """
    update = {k: v for k, v in (("seeds", seeds), ("iterations", iterations)) if v is not None}
    chosen = load_suite(suite).model_copy(update=update)
    names = list(policies)
    for i, name in enumerate(names):
        if name == "best-static":
            with output.progress("best static setting", search_size(chosen)) as done:
                names[i] = best_static(chosen, on_done=done)
    with output.progress(f"evaluate on {chosen.name}", len(chosen.cases) * (len(names) + 1)) as done:
        comparison = compare(names, chosen, on_done=done)
    for line in comparison.outside():
        output.say(line)
    if json_ is not None:
        output.write_json(report.as_json(comparison), json_)
    if json_ != "-":
        rows = [report.cells(score) for score in report.scores(comparison)]
        note = f"{chosen.seeds} seeds x {chosen.iterations} iterations, paired on common random numbers"
        output.print_table(f"Suite {chosen.name}", report.HEADER, rows, note)


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("runs/demo"),
    timesteps: Annotated[int | None, typer.Option(min=1, help="Shorter or longer training, in decisions.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0,
    traces: Annotated[
        Path | None,
        typer.Option(help="Folder with trace-AR.parquet and trace-SE.parquet. Default: packaged measurements."),
    ] = None,
) -> None:
    """The guided tour: calibrate a cluster, train a policy, compare it with its baselines, draw the pictures.

    About four minutes on two cores. Everything it prints is also written to the output folder.
    """
    from trainers.demo import run_demo

    run_demo(prepare_folder(out), timesteps, seed, traces)


def scores(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for SCORES.md and SCORES.json.")] = Path(),
) -> None:
    """Rebuild SCORES.md and SCORES.json from the committed configs: every suite, every policy that ships."""
    from trainers.scores import rebuild

    rebuild(prepare_folder(out))


def prepare_folder(path: Path) -> Path:
    """``path`` as a folder that can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be made a folder: {error.strerror}") from None
    return path
