"""A job's trace as a matrix: one row per operation, one column per step. Calibration and diagnosis read it.

Rows of two steps are the same operation if rank, name, process group, peer, micro-batch, chunk and position among those
agree. An operation that a step lacks takes no time in it. Axes: N operations, T steps, R ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.trace import COLLECTIVE_OPS, COMPUTE_OPS, INTERRUPTIONS, PACE_OP, POINT_TO_POINT_OPS, Trace
from paceenv.core.wording import steps_left_out

USUAL: Final = 0.5
"""Share of steps from which on an operation belongs to the usual step."""
BARRIER_OP: Final = "barrier"
MOMENT: Final = 0.1
"""Share of the compute after a delay; less, right before it, is what the agent needs to begin it."""
MAX_CELLS: Final = 1 << 27
"""Of the matrix, which memory must hold."""

_COLUMNS: Final = ("rank", "iteration", "seq", "group", "micro_batch", "chunk", "peer", "start_s", "end_s", "bytes")
_OF_OPERATION: Final = ("op", "rank", "group", "micro_batch", "chunk", "peer", "position", "bytes")

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class OperationMatrix:
    """Operations in the order of rank and usual place in the step; times are seconds from the begin of a step.

    ``world_size`` is how many ranks the job had at least, as far as the trace says, and ``rank_step`` how far the
    numbers of those that it should have lie apart; ``counted`` is true where the agents of that very job counted them.
    ``op_N`` counts in the names ``ops``, ``rank_N`` in ``ranks``; ``dp_rank_N``, ``stage_N`` and ``hosts`` come from
    the metadata. ``bytes_N`` is the mean over steps, 0 where unknown. ``start_NT`` and ``end_NT`` are not a number
    where a step lacks the operation. ``begin_s_T`` is when steps began on the trace's clock, ``step_s_T`` how long they
    took. Of ``recorded`` steps ``dropped`` were left out because a rank is missing in them; ``lacking`` says it of
    those that the trace has, "" without any.
    """

    name: str
    source: str
    world_size: int
    rank_step: int
    counted: bool
    ops: tuple[str, ...]
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    op_N: Integers
    rank_N: Integers
    dp_rank_N: Integers
    stage_N: Integers
    group_N: Integers
    micro_batch_N: Integers
    chunk_N: Integers
    peer_N: Integers
    position_N: Integers
    bytes_N: Integers
    start_NT: Array
    end_NT: Array
    iteration_T: Integers
    begin_s_T: Array
    step_s_T: Array
    recorded: int
    dropped: int
    lacking: str

    def of_steps(self, chosen: Integers) -> OperationMatrix:
        """The matrix of some of its steps, by place, without operations that none of them has."""
        here_N = np.isfinite(self.start_NT[:, chosen]).any(axis=1)
        of_operations = {k: v[here_N] for k, v in vars(self).items() if k.endswith("_N")}
        of_steps = {k: v[chosen] for k, v in vars(self).items() if k.endswith("_T")}
        both = {k: v[np.ix_(here_N, chosen)] for k, v in vars(self).items() if k.endswith("_NT")}
        return replace(self, **of_operations, **of_steps, **both)

    def set_back(self, ahead_s_R: Array) -> OperationMatrix:
        """The matrix by other clocks: those of ranks that are ahead by so many seconds are set back."""
        start_NT, end_NT = self.clock_2NT - ahead_s_R[self.rank_N, None]
        begin_s_T, step_s_T = _steps(start_NT, end_NT, self.iteration_T)
        moved = {"start_NT": start_NT - begin_s_T, "end_NT": end_NT - begin_s_T}
        return replace(self, **moved, begin_s_T=begin_s_T, step_s_T=step_s_T)

    @property
    def steps(self) -> int:
        return len(self.iteration_T)

    @property
    def duration_NT(self) -> Array:
        """How long each operation took, 0 where a step does not have it."""
        return np.nan_to_num(self.end_NT - self.start_NT)

    @property
    def clock_2NT(self) -> Array:
        """When each operation began and ended on the trace's clock, seconds."""
        return np.stack([self.start_NT, self.end_NT]) + self.begin_s_T

    def seconds_RT(self, which_N: NDArray[np.bool_]) -> Array:
        """How long each rank is in some of the operations in each step, seconds."""
        seconds_RT = np.zeros((len(self.ranks), self.steps))
        np.add.at(seconds_RT, self.rank_N[which_N], self.duration_NT[which_N])
        return seconds_RT

    @property
    def is_interrupted_RT(self) -> NDArray[np.bool_]:
        """Which ranks have a checkpoint or the like in which steps."""
        return self.seconds_RT(self.is_op(*INTERRUPTIONS)) > 0.0

    @property
    def stage_R(self) -> Integers:
        stage_R = np.zeros(len(self.ranks), np.int64)
        stage_R[self.rank_N] = self.stage_N
        return stage_R

    @property
    def usual_N(self) -> NDArray[np.bool_]:
        return np.asarray(np.isfinite(self.start_NT).mean(axis=1) >= USUAL)

    @property
    def kind_N(self) -> Integers:
        """A number for each operation's kind; operations of one kind should all take equally long.

        The kind is the operation's name. Without micro-batches, and where all ranks have as many of them, its position
        counts as well: compute before the first bucket is not compute before the last.
        """
        kind_N, usual_N = self.op_N.copy(), self.usual_N
        for op in np.unique(self.op_N):
            operations = np.flatnonzero((self.op_N == op) & usual_N)
            of_rank = np.bincount(self.rank_N[operations])
            if (self.micro_batch_N[operations] < 0).all() and len(np.unique(of_rank[of_rank > 0])) == 1:
                kind_N[operations] += len(self.ops) * self.position_N[operations]
        return kind_N

    def is_op(self, *names: str) -> NDArray[np.bool_]:
        """Which operations have one of these names."""
        wanted = [i for i, op in enumerate(self.ops) if op in names]
        return np.isin(self.op_N, wanted)

    @property
    def is_compute_N(self) -> NDArray[np.bool_]:
        return self.is_op(*COMPUTE_OPS)

    @property
    def is_transfer_N(self) -> NDArray[np.bool_]:
        """Sends and receives of a pipeline or otherwise."""
        return self.is_op(*POINT_TO_POINT_OPS)

    @property
    def is_collective_N(self) -> NDArray[np.bool_]:
        """By name, or by having a process group."""
        return self.is_op(*COLLECTIVE_OPS) | (self.group_N >= 0)

    @property
    def is_pace_N(self) -> NDArray[np.bool_]:
        return self.is_op(PACE_OP)


def read_matrix(trace: Trace, *, job: str | None = None) -> OperationMatrix:
    """The matrix of one job of a trace; ``job`` must be named where the trace holds several."""
    name = trace.job_name(job)
    mine = trace.isin("job", name)
    rows: Any = slice(None) if mine.all() else np.flatnonzero(mine)
    columns = {key: trace.column(key)[rows] for key in _COLUMNS}
    codes = trace.table["op"].combine_chunks()
    ops = tuple(map(str, codes.dictionary.to_pylist()))
    columns["op"] = np.asarray(codes.indices)[rows]
    kept, recorded, lacking = _complete(columns)
    columns = {key: column[kept] for key, column in columns.items()}
    kept = _absorbed(columns, ops)
    columns = {key: column[kept] for key, column in columns.items()}
    ranks, columns["rank"] = np.unique(columns["rank"], return_inverse=True)
    iterations, at_T = np.unique(columns["iteration"], return_inverse=True)
    if not len(iterations):
        raise InputError(f"trace of {name}: 0 steps that all ranks have; allowed: at least 1")
    operation, first = _operations(columns, at_T)
    operations, steps = len(first), len(iterations)
    if operations * steps > MAX_CELLS:
        raise InputError(
            f"trace of {name}: {operations} different operations in {steps} steps; allowed: at most {MAX_CELLS} cells"
        )
    start_NT, end_NT = np.full((operations, steps), np.nan), np.full((operations, steps), np.nan)
    start_NT[operation, at_T], end_NT[operation, at_T] = columns["start_s"], columns["end_s"]
    place_N = np.bincount(operation, columns["seq"]) / np.bincount(operation)
    order = np.lexsort((place_N, columns["rank"][first]))
    columns["bytes"][first] = np.rint(np.bincount(operation, columns["bytes"]) / np.bincount(operation))
    taken: dict[str, Any] = {key: columns[key][first][order].astype(np.int64) for key in _OF_OPERATION}
    begin_s_T, step_s_T = _steps(start_NT, end_NT, iterations)
    start_NT, end_NT = start_NT[order] - begin_s_T, end_NT[order] - begin_s_T
    _tell_apart(ops, taken, start_NT, end_NT)
    world_size, rank_step = _world_size(trace, ranks)
    before = trace.metadata.job.get("steps_left_out")  # when files of ranks were made into one trace
    before = before if type(before) is int and before > 0 else 0
    dp_rank, stage = (_of_ranks(trace, key, ranks) for key in ("dp_rank", "stage"))
    hosts = trace.metadata.of_ranks("host")
    return OperationMatrix(
        name=name,
        source=trace.metadata.source,
        world_size=world_size,
        rank_step=rank_step,
        counted="attempt" in trace.metadata.job,  # only they write that
        ops=ops,
        ranks=tuple(ranks.tolist()),
        hosts=tuple(str(hosts.get(rank) or "") for rank in ranks.tolist()),
        dp_rank_N=dp_rank[taken["rank"]],
        stage_N=stage[taken["rank"]],
        **{f"{key}_N": taken[key] for key in _OF_OPERATION},
        start_NT=start_NT,
        end_NT=end_NT,
        iteration_T=iterations.astype(np.int64),
        begin_s_T=begin_s_T,
        step_s_T=step_s_T,
        recorded=recorded + before,
        dropped=recorded + before - steps,
        lacking=lacking,
    )


def _complete(columns: dict[str, NDArray[Any]]) -> tuple[NDArray[np.bool_], int, str]:
    """Which rows belong to a step that every rank has, how many steps there are, and a line on those left out."""
    ranks, rank = np.unique(columns["rank"], return_inverse=True)
    steps, step = np.unique(columns["iteration"], return_inverse=True)
    present_TR = np.zeros((len(steps), len(ranks)), np.bool_)
    present_TR[step, rank] = True
    whole_T = np.asarray(present_TR.all(axis=1))
    dropped, lacks_R = int((~whole_T).sum()), (~present_TR).sum(axis=0)
    worst = int(lacks_R.argmax()) if dropped else 0
    text = steps_left_out(dropped, len(steps), int(ranks[worst]), int(lacks_R[worst])) if dropped else ""
    return np.asarray(whole_T[step]), len(steps), text


def _absorbed(columns: dict[str, NDArray[Any]], ops: tuple[str, ...]) -> NDArray[np.bool_]:
    """Which rows are left when a moment of compute right before a delay moves behind it, to the rest, in place.

    Otherwise a rank's compute would be its second in steps with a delay and its first in those without.
    """
    kept = np.ones(len(columns["op"]), np.bool_)
    if PACE_OP not in ops:
        return kept
    order = np.lexsort((columns["seq"], columns["iteration"], columns["rank"]))
    op, start_s, end_s = (columns[key][order] for key in ("op", "start_s", "end_s"))
    compute = np.isin(op, [i for i, name in enumerate(ops) if name in COMPUTE_OPS])
    together = (np.diff(columns["rank"][order]) == 0) & (np.diff(columns["iteration"][order]) == 0)
    at = np.flatnonzero(compute[:-2] & (op[1:-1] == ops.index(PACE_OP)) & compute[2:] & together[:-1] & together[1:])
    at = at[(end_s - start_s)[at] <= MOMENT * (end_s - start_s)[at + 2]]
    until_s = start_s[at] + (end_s - start_s)[at + 1]
    columns["start_s"][order[at + 1]], columns["start_s"][order[at + 2]] = start_s[at], until_s
    columns["end_s"][order[at + 1]] = until_s
    kept[order[at]] = False
    return kept


def _operations(columns: dict[str, NDArray[Any]], at_T: Integers) -> tuple[Integers, Integers]:
    """Each row's operation, and each operation's first row; adds the column ``position`` among its like in a step."""
    like = _joined(*(columns[name] for name in ("rank", "op", "group", "micro_batch", "chunk", "peer")))
    columns["position"] = _places(like, at_T, columns["seq"])
    _, first, operation = np.unique(_joined(like, columns["position"]), return_index=True, return_inverse=True)
    if len(first) * (int(at_T.max(initial=0)) + 1) > len(like):
        columns["position"] = _by_size(columns, at_T, np.unique(like, return_inverse=True)[1], first)
        _, first, operation = np.unique(_joined(like, columns["position"]), return_index=True, return_inverse=True)
    return operation.astype(np.int64), first.astype(np.int64)


def _by_size(columns: dict[str, NDArray[Any]], at_T: Integers, like: Integers, first: Integers) -> Integers:
    """Positions where steps lack operations: a size tells which ones are there, unless sizes vary by themselves."""
    sized = _joined(like, np.unique(columns["bytes"], return_inverse=True)[1])
    sized = _joined(sized, _places(sized, at_T, columns["seq"]))
    _, one, of_size = np.unique(sized, return_index=True, return_inverse=True)
    place = np.zeros(len(one), np.int64)  # in a step that has all of its like
    np.maximum.at(place, of_size, columns["position"])
    several = one[np.unique(_joined(like[one], place), return_index=True)[1]]
    by_place, by_size, at_places = (np.bincount(like[rows]) for rows in (first, one, several))
    is_told = (by_place == by_size) & (by_size == at_places)
    return np.where(is_told[like], place[of_size], columns["position"])


def _joined(*columns: NDArray[Any]) -> Integers:
    """A number for each different row of some columns."""
    key, keys = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        if keys * (high - low + 1) >= 1 << 62:  # dense, so that no product can overflow
            key = np.unique(key, return_inverse=True)[1]
            keys = int(key.max(initial=0)) + 1
        key, keys = key * (high - low + 1) + (column.astype(np.int64) - low), keys * (high - low + 1)
    return key


def _places(key: Integers, at_T: Integers, seq: NDArray[Any]) -> Integers:
    """Which one each row is, in order, among those of its step with the same key."""
    order, row, place = np.lexsort((seq, key, at_T)), np.arange(len(key)), np.empty(len(key), np.int64)
    fresh = np.ones(len(key), np.bool_)
    fresh[1:] = (np.diff(key[order]) != 0) | (np.diff(at_T[order]) != 0)
    place[order] = row - np.maximum.accumulate(np.where(fresh, row, 0))
    return place


def _tell_apart(ops: tuple[str, ...], operations: dict[str, Integers], start_NT: Array, end_NT: Array) -> None:
    """Split rows that replace a rank's compute in some steps into its usual compute and the rest, in place.

    A live trace gives everything outside of collectives the name of the iteration's mark, such as a checkpoint, and
    does not separate compute from it (``live/record/recorder.py``).
    """
    known = (*COMPUTE_OPS, *COLLECTIVE_OPS, *POINT_TO_POINT_OPS, PACE_OP)
    other = [i for i, op in enumerate(ops) if op not in known]
    compute = [i for i, op in enumerate(ops) if op == COMPUTE_OPS[0]]
    place = list(zip(operations["rank"].tolist(), operations["position"].tolist(), strict=True))
    computes = {place[n]: n for n in np.flatnonzero(np.isin(operations["op"], compute)).tolist()}
    for n in np.flatnonzero(np.isin(operations["op"], other) & (operations["group"] < 0)).tolist():
        c = computes.get(place[n])
        instead_T = np.isfinite(start_NT[n]) & np.isnan(start_NT[c]) if c is not None else np.zeros(0, np.bool_)
        if c is not None and instead_T.any() and not instead_T.all():
            usual_s = np.nanmedian(end_NT[c] - start_NT[c])
            start_NT[c, instead_T] = start_NT[n, instead_T]
            end_NT[c, instead_T] = np.minimum(start_NT[n, instead_T] + usual_s, end_NT[n, instead_T])
            start_NT[n, instead_T] = end_NT[c, instead_T]


def _steps(start_NT: Array, end_NT: Array, iterations: Integers) -> tuple[Array, Array]:
    """When each step began and how long it took: from the end of the one before, where the trace has that one."""
    begin_s, end_s = np.fmin.reduce(start_NT), np.fmax.reduce(end_NT)
    follows = (np.diff(iterations) == 1) & (end_s[:-1] < end_s[1:])
    begin_s[1:] = np.where(follows, end_s[:-1], begin_s[1:])
    return begin_s, end_s - begin_s


def _world_size(trace: Trace, ranks: Integers) -> tuple[int, int]:
    """How many ranks the job had at least, as the metadata say, and how far the numbers of those in it lie apart.

    A trace may have one rank of each tensor group, as those of the straggler study; not if it says its ``ranks``.
    """
    least = max([int(ranks.max()), *(int(entry["rank"]) for entry in trace.metadata.ranks)]) + 1
    about, said = trace.metadata.job, dict[str, int]()
    for key in ("world_size", "ranks"):
        if type(size := about.get(key)) is int and size >= least:
            said[key] = size
    step = 1 if "ranks" in said else int(np.gcd.reduce(ranks - ranks[0])) or 1
    return max([least, *said.values()]), step


def _of_ranks(trace: Trace, key: str, ranks: NDArray[Any]) -> Integers:
    """An integer of each rank from the metadata; without one 0 for a stage, else the rank's place."""
    said = trace.metadata.of_ranks(key)
    known = ((i, said.get(rank)) for i, rank in enumerate(ranks.tolist()))
    return np.array([one if type(one) is int else 0 if key == "stage" else i for i, one in known], np.int64)


def meetings(matrix: OperationMatrix) -> list[list[int]]:
    """Operations that begin together, each set of two or more."""
    sets: dict[tuple[object, ...], list[int]] = defaultdict(list)
    forward, backward = (matrix.is_op(f"{d}-send", f"{d}-recv") for d in ("forward", "backward"))
    sends, stages = matrix.is_op("forward-send", "backward-send"), int(matrix.stage_N.max()) + 1
    is_barrier = matrix.is_op(BARRIER_OP)
    for n in np.flatnonzero((matrix.group_N >= 0) | is_barrier).tolist():
        like = (matrix.op_N, matrix.group_N, matrix.micro_batch_N, matrix.chunk_N, matrix.position_N)
        sets["group", *(int(x[n]) for x in like)].append(n)
    for n in np.flatnonzero((forward | backward) & (matrix.micro_batch_N >= 0)).tolist():
        place = max(int(matrix.chunk_N[n]), 0) * stages + int(matrix.stage_N[n])
        border = place if bool(forward[n]) == bool(sends[n]) else place - 1
        place_in = (matrix.dp_rank_N, matrix.micro_batch_N, matrix.position_N)
        sets["transfer", bool(forward[n]), border, *(int(x[n]) for x in place_in)].append(n)
    return [operations for operations in sets.values() if len(operations) > 1]
