"""Where machine code is kept between runs, for everything that Numba compiles here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba


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
    settings.CACHE_DIR = str(directory) if writable else before
    try:
        yield writable
    finally:
        settings.CACHE_DIR = before
