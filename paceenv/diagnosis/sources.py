"""Reads what is to be diagnosed, in bounded memory: of a long trace only blocks of consecutive steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from paceenv.diagnosis.cells import Cells, read_cells
from paceenv.importers import detect_format, load_traces, sniff
from paceenv.trace import Trace, iter_batches, open_parquet, read_metadata

MOST_ROWS: Final = 4_000_000
"""Rows of a trace in memory; about half a gigabyte."""
BLOCKS: Final = 8
"""Blocks of consecutive steps that a longer trace is cut down to, so that memory from step to step stays visible."""


def read_sources(
    paths: Sequence[Path], job: str | None = None, *, most_rows: int = MOST_ROWS
) -> tuple[Cells, tuple[str, ...]]:
    """The matrix of a job from its trace files, and lines on what was left out or is damaged. Raises InputError."""
    if len(paths) == 1 and sniff(paths[0]) == "parquet" and detect_format(paths[0]) == "paceenv":
        with open_parquet(paths[0]) as file:
            rows = file.metadata.num_rows
        if rows > most_rows:
            trace, note = _sample(paths[0], rows, most_rows)
            return read_cells(trace, job=job), (note,)
    trace, notes = load_traces(paths)
    return read_cells(trace, job=job), notes


def _sample(path: Path, rows: int, most_rows: int) -> tuple[Trace, str]:
    """Blocks of steps at even distances, together at most ``most_rows`` rows."""
    low, high = _range(path)
    kept = max(int((high - low + 1) * most_rows / rows / BLOCKS), 2)  # steps a block
    starts = np.linspace(low, max(high + 1 - kept, low), BLOCKS).astype(np.int64)
    batches = []
    for batch in iter_batches(path):
        iteration = np.asarray(batch.column("iteration"))
        at = np.searchsorted(starts, iteration, side="right") - 1
        keep = (at >= 0) & (iteration < starts[np.maximum(at, 0)] + kept)
        if keep.any():
            batches.append(batch.filter(pa.array(keep)))
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    note = f"{path}: {rows} rows; looked at {BLOCKS} blocks of {kept} steps each, {table.num_rows} rows"
    return Trace(table, read_metadata(path)), note


def _range(path: Path) -> tuple[int, int]:
    """First and last iteration, from the file's own statistics where it has them."""
    with open_parquet(path) as file:
        column = file.schema_arrow.names.index("iteration")
        found: list[NDArray[np.int64]] = []
        for group in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(group).column(column).statistics
            if statistics is None or not statistics.has_min_max:
                values = np.asarray(file.read_row_group(group, columns=["iteration"])["iteration"])
                found.append(np.array([values.min(), values.max()], np.int64))
            else:
                found.append(np.array([statistics.min, statistics.max], np.int64))
    edges = np.concatenate(found)
    return int(edges.min()), int(edges.max())
