"""Every command with its arguments and options, from the Typer applications of the entry points."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from paceenv.cli.application import SUMMARIES
from site_pages.markdown import plain, table

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
GROUP = "paceenv.commands"


def commands() -> Iterator[tuple[str, Any]]:
    """Name and command of every console command, the most used ones first, each followed by its own subcommands."""
    entries = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    order = list(SUMMARIES)
    for name in sorted(entries, key=lambda name: (order.index(name) if name in order else len(order), name)):
        module, _, attribute = entries[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            application = typer.Typer(add_completion=False)
            application.command()(found)
            found = application
        yield from _with_subcommands(f"paceenv {name}", typer.main.get_command(found))


def _with_subcommands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for sub, inner in getattr(command, "commands", {}).items():
        yield from _with_subcommands(f"{name} {sub}", inner)


def help_and_examples(command: Any) -> tuple[str, list[str]]:
    """The help of a command without its examples, and the examples as command lines."""
    text, _, examples = (command.help or "").partition("Examples:")
    lines = re.split(r"\s+--\s+(?=paceenv )|\n\n", examples)
    return text.strip(), [" ".join(line.split()) for line in lines if line]


def _allowed(kind: Any) -> str:
    choices = getattr(kind, "choices", None)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    if low is not None or high is not None:
        return (
            f"{low} to {high}"
            if low is not None and high is not None
            else f"from {low}"
            if low is not None
            else f"to {high}"
        )
    return {"path": "a path", "integer": "a whole number", "float": "a number", "boolean": "a switch"}.get(
        kind.name, ""
    )


def _row(parameter: Any) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}{'...' if parameter.nargs == -1 else ''}`"
    default = parameter.default
    shown = "required" if parameter.required else "" if default in (None, False, [], ()) else f"`{default}`"
    return names, _allowed(parameter.type), shown, plain(getattr(parameter, "help", "") or "")


def _section(name: str, command: Any) -> list[str]:
    text, examples = help_and_examples(command)
    lines = [f"{'#' * (len(name.split()))} {name}", "", plain(text), ""]
    if examples:
        lines += ["```sh", *examples, "```", ""]
    rows = [_row(p) for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    return [*lines, *(table(("argument or option", "allowed", "default", "meaning"), rows) if rows else []), ""]


def every_command() -> str:
    """One section for each command and subcommand."""
    return "\n".join(line for name, command in commands() for line in _section(name, command))


MAKERS = {"commands": every_command}
