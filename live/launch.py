"""The command line of ``-m paceenv.live``: settings of the agent, then a script that runs as if we were not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.core.errors import InputError
from paceenv.live.attach_hook import attach_later
from paceenv.live.options import ACTUATORS, MODES, Options, make_options
from paceenv.live.run_script import prepare_module, prepare_script

USER_ERROR = 2
DEFAULTS = Options()
HELP = """Run a training script with the agent attached, without a line changed in it.

\b
torchrun --nproc-per-node 8 -m paceenv.live train.py --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --out runs/live/mine train.py --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --out runs/live/mine -m package.train --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --mode canary --policy policy.safetensors train.py --lr 3e-4

Begin with the first: it only observes, and says at the end where the step went and who waits for whom. Look on with
paceenv live status DIR. Go on to shadow (decides, never delays), canary (delays in half of the blocks and measures
whether it pays) and active. Mode probe delays by chance and very little, so that its trace can tell what a
delay does to the job. Everything after the script's name is the script's. PACEENV_LIVE=off in the environment
switches the agent off."""

application = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@application.command(help=HELP, context_settings={"allow_interspersed_args": False})
def launch(
    context: typer.Context,
    *,
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="The training script and what it is given.")
    ],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")] = False,
    mode: Annotated[str, typer.Option(help=f"One of {', '.join(MODES)}.")] = DEFAULTS.mode,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Decides in modes shadow, canary and active: a policy file of paceenv train, learned (the "
            "released one), both also with :preference=0.3, or a rule by name: paper, adaptive, "
            "static:mechanism=slack,threshold=0.02,window=0.4.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for trace, status and summary, for all ranks. Default: no files."),
    ] = DEFAULTS.out,
    job: Annotated[
        str, typer.Option(help="The job's name in traces and metrics. Default: the script's.", show_default=False)
    ] = DEFAULTS.job,
    cap_s: Annotated[float, typer.Option(help="Longest delay of an iteration, seconds, 0 to 1.")] = DEFAULTS.cap_s,
    cap_share: Annotated[
        float, typer.Option(help="Longest delay as a share of the job's baseline step, 0 to 0.5.")
    ] = DEFAULTS.cap_share,
    budget_s_per_minute: Annotated[
        float, typer.Option(help="Most seconds of delay in a minute, 0 to 30.")
    ] = DEFAULTS.budget_s_per_minute,
    probe_s: Annotated[
        float,
        typer.Option(help="Longest delay in mode probe, seconds, 0 to 1; the caps bound it too."),
    ] = DEFAULTS.probe_s,
    quiet_first: Annotated[
        int, typer.Option(help="Iterations at the start that are never delayed.")
    ] = DEFAULTS.quiet_first,
    interval_iterations: Annotated[
        int, typer.Option(help="Control interval of the policy, as in its training.")
    ] = DEFAULTS.interval_iterations,
    block_iterations: Annotated[
        int, typer.Option(help="Iterations of a block with or without pacing, a multiple of the interval.")
    ] = DEFAULTS.block_iterations,
    min_gain: Annotated[
        float, typer.Option(help="Smallest gain in mean step time that counts as help, 0 to 1.")
    ] = DEFAULTS.min_gain,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of the order of the blocks, and of the probes. Default: one that all ranks of the launch share."
        ),
    ] = DEFAULTS.seed,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the Prometheus endpoint of a node's first rank; the other ranks take the next ones. "
            "Default: no endpoint."
        ),
    ] = DEFAULTS.metrics_port,
    metrics_host: Annotated[str, typer.Option(help="Address of that endpoint.")] = DEFAULTS.metrics_host,
    kill_file: Annotated[
        Path | None, typer.Option(help="The agents let go of the job as soon as this file exists.")
    ] = DEFAULTS.kill_file,
    actuator: Annotated[
        str,
        typer.Option(help=f"Where a delay is spent, one of {', '.join(ACTUATORS)}: in a sleep, or on the GPU."),
    ] = DEFAULTS.actuator,
) -> Callable[[], None]:
    given: dict[str, Any] = {option.name: context.params[option.name] for option in fields(Options)}
    name, *arguments = script
    given["job"] = job or (name if module else Path(name).stem)
    options = make_options(given)
    run = (prepare_module if module else prepare_script)(name, arguments)
    if options.mode == "off" != mode:  # the kill switch: as little as possible happens
        return run
    attach_later(policy=policy, **given)
    return run


def main() -> None:
    """Entry point of ``python -m paceenv.live``; exit code 2 for what the user can mend, before the script starts."""
    try:
        command = typer.main.get_command(application)
        run = command.main(sys.argv[1:], prog_name="python -m paceenv.live", standalone_mode=False)
    except Exception as error:
        explain = getattr(error, "format_message", None)  # only errors of usage have one
        if explain is None and not isinstance(error, InputError):
            raise
        text = str(error) if explain is None else f"{explain()} See python -m paceenv.live --help"
        print(f"paceenv: error: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if callable(run):  # else it was --help
        run()
