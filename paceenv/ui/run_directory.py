"""Folders that one process at a time works in, and differences between an old request and a new one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError, short_repr

LOCK = ".lock"


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Make a folder and lock it; it goes with the process, however it ends. Raises InputError where it is held."""
    from filelock import FileLock, Timeout  # an extra that only sweeps need

    try:
        held = FileLock(prepare_folder(path) / LOCK, blocking=False).acquire()
    except Timeout:
        raise InputError(f"{path}: another {what} is at work there; allowed: another folder") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be locked: {error.strerror}") from None
    with held:
        yield


def first_difference(theirs: Any, mine: Any, where: str = "") -> str:
    """The first key in which two trees of plain data differ, with both values; empty if they are equal."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        inside = [(key, theirs.get(key), mine.get(key)) for key in sorted({*theirs, *mine})]
    elif isinstance(theirs, list) and isinstance(mine, list) and len(theirs) == len(mine):
        inside = [(str(i), *both) for i, both in enumerate(zip(theirs, mine, strict=True))]
    else:
        return "" if theirs == mine else f"{where} = {short_repr(theirs)}, now {short_repr(mine)}"
    differences = (first_difference(a, b, f"{where}.{key}" if where else key) for key, a, b in inside)
    return next(filter(None, differences), "")


def prepare_folder(path: Path) -> Path:
    """``path`` as a folder that can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be made a folder: {error.strerror}") from None
    return path
