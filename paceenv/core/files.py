"""Writing files whole or not at all: to a temporary file beside the target, then renamed over it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from paceenv.core.errors import InputError


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` to ``path``, making its folder; on any failure the old file stays and nothing else is left.

    What the system refuses (no permission, disk full) is an :class:`InputError`.
    """
    with open_whole(path) as file:
        file.write(content)


@contextmanager
def open_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """As :func:`write_whole` for content that comes piece by piece: a file that replaces ``path`` on a clean exit."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None
        raise
