"""The stamps of a job: the rows of its trace by step and rank, and what every description of a step reads from them.

Reads :mod:`paceenv.core.trace`, from the simulator or from a live job. ``job_stamps`` describes a step by one
collective, ``program_stamps`` by all of its transfers, ``known_program`` by those of a program that is given.

Axes: T steps, R ranks, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from paceenv.core.trace import COLLECTIVE_OPS, COMPUTE_OPS, INTERRUPTIONS, OTHER_OPS, PACE_OP, Trace
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
_TRANSFERS: Final = frozenset((*PLAIN_OPS, *COLLECTIVE_OPS))
_NOT_TRANSFERS: Final = frozenset((*COMPUTE_OPS, *OTHER_OPS, PACE_OP, "evaluation"))

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
        return replace(self, **_parts(self, use_T))


def _parts(of: StepStamps | JobRows, use_T: NDArray[np.bool_]) -> dict[str, Any]:
    names = [one.name for one in fields(of) if one.name.rpartition("_")[2].startswith("T")]
    return {name: getattr(of, name)[use_T] for name in names}


class Row(NamedTuple):
    """A row of one rank in one step."""

    op: str
    group: int
    size: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class JobRows:
    """The rows of a job by step and rank in the order of time: transfers, and all ``others``.

    ``first_T`` and ``end_T`` are those of all rows of a step, seconds; ``delay_TR`` what a rank held back by its own
    choice, ``odd_TR`` whether it had a checkpoint or the like, ``here_TR`` whether it has the step at all.
    """

    name: str
    source: str
    names: tuple[int, ...]
    hosts: tuple[str, ...]
    iteration_T: NDArray[np.int64]
    transfers: list[list[list[Row]]]
    others: list[list[list[Row]]]
    first_T: Array
    end_T: Array
    delay_TR: Array
    odd_TR: NDArray[np.bool_]
    here_TR: NDArray[np.bool_]

    def usual(self) -> JobRows:
        """Steps that all ranks have, without a delay of pacing, a checkpoint or the like."""
        use_T = np.asarray((self.here_TR & ~self.odd_TR & (self.delay_TR <= 0.0)).all(axis=1))
        transfers, others = ([rows[t] for t in np.flatnonzero(use_T)] for rows in (self.transfers, self.others))
        return replace(self, **_parts(self, use_T), transfers=transfers, others=others)


def read_rows(trace: Trace, job: str | None = None) -> JobRows:
    """The rows of one job of a trace; ``job`` must be named where the trace holds several."""
    name = trace.job_name(job)
    mine = np.flatnonzero(trace.isin("job", name))
    keys = ("rank", "iteration", "seq", "op", "group", "bytes", "start_s", "end_s")
    columns = {key: trace.column(key)[mine] for key in keys}
    columns["group"] = _with_pairs(columns, trace.column("peer")[mine])
    columns["op"] = columns["op"].astype(str)
    names, rank = np.unique(columns["rank"], return_inverse=True)
    iteration_T, at = np.unique(columns["iteration"], return_inverse=True)
    shape, cell = (len(iteration_T), len(names)), (at, rank)
    first_T, end_T = np.full(shape[0], np.inf), np.full(shape[0], -np.inf)
    np.minimum.at(first_T, at, columns["start_s"])
    np.maximum.at(end_T, at, columns["end_s"])
    lasts_s = columns["end_s"] - columns["start_s"]
    delay_TR, odd_TR, here_TR = np.zeros(shape), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    np.add.at(delay_TR, cell, np.where(columns["op"] == PACE_OP, lasts_s, 0.0))
    np.logical_or.at(odd_TR, cell, np.isin(columns["op"], INTERRUPTIONS) & (lasts_s > 0.0))
    here_TR[cell] = True
    transfers, others = ([[list[Row]() for _ in names] for _ in iteration_T] for _ in range(2))
    order = np.lexsort((columns["seq"], columns["start_s"]))
    listed = [columns[key][order].tolist() for key in ("op", "group", "bytes", "start_s", "end_s")]
    for t, r, *values in zip(at[order].tolist(), rank[order].tolist(), *listed, strict=True):
        row = Row(*values)
        is_other = row.op in _NOT_TRANSFERS or (row.group < 0 and row.op not in _TRANSFERS)
        (others if is_other else transfers)[t][r].append(row)
    hosts = trace.metadata.of_ranks("host", "")
    return JobRows(
        name=name,
        source=trace.metadata.source,
        names=tuple(names.tolist()),
        hosts=tuple(str(hosts.get(r, "") or "") for r in names.tolist()),
        iteration_T=iteration_T.astype(np.int64),
        transfers=transfers,
        others=others,
        first_T=first_T,
        end_T=end_T,
        delay_TR=delay_TR,
        odd_TR=odd_TR,
        here_TR=here_TR,
    )


def _with_pairs(columns: Mapping[str, NDArray[Any]], peer_N: NDArray[Any]) -> NDArray[np.int64]:
    """Process groups of rows, with one for each sender and receiver of messages that have none."""
    group_N = columns["group"].astype(np.int64)
    op_N = columns["op"].astype(str)
    some_N = (group_N < 0) & (peer_N >= 0) & np.isin(op_N, MESSAGES)
    rank_N = columns["rank"].astype(np.int64)
    sender_N, receiver_N = (np.where(op_N == op, rank_N, peer_N) for op in MESSAGES)
    _, pair_N = np.unique(np.stack([sender_N, receiver_N])[:, some_N], axis=1, return_inverse=True)
    group_N[some_N] = group_N.max(initial=-1) + 1 + pair_N.ravel()
    return group_N
