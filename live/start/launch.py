"""The agent's settings on a command line, left in the environment for the script that this process becomes.

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

POLICY_HELP = """Decides in modes shadow, canary and active; beside candidates one more. A policy file of paceenv
train; learned (the released one); both also with :preference=0.3. Or a rule: paper, adaptive,
static:mechanism=slack,threshold=0.02,window=0.4, or static:my-cluster.yaml for the pacing of a cluster config."""


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
