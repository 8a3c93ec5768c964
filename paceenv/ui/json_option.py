"""The option ``--json`` of all commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.core.errors import InputError


def _no_input(where: str | None) -> str | None:
    """No input is replaced: ``--json A B`` takes A as the file to write, and somebody may have meant to read it."""
    if where is not None and Path(where).is_dir():
        raise InputError(f"--json {where}: is a folder; allowed: a file, or '-' for the screen")
    if where is None or not Path(where).is_file():  # a device or a pipe has nothing to lose
        return where
    try:
        with Path(where).open("rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise InputError(f"--json {where}: {error.strerror}") from None
    foreign = any(key in head for key in (b'"traceEvents"', b'"schemaVersion"', b'"log_history"', b'"pg_config"'))
    if foreign or (head and not head.startswith((b'{\n  "', b"[\n"))):  # as answers begin
        raise InputError(f"--json {where}: is there, and no such answer; allowed: a new file, or '-' for the screen")
    return where


JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", help="Write the result as JSON to this file, or to standard output with '-'.", callback=_no_input
    ),
]
