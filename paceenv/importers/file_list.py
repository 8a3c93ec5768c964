"""Files behind what a user names: files, folders with everything in them, and patterns such as ``rank*.json``."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceenv.core.errors import InputError

MAX_FILES: Final = 20_000
MAX_DEPTH: Final = 8
"""Folders below one that is named; what lies deeper is not looked at."""
_NUMBER: Final = re.compile(r"(\d+)")


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """Regular files, each once, numbers in names in their order; hidden files and linked folders are left out.

    Args:
        paths: files, folders (up to MAX_DEPTH deep) and patterns (``*``, ``?``, ``[ab]``, ``**``).

    Raises:
        InputError: nothing is there, or there are more than MAX_FILES.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        for file in _files_of(path):
            found[file] = None
            if len(found) > MAX_FILES:
                raise InputError(f"{path}: more than {MAX_FILES} files; allowed: a folder or pattern with fewer")
    if not found:
        named = ", ".join(map(str, paths)) or "none given"
        raise InputError(f"{named}: no file; allowed: at least one file")
    return list(found)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return [path]
    if path.exists():
        raise InputError(f"{path}: is no regular file; allowed: files, folders and patterns")
    if not glob.has_magic(str(path)):
        raise InputError(f"{path}: no such file or folder")
    matches = sorted(map(Path, glob.iglob(str(path), recursive=True)), key=in_order)
    files = [file for match in matches for file in ([match] if match.is_file() else [])]
    files += [file for match in matches if match.is_dir() and "**" not in path.parts for file in _in_folder(match)]
    if not files:
        raise InputError(f"{path}: no file has such a name")
    return files


def _in_folder(folder: Path) -> list[Path]:
    found: list[Path] = []
    for at, folders, names in os.walk(folder):
        deep = len(Path(at).relative_to(folder).parts) >= MAX_DEPTH
        folders[:] = [] if deep else sorted((name for name in folders if name[0] != "."), key=_numbered)
        paths = (Path(at, name) for name in sorted(names, key=_numbered) if name[0] != ".")
        found += [path for path in paths if path.is_file()]
        if len(found) > MAX_FILES:
            break
    return found


def in_order(path: Path) -> list[tuple[int, str]]:
    """A key to sort paths by, numbers by their value."""
    return _numbered(str(path))


def _numbered(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if k % 2 else (-1, part) for k, part in enumerate(_NUMBER.split(text[:4000]))]
