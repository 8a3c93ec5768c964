"""The command ``paceenv``: finds its subcommands by entry point and runs one; imports nothing else before that."""

from __future__ import annotations

import logging
import os
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from paceenv import __version__
from paceenv.core.errors import InputError, did_you_mean, needs

GROUP = "paceenv.commands"
USER_ERROR = 2

HEADINGS = {
    "look at a job": {
        "diagnose": "Recognise what a job left behind; say what it loses, to whom, why, and what is next.",
        "report": "Write one page about a traced job: causes, pictures, would pacing help.",
        "whatif": "Predict a job after a change: other nodes, fabric, pacing, a rank replaced; with intervals.",
        "live": "Run a training job with the agent, look at it, and change what the agent does.",
    },
    "the simulator": {
        "simulate": "Run a job on a simulated cluster and print its step-time statistics.",
        "calibrate": "Fit a cluster config to a trace or to published numbers.",
        "train": "Train a pacing policy on the simulator, or for one job from its trace.",
        "sweep": "Try many settings or hyperparameters on Ray; resumable, on one machine or a cluster.",
        "evaluate": "Compare policies on a suite of clusters, with confidence intervals.",
    },
    "try it": {
        "demo": "The guided tour: train, compare, draw; results in runs/demo.",
        "testbed": "Real jobs on network namespaces of this machine; the closed loop from trace to canary.",
    },
}
"""One line for each command, kept here so that ``paceenv --help`` need not import the commands."""
SUMMARIES = {name: line for commands in HEADINGS.values() for name, line in commands.items()}
EXTRA = dict.fromkeys(("diagnose", "report", "whatif", "simulate", "calibrate"), "sim")
EXTRA |= {name: name for name in ("live", "sweep", "testbed")}
"""The extra that a command needs; all others need ``train``."""


def main() -> None:
    """Entry point of the command line; exit code 2 for errors that the user can fix."""
    engine, notes = logging.getLogger("paceenv.engine"), logging.StreamHandler()
    notes.setFormatter(logging.Formatter("paceenv: %(message)s"))
    engine.addHandler(notes)
    engine.setLevel(logging.INFO)
    try:
        code = run(sys.argv[1:])
    except InputError as error:
        print(f"paceenv: error: {error}", file=sys.stderr)
        code = USER_ERROR
    except PermissionError as error:  # asking whether a file is there raises it where a folder may not be searched
        print(f"paceenv: error: {error.filename or error}: {error.strerror}", file=sys.stderr)
        code = USER_ERROR
    except KeyboardInterrupt:
        print("paceenv: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code."""
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        _print_help()
        return 0
    if arguments[0] in {"-V", "--version"}:
        print(f"paceenv {__version__}")
        return 0
    name, *rest = arguments
    if name not in commands and (Path(name).exists() or any(sign in name for sign in "./*?[")):  # a path or pattern
        name, rest = "diagnose", arguments
    if name not in commands:
        hint = did_you_mean(name, commands) or f"; there are {', '.join(sorted(commands))}"
        raise InputError(f"no command {name}, and no such file or folder{hint}")
    try:
        return _run_command(commands[name], rest)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "paceenv":
            raise
        raise needs(f"paceenv {name}", error.name, EXTRA.get(name, "train")) from None


def _run_command(entry: EntryPoint, arguments: list[str]) -> int:
    import inspect

    import typer

    application = command = entry.load()
    if not isinstance(command, typer.Typer):
        application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        application.command()(command)
    for one in application.registered_commands:
        one.help = _help(one.help or inspect.getdoc(one.callback) or "")
    name = f"paceenv {entry.name}"
    try:
        result = application(args=arguments, prog_name=name, standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        explain = getattr(error, "format_message", None)  # only errors of usage have one
        if explain is None:
            raise
        raise InputError(f"{explain()} See {name} --help") from None
    return result if isinstance(result, int) else 0


def _help(text: str) -> str:
    """What a command's docstring says, each paragraph and each of its examples on a line."""
    text, heading, examples = text.partition("Examples: ")
    lines = (" ".join(line.split()) for line in re.split(r"\s--\s+(?=paceenv)", examples))
    paragraphs = (" ".join(part.split()) for part in f"{text}{heading}".split("\n\n"))
    return "\n\n".join([*paragraphs, *lines])


def _print_help() -> None:
    print("Usage: paceenv COMMAND [OPTIONS]\n")
    print(
        "Find out why a distributed PyTorch job is slow, and tune bounded delays (pacing)\nthat fix it where they can."
    )
    for heading, commands in HEADINGS.items():
        print(f"\n{heading}:")
        for name, line in commands.items():
            print(f"  {name:<10} {line}")
    print("\n  paceenv PATH recognises what lies there (diagnose).")
    print("  paceenv COMMAND --help explains a command. First steps: paceenv demo")
