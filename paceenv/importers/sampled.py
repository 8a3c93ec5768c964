"""Reads a trace in the project's own format in bounded memory: of a long one only blocks of consecutive steps."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from paceenv.core.trace import Trace, iter_batches, open_parquet, read_metadata, read_trace

BLOCKS: Final = 4
"""Blocks of consecutive steps kept of a longer trace, so that correlation between steps stays visible."""


def read_capped(path: Path, max_rows: int | None) -> tuple[Trace, str]:
    """A trace, and a note on what was left out, or "".

    Args:
        path: a Parquet file in the project's schema.
        max_rows: rows to keep at most; None: all.

    Raises:
        InputError: the file is damaged or no such trace.
    """
    if max_rows is not None:
        with open_parquet(path) as file:
            rows = file.metadata.num_rows
        if rows > max_rows:
            return _sample(path, rows, max_rows)
    return read_trace(path), ""


def _sample(path: Path, rows: int, max_rows: int) -> tuple[Trace, str]:
    """Blocks of steps at even distances, together at most ``max_rows`` rows."""
    low_K, high_K = _ranges(path)
    low, high = int(low_K.min()), int(high_K.max())
    kept = max(int((high - low + 1) * max_rows / rows / BLOCKS), 2)  # steps a block
    starts = np.linspace(low, max(high + 1 - kept, low), BLOCKS).astype(np.int64)
    needed_K = ((low_K[:, None] < starts + kept) & (high_K[:, None] >= starts)).any(axis=1)
    batches = []
    for batch in iter_batches(path, row_groups=np.flatnonzero(needed_K).tolist()):
        iteration = np.asarray(batch.column("iteration"))
        at = np.searchsorted(starts, iteration, side="right") - 1
        keep = (at >= 0) & (iteration < starts[np.maximum(at, 0)] + kept)
        if keep.any():
            batches.append(batch.filter(pa.array(keep)))
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    note = f"{path}: {rows} rows; looked at {BLOCKS} blocks of {kept} steps each, {table.num_rows} rows"
    return Trace(table, read_metadata(path)), note


def _ranges(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last iteration of each of the file's row groups, from its own statistics where it has them."""
    with open_parquet(path) as file:
        column, found = file.schema_arrow.names.index("iteration"), []
        for group in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(group).column(column).statistics
            if statistics is None or not statistics.has_min_max:
                values = np.asarray(file.read_row_group(group, columns=["iteration"])["iteration"])
                found.append((int(values.min()), int(values.max())))
            else:
                found.append((int(statistics.min), int(statistics.max)))
    edges = np.array(found, np.int64)
    return edges[:, 0], edges[:, 1]
