"""The simulator's side of the trace contract: recordings of a job as rows of the project's one Parquet schema."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceenv.engine import layout
from paceenv.engine.simulator import JobBatch, Recording
from paceenv.trace import TraceMetadata, TraceWriter

_PAYLOAD_OPS = {layout.NO_INCAST: "all_reduce", layout.GATHER: "gather", layout.ALL_TO_ALL: "all_to_all"}
_NEGLIGIBLE = 1e-9
"""Share of a step: what is left over of it at the end is rounding, not a checkpoint."""


class Recorded(Protocol):
    """An engine whose recordings can be written: any that tells its jobs."""

    batch: JobBatch


class RecordingWriter:
    """Writes consecutive recordings of one environment of an engine to a trace file; whole or not at all.

    Times run from the start of the first recording, in seconds. An iteration's operations are, in their order: pace,
    compute, the payload collective, optimizer (work exposed after it), barrier, checkpoint or restart. What takes no
    time or is not there has no row.
    """

    def __init__(self, path: str | Path, simulator: Recorded, name: str, environment: int = 0) -> None:
        batch = simulator.batch
        self._per_group, self._environment, self._name = batch.ranks // batch.groups, environment, name
        self._job = batch.jobs[environment]
        self._payload_op = _PAYLOAD_OPS[int(self._job["incast_kind"])]
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
        start_TR, entry_TR = begin_TR + recording.start_ETR[e], begin_TR + recording.entry_ETR[e]
        released_TR = start_TR + recording.delay_ETR[e]
        finish_TR = begin_TR + np.repeat(recording.finish_ETG[e], self._per_group, axis=1)
        ready_TR = begin_TR + np.repeat(recording.ready_ETG[e], self._per_group, axis=1)
        barrier_s = float(self._job["barrier_s"])
        done_T = recording.ready_ETG[e].max(axis=1) + barrier_s  # all but a checkpoint or a restart
        done_T = np.where(step_T - done_T > _NEGLIGIBLE * step_T, done_T, step_T)
        done_TR, end_TR = (np.broadcast_to(begin_TR + x[:, None], entry_TR.shape) for x in (done_T, step_T))
        self._append("pace", 0, start_TR, released_TR)
        self._append("compute", 1, released_TR, entry_TR)
        self._append(self._payload_op, 2, entry_TR, finish_TR)
        self._append("optimizer", 3, finish_TR, ready_TR)
        if self._job["has_barrier"]:
            self._append("barrier", 4, ready_TR, done_TR)
        # a restart takes longer than any checkpoint of the same job, or there are no checkpoints
        is_restart_T1 = (step_T - done_T >= float(self._job["restart_s"]))[:, None] & bool(
            self._job["failure_rate"] > 0
        )
        self._append("restart", 5, np.where(is_restart_T1, done_TR, end_TR), end_TR)
        self._append("checkpoint", 5, np.where(is_restart_T1, end_TR, done_TR), end_TR)
        self._now_s += float(step_T.sum())
        self._iteration += len(step_T)

    def _append(self, op: str, seq: int, start_TR: NDArray[np.float64], end_TR: NDArray[np.float64]) -> None:
        iterations, ranks = start_TR.shape
        rank_TR = np.broadcast_to(np.arange(ranks), start_TR.shape)
        iteration_TR = np.broadcast_to(self._iteration + np.arange(iterations)[:, None], start_TR.shape)
        group: Any = rank_TR // self._per_group if op == self._payload_op else np.full_like(rank_TR, -1)
        always = op in {"compute", "barrier", self._payload_op}
        keep = np.ones(start_TR.shape, np.bool_) if always else end_TR > start_TR
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
