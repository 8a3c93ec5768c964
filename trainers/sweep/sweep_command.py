"""``paceenv sweep CONFIG -o FOLDER`` runs a sweep, or goes on with it; ``paceenv sweep FOLDER`` shows one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.core.errors import InputError
from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.trainers.sweep.sweep_results import COLUMNS, CONFIG, Results, as_json
from paceenv.ui import config_files, output
from paceenv.ui.json_option import JsonFile
from paceenv.ui.run_directory import first_difference, locked


def sweep(
    what: Annotated[
        str, typer.Argument(help="A sweep's config to run: a file, or a name in configs/sweeps; or a folder to show.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The sweep's folder; shared by all nodes, for training.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster: auto, or HOST:PORT. Default: this machine, by itself.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: static.seeds=4")] = None,
    json_: JsonFile = None,
) -> None:
    """Try many settings or hyperparameters on Ray, and resume after an interruption.

    Ray Tune searches, and keeps its state in the folder: after an interruption the same command finishes the sweep. In
    the end the folder holds the winner (policy.safetensors) and a picture. With a
    sweep's folder in place of a config its Pareto front is shown, also while it runs.

    Examples: paceenv sweep demo -o runs/sweep -- paceenv sweep runs/sweep -- paceenv sweep ppo-asha -o runs/asha
    --address auto
    """
    if Path(what).is_dir() and what not in config_files.names("sweeps"):
        for name, value in (("--out", out), ("--address", address), ("--set", set_)):
            if value:
                raise InputError(f"{name} with a sweep's folder, {what}; allowed: --json")
        results = Results.read(Path(what))
        if output.write_json([as_json(row) for row in results.front()], json_):
            _show(results)
        return
    if out is None:
        raise InputError(f"{what}: a config to run needs a folder; allowed: --out FOLDER")
    _run(config_files.load(SweepConfig, "sweeps", what, set_ or ()), out, address, json_)


def _run(config: SweepConfig, out: Path, address: str | None, json_: str | None) -> None:
    with output.progress("prepare, and simulate without pacing"):
        from paceenv.trainers.sweep import ray_tuner
        from paceenv.trainers.sweep.trainables import make_task
        from paceenv.trainers.sweep.winner import POLICY, finish

        task = make_task(config)
    with locked(out, "sweep"):
        _begin(out, config.model_dump(mode="json", exclude={"description"}))
        try:
            with ray_tuner.connected(address):
                ray_tuner.tune_all(config, task, out)
        except KeyboardInterrupt:
            output.say("interrupted; the same command goes on from here")
            raise
        said = finish(out, task)
    is_shown = output.write_json(said, json_)
    if said["failed"] and not said["winners"]:
        first = said["failed"][0]
        raise InputError(f"{out}: no trial was finished; trial {first['trial']} failed: {first['error']}")
    if is_shown:
        _show(Results.read(out))
        suite = config.static.suite if config.static else "held-out"
        output.say(f"winner and picture are in {out}/; on other seeds: paceenv evaluate {out}/{POLICY} --suite {suite}")


def _begin(out: Path, asked: dict[str, Any]) -> None:
    """Put on record what the folder's sweep is. Raises InputError where it was begun with something else."""
    if (out / CONFIG).exists():
        if changed := first_difference(config_files.read_yaml(out / CONFIG), asked):
            raise InputError(f"{out}: begun with {changed}; allowed: the same, or another folder")
    else:
        config_files.write_yaml(out / CONFIG, asked)


def _show(results: Results) -> None:
    columns, rows = [COLUMNS[name] for name in results.objectives], [results.cells(row) for row in results.front()]
    of_all, end = ("", "") if results.is_finished else (f" of {results.asked}", ", unfinished")
    note = f"{len(results.candidates)}{of_all} candidates, {len(results.failed)} trials failed{end}"
    static, training, candidate = results.config.static, results.config.training, "candidate"
    if static is not None:
        length = f"{static.seeds} seeds x {static.iterations} iterations"
        note += f"\nmeans over {length} on each cluster of suite {static.suite}, by the clusters' weights"
    elif training is not None:
        note += f"\nscore: the median of {training.seeds} trainings, on the validation clusters of {training.train}"
        candidate += " (last values)" if training.pbt else ""
    output.print_table(f"sweep {results.config.name}: front", [candidate, "trial", *columns], rows, note)
    for row in results.failed:
        output.say(f"trial {row['trial']} failed: {row['error']}")
