"""Importer of the traces published with "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI 2025; repository ByteDance-Seed/StragglerAnalysis): one Parquet file, and a ``meta-<name>.yaml`` beside it.

One traced rank is one worker (a tensor-parallel group), identified by ``(dp_rank, stage)``. Operation names are kept.
The file's times restart at every step and its steps are sampled, not consecutive; here the steps are laid end to end
so that a trace has one clock. ``iteration`` keeps the step's number, so gaps between samples remain visible.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.files import read_yaml
from paceenv.core.trace import COMPUTE_OPS, Trace, TraceMetadata, open_parquet

COLUMNS: Final = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
"""The columns used. ``gmc`` (the chunk's number over all stages) follows from ``mc`` and the stage."""
_OTHER_TYPES = {"optype": pa.string(), "start_ts": pa.float64(), "duration": pa.float64()}
_TYPES: Final = pa.schema([(name, _OTHER_TYPES.get(name, pa.int32())) for name in COLUMNS])
_DATA_PARALLEL_OPS = ("grads-reduce-scatter", "params-all-gather", "separate-grads-all-reduce")
_EMBEDDING_OP = "embedding-grads-all-reduce"
_CLIP_OP = "optimizer-clip-main-grad"
_CLOCK_S = 5e-5
"""How far apart stamps of one moment may lie."""

Columns = dict[str, NDArray[Any]]


def import_straggler(path: str | Path) -> Trace:
    """Read a straggler trace.

    ``group`` is the stage for collectives among data-parallel ranks, and ``stages + dp_rank`` for the embedding
    gradients, which the first and the last stage share, and one more for gradient clipping, in which all workers meet;
    collectives inside a worker have none. ``micro_batch`` and ``chunk`` of a send or receive are those of the compute
    that it serves, and -1 where it has no peer: such are recorded, but never happened. Raises InputError if the file is
    missing, damaged, has other columns or types, or impossible values.
    """
    path = Path(path)
    columns = _read(path)
    rank, stage, dp_rank = columns["rank"], columns["stage"], columns["dp_rank"]
    ranks, first = np.unique(rank, return_index=True)
    at = np.searchsorted(ranks, rank)
    if np.any(stage[first][at] != stage) or np.any(dp_rank[first][at] != dp_rank):
        raise InputError(f"{path}: a rank appears with more than one (dp_rank, stage)")
    iteration = columns["step"]
    steps, step = np.unique(iteration, return_inverse=True)
    last_s = np.full(len(steps), -np.inf)
    np.maximum.at(last_s, step, columns["start_ts"] + columns["duration"])
    # every step begins where the previous one ended
    start_s = columns["start_ts"] + np.concatenate([[0.0], np.cumsum(last_s)])[step]
    end_s = start_s + columns["duration"]
    order = np.lexsort((end_s, start_s, rank, iteration))
    job = {"name": path.stem.removeprefix("trace-")}
    sidecar = path.with_name(f"meta-{job['name']}.yaml")
    if sidecar.is_file():
        job = {**read_yaml(sidecar), **job}
    micro_batch, chunk = _served(columns)
    trace_columns = {
        "rank": rank[order],
        "iteration": iteration[order],
        "seq": _positions(iteration[order], rank[order]),
        "op": columns["optype"][order],
        "group": _groups(columns)[order],
        "micro_batch": micro_batch[order],
        "chunk": chunk[order],
        "start_s": start_s[order],
        "end_s": end_s[order],
    }
    workers = tuple({"rank": int(rank[i]), "dp_rank": int(dp_rank[i]), "stage": int(stage[i])} for i in first)
    metadata = TraceMetadata(job, workers, "ByteDance-Seed/StragglerAnalysis, Apache-2.0")
    return Trace.from_columns({"job": job["name"], **trace_columns}, metadata, str(path))


def _read(path: Path) -> Columns:
    """The used columns as arrays ``(rows,)``: int32, float64, and text as objects."""
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise InputError(f"{path}: not a straggler trace: no columns {missing}; it has {names}")
        try:
            table = file.read(columns=list(COLUMNS)).select(COLUMNS).cast(_TYPES)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: damaged, or a column has another type: {error}") from error
    columns = {name: np.asarray(table[name]) for name in COLUMNS}
    for name, values in columns.items():
        if table[name].null_count or not (name == "optype" or np.isfinite(values).all()):
            raise InputError(f"{path}: column {name!r} has empty or infinite values")
    return columns


def _positions(*sorted_keys: NDArray[Any]) -> NDArray[np.int64]:
    """Position of each row among those with equal keys, from 0; rows with equal keys are adjacent."""
    row = np.arange(len(sorted_keys[0]))
    begins = np.ones(len(row), dtype=bool)
    begins[1:] = np.any([key[1:] != key[:-1] for key in sorted_keys], axis=0)
    return row - np.maximum.accumulate(np.where(begins, row, 0))


def _groups(columns: Columns) -> NDArray[np.int32]:
    stages, replicas = (int(columns[name].max(initial=-1)) + 1 for name in ("stage", "dp_rank"))
    op = columns["optype"]
    group = np.where(np.isin(op, _DATA_PARALLEL_OPS), columns["stage"], -1)
    group = np.where(op == _EMBEDDING_OP, stages + columns["dp_rank"], group)
    return np.where(op == _CLIP_OP, stages + replicas, group)


def _served(columns: Columns) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """``micro_batch`` and ``chunk`` of every row: a compute's own, a transfer's from the compute that it serves.

    The k-th send or receive of a worker and direction serves its k-th compute. Recorded without having happened are
    receives after the last compute and sends before the first, and the ends of the pipeline, where there is no peer; of
    an interleaved pipeline's first receive not even that is recorded.
    """
    op, (ranks, rank_at) = columns["optype"], np.unique(columns["rank"], return_inverse=True)
    # a number for each worker and step
    key = np.unique(columns["step"], return_inverse=True)[1].astype(np.int64) * len(ranks) + rank_at
    is_compute = np.isin(op, COMPUTE_OPS)
    micro_batch = np.where(is_compute, columns["mb_id"], -1).astype(np.int32)
    chunk = np.where(is_compute, columns["mc"], -1).astype(np.int32)
    keys, chunks = int(key.max(initial=-1)) + 1, max(int(columns["mc"].max(initial=-1)) + 1, 1)
    stages = int(columns["stage"].max(initial=-1)) + 1
    place = np.maximum(columns["mc"], 0) * stages + columns["stage"]  # among all chunks of the model
    end_s = columns["start_ts"] + columns["duration"]
    for direction in ("forward", "backward"):
        computes = _in_order(columns, key, op == f"{direction}-compute")
        count, first = np.bincount(key[computes], minlength=keys), np.searchsorted(key[computes], np.arange(keys))
        last_start_s, first_end_s = np.full(keys, -np.inf), np.full(keys, np.inf)
        np.maximum.at(last_start_s, key[computes], columns["start_ts"][computes])
        np.minimum.at(first_end_s, key[computes], end_s[computes])
        for way in ("send", "recv"):
            rows = _in_order(columns, key, op == f"{direction}-{way}")
            if way == "recv":
                rows = rows[columns["start_ts"][rows] <= last_start_s[key[rows]] + _CLOCK_S]
            else:
                rows = rows[end_s[rows] >= first_end_s[key[rows]] - _CLOCK_S]
            behind = (way == "recv") & (np.bincount(key[rows], minlength=keys) + 1 == count)
            nth = _positions(key[rows]) + behind[key[rows]]
            rows, nth = rows[nth < count[key[rows]]], nth[nth < count[key[rows]]]
            served = computes[first[key[rows]] + nth]
            at_end = 0 if (direction == "forward") == (way == "recv") else chunks * stages - 1
            has_peer = place[served] != at_end
            micro_batch[rows[has_peer]] = columns["mb_id"][served[has_peer]]
            chunk[rows[has_peer]] = columns["mc"][served[has_peer]]
    return micro_batch, chunk


def _in_order(columns: Columns, key: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Indices of the chosen rows by worker and step, there in the order in which they began."""
    rows = np.flatnonzero(chosen)
    return rows[np.lexsort((columns["seq_id"][rows], columns["start_ts"][rows], key[rows]))]
