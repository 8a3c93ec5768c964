"""The simulator's side of the trace contract: recordings of a job as rows of the project's one Parquet schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core.trace import TraceMetadata, TraceWriter
from paceenv.sim.engine import layout
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.program_layout import OPS, START, WAIT, Program
from paceenv.sim.engine.simulator import JobBatch, Simulator

_PAYLOAD_OPS = {layout.NO_INCAST: "all_reduce", layout.GATHER: "gather", layout.ALL_TO_ALL: "all_to_all"}
SUMMARY = ("compute", *_PAYLOAD_OPS.values(), "optimizer")
"""What :class:`ProgramRows` says in full."""
SIMULATOR = "paceenv simulator"
"""Source of a simulated trace, whose ranks are the cluster's."""
_NEGLIGIBLE = 1e-9
"""Share of a step; a smaller rest at its end is rounding, not a checkpoint."""


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


class ProgramRows:
    """The rows of a program in every step: one for each computing and each transfer of each rank. K rows.

    A transfer's row begins when the rank entered it, or handed it over where it runs in the background, and ends when
    the transfer is through. A rank that waits for one in the background has no row meanwhile.
    """

    def __init__(self, program: Program) -> None:
        at_K = np.flatnonzero(program.kind_I != WAIT)
        operation_K, is_transfer_K = program.operation_I[at_K], program.kind_I[at_K] == START

        def of_transfer(values_O: NDArray[Any], otherwise: Any) -> NDArray[Any]:
            return np.where(is_transfer_K, np.append(values_O, otherwise)[operation_K], otherwise)

        first_R = program.first_R
        self.rank_K = np.repeat(np.arange(len(first_R) - 1), np.diff(first_R))[at_K]
        self.seq_K = np.arange(len(at_K)) - np.searchsorted(self.rank_K, self.rank_K) + 1  # a delay comes before
        self.op_K = of_transfer(np.array(OPS, object)[program.op_O], "compute")
        self.op_K[(self.op_K == "send") & (program.place_I[at_K] == 1)] = "recv"
        self.group_K = of_transfer(program.group_O, -1)
        self.bytes_K = of_transfer(np.rint(program.bytes_O).astype(np.int64), 0)
        self._every_K = of_transfer(program.every_O, 1)
        self._is_first_K = ~is_transfer_K & (at_K == first_R[self.rank_K])
        self._start_K = np.where(is_transfer_K, at_K, np.maximum(at_K - 1, 0))
        """The instruction at whose end a row begins; the first computing begins with the rank's step."""
        self._end_K = np.where(is_transfer_K, 0, at_K)
        self._operation_K, self._is_transfer_K = np.where(is_transfer_K, operation_K, 0), is_transfer_K

    def times(self, recording: Recording) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Starts and ends of the rows of the first environment, seconds from the end of the step before, and which
        happened, all ``(T, K)``: not transfers that skip an iteration, nor computing that took no time."""
        end_TI, begun_TO, through_TO = recording.end_ETI[0], recording.start_ETO[0], recording.through_ETO[0]
        begin_TR = recording.start_ETR[0] + recording.delay_ETR[0]
        start_TK = np.where(self._is_first_K, begin_TR[:, self.rank_K], end_TI[:, self._start_K])
        end_TK = end_TI[:, self._end_K]
        keep_TK = (end_TK > start_TK) | self._is_transfer_K
        if through_TO.shape[1]:
            own_TK = through_TO[:, self._operation_K]
            keep_TK &= (self._every_K == 1) | (own_TK > begun_TO[:, self._operation_K])
            end_TK = np.where(self._is_transfer_K, own_TK, end_TK)
        return start_TK, end_TK, keep_TK


class RecordingWriter(TraceWriter):
    """Writes consecutive recordings of the first environment of an engine to a trace file; whole or not at all.

    Times run from the start of the first recording, in seconds. The operations of an iteration are those of
    :func:`operations`, or of a program all of :class:`ProgramRows`. An operation that takes no time or is missing has
    no row.
    """

    def __init__(self, path: str | Path, simulator: Simulator, name: str) -> None:
        self._batch = batch = simulator.batch
        self._per_group, self._name = batch.ranks // batch.groups, name
        self._now_s, self._iteration = 0.0, 0
        ranks = tuple({"rank": r, "dp_rank": r, "stage": 0} for r in range(batch.ranks))
        self._program = None if batch.program is None else ProgramRows(batch.program)
        groups = batch.groups if batch.program is None else len(batch.program.first_member_N) - 1
        job = {"name": name, "ranks": batch.ranks, "groups": groups}
        super().__init__(path, TraceMetadata(job, ranks, SIMULATOR))

    def add(self, recording: Recording) -> None:
        """Add the iterations of a recording."""
        step_T = recording.step_ET[0]
        begin_T1 = (self._now_s + np.concatenate([[0.0], np.cumsum(step_T)[:-1]]))[:, None]
        rows = self._program
        if rows is not None:
            start_TK, end_TK, keep_TK = rows.times(recording)
            columns = {"rank": rows.rank_K, "seq": rows.seq_K, "group": rows.group_K, "bytes": rows.bytes_K}
            self._add(keep_TK, begin_T1, start_TK, end_TK, op=rows.op_K, **columns)
        rank_R = np.arange(self._batch.ranks)
        for one in operations(recording, self._batch):
            if rows is None or one.op not in SUMMARY:
                payload = one.op in _PAYLOAD_OPS.values()
                keep_TR = (one.end_TR > one.start_TR) | payload | (one.op in {"compute", "barrier"})
                seq = one.seq + (int(rows.seq_K.max()) if rows is not None and one.seq else 0)
                group = rank_R // self._per_group if payload else -1
                self._add(keep_TR, begin_T1, one.start_TR, one.end_TR, op=one.op, rank=rank_R, seq=seq, group=group)
        self._now_s += float(step_T.sum())
        self._iteration += len(step_T)

    def _add(
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
        self.append(rows)
