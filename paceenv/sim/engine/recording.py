"""The simulator's side of the trace contract: recordings of a job as rows of the project's one Parquet schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceenv.core.trace import TraceMetadata, TraceWriter
from paceenv.sim.engine import layout
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import JobBatch

_PAYLOAD_OPS = {layout.NO_INCAST: "all_reduce", layout.GATHER: "gather", layout.ALL_TO_ALL: "all_to_all"}
_NEGLIGIBLE = 1e-9
"""Share of a step; a smaller rest at its end is rounding, not a checkpoint."""


class Recorded(Protocol):
    """An engine whose recordings can be written: it has a batch of jobs."""

    batch: JobBatch


@dataclass(frozen=True)
class Operation:
    """One operation of every rank and iteration: name, place in the step, seconds from the end of the step before."""

    op: str
    seq: int
    start_TR: NDArray[np.float64]
    end_TR: NDArray[np.float64]


def operations(recording: Recording, batch: JobBatch) -> list[Operation]:
    """What the ranks of the first environment did in a recording of it, in the order of a step.

    The operations are pace, compute, the payload collective, optimizer (post-collective work), barrier (in jobs that
    have one), restart, checkpoint. An operation that a step does not have lasts no time in it.

    Args:
        recording: with stamps.
        batch: the jobs that were recorded.
    """
    job, per_group = batch.jobs[0], batch.ranks // batch.groups
    step_T = recording.step_ET[0]
    start_TR, entry_TR = recording.start_ETR[0], recording.entry_ETR[0]
    released_TR = start_TR + recording.delay_ETR[0]
    exit_TR = recording.exit_ETR[0]
    ready_TR = exit_TR + np.repeat(recording.ready_ETG[0] - recording.finish_ETG[0], per_group, axis=1)
    done_T = recording.ready_ETG[0].max(axis=1) + float(job["barrier_s"])  # all but a checkpoint or a restart
    done_T = np.where(step_T - done_T > _NEGLIGIBLE * step_T, done_T, step_T)
    done_TR, end_TR = (np.broadcast_to(x[:, None], entry_TR.shape) for x in (done_T, step_T))
    # a restart takes longer than any checkpoint of the same job, or there are no checkpoints
    is_restart_T1 = (step_T - done_T >= float(job["restart_s"]))[:, None] & bool(job["failure_per_s"] > 0)
    barrier = [Operation("barrier", 4, ready_TR, done_TR)] if job["has_barrier"] else []
    return [
        Operation("pace", 0, start_TR, released_TR),
        Operation("compute", 1, released_TR, entry_TR),
        Operation(_PAYLOAD_OPS[int(job["incast_kind"])], 2, entry_TR, exit_TR),
        Operation("optimizer", 3, exit_TR, ready_TR),
        *barrier,
        Operation("restart", 5, np.where(is_restart_T1, done_TR, end_TR), end_TR),
        Operation("checkpoint", 5, np.where(is_restart_T1, end_TR, done_TR), end_TR),
    ]


class RecordingWriter:
    """Writes consecutive recordings of the first environment of an engine to a trace file; whole or not at all.

    Times run from the start of the first recording, in seconds. The operations of an iteration are those of
    :func:`operations`. An operation that takes no time or is missing has no row.

    Args:
        path: the file.
        simulator: the engine that records.
        name: of the job.
    """

    def __init__(self, path: str | Path, simulator: Recorded, name: str) -> None:
        self._batch = batch = simulator.batch
        self._per_group, self._name = batch.ranks // batch.groups, name
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
        step_T = recording.step_ET[0]
        begin_T1 = (self._now_s + np.concatenate([[0.0], np.cumsum(step_T)[:-1]]))[:, None]
        for one in operations(recording, self._batch):
            self._append(one, begin_T1 + one.start_TR, begin_T1 + one.end_TR)
        self._now_s += float(step_T.sum())
        self._iteration += len(step_T)

    def _append(self, one: Operation, start_TR: NDArray[np.float64], end_TR: NDArray[np.float64]) -> None:
        iterations, ranks = start_TR.shape
        rank_TR = np.broadcast_to(np.arange(ranks), start_TR.shape)
        iteration_TR = np.broadcast_to(self._iteration + np.arange(iterations)[:, None], start_TR.shape)
        payload = one.op in _PAYLOAD_OPS.values()
        group: Any = rank_TR // self._per_group if payload else np.full_like(rank_TR, -1)
        always = payload or one.op in {"compute", "barrier"}
        keep = np.ones(start_TR.shape, np.bool_) if always else end_TR > start_TR
        if not keep.any():
            return
        self._writer.append(
            {
                "job": self._name,
                "op": one.op,
                "seq": one.seq,
                "rank": rank_TR[keep],
                "iteration": iteration_TR[keep],
                "group": group[keep],
                "start_s": start_TR[keep],
                "end_s": np.maximum(end_TR, start_TR)[keep],
            }
        )
