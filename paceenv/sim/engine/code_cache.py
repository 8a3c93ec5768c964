"""Where machine code is kept between runs, for everything that Numba compiles here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numba

KEPT: Final = 8
"""Versions of the engine whose machine code stays: those that were used last."""


def base_directory() -> Path:
    """``$PACEENV_CACHE_DIR``, or a folder in the user's cache."""
    return Path(
        os.environ.get("PACEENV_CACHE_DIR")
        or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "paceenv")
    )


@contextmanager
def numba_cache(directory: Path) -> Iterator[bool]:
    """Point Numba's cache at ``directory`` while functions are declared; yields whether it can be written."""
    settings: Any = numba.config  # its attributes are set at import, by name
    before = settings.CACHE_DIR
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError:
        writable = False
    if writable:
        _keep_newest(directory)
    settings.CACHE_DIR = str(directory) if writable else before
    try:
        yield writable
    finally:
        settings.CACHE_DIR = before


def _keep_newest(version: Path) -> None:
    """Note that this version is used, and remove the oldest; a process that still runs one of those compiles again."""
    with suppress(OSError):
        os.utime(version)
        versions = sorted(version.parent.glob("[0-9a-f]" * 16), key=lambda one: one.stat().st_mtime)
        for old in versions[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
