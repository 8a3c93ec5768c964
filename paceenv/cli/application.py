"""The command ``paceenv``: finds its subcommands by entry point and runs one; imports nothing else before that."""

from __future__ import annotations

import difflib
import glob
import logging
import os
import sys
import warnings
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TextIO

from paceenv import __version__
from paceenv.core.errors import InputError, needs
from paceenv.core.renames import RenamedWarning

GROUP = "paceenv.commands"
USER_ERROR = 2

SUMMARIES = {
    "demo": "The guided tour: calibrate, train, compare, draw; results in runs/demo.",
    "simulate": "Run a job on a simulated cluster and print its step-time statistics.",
    "calibrate": "Fit a cluster config to a trace or to published numbers.",
    "analyse": "Recognise what lies in a folder, do what can be done with it, and say the next step.",
    "diagnose": "Say what a job loses against its ideal step, to whom, and why.",
    "whatif": "Predict a job after a change: other nodes, fabric, ranks, pacing; with intervals.",
    "report": "Write one page about a traced job: causes, pictures, other sizes, would pacing help.",
    "validate": "Hold the simulator against published numbers, line by line.",
    "train": "Train a pacing policy on the simulator (PPO of Stable-Baselines3).",
    "tailor": "Train a policy for one job, from its trace or cluster; say whether pacing helps it.",
    "sweep": "Try many settings or hyperparameters on Ray; resumable, on one machine or a cluster.",
    "evaluate": "Compare policies on a suite of clusters, with confidence intervals.",
    "explain": "Show what a policy does: its settings over what it sees, a timeline of ranks.",
    "score": "Score an agent by the leaderboard's fixed protocol.",
    "leaderboard": "Check and merge the scores of a folder into one table.",
    "dataset": "Make offline data sets in Minari's format, and learn a policy from one.",
    "policy": "Share a policy on the Hugging Face Hub, with its card.",
    "scores": "Rebuild SCORES.md from the committed configs.",
    "live": "Run a training job with the agent, and look at it: status, summary, trace, prediction.",
    "testbed": "Real jobs on network namespaces of this machine; the closed loop from trace to canary.",
}
"""One line each, kept here so that ``paceenv --help`` need not import the commands."""
EXTRAS = {
    "analyse": "sim",
    "diagnose": "sim",
    "trainers": "train",
    "live": "live",
    "testbed": "testbed",
    "sweep": "sweep",
}
"""The extra that a command needs, by its name or else by its package; all others need ``sim``."""


class _Notes(logging.Handler):
    """What the engine has to say, a line each on the error stream."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"paceenv: {record.getMessage()}", file=sys.stderr)


def main() -> None:
    """Entry point of the command line; exit code 2 for errors that the user can fix."""
    warnings.showwarning = _show_warning
    engine = logging.getLogger("paceenv.engine")
    engine.addHandler(_Notes())
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


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A renamed option or key is one line; any other warning is printed as Python prints it."""
    if issubclass(category, RenamedWarning):
        print(f"paceenv: warning: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code."""
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if asks_for_completion(arguments):
        from paceenv.cli.completion import complete

        complete(arguments, commands, SUMMARIES)
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        _print_help(sorted(commands, key=lambda name: (list(SUMMARIES).index(name) if name in SUMMARIES else 99, name)))
        return 0
    if arguments[0] in {"-V", "--version"}:
        print(f"paceenv {__version__}")
        return 0
    name, *rest = arguments
    if name not in commands and (Path(name).exists() or (glob.has_magic(name) and glob.glob(name, recursive=True))):
        name, rest = "analyse", arguments
    if name not in commands:
        close = difflib.get_close_matches(name, commands, 1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(commands))}"
        raise InputError(f"no command {name}{hint}")
    return _run_command(commands[name], rest)


def asks_for_completion(arguments: list[str]) -> bool:
    """Whether this call is about completion by the shell, and runs no command."""
    return "_PACEENV_COMPLETE" in os.environ or arguments[:1] in (["--install-completion"], ["--show-completion"])


def _run_command(entry: EntryPoint, arguments: list[str]) -> int:
    import typer

    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(entry.name) or EXTRAS.get(entry.value.split(".")[1], "sim")
        if error.name and error.name.split(".")[0] == "paceenv":
            raise
        raise needs(f"paceenv {entry.name}", error.name, extra) from None
    if isinstance(command, typer.Typer):
        application = command
    else:
        application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        application.command()(command)
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


def _print_help(names: list[str]) -> None:
    print("Usage: paceenv COMMAND [OPTIONS]\n")
    print("A testbed for tuning the pacing of synchronous training jobs: calibrate a simulator to a cluster,")
    print("train and compare pacing policies on it, and learn whether pacing helps there at all.\n")
    print("Commands:")
    for name in names:
        print(f"  {name:<10} {SUMMARIES.get(name, '')}")
    print("\n  paceenv PATH recognises what lies there (analyse).")
    print("  paceenv COMMAND --help explains a command. First steps: paceenv demo")
    print("  paceenv --install-completion lets the shell complete commands and options.")
