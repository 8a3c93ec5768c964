"""The stamps of a job: what every description of a step has, and what it reads from the matrix of a trace.

``job_stamps`` describes a step by one collective, ``program_stamps`` by all of its transfers, ``known_program`` by
those of a program that is given. All read :mod:`paceenv.core.operation_matrix`.

Axes: T steps, R ranks, N operations.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from paceenv.core.operation_matrix import Integers, OperationMatrix
from paceenv.core.trace import COMPUTE_OPS, OTHER_OPS, PACE_OP
from paceenv.sim.cluster.collectives import Op

PLAIN_OPS: Final[dict[str, Op]] = {
    "all_reduce": "all_reduce",
    "separate-grads-all-reduce": "all_reduce",
    "embedding-grads-all-reduce": "all_reduce",
    "layernorm-grads-all-reduce": "all_reduce",
    "barrier": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "grads-reduce-scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "params-all-gather": "all_gather",
    "broadcast": "broadcast",
    "reduce": "broadcast",
    "all_to_all": "all_to_all",
    "send": "send",
    "recv": "send",
}
"""What a program calls the trace's transfers; a barrier is an all-reduce of nothing."""
MESSAGES: Final = ("send", "recv")
MIN_UNPACED: Final = 16
"""Steps without pacing from which on only those count as what the job does by itself."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepStamps:
    """What the stamps of a job have, however its step is described.

    ``names`` are the trace's numbers of the ranks, in the order of axis R. ``begin_T`` is when an iteration began on
    the trace's clock, seconds, ``iteration_T`` its number, ``step_T`` how long it took. ``dropped`` counts the
    iterations left out: incomplete, unlike the usual ones, or with a checkpoint.
    """

    name: str
    source: str
    names: tuple[int, ...]
    iteration_T: NDArray[np.int64]
    begin_T: Array
    step_T: Array
    dropped: int

    @property
    def ranks(self) -> int:
        return len(self.names)

    @property
    def unpaced_T(self) -> NDArray[np.bool_]:
        """Iterations without any delay."""
        return np.ones(len(self.step_T), np.bool_)

    @property
    def steady_T(self) -> NDArray[np.bool_]:
        """Iterations that show the job by itself: those without pacing, or all where too few are without."""
        unpaced_T = self.unpaced_T
        return unpaced_T if unpaced_T.sum() >= MIN_UNPACED else np.ones_like(unpaced_T)

    @property
    def described(self) -> str:
        """The job and its trace, in words."""
        return f"{self.name} ({self.source})"

    @property
    def counted(self) -> str:
        """How many iterations are used and left out, in words."""
        return f"{len(self.step_T)} iterations alike, {self.dropped} left out"

    def part(self, use_T: NDArray[np.bool_]) -> Self:
        """The stamps of some iterations: of every field whose first axis is T."""
        names = [one.name for one in fields(self) if one.name.rpartition("_")[2].startswith("T")]
        return replace(self, **{name: getattr(self, name)[use_T] for name in names})


def moves(matrix: OperationMatrix) -> NDArray[np.bool_]:
    """Which operations are transfers between ranks; all others count as compute."""
    is_work_N = matrix.is_op(*COMPUTE_OPS, *OTHER_OPS, PACE_OP, "evaluation")
    return matrix.is_op(*PLAIN_OPS) | (matrix.is_collective_N & ~is_work_N)


def usual_steps(matrix: OperationMatrix) -> OperationMatrix:
    """The steps without a delay of pacing, a checkpoint or the like."""
    is_odd_RT = matrix.is_interrupted_RT | (matrix.seconds_RT(matrix.is_pace_N) > 0.0)
    return matrix.of_steps(np.flatnonzero(~is_odd_RT.any(axis=0)))


def in_order(matrix: OperationMatrix, mine: Integers) -> tuple[Integers, Array, Array]:
    """Some operations of a rank in the order of each step, -1 behind its last, and their start and end, ``(J, T)``."""
    order_JT = np.argsort(matrix.start_NT[mine], axis=0, kind="stable")  # what a step lacks comes last
    start_JT, end_JT = (np.take_along_axis(x[mine], order_JT, axis=0) for x in (matrix.start_NT, matrix.end_NT))
    return np.where(np.isnan(start_JT), -1, mine[order_JT]), start_JT, end_JT
