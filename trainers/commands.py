"""``paceenv train``, ``evaluate``, ``demo``, ``scores``: the commands of the top floor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv import configs, output
from paceenv.errors import InputError
from policies.select import POLICY_HELP
from trainers import report
from trainers.config import TrainConfig
from trainers.contest import Contest, is_contest, load_contest
from trainers.evaluate import evaluate as compare
from trainers.static_search import search_static
from trainers.suites import Split, load_suite


def train(
    config: Annotated[str, typer.Argument(help="A training config: a file, or a name in configs/train.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for policy.safetensors, curve and resolved config.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the config's.")] = None,
    seeds: Annotated[
        int,
        typer.Option(min=1, max=99, help="Train so often, from this seed on, and keep the best on validation."),
    ] = 1,
    timesteps: Annotated[
        int | None, typer.Option(min=1, help="Decisions to train on, instead of the config's.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the folder's checkpoints, to the same result.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: ppo.gamma=0.9")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Train a pacing policy on the simulator with Stable-Baselines3's PPO.

    Writes the policy file, the learning curve (JSON and picture), the resolved config, a checkpoint and TensorBoard's
    event files (tensorboard --logdir). The same config and seed give the same file, digest and all, on one machine,
    also when it was interrupted and resumed. A config with a selection is judged on validation clusters while it runs,
    keeps its best policy and stops when it no longer improves; with several seeds median and spread are reported.

    Examples: paceenv train demo -o runs/mine -- paceenv train released -o runs/released --seeds 5 --resume
    """
    from trainers import several

    path = configs.find("train", config)
    data = configs.read_yaml(path)
    changes = [("seed", seed), ("ppo.total_timesteps", timesteps)]
    for assignment in [*(f"{key}={value}" for key, value in changes if value is not None), *(set_ or [])]:
        configs.set_value(data, assignment)
    resolved = configs.parse(TrainConfig, data, str(path)).beside(path)
    if seeds > 1 and resolved.selection is None:
        raise InputError(f"--seeds {seeds}: {path} has no selection to tell them apart; allowed: 1")
    summary = several.train_seeds(resolved, seeds, prepare_folder(out), resume=resume)
    if json_ is not None:
        output.write_json(summary, json_)
    if json_ != "-":
        output.print_table(f"trained {resolved.name}", ("", ""), [(k, str(v)) for k, v in summary.items()])


def evaluate(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY...",
            help=f"{POLICY_HELP}; or best-static; or a .yaml of policies and suite, such as a sweep's winner.yaml.",
        ),
    ],
    suite: Annotated[
        str | None, typer.Option(help="A suite: a file, a name in configs/suites, or all. Default: demo.")
    ] = None,
    split: Annotated[Split | None, typer.Option(help="Only the clusters of this split of the suite.")] = None,
    seeds: Annotated[int | None, typer.Option(min=2, help="Seeds per cluster, instead of the suite's.")] = None,
    iterations: Annotated[
        int | None, typer.Option("--iterations", "-i", min=40, help="Instead of the suite's.")
    ] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Compare policies on a suite of clusters against passive, paired on the same noise, with 95 % intervals.

    best-static searches the single static setting that is best for the whole suite (on other seeds).

    Examples: paceenv evaluate paper adaptive -- paceenv evaluate learned best-static --suite all --split validation
    """
    update = {k: v for k, v in (("seeds", seeds), ("iterations", iterations)) if v is not None}
    contest, names = _contest(policies)
    chosen = contest.chosen() if contest and not suite else load_suite(suite or "demo")
    chosen = chosen.model_copy(update=update)
    chosen = chosen.only([split]) if split else chosen
    tuned = contest.tuned_for(chosen) if contest else {}
    for i, name in enumerate(names):
        if name == "best-static":
            with output.progress("best static setting", 1) as done:
                names[i] = search_static(chosen, on_done=done).best()
    runs = len(chosen.cases) * (len(set(names)) + 1 + bool(tuned))
    with output.progress(f"evaluate on {chosen.name}", runs) as done:
        comparison = compare(names, chosen, on_done=done, tuned=tuned)
    for line in comparison.outside():
        output.say(line)
    if json_ is not None:
        output.write_json(report.as_json(comparison), json_)
    if json_ != "-":
        rows = [report.cells(score) for score in report.scores(comparison)]
        note = f"{chosen.seeds} seeds x {chosen.iterations} iterations, paired on common random numbers"
        output.print_table(f"Suite {chosen.name}", report.HEADER, rows, note)


def _contest(arguments: list[str]) -> tuple[Contest | None, list[str]]:
    """The one contest among the arguments, if there is one, and all policies that they name."""
    contests = [load_contest(name) for name in arguments if is_contest(name)]
    if len(contests) > 1:
        raise InputError("POLICY: several .yaml files; allowed: one, with other policies beside it")
    inside = contests[0].policies if contests else []
    return contests[0] if contests else None, [*inside, *(name for name in arguments if not is_contest(name))]


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
