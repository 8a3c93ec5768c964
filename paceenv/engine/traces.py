"""The simulator's side of the trace contract: recordings of a job as rows of the project's one Parquet schema."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceenv.engine.simulator import JobBatch, Recording
from paceenv.trace import TraceMetadata, TraceWriter

_ORDER = ("pace", "compute", "all_reduce", "optimizer", "barrier")
"""Operations of an iteration in their order; work exposed after the collective counts as ``optimizer``."""


class Recorded(Protocol):
    """An engine whose recordings can be written: any that tells its jobs."""

    batch: JobBatch


class RecordingWriter:
    """Writes consecutive recordings of one environment of an engine to a trace file; whole or not at all.

    Times run from the start of the first recording, in seconds. Delays and exposed work of no length have no row.
    """

    def __init__(self, path: str | Path, simulator: Recorded, name: str, environment: int = 0) -> None:
        batch = simulator.batch
        self._per_group, self._environment, self._name = batch.ranks // batch.groups, environment, name
        self._has_barrier = bool(batch.jobs["has_barrier"][environment])
        self._now_s, self._iteration = 0.0, 0
        ranks = tuple({"rank": r, "dp_rank": r, "stage": 0} for r in range(batch.ranks))
        job = {"name": name, "ranks": batch.ranks, "groups": batch.groups}
        self._writer = TraceWriter(path, TraceMetadata(job, ranks, "paceenv simulator"))

    def __enter__(self) -> RecordingWriter:
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def append(self, recording: Recording) -> None:
        """Add the iterations of a recording."""
        e = self._environment
        step_T = recording.step_ET[e]
        begin_TR = (self._now_s + np.concatenate([[0.0], np.cumsum(step_T)[:-1]]))[:, None]
        released_TR, entry_TR = begin_TR + recording.delay_ETR[e], begin_TR + recording.entry_ETR[e]
        finish_TR = begin_TR + np.repeat(recording.finish_ETG[e], self._per_group, axis=1)
        ready_TR = begin_TR + np.repeat(recording.ready_ETG[e], self._per_group, axis=1)
        start_TR = np.broadcast_to(begin_TR, released_TR.shape)
        edges = [start_TR, released_TR, entry_TR, finish_TR, ready_TR, start_TR + step_T[:, None]]
        for seq, op in enumerate(_ORDER):
            if op != "barrier" or self._has_barrier:
                self._append(op, seq, edges[seq], edges[seq + 1])
        self._now_s += float(step_T.sum())
        self._iteration += len(step_T)

    def _append(self, op: str, seq: int, start_TR: NDArray[np.float64], end_TR: NDArray[np.float64]) -> None:
        iterations, ranks = start_TR.shape
        rank_TR = np.broadcast_to(np.arange(ranks), start_TR.shape)
        iteration_TR = np.broadcast_to(self._iteration + np.arange(iterations)[:, None], start_TR.shape)
        group: Any = rank_TR // self._per_group if op == "all_reduce" else np.full_like(rank_TR, -1)
        keep = end_TR > start_TR if op in {"pace", "optimizer"} else np.ones(start_TR.shape, np.bool_)
        if not keep.any():
            return
        self._writer.append(
            {
                "job": self._name,
                "op": op,
                "seq": seq,
                "rank": rank_TR[keep],
                "iteration": iteration_TR[keep],
                "group": group[keep],
                "start_s": start_TR[keep],
                "end_s": np.maximum(end_TR, start_TR)[keep],
            }
        )
