"""Which format a file has, by its content and never by its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from paceenv.core.errors import InputError
from paceenv.core.trace import METADATA_KEY, open_parquet
from paceenv.importers.nccl_inspector import is_inspector
from paceenv.importers.packed import head_of
from paceenv.importers.plain_pickle import is_pickle
from paceenv.importers.straggler import COLUMNS as STRAGGLER_COLUMNS

Format = Literal["paceenv trace", "straggler trace", "profile", "flight recorder", "nccl inspector", "text"]
ALLOWED: Final = (
    "allowed: Parquet (a paceenv or straggler trace), JSON of the PyTorch profiler, dumps of its Flight Recorder, one "
    "file per rank, JSON of NCCL Inspector, the output of nccl-tests, or a log with step times"
)
_NO_JSON: Final = re.compile(r"\{'|\[(?!\s*[{\]])")
"""Beginnings of logs: Python's dictionaries, and tags or time stamps in brackets."""
_PROFILE_KEYS: Final = re.compile(r'"(?:traceEvents|ph|schemaVersion|deviceProperties|distributedInfo)"')
_DUMP_KEYS: Final = re.compile(r'"(?:pg_config|pg_status|nccl_version|record_id|comm_lib_version)"')


def find_format(path: str | Path) -> Format:
    """The format of a file. Raises InputError if it is none of these; text may still turn out to be foreign."""
    head = head_of(Path(path))
    if head[:4] == b"PAR1":
        return "paceenv trace" if detect_format(path) == "paceenv" else "straggler trace"
    if is_pickle(head):
        return "flight recorder"
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if text[:1] == "{" and '"traceEvents"' not in text and is_inspector(text):
        return "nccl inspector"
    if text[:1] in {"{", "["} and not _is_log(text):
        if '"traceEvents"' not in text and ('"entries"' in text or _DUMP_KEYS.search(text)):
            return "flight recorder"
        return "profile" if _PROFILE_KEYS.search(text) else "text"
    if not text or "\0" in text:
        raise InputError(f"{path}: {'unknown format' if text else 'empty'}; {ALLOWED}")
    return "text"


def _is_log(head: str) -> bool:
    """Whether what begins like JSON is a log: lines in brackets, JSON lines, or the state of a trainer."""
    if _NO_JSON.match(head) or '"log_history"' in head:
        return True
    first, end, rest = head.partition("\n")
    return bool(end) and first.rstrip().endswith("}") and rest[:1] == "{" and '"traceEvents"' not in first


def detect_format(path: str | Path) -> Literal["paceenv", "straggler"]:
    """Which format a Parquet file has, by its schema. Raises InputError that names what was found instead."""
    with open_parquet(path) as file:
        schema = file.schema_arrow
    if METADATA_KEY in (schema.metadata or {}):
        return "paceenv"
    if set(STRAGGLER_COLUMNS) <= set(schema.names):
        return "straggler"
    raise InputError(
        f"{path}: unknown trace format with columns {schema.names}; allowed: a paceenv trace (metadata "
        f"{METADATA_KEY.decode()!r}) or a straggler trace (columns {list(STRAGGLER_COLUMNS)})"
    )
