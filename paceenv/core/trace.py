"""The trace (contract 3): one Parquet schema of what every rank did when, one row per operation.

The simulator and ``live`` write it; importers make it from other formats. Calibration, diagnosis and the reports read
it. It needs numpy and pyarrow only. Facts that do not change during a job (where a rank is, its data-parallel rank and
stage) are in the metadata of the file, not in the rows.

Times are seconds on one clock per job; for a collective they are entry and exit. ``seq`` orders the operations of one
rank within one iteration; operations may overlap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from paceenv.core.errors import InputError, out_of_range
from paceenv.core.files import check_file_name, open_atomic
from paceenv.core.lateness.watch import COMMON_END

SCHEMA_VERSION: Final = 3
"""Of the files that are written. Columns with a default may be missing in a file."""
METADATA_KEY: Final = b"paceenv.trace"

_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA: Final = pa.schema(
    [
        ("job", _TEXT),
        ("rank", pa.int32()),
        ("iteration", pa.int32()),
        ("seq", pa.int32()),
        ("op", _TEXT),
        ("group", pa.int32()),  # process group of a collective, -1 none
        ("micro_batch", pa.int32()),  # -1 none
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("bytes", pa.int64()),  # 0 unknown or none; of an all-gather all outputs, of a reduce-scatter all inputs
        ("chunk", pa.int32()),  # model chunk of an interleaved pipeline, -1 none
        ("peer", pa.int32()),  # rank at the other end of a send or receive, -1 unknown or none
    ]
)
_TEXT_COLUMNS = [field.name for field in SCHEMA if field.type == _TEXT]
_DEFAULTS = {"group": -1, "micro_batch": -1, "bytes": 0, "chunk": -1, "peer": -1}

# The vocabulary of ``op``. Other names are allowed; readers treat them like OTHER_OPS.
COMPUTE_OPS: Final = ("compute", "forward-compute", "backward-compute")
PACE_OP: Final = "pace"  # a delay the rank took by its own choice
COLLECTIVE_OPS: Final = (
    *COMMON_END,
    "gather",
    "grads-reduce-scatter",
    "separate-grads-all-reduce",
    "params-all-gather",
    "embedding-grads-all-reduce",
    "layernorm-grads-all-reduce",
)
POINT_TO_POINT_OPS: Final = ("send", "recv", "forward-send", "forward-recv", "backward-send", "backward-recv")
OTHER_OPS: Final = ("optimizer", "optimizer-clip-main-grad", "gc", "checkpoint", "restart")
INTERRUPTIONS: Final = ("gc", "checkpoint", "restart", "evaluation")
"""What makes an iteration long for a reason of its own."""

ROW_GROUP_ROWS: Final = 1 << 17
"""Rows the writer collects before it writes a row group, so that many small appends do not make a slow file."""


@dataclass(frozen=True)
class TraceMetadata:
    """What is constant over a trace.

    ``job``: free description (name, sizes, configuration). ``ranks``: one mapping per rank with an integer ``rank``
    and, where known, ``dp_rank``, ``stage``, ``host``, ``device`` and other locality. ``source``: the program that made
    the trace.
    """

    job: Mapping[str, Any]
    ranks: tuple[Mapping[str, Any], ...]
    source: str

    def of_ranks(self, key: str, default: Any = None) -> dict[int, Any]:
        """The entry ``key`` of every rank, by rank.

        Args:
            key: of the entry.
            default: for ranks that do not have it.
        """
        return {entry["rank"]: entry.get(key, default) for entry in self.ranks}

    def to_json(self) -> str:
        """The text stored under the file's metadata key, schema version included."""
        content = {"schema_version": SCHEMA_VERSION, "job": self.job, "ranks": self.ranks, "source": self.source}
        return json.dumps(content, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "trace metadata") -> TraceMetadata:
        """Parse :meth:`to_json`. Raises InputError, naming ``where``, if it is malformed or of a newer version.

        Args:
            text: JSON.
            where: name of the file, for the error.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise InputError(f"{where}: metadata is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise out_of_range("metadata", content, "a JSON object", where)
        version = content.get("schema_version")
        if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
            raise out_of_range("schema_version", version, f"1 to {SCHEMA_VERSION} (newer: upgrade paceenv)", where)
        job, ranks, source = (content.get(name) for name in ("job", "ranks", "source"))
        are_ranks = isinstance(ranks, list) and all(isinstance(r, dict) and type(r.get("rank")) is int for r in ranks)
        if not (isinstance(job, dict) and isinstance(ranks, list) and isinstance(source, str) and are_ranks):
            allowed = "job: an object; ranks: a list of objects, each with an integer 'rank'; source: a string"
            raise out_of_range("metadata", {"job": job, "ranks": ranks, "source": source}, allowed, where)
        return cls(job, tuple(ranks), source)


@dataclass(frozen=True)
class Trace:
    """A trace in memory: ``table`` has SCHEMA's columns, one chunk each."""

    table: pa.Table
    metadata: TraceMetadata

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, ArrayLike | pa.Array], metadata: TraceMetadata, where: str = "trace"
    ) -> Trace:
        """A trace from columns.

        Args:
            columns: as for :meth:`TraceWriter.append`.
            metadata: of the job.
            where: what errors name as the source.

        Raises:
            InputError: for columns that the schema does not allow.
        """
        return cls(pa.Table.from_batches([_to_batch(columns, 0, where)]), metadata)

    def column(self, name: str) -> NDArray[Any]:
        """One column as a NumPy array of one value per row; text columns as objects.

        Args:
            name: of the column.
        """
        column = self.table[name]
        return np.asarray(column.cast(pa.string()) if column.type == _TEXT else column)

    def isin(self, name: str, *values: str) -> NDArray[np.bool_]:
        """Which rows have one of ``values`` in a text column, ``(rows,)``, without unpacking the text.

        Args:
            name: of the column.
        """
        return np.asarray(pc.is_in(self.table[name], value_set=pa.array(values, pa.string())))

    def job_name(self, job: str | None) -> str:
        """The job's name, the only one's if ``job`` is None. Raises InputError if it is not there or must be named.

        Args:
            job: what the user named; None for nothing.
        """
        names = sorted(self.table["job"].unique().to_pylist())
        if job is None and len(names) == 1:
            job = names[0]
        if job is None or job not in names:
            raise InputError(f"trace: job = {job!r}; allowed: one of {names}")
        return job


class TraceWriter:
    """Stream a trace to ``path``: a context manager that leaves a whole file or no file.

    Raises InputError if the file cannot be written, the disk is full, or rows do not fit the schema.

    Args:
        path: of the file.
        metadata: about job and ranks.
    """

    def __init__(self, path: str | Path, metadata: TraceMetadata) -> None:
        self._path = Path(path)
        check_file_name(self._path)
        self._schema = SCHEMA.with_metadata({METADATA_KEY: metadata.to_json().encode()})
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._rows = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            file = stack.enter_context(open_atomic(self._path))
            self._writer = stack.enter_context(pq.ParquetWriter(file, self._schema, compression="zstd"))
            self._open = stack.pop_all()
        return self

    def append(self, columns: Mapping[str, ArrayLike | pa.Array] | pa.RecordBatch) -> None:
        """Add rows: ``start_s`` with one value per row, every other column with as many values or one for all.

        ``group``, ``micro_batch``, ``chunk``, ``peer`` (-1) and ``bytes`` (0) may be left out. Raises InputError for
        missing, unknown or ill-typed columns, unequal lengths, for ``end_s < start_s``, and where the disk is full.

        Args:
            columns: by name.
        """
        if isinstance(columns, pa.RecordBatch):
            columns = dict(zip(columns.schema.names, columns.columns, strict=True))
        batch = _to_batch(columns, self._rows, str(self._path))
        self._rows += batch.num_rows
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        if self._pending_rows >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            table = pa.Table.from_batches(self._pending).unify_dictionaries()
            self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        self._pending, self._pending_rows = [], 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._open.__exit__(kind, error, traceback)
            return
        with self._open:
            self._flush()


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a whole trace.

    Args:
        trace: metadata and rows.
        path: the Parquet file; written whole or not at all, as by :class:`TraceWriter`.
    """
    with TraceWriter(path, trace.metadata) as writer:
        for batch in trace.table.to_batches():
            writer.append(batch)


def read_trace(path: str | Path, steps: Sequence[range] | None = None) -> Trace:
    """Read a trace, or some of its iterations.

    Raises InputError if the file is missing, truncated, not Parquet, not a trace, of a newer schema version, or if a
    row has nulls, non-finite times or ``end_s < start_s``.

    Args:
        path: of the file.
        steps: ranges of iterations; default: all.
    """
    where, iteration = str(path), pc.field("iteration")
    with open_parquet(path) as file:
        names, about = file.schema_arrow.names, file.schema_arrow.metadata or {}
    if METADATA_KEY not in about:
        raise InputError(f"{path}: not a paceenv trace: no metadata {METADATA_KEY.decode()!r}; columns {names}")
    metadata = TraceMetadata.from_json(about[METADATA_KEY], where)
    _check_names([*names, *(set(_DEFAULTS) - set(names))], where)
    wanted = [(iteration >= one.start) & (iteration < one.stop) for one in steps or ()]
    try:
        table = pq.read_table(
            path,
            columns=[name for name in SCHEMA.names if name in names],
            filters=reduce(or_, wanted) if wanted else None,
            partitioning=None,
            read_dictionary=_TEXT_COLUMNS,
        )
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{where}: damaged: {error}") from error
    for field in SCHEMA:
        if field.name not in names:
            table = table.append_column(field, _to_array(_DEFAULTS[field.name], field, table.num_rows, where))
        elif (found := table.schema.field(field.name).type) != field.type:
            raise out_of_range(f"type of column {field.name!r}", str(found), str(field.type), where)
    table = table.select(SCHEMA.names).cast(SCHEMA)
    _check_rows(table, 0, where)
    return Trace(table.unify_dictionaries().combine_chunks(), metadata)


def open_parquet(path: str | Path) -> pq.ParquetFile:
    """Open a Parquet file of any schema. Raises InputError with one line about the reason if it cannot be read.

    Args:
        path: of the file.
    """
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: {_why_unreadable(Path(path), error)}") from error


def _why_unreadable(path: Path, error: Exception) -> str:
    if not path.exists():
        return "no such file"
    if not path.is_file():
        return "not a file"
    with path.open("rb") as stream:
        head = stream.read(4)
    if head == b"PAR1":
        return f"truncated or damaged Parquet file ({error})"
    return "not a Parquet file" if head else "empty file"


def _check_names(names: list[str], where: str) -> None:
    missing, unknown = set(SCHEMA.names) - set(names), set(names) - set(SCHEMA.names)
    if missing or unknown or len(names) != len(set(names)):
        raise InputError(
            f"{where}: columns of a trace are {SCHEMA.names}; missing {sorted(missing)}, unknown {sorted(unknown)}"
        )


def _to_batch(given: Mapping[str, Any], first_row: int, where: str) -> pa.RecordBatch:
    """Columns as a checked record batch with SCHEMA."""
    columns = _DEFAULTS | dict(given)
    _check_names(list(columns), where)
    rows = np.size(columns["start_s"])
    batch = pa.record_batch([_to_array(columns[field.name], field, rows, where) for field in SCHEMA], schema=SCHEMA)
    _check_rows(batch, first_row, where)
    return batch


def _to_array(column: Any, field: pa.Field, rows: int, where: str) -> pa.Array:
    """``column`` as an Arrow array of the field's type and ``rows`` values; InputError if it is not."""
    try:
        if isinstance(column, str):
            array = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), [column])
        elif isinstance(column, pa.Array):
            array = column.cast(field.type)
        elif field.type == _TEXT:
            array = pa.array(np.asarray(column), pa.string()).dictionary_encode()
        else:
            array = pa.array(np.broadcast_to(column, rows), field.type)
        if len(array) != rows or array.type != field.type:
            raise ValueError(f"it has {len(array)} of {array.type}")
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InputError(f"{where}: column {field.name!r} must be {field.type}, {rows} values: {error}") from error
    return array


def _check_rows(batch: pa.RecordBatch | pa.Table, first_row: int, where: str) -> None:
    for field in SCHEMA:
        if batch.column(field.name).null_count:
            raise InputError(f"{where}: column {field.name!r} has empty values")
    start_s, end_s = np.asarray(batch.column("start_s")), np.asarray(batch.column("end_s"))
    good = np.isfinite(start_s) & np.isfinite(end_s) & (end_s >= start_s)
    if not good.all():
        i = int(np.argmin(good))
        raise InputError(
            f"{where}: row {first_row + i}: start_s = {start_s[i]}, end_s = {end_s[i]}; "
            "allowed: finite, end_s >= start_s"
        )
