"""Which format a file has, by its content and never by its name."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from paceenv.core.errors import InputError
from paceenv.core.trace import METADATA_KEY, open_parquet
from paceenv.importers.packed import head_of
from paceenv.importers.plain_pickle import is_pickle
from paceenv.importers.straggler import COLUMNS as STRAGGLER_COLUMNS

Format = Literal["paceenv trace", "straggler trace", "profile", "flight recorder", "text"]
ALLOWED: Final = (
    "allowed: Parquet (a paceenv or straggler trace), JSON of the PyTorch profiler, dumps of its Flight Recorder, one "
    "file per rank, output of nccl-tests, a log whose lines name a step and its time (as in "
    "'step: 10 time: 0.4 s'), a progress bar, CSV or JSON lines with a column such as step_time, or any other log with "
    "--pattern 'step (?P<step>\\d+).*time: (?P<ms>[\\d.]+)'"
)
_NO_JSON: Final = re.compile(r"\{'|\[(?!\s*[{\]])")
"""Beginnings of logs: Python's dictionaries, and tags or time stamps in brackets."""
_PROFILE_KEYS: Final = re.compile(r'"(?:traceEvents|ph|schemaVersion|deviceProperties|distributedInfo)"')
_DUMP_KEYS: Final = re.compile(r'"(?:pg_config|pg_status|nccl_version|record_id|comm_lib_version)"')


def find_format(path: str | Path) -> Format:
    """The format of a file. Raises InputError if it is none of these; text may still turn out to be foreign."""
    head = head_of(Path(path))
    if head[:4] == b"PAR1":
        with open_parquet(path) as file:
            schema = file.schema_arrow
        if METADATA_KEY in (schema.metadata or {}):
            return "paceenv trace"
        if set(STRAGGLER_COLUMNS) <= set(schema.names):
            return "straggler trace"
        raise InputError(
            f"{path}: unknown trace format with columns {schema.names}; allowed: a paceenv trace (metadata "
            f"{METADATA_KEY.decode()!r}) or a straggler trace (columns {list(STRAGGLER_COLUMNS)})"
        )
    if is_pickle(head):
        return "flight recorder"
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if text[:1] in {"{", "["} and not _is_log(text):
        if '"traceEvents"' not in text and ('"entries"' in text or _DUMP_KEYS.search(text)):
            return "flight recorder"
        return "profile" if _PROFILE_KEYS.search(text) else "text"
    is_page = text[:14].lower().startswith(("<!doctype html", "<html"))
    if not text or "\0" in text or is_page:
        raise InputError(f"{path}: {'an HTML page' if is_page else 'unknown format' if text else 'empty'}; {ALLOWED}")
    return "text"


def _is_log(head: str) -> bool:
    """Whether what begins like JSON is a log: lines in brackets, JSON lines, or the state of a trainer."""
    if _NO_JSON.match(head) or '"log_history"' in head:
        return True
    first, end, rest = head.partition("\n")
    return bool(end) and first.rstrip().endswith("}") and rest[:1] == "{" and '"traceEvents"' not in first


MAX_FILES: Final = 20_000
MAX_DEPTH: Final = 8
"""Folders below one that is named; what lies deeper is not looked at."""
_NUMBER: Final = re.compile(r"(\d+)")


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """Regular files, each once, numbers in names in their order; hidden files and linked folders are left out.

    Args:
        paths: files, folders (up to MAX_DEPTH deep) and patterns (``*``, ``?``, ``[ab]``, ``**``).

    Raises InputError: nothing is there, or there are more than MAX_FILES.
    """
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        for file in _files_of(path):
            files[file] = None
            if len(files) > MAX_FILES:
                raise InputError(f"{path}: more than {MAX_FILES} files; allowed: a folder or pattern with fewer")
    if not files:
        named = ", ".join(map(str, paths)) or "none given"
        raise InputError(f"{named}: no file; allowed: at least one file")
    return list(files)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return [path]
    if path.exists():
        raise InputError(f"{path}: is no regular file; allowed: files, folders and patterns")
    if not glob.has_magic(str(path)):
        raise InputError(f"{path}: no such file or folder")
    matches = sorted(map(Path, glob.iglob(str(path), recursive=True)), key=lambda path: _numbered(str(path)))
    files = [match for match in matches if match.is_file()]
    files += [file for match in matches if match.is_dir() and "**" not in path.parts for file in _in_folder(match)]
    if not files:
        raise InputError(f"{path}: no file has such a name")
    return files


def _in_folder(folder: Path) -> list[Path]:
    files: list[Path] = []
    for at, folders, names in os.walk(folder):
        deep = len(Path(at).relative_to(folder).parts) >= MAX_DEPTH
        folders[:] = [] if deep else sorted((name for name in folders if name[0] != "."), key=_numbered)
        paths = (Path(at, name) for name in sorted(names, key=_numbered) if name[0] != ".")
        files += [path for path in paths if path.is_file()]
        if len(files) > MAX_FILES:
            break
    return files


def _numbered(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if k % 2 else (-1, part) for k, part in enumerate(_NUMBER.split(text[:4000]))]
