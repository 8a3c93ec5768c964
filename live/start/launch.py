"""The command line of ``-m paceenv.live``: settings of the agent, then a script that runs as it does without it.

``paceenv live run`` has the same settings, and launches the ranks as well (``paceenv.live.start.run_command``).

The settings go into the environment (``paceenv.live.start.attach_hook``), and this process becomes the interpreter
that was asked for: signals, exit codes, tracebacks, pickles and ``__main__`` are the script's.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from paceenv.core.errors import InputError
from paceenv.live.options import ENVIRONMENT_KILL_FILE, OPTIONS, absolute_policy, make_options
from paceenv.live.start.attach_hook import hand_down
from paceenv.live.start.obstacles import obstacle

USER_ERROR = 2
HELP = """Run a training script with the agent attached, without a line changed in it.

\b
torchrun --nproc-per-node 8 -m paceenv.live train.py --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --out runs/live/mine train.py --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --out runs/live/mine -m package.train --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --mode canary --policy policy.safetensors train.py --lr 3e-4

paceenv live run --nproc-per-node 8 --out runs/live/mine train.py --lr 3e-4 launches the ranks by itself.

Begin with the first: it only observes, and reports at the end where the step went and which rank waits for which. Watch
it with paceenv live status DIR. Then go on to shadow (decides, never delays), canary (a switchback test: every rank
alternates paired blocks with and without pacing, and measures whether pacing pays) and active (paces nine of ten
blocks). Mode probe adds very small random delays, so that its trace shows what a delay does to the job.
Everything after the script's name belongs to the script. PACEENV_LIVE=off in the environment switches the agent off."""
POLICY_HELP = """Decides in modes shadow, canary and active; beside candidates one more. A policy file of paceenv
train; learned (the released one); both also with :preference=0.3. Or a rule: paper, adaptive,
static:mechanism=slack,threshold=0.02,window=0.4, or static:my-cluster.yaml for the pacing of a cluster config."""

application = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def with_agent_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter ``mode`` and the ``**given`` of ``function`` by command-line options made from Options."""
    signature, options = inspect.signature(function, eval_str=True), {option.name: option for option in OPTIONS}
    parameters: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in options:
            parameters.append(_parameter(options.pop(name)))
        elif parameter.kind is Parameter.VAR_KEYWORD:
            parameters += map(_parameter, options.values())
        else:
            parameters.append(parameter)
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _parameter(option: Field[Any]) -> Parameter:
    means = option.metadata["meaning"]
    text = f"{means.help} ({means.allowed})." if means.allowed else f"{means.help}."
    text += f" Default: {means.unset}." if means.unset else ""
    flag = (f"--{option.name.replace('_', '-')}",) if option.type is bool else ()  # without a --no-... beside it
    default = typer.Option(option.default, *flag, help=text, show_default=not means.unset and not flag)
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=option.type)


Script = Annotated[
    list[str], typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="The training script and its arguments.")
]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")]
PolicyName = Annotated[str | None, typer.Option(help=" ".join(POLICY_HELP.split()))]


@application.command(help=HELP, context_settings={"allow_interspersed_args": False})
@with_agent_options
def launch(*, script: Script, module: Module = False, mode: str, policy: PolicyName = None, **given: Any) -> NoReturn:
    become([*_own_flags(), *prepare(script, module, given | {"mode": mode}, policy)])


def prepare(
    script: Sequence[str], module: bool, given: dict[str, Any], policy: str | None, *, below: bool = False
) -> list[str]:
    """Check the settings and leave them in the environment, and return the interpreter's arguments for the script.

    Args:
        below: whether the processes that this one will start run the script, and not this one itself.
    """
    mode = given["mode"]
    options = make_options(given | {"job": given["job"] or (script[0] if module else Path(script[0]).stem)})
    if not module and not Path(script[0]).exists():
        raise InputError(f"script {script[0]}: no such file; allowed: a Python file, or a module with -m")
    why = obstacle(options, policy) if options.strict or below else ""
    if why and options.strict:
        raise InputError(f"mode {mode} cannot be entered: {why}")
    if why:
        say(f"warning: mode {mode} cannot be entered: {why}; the job runs unpaced (--strict ends the launch instead)")
    if options.mode == mode:  # else it is the kill switch: as little as possible happens
        if os.environ.get(ENVIRONMENT_KILL_FILE):
            os.environ[ENVIRONMENT_KILL_FILE] = str(options.kill_file or "")
        absolute = {"out": options.out, "kill_file": options.kill_file}  # the script may change the folder
        hand_down(given | absolute | {"job": options.job, "policy": absolute_policy(policy)}, below=below)
    return [*(["-m"] if module else []), *script]


def say(text: str) -> None:
    print(f"paceenv live run: {text}", file=sys.stderr)


def become(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the interpreter with these arguments."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def _own_flags() -> list[str]:
    """The interpreter's options, as torchrun's ``-u``, where it was started as ``python ... -m paceenv.live``."""
    own, rest = sys.orig_argv, sys.argv[1:]
    before = own[1 : len(own) - len(rest)]
    return before[:-2] if own[len(own) - len(rest) :] == rest and before[-2:] == ["-m", "paceenv.live"] else []


def main() -> None:
    """Entry point of ``python -m paceenv.live``; exit code 2 for a user's mistake, before the script starts."""
    try:
        typer.main.get_command(application).main(
            sys.argv[1:], prog_name="python -m paceenv.live", standalone_mode=False
        )
    except Exception as error:
        explain = getattr(error, "format_message", None)  # only errors of usage have one
        if explain is None and not isinstance(error, InputError):
            raise
        text = str(error) if explain is None else f"{explain()} See python -m paceenv.live --help"
        print(f"paceenv: error: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(USER_ERROR)
