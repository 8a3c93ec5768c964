"""A job's transfers as its trace shows them: communicators, a common order of all ranks, and when each began and ended.

Transfers are matched by their order on each communicator, as real ones are. A row begins when a rank entered the
transfer, or handed it over, and ends when it was through.

Axes: T steps, R ranks, K transfers of a step in their order, N rows.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.step_stamps import MESSAGES, PLAIN_OPS, StepStamps, moves, usual_steps
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import BARRIER_OP, Integers, OperationMatrix
from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.program.step_program import WORLD, Communicator

MIN_STEPS: Final = 2
RARE: Final = 0.05
"""Share of steps below which another kind of step counts as unusual and is left out."""
MAX_EVERY: Final = 64
UNKNOWN_PEERS: Final = "the trace does not say who is at the other end"

Array = NDArray[np.float64]


class Transfer(NamedTuple):
    """One transfer of a step, of every process group of a communicator that takes part."""

    op: Op
    communicator: str
    payload_bytes: float
    every: int
    """It happens in one of so many steps."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of the process groups that take part."""

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for group in self.groups for rank in group)


@dataclass(frozen=True)
class ProgramStamps(StepStamps):
    """The steps of a job; times in seconds on the trace's clock, not a number where a rank lacks a transfer.

    ``begin_T`` is when the last rank ended the step before. ``compute`` are all other rows of a rank: step, start and
    end ``(3, N)`` each.
    """

    hosts: tuple[str, ...]
    communicators: Mapping[str, Communicator]
    transfers: tuple[Transfer, ...]
    start_TRK: Array
    end_TRK: Array
    compute: tuple[Array, ...]

    @property
    def full_T(self) -> NDArray[np.bool_]:
        """Steps that have all transfers."""
        some_TK = np.isfinite(self.start_TRK).max(axis=1)
        return np.asarray(some_TK.min(axis=1), np.bool_)

    def part(self, use_T: NDArray[np.bool_]) -> ProgramStamps:
        place_T = np.cumsum(use_T) - 1
        rows = tuple(one[:, use_T[one[0].astype(np.int64)]] for one in self.compute)
        moved = tuple(np.stack([place_T[t.astype(np.int64)], start, end]) for t, start, end in rows)
        return replace(super().part(use_T), compute=moved)


class _Row(NamedTuple):
    """An operation of a rank, in a step that has all of them."""

    n: int
    op: str
    group: int
    start_s: float


def read_program(whole: OperationMatrix) -> ProgramStamps:
    usual = usual_steps(whole)
    matrix = usual.of_steps(_alike(usual.name, np.isfinite(usual.start_NT[moves(usual)])))
    name, ranks, move_N, group_N = matrix.name, len(matrix.ranks), moves(matrix), _with_pairs(matrix)
    full = int(np.isfinite(matrix.start_NT[move_N]).sum(axis=0).argmax())
    rows = [list[_Row]() for _ in range(ranks)]
    for n in np.argsort(matrix.start_NT[:, full], kind="stable").tolist():
        if move_N[n]:
            row = _Row(n, matrix.ops[matrix.op_N[n]], int(group_N[n]), float(matrix.start_NT[n, full]))
            rows[matrix.rank_N[n]].append(row)
    _check_ops(name, rows)
    while all(mine and mine[-1].op == BARRIER_OP for mine in rows):  # a program's step ends for all together
        rows = [mine[:-1] for mine in rows]
    groups, pairs = _members(rows)
    others = {group: members for group, members in groups.items() if group not in pairs}
    communicators, communicator_of = _communicators(name, others, ranks)
    for label in dict.fromkeys(pairs.values()):
        members = [list(groups[group]) for group, of in pairs.items() if of == label]
        communicators[label] = Communicator(pairs=sorted(members))
    communicator_of |= pairs
    rows = [[row for row in mine if row.group in communicator_of] for mine in rows]
    transfers, number = _ordered(name, rows, communicator_of, groups)
    if not transfers:
        raise InputError(f"trace of {name}: no transfer between ranks; allowed: a job whose ranks communicate")
    at, k_N = [row.n for mine in rows for row in mine], [k for mine in number for k in mine]
    clock_2NT, stamps_2TRK = matrix.clock_2NT, np.full((2, matrix.steps, ranks, len(transfers)), np.nan)
    stamps_2TRK[:, :, matrix.rank_N[at], k_N] = clock_2NT[:, at].swapaxes(1, 2)
    size_RK = np.full((ranks, len(transfers)), np.nan)
    size_RK[matrix.rank_N[at], k_N] = matrix.bytes_N[at]
    is_sent_K = np.array([one.op == "send" for one in transfers])  # a receiver need not know what a message has
    payload_K = np.where(is_sent_K, np.nanmax(size_RK, axis=0), np.nanmean(size_RK, axis=0)).tolist()
    every_K = _every(name, matrix.iteration_T, np.isfinite(stamps_2TRK[0]).any(axis=1))
    return ProgramStamps(
        name=name,
        source=matrix.source,
        names=matrix.ranks,
        hosts=matrix.hosts,
        communicators=communicators,
        transfers=tuple(
            one._replace(payload_bytes=size, every=every)
            for one, size, every in zip(transfers, payload_K, every_K, strict=True)
        ),
        iteration_T=matrix.iteration_T,
        begin_T=matrix.begin_s_T,
        step_T=matrix.step_s_T,
        start_TRK=stamps_2TRK[0],
        end_TRK=stamps_2TRK[1],
        compute=tuple(_compute(clock_2NT[:, ~move_N & (matrix.rank_N == r)]) for r in range(ranks)),
        dropped=matrix.recorded - matrix.steps,
    )


def _compute(clock_2NT: Array) -> Array:
    """All rows of some operations: step, start and end ``(3, N)``."""
    t, n = np.nonzero(np.isfinite(clock_2NT[0]).T)
    return np.stack([t, *clock_2NT[:, n, t]])


def _with_pairs(matrix: OperationMatrix) -> Integers:
    """Process groups of operations, with one for each sender and receiver of messages that have none."""
    group_N, rank_N = matrix.group_N.copy(), np.array(matrix.ranks)[matrix.rank_N]
    some_N = (group_N < 0) & (matrix.peer_N >= 0) & matrix.is_op(*MESSAGES)
    ends_2N = np.where(matrix.is_op(MESSAGES[0]), [rank_N, matrix.peer_N], [matrix.peer_N, rank_N])
    _, pair_N = np.unique(ends_2N[:, some_N], axis=1, return_inverse=True)
    group_N[some_N] = group_N.max(initial=-1) + 1 + pair_N.ravel()
    return group_N


def _check_ops(name: str, rows: list[list[_Row]]) -> None:
    for op, is_known in sorted({(row.op, row.group >= 0) for mine in rows for row in mine}):
        if op not in PLAIN_OPS:
            raise InputError(f"trace of {name}: {op} is no transfer of a program; allowed: {', '.join(PLAIN_OPS)}")
        if not is_known and PLAIN_OPS[op] == "send":
            raise InputError(
                f"trace of {name}: {UNKNOWN_PEERS} of a {op}; allowed: sends and receives with a process group or a "
                "known peer. A program typed by hand, given as --base, settles it"
            )


def _alike(name: str, has_NT: NDArray[np.bool_]) -> Integers:
    """The steps that have all transfers of the usual step, or lack some of them at most, by place."""
    kinds, kind_T, counts = np.unique(has_NT.T, axis=0, return_inverse=True, return_counts=True)
    steps = has_NT.shape[1]
    usual = (counts > RARE * steps) & kinds.any(axis=1)
    if counts[usual].sum() < MIN_STEPS:
        raise InputError(
            f"trace of {name}: {counts.max(initial=0)} of {steps} steps have the same transfers; "
            f"allowed: at least {MIN_STEPS}. A longer trace of steps that are alike settles it"
        )
    largest = max(np.flatnonzero(usual).tolist(), key=lambda k: (kinds[k].sum(), counts[k]))
    usual &= ~(kinds & ~kinds[largest]).any(axis=1)
    if counts[usual].sum() < max(MIN_STEPS, 0.8 * steps):
        raise InputError(
            f"trace of {name}: transfers differ from step to step ({len(kinds)} kinds in {steps} steps); allowed: "
            "the same in every step, or some left out in turns. A trace of steps that are alike settles it"
        )
    return np.flatnonzero(usual[kind_T.ravel()])


def _members(step: list[list[_Row]]) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """Ranks of each process group, and the communicators of groups that have messages in one direction only.

    Of such a group the sender is the first; those of equal distance, a stage together, share a communicator.
    """
    ops: dict[int, dict[int, set[str]]] = {}
    for r, mine in enumerate(step):
        for row in mine:
            ops.setdefault(row.group, {}).setdefault(r, set()).add(row.op)
    members, communicator_of = dict[int, tuple[int, ...]](), dict[int, str]()
    first: dict[tuple[int, int], str] = {}
    for group, of_rank in ops.items():
        members[group] = tuple(sorted(of_rank))
        pair = sorted(of_rank, key=lambda r: MESSAGES[0] not in of_rank[r])
        if [of_rank[r] for r in pair] == [{op} for op in MESSAGES]:
            members[group] = sender, receiver = pair[0], pair[1]
            stage = receiver - sender, sender // abs(receiver - sender)
            communicator_of[group] = first.setdefault(stage, f"messages-{sender}-to-{receiver}")
    return members, communicator_of


def _communicators(
    name: str, groups: Mapping[int, tuple[int, ...]], ranks: int
) -> tuple[dict[str, Communicator], dict[int, str]]:
    """Communicators of equal groups over all ranks, and that of each process group; groups of one rank have none."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for group in sorted(groups):
        members = groups[group]
        if len(members) < 2:
            continue
        size, stride = len(members), members[1] - members[0]
        if ranks % (size * stride) or list(members) not in Communicator(size=size, stride=stride).groups(ranks):
            raise InputError(
                f"trace of {name}: a process group of ranks {', '.join(map(str, members))} of {ranks} is not one of "
                "equal groups at equal distances; allowed: such groups. A trace of all ranks settles it, where some "
                "are missing"
            )
        kinds.setdefault((size, stride), []).append(group)
    communicators, communicator_of = dict[str, Communicator](), dict[int, str]()
    for (size, stride), numbers in kinds.items():
        count = Counter[int]()
        for group in numbers:
            place, *other_places = {count[r] for r in groups[group]}
            if other_places:
                raise InputError(
                    f"trace of {name}: ranks of {size} are in process groups of which some ranks have more than others"
                    "; allowed: as many on all. A program typed by hand, given as --base, settles it"
                )
            count.update(groups[group])
            label = "all" if size == ranks else f"groups-of-{size}" + (f"-stride-{stride}" if stride > 1 else "")
            label += f"-{place + 1}" if place else ""
            if label == "all":
                label = WORLD
            else:
                communicators[label] = Communicator(size=None if size == ranks else size, stride=stride)
            communicator_of[group] = label
    return communicators, communicator_of


def _ordered(
    name: str,
    step: list[list[_Row]],
    communicator_of: Mapping[int, str],
    groups: Mapping[int, tuple[int, ...]],
) -> tuple[list[Transfer], list[list[int]]]:
    """One order of the transfers of all ranks that each rank's own order is part of, and the places of each rank's."""
    Key = tuple[str, int, Op]
    keys: list[list[Key]] = []
    of_key: dict[Key, set[int]] = {}
    start_s: dict[Key, float] = {}
    order = TopologicalSorter[Key]()
    for mine in step:
        own, count = list[Key](), Counter[str]()
        for row in mine:
            communicator = communicator_of[row.group]
            key = (communicator, count[communicator], PLAIN_OPS[row.op])
            count[communicator] += 1
            of_key.setdefault(key, set()).add(row.group)
            start_s[key] = min(start_s.get(key, np.inf), row.start_s)
            order.add(key, *own[-1:])
            own.append(key)
        keys.append(own)
    try:
        order.prepare()
    except CycleError:
        raise InputError(
            f"trace of {name}: ranks order the transfers of several communicators differently; allowed: one order that "
            "fits all ranks. A program typed by hand, given as --base, settles it"
        ) from None
    place, ready = dict[Key, int](), list[tuple[float, Key]]()
    while order.is_active():
        for key in order.get_ready():
            heapq.heappush(ready, (start_s[key], key))
        _, key = heapq.heappop(ready)
        place[key] = len(place)
        order.done(key)
    transfers = [
        Transfer(op, communicator, 0.0, 1, tuple(groups[group] for group in sorted(of_key[communicator, n, op])))
        for communicator, n, op in place
    ]
    return transfers, [[place[key] for key in own] for own in keys]


def _every(name: str, iteration_T: NDArray[np.int64], some_TK: NDArray[np.bool_]) -> list[int]:
    """In one of how many steps each transfer happens."""
    every_K, phases = [], dict[int, int]()
    for here_T in some_TK.T:
        if here_T.all():
            every_K.append(1)
            continue
        steps = iteration_T[here_T]
        every = int(np.gcd.reduce(np.diff(steps))) if len(steps) > 1 else 0
        if not 1 < every <= MAX_EVERY or not (here_T == ((iteration_T - steps[0]) % every == 0)).all():
            raise InputError(
                f"trace of {name}: a transfer is missing in some steps, but not in turns; allowed: in one of so many "
                "steps. A longer trace settles it"
            )
        if phases.setdefault(every, int(steps[0]) % every) != int(steps[0]) % every:
            raise InputError(
                f"trace of {name}: different transfers take turns from step to step; allowed: all in the same steps"
            )
        every_K.append(every)
    return every_K
