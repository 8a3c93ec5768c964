"""How the ranks of a traced job spend their time: computing, waiting for peers, communicating, other work.

Reads the matrix of the trace and its dependency graph (``paceenv.diagnosis``). An operation that meets others waits
until the last of them arrives, and communicates from then on. Axes: N operations, K tasks, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from paceenv.core.trace import PACE_OP
from paceenv.diagnosis.dependency_graph import Graph
from paceenv.diagnosis.operation_matrix import Array, Integers, OperationMatrix

WAIT: Final = "wait for peers"
_NAMES: Final = {
    "compute": "compute",
    "forward-compute": "forward",
    "backward-compute": "backward",
    PACE_OP: "delay",
    "restart": "restart",
    "checkpoint": "checkpoint",
}
OTHER: Final = "other work"


@dataclass(frozen=True)
class Spans:
    """One kind of time of the operations ``operation_n``; seconds from the begin of a step, not a number where absent.

    ``beside`` says whether it may overlap what the rank computes.
    """

    name: str
    operation_n: Integers
    start_nT: Array
    end_nT: Array
    beside: bool


def met_s(matrix: OperationMatrix, graph: Graph) -> Array:
    """When the last of the operations that meet arrives, ``(N, T)``; an operation's own start where it meets none.

    Args:
        matrix: of the job, N operations by T steps.
        graph: which operation waits for which.
    """
    last_KT = np.full((len(graph.queued_K), matrix.steps), -np.inf)
    np.maximum.at(last_KT, graph.task_of_N, np.nan_to_num(matrix.start_NT, nan=-np.inf))
    met_NT = last_KT[graph.task_of_N]
    return np.where(np.isfinite(matrix.start_NT), np.minimum(met_NT, matrix.end_NT), np.nan)


def spans(matrix: OperationMatrix, graph: Graph) -> list[Spans]:
    """All kinds of time that the job has.

    Args:
        matrix: of the job.
        graph: which operation waits for which.
    """
    met_NT = met_s(matrix, graph)
    communicates = matrix.is_collective_N | matrix.is_transfer_N | graph.meets_N
    found = []
    for name, node, beside in (
        ("collective", np.flatnonzero(communicates & ~matrix.is_transfer_N), True),
        ("send, receive", np.flatnonzero(matrix.is_transfer_N), True),
    ):
        if len(node):
            found.append(Spans(WAIT, node, matrix.start_NT[node], met_NT[node], beside))
            found.append(Spans(name, node, met_NT[node], matrix.end_NT[node], beside))
    names = np.array([_NAMES.get(op, OTHER) for op in matrix.ops])[matrix.op_N]
    for name in (*_NAMES.values(), OTHER):
        node = np.flatnonzero((names == name) & ~communicates)
        if len(node):
            found.append(Spans(name, node, matrix.start_NT[node], matrix.end_NT[node], False))
    return found


def label(matrix: OperationMatrix, r: int) -> str:
    """The name of a rank in pictures: in a pipeline by its replica and stage.

    Args:
        matrix: of the job.
        r: place of the rank.
    """
    if int(matrix.stage_N.max()) == int(matrix.stage_N.min()):
        return f"rank {matrix.ranks[r]}"
    node = int(np.argmax(matrix.rank_N == r))
    return f"dp {matrix.dp_rank_N[node]}, stage {matrix.stage_N[node]}"
