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
from paceenv.sim.engine.program_layout import COMPUTE, OPS, START, Program
from paceenv.sim.engine.simulator import JobBatch

_PAYLOAD_OPS = {layout.NO_INCAST: "all_reduce", layout.GATHER: "gather", layout.ALL_TO_ALL: "all_to_all"}
SUMMARY = ("compute", *_PAYLOAD_OPS.values(), "optimizer")
"""What :class:`ProgramRows` says in full."""
SIMULATOR = "paceenv simulator"
"""Source of a simulated trace, whose ranks are the cluster's."""
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
    extra_T = step_T - done_T
    is_checkpoint_T = (job["checkpoint_iterations"] > 0) & (
        np.abs(extra_T - float(job["checkpoint_s"])) <= _NEGLIGIBLE * step_T
    )
    is_restart_T1 = ((job["failure_per_s"] > 0) & (extra_T >= float(job["restart_s"])) & ~is_checkpoint_T)[:, None]
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


@dataclass(frozen=True)
class ProgramRows:
    """The rows of a program in every step: one for each computing and each transfer of each rank. K rows.

    A transfer's row begins when the rank entered it, or handed it over where it runs in the background, and ends when
    the transfer is through. A rank that waits for one in the background has no row meanwhile.
    """

    rank_K: NDArray[np.int64]
    seq_K: NDArray[np.int64]
    """Place in the rank's step, from 1: a delay comes before."""
    op_K: NDArray[np.object_]
    group_K: NDArray[np.int64]
    """The process group; -1 of computing."""
    bytes_K: NDArray[np.int64]
    start_K: NDArray[np.int64]
    """The instruction at whose end it begins; -1: where the rank's step does."""
    end_K: NDArray[np.int64]
    """The instruction, or the operation of a transfer, at whose end it ends."""
    every_K: NDArray[np.int64]
    """It happens in one of so many iterations."""

    @classmethod
    def of(cls, program: Program) -> ProgramRows:
        """The rows of a program."""
        rows: list[tuple[int, int, str, int, int, int, int, int]] = []
        for r in range(len(program.replica_R)):
            first, seq = int(program.first_R[r]), 1
            for i in range(first, int(program.first_R[r + 1])):
                o, before = int(program.operation_I[i]), i - 1 if i > first else -1
                if program.kind_I[i] == COMPUTE:
                    rows.append((r, seq, "compute", -1, 0, before, i, 1))
                elif program.kind_I[i] == START:
                    group, size = int(program.group_O[o]), round(float(program.bytes_O[o]))
                    op = OPS[program.op_O[o]]
                    if op == "send" and program.place_I[i] == 1:
                        op = "recv"
                    rows.append((r, seq, op, group, size, i, o, int(program.every_O[o])))
                else:
                    continue
                seq += 1
        ops_K = np.array([row[2] for row in rows], object)
        numbers = np.array([(*row[:2], *row[3:]) for row in rows], np.int64).T
        rank_K, seq_K, group_K, bytes_K, start_K, end_K, every_K = numbers
        return cls(rank_K, seq_K, ops_K, group_K, bytes_K, start_K, end_K, every_K)

    @property
    def last_seq(self) -> int:
        """The last place in a step that a row has."""
        return int(self.seq_K.max())

    def times(self, recording: Recording) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Starts and ends of the rows of the first environment ``(T, K)``, seconds from the end of the step before."""
        end_TI, through_TO = recording.end_ETI[0], recording.through_ETO[0]
        start_TK = end_TI[:, np.maximum(self.start_K, 0)]
        begin_TR = recording.start_ETR[0] + recording.delay_ETR[0]
        start_TK = np.where(self.start_K < 0, begin_TR[:, self.rank_K], start_TK)
        is_transfer_K = self.group_K >= 0
        end_TK = end_TI[:, np.where(is_transfer_K, 0, self.end_K)]
        if through_TO.shape[1]:
            end_TK = np.where(is_transfer_K, through_TO[:, np.where(is_transfer_K, self.end_K, 0)], end_TK)
        return start_TK, end_TK

    def keep(self, recording: Recording, start_TK: NDArray[np.float64], end_TK: NDArray[np.float64]) -> Any:
        """Which rows happened ``(T, K)``: all but transfers that skip an iteration, and computing that took no time."""
        keep_TK = (end_TK > start_TK) | (self.group_K >= 0)
        for k in np.flatnonzero(self.every_K > 1):
            o = self.end_K[k]
            keep_TK[:, k] = recording.through_ETO[0, :, o] > recording.start_ETO[0, :, o]
        return keep_TK


class RecordingWriter:
    """Writes consecutive recordings of the first environment of an engine to a trace file; whole or not at all.

    Times run from the start of the first recording, in seconds. The operations of an iteration are those of
    :func:`operations`, or of a program all of :class:`ProgramRows`. An operation that takes no time or is missing has
    no row.
    """

    def __init__(self, path: str | Path, simulator: Recorded, name: str) -> None:
        self._batch = batch = simulator.batch
        self._per_group, self._name = batch.ranks // batch.groups, name
        self._now_s, self._iteration = 0.0, 0
        ranks = tuple({"rank": r, "dp_rank": r, "stage": 0} for r in range(batch.ranks))
        self._program = ProgramRows.of(batch.program) if batch.jobs[0]["has_program"] else None
        groups = batch.groups if self._program is None else len(batch.program.first_member_N) - 1
        job = {"name": name, "ranks": batch.ranks, "groups": groups}
        self._writer = TraceWriter(path, TraceMetadata(job, ranks, SIMULATOR))

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
        rows = self._program
        if rows is not None:
            start_TK, end_TK = rows.times(recording)
            keep_TK = rows.keep(recording, start_TK, end_TK)
            columns = {"rank": rows.rank_K, "seq": rows.seq_K, "group": rows.group_K, "bytes": rows.bytes_K}
            self._append(keep_TK, begin_T1, start_TK, end_TK, op=rows.op_K, **columns)
        rank_R = np.arange(self._batch.ranks)
        for one in operations(recording, self._batch):
            if rows is None or one.op not in SUMMARY:
                payload = one.op in _PAYLOAD_OPS.values()
                keep_TR = (one.end_TR > one.start_TR) | payload | (one.op in {"compute", "barrier"})
                seq = one.seq + (rows.last_seq if rows is not None and one.seq else 0)
                group = rank_R // self._per_group if payload else -1
                self._append(keep_TR, begin_T1, one.start_TR, one.end_TR, op=one.op, rank=rank_R, seq=seq, group=group)
        self._now_s += float(step_T.sum())
        self._iteration += len(step_T)

    def _append(
        self,
        keep_TX: NDArray[np.bool_],
        begin_T1: NDArray[np.float64],
        start_TX: NDArray[np.float64],
        end_TX: NDArray[np.float64],
        **columns: Any,
    ) -> None:
        """Add rows where ``keep_TX``; columns broadcast to it, times are from the starts of the steps."""
        if not keep_TX.any():
            return
        start_s, iteration_T1 = begin_T1 + start_TX, self._iteration + np.arange(len(keep_TX))[:, None]
        columns |= {"iteration": iteration_T1, "start_s": start_s, "end_s": np.maximum(begin_T1 + end_TX, start_s)}
        rows = {
            name: column if isinstance(column, str) else np.broadcast_to(column, keep_TX.shape)[keep_TX]
            for name, column in (columns | {"job": self._name}).items()
        }
        self._writer.append(rows)
