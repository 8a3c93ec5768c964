"""Shell completion of ``paceenv``: Typer's own, over commands that are found by entry point."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint

import typer

PROGRAM = "paceenv"
_WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Environment variables with the line that the shell completes."""
_NO_DETECTION = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""Typer takes the name of a shell only where this is set; else it looks for the one that runs."""


def complete(arguments: Sequence[str], commands: Mapping[str, EntryPoint], summaries: Mapping[str, str]) -> None:
    """Answer the shell, or install or print the script for it; ends the process.

    Only the command on the line is imported, so that the names of all commands come at once.

    Args:
        arguments: of ``paceenv``.
    """
    if len(arguments) > 1:
        os.environ[_NO_DETECTION] = "1"
    words = " ".join(os.environ.get(name, "") for name in _WORDS).split()
    application = typer.Typer(add_completion=True, no_args_is_help=True)
    application.callback()(lambda: None)
    for name, entry in commands.items():
        if name not in words:
            application.command(name, help=summaries.get(name, ""))(_nothing)
            continue
        try:
            command = entry.load()
        except ModuleNotFoundError:  # an extra that is not installed
            continue
        if isinstance(command, typer.Typer):
            application.add_typer(command, name=name)
        else:
            application.command(name)(command)
    application(args=list(arguments), prog_name=PROGRAM)


def _nothing() -> None:
    """In place of a command that is not on the line."""
