"""The matrix of a job from whatever files hold its trace, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceenv.diagnosis.clocks import on_one_clock
from paceenv.diagnosis.operation_matrix import OperationMatrix, read_matrix
from paceenv.importers.inputs import read_inputs

MAX_ROWS: Final = 2_000_000
"""Rows of a trace in memory; with everything computed from them less than a gigabyte."""


def read_sources(
    paths: Sequence[Path], job: str | None = None, *, max_rows: int = MAX_ROWS
) -> tuple[OperationMatrix, tuple[str, ...]]:
    """The matrix of a job, and notes on what was left out, skipped or is damaged.

    Args:
        paths: files, folders and patterns.
        job: the job's name; needed where the trace holds several.
        max_rows: rows to read at most.

    Raises:
        InputError: no trace is there, or it holds no such job.
    """
    found = read_inputs(paths, max_rows=max_rows)
    matrix, note = on_one_clock(read_matrix(found.require_trace(), job=job))
    return matrix, (*found.notes, note) if note else found.notes
