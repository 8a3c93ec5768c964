"""Other trace formats, converted to :mod:`paceenv.trace`; one module per format."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from paceenv.errors import InputError
from paceenv.importers.straggler import COLUMNS as STRAGGLER_COLUMNS
from paceenv.importers.straggler import import_straggler
from paceenv.trace import METADATA_KEY, Trace, open_parquet, read_trace

__all__ = ["detect_format", "import_straggler", "load_trace"]


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


def load_trace(path: str | Path) -> Trace:
    """Read a trace of any known format. Raises InputError if it is none or damaged."""
    return read_trace(path) if detect_format(path) == "paceenv" else import_straggler(path)
