"""``paceenv sweep CONFIG -o DIR``, ``paceenv sweep show DIR``, ``paceenv sweep rerun DIR TRIAL``."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceenv.core.errors import InputError, needs
from paceenv.trainers.sweep.ledger import Ledger, as_far_as
from paceenv.trainers.sweep.outcome.sweep_results import Results, cells
from paceenv.trainers.sweep.searches.search import Trial
from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.trainers.sweep.sweep_run import make_task, open_sweep
from paceenv.trainers.sweep.trial import PpoTask, run_trial
from paceenv.ui import config_files, output
from paceenv.ui.run_directory import first_difference, locked


class _RunUnlessNamed(TyperGroup):
    """A config's name may stand in place of a command; then the command is ``run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


application = typer.Typer(
    cls=_RunUnlessNamed,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="""Try many settings or hyperparameters on Ray, and resume after an interruption.

    paceenv sweep CONFIG -o DIR [--resume] [--address auto|HOST:PORT] [--set KEY=VALUE] [--json FILE]

    CONFIG is a file or a name in configs/sweeps. Options: paceenv sweep run --help

    First steps: paceenv sweep demo -o runs/sweep
    """,
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a sweep.")]


@application.command()
def run(
    config: Annotated[str, typer.Argument(help="A sweep's config: a file, or a name in configs/sweeps.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The sweep's folder; shared by all nodes, for training.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in the folder.")] = False,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster: auto, or HOST:PORT. Default: this machine, by itself.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: static.seeds=4")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Run a sweep; the word run may be left out.

    Every trial that has ended is a line in the ledger before the next one begins. After an interruption the same
    command with --resume finishes the sweep, with the same result; no trial is lost or runs twice. In the end the
    folder holds the winner (policy.safetensors, winner.yaml for paceenv evaluate), pictures, and sweep.html.

    Examples: paceenv sweep demo -o runs/sweep -- paceenv sweep ppo-asha -o runs/asha --resume --address auto
    """
    path = config_files.find("sweeps", config)
    data = config_files.read_yaml(path)
    for assignment in set_ or []:
        config_files.set_value(data, assignment)
    resolved = config_files.parse(SweepConfig, data, str(path))
    try:
        from paceenv.trainers.sweep import tune
        from paceenv.trainers.sweep.outcome.finish import finish
        from paceenv.trainers.sweep.progress_screen import Screen
    except ModuleNotFoundError as error:
        raise needs("paceenv sweep", error.name, "sweep") from None
    task = make_task(resolved, out)
    with locked(out, "sweep"):
        sweep = open_sweep(resolved, task, out, resume=resume)
        if not sweep.is_over():
            with tune.connected(address) as cpus, Screen(sweep) as screen:
                tune.run_on_ray(sweep, cpus, screen.update)
        said = finish(sweep.ledger, task)
    if json_ is not None:
        output.write_json(said, json_)
    if said["failed"] and not said["winners"]:
        first = said["failed"][0]
        raise InputError(f"{out}: no trial was finished; trial {first['trial']} failed: {first['error']}")
    if json_ != "-":
        _show(Results.of(sweep.ledger), only_best=False)
        _show_robustness(said.get("robustness"))
        output.say(f"winner, pictures and page are in {out}/")


@application.command()
def show(
    folder: Folder,
    best: Annotated[bool, typer.Option("--best", help="Only the winner, or each cluster's.")] = False,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Show the Pareto front of a sweep, or only its winner; also while it runs.

    Examples: paceenv sweep show runs/sweep --best
    """
    results = Results.of(Ledger.read(folder))
    if json_ is not None:
        output.write_json(results.as_json(_chosen(results, only_best=best)), json_)
    if json_ != "-":
        _show(results, only_best=best)


@application.command()
def rerun(
    folder: Folder,
    trial: Annotated[int, typer.Argument(min=0, help="The trial's number.")],
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Run one trial of a sweep again on this machine and compare the result; exit code 1 if it differs.

    Examples: paceenv sweep rerun runs/sweep 7
    """
    ledger = Ledger.read(folder)
    row = ledger.rows.get(trial)
    if row is None:
        last = max(ledger.rows, default=None)
        known = "no trial has ended yet" if last is None else f"allowed: a trial that has ended, the last one is {last}"
        raise InputError(f"{folder}: no trial {trial}; {known}")
    task = make_task(config_files.parse(SweepConfig, ledger.header["config"], str(ledger.path)), folder)
    known = ledger.header["inputs"]
    if changed := first_difference(known, as_far_as(known, task.inputs())):
        raise InputError(f"{folder}: begun with {changed}; allowed: the configs it was begun with")
    with tempfile.TemporaryDirectory() as again:
        if isinstance(task, PpoTask):
            task = dataclasses.replace(task, again=Path(again))
        found = run_trial(task, Trial(trial, row["work"]))
    theirs, mine = ({key: one.get(key) for key in ("status", "result", "error")} for one in (row, found))
    differs = first_difference(theirs, mine)
    if json_ is not None:
        output.write_json({"same": not differs, **found}, json_)
    if json_ != "-":
        print(f"trial {trial}: {'DIFFERS: ' + differs if differs else 'the same, bit for bit'}")
    raise typer.Exit(1 if differs else 0)


def _chosen(results: Results, *, only_best: bool) -> list[Any]:
    winners = [best for cluster in results.clusters if (best := results.best(cluster)) is not None]
    return winners if only_best or len(results.clusters) > 1 else results.front()


def _show(results: Results, *, only_best: bool) -> None:
    from paceenv.trainers.sweep.progress_screen import columns

    rows = [cells(candidate, results.objectives) for candidate in _chosen(results, only_best=only_best)]
    note = f"{len(results.candidates)} candidates, {len(results.failed)} trials failed"
    what = "winner" if only_best else "winners" if len(results.clusters) > 1 else "front"
    output.print_table(f"sweep {results.config.name}: {what}", columns(results), rows, note)
    for row in results.failed:
        output.say(f"trial {row['trial']} failed: {row['error']}")


def _show_robustness(found: dict[str, Any] | None) -> None:
    if found is None:
        return
    rows = [
        (total["policy"], f"{total['gain']:+.2%}", f"{total['gain_ci95'][0]:+.2%} to {total['gain_ci95'][1]:+.2%}")
        for total in found["totals"]
    ]
    note = f"{found['seeds']} fresh seeds x {found['iterations']} iterations; every cluster in robustness.json"
    output.print_table(f"the winner again, on {found['suite']}", ("policy", "gain", "95 % interval"), rows, note)
