"""Other trace formats, converted to :mod:`paceenv.core.trace`; one module per format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from paceenv.core.errors import InputError
from paceenv.core.trace import METADATA_KEY, Trace, open_parquet, read_trace
from paceenv.importers import flight_recorder, kineto
from paceenv.importers.flight_recorder import import_flight_recorder
from paceenv.importers.kineto import import_kineto
from paceenv.importers.merge_ranks import merge_timelines
from paceenv.importers.packed import head_of
from paceenv.importers.plain_pickle import is_pickle
from paceenv.importers.straggler import COLUMNS as STRAGGLER_COLUMNS
from paceenv.importers.straggler import import_straggler

__all__ = ["Format", "detect_format", "import_straggler", "load_trace", "load_traces", "sniff"]

Format = Literal["parquet", "kineto", "flight recorder"]
_NCCL_TESTS: Final = re.compile(r"^#\s+size\s+count\s+type\b", re.MULTILINE)


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
    """Read a trace of any known format in Parquet. Raises InputError if the file is damaged or no trace."""
    return read_trace(path) if detect_format(path) == "paceenv" else import_straggler(path)


def sniff(path: str | Path) -> Format:
    """The kind of a file, by its first bytes. Raises InputError with advice for any other."""
    head = head_of(Path(path))
    if head[:4] == b"PAR1":
        return "parquet"
    if is_pickle(head):
        return "flight recorder"
    text = head.decode("utf-8", "replace")
    if text.lstrip("\ufeff \t\r\n")[:1] in {"{", "["}:
        return "flight recorder" if '"entries"' in text and '"traceEvents"' not in text else "kineto"
    if _NCCL_TESTS.search(text):
        raise InputError(f"{path}: a bandwidth table of nccl-tests, no trace; allowed: paceenv calibrate {path}")
    raise InputError(
        f"{path}: unknown format; allowed: Parquet (a paceenv or straggler trace), JSON of the PyTorch profiler, or "
        "dumps of its Flight Recorder, one file per rank"
    )


def load_traces(paths: Sequence[str | Path]) -> tuple[Trace, tuple[str, ...]]:
    """Read one trace from one file, or from one file per rank; and notes on what is damaged in them.

    Raises InputError if files cannot be read at all, do not belong together, or are of a format with one file per job.
    """
    formats = {path: sniff(path) for path in dict.fromkeys(map(Path, paths))}
    kinds = set(formats.values())
    if not kinds:
        raise InputError("traces: none given; allowed: at least one file")
    if len(kinds) > 1:
        named = ", ".join(f"{path} is {kind}" for path, kind in list(formats.items())[:4])
        raise InputError(f"traces of different formats: {named}; allowed: one format")
    files = list(formats)
    if kinds == {"parquet"}:
        if len(files) > 1:
            raise InputError(
                f"{len(files)} Parquet files; allowed: one, which has all ranks (paceenv live trace merges)"
            )
        return load_trace(files[0]), ()
    read, source = (
        (import_kineto, kineto.SOURCE) if kinds == {"kineto"} else (import_flight_recorder, flight_recorder.SOURCE)
    )
    found = [read(path) for path in files]
    name = files[0].parent.resolve().name or "job"
    trace = merge_timelines([timeline for timeline, _ in found], name, source)
    return trace, tuple(note for _, note in found if note)
