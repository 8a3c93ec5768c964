"""``paceenv train``: one seed or several, everything it leaves in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.core.errors import InputError
from paceenv.trainers.training.train_config import TrainConfig, with_algorithm
from paceenv.ui import config_files, output
from paceenv.ui.run_directory import prepare_folder


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
    algorithm: Annotated[
        str | None,
        typer.Option(help="What learns, instead of the config's; hyperparameters of its own by --set sac.gamma=0.95"),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the folder's checkpoints, to the same result.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: ppo.gamma=0.9")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Train a pacing policy on the simulator.

    algorithm: in the config says what learns, and its hyperparameters are the section of the same name, by the names of
    its library: ppo and sac (Stable-Baselines3), recurrent_ppo, tqc and crossq (sb3-contrib), cma_es (cmaes), ars (of
    our own), and distill, which fits the policy to a teacher that knows the future.

    Writes the policy file, the learning curve (JSON and picture), the resolved config, a checkpoint and TensorBoard's
    event files (tensorboard --logdir). The same config and seed give the same file, digest and all, on one machine,
    also after an interruption with --resume. A config with a selection is scored on validation clusters while it runs,
    keeps its best policy and stops when the score no longer improves. Several seeds report median and spread.

    Examples: paceenv train demo -o runs/mine -- paceenv train distilled -o runs/released --seeds 5 --resume --
    paceenv train distilled -o runs/distilled -- paceenv train demo -o runs/sac --algorithm sac
    """
    from paceenv.trainers.training import multi_seed

    path = config_files.find("train", config)
    data = config_files.read_yaml(path)
    if algorithm is not None:
        data = with_algorithm(data, algorithm)
    for assignment in [*([] if seed is None else [f"seed={seed}"]), *(set_ or [])]:
        config_files.set_value(data, assignment)
    resolved = config_files.parse(TrainConfig, data, str(path)).beside(path)
    resolved = resolved if timesteps is None else resolved.with_timesteps(timesteps)
    if seeds > 1 and resolved.selection is None:
        raise InputError(f"--seeds {seeds}: {path} has no selection to compare seeds; allowed: 1")
    summary = multi_seed.train_seeds(resolved, seeds, prepare_folder(out), resume=resume)
    if json_ is not None:
        output.write_json(summary, json_)
    if json_ != "-":
        output.print_table(f"trained {resolved.name}", ("", ""), [(k, str(v)) for k, v in summary.items()])
