"""From what every rank does in a step to the tables that the engine runs (``paceenv.sim.engine.program_layout``).

A :class:`StepPlan` lists, for each role, computing, started transfers and waits in order; ranks of one role do the
same. Operations are matched by their order on each communicator, as real ones are. Links that never limit anything are
left out, and links that always carry the same are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.timing import BARRIER_BYTES
from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.program.footprint import Use
from paceenv.sim.engine.program_layout import COMPUTE, OPS, START, UPLINK, WAIT, Program, Uses

_SAME = 1e-9
"""Shares of a link that differ by less are the same."""
_Uses = list[tuple[NDArray[np.int64], NDArray[np.float64]]]
MAX_PRUNED_LINKS = 400


class Compute(NamedTuple):
    """A rank computes."""

    seconds: float
    micro_batch: int = -1
    """Whose length its time follows; -1: none."""


class Start(NamedTuple):
    """A rank hands a transfer to a communicator and goes on."""

    communicator: str
    op: Op
    payload_bytes: float
    can_wait: bool = False
    """Whether its result is not needed soon, so that it may be held back."""
    every: int = 1
    """It happens in one of so many iterations."""
    parts: int = 1
    """So many equal operations one after the other, folded into one; ``payload_bytes`` is of all."""


class Wait(NamedTuple):
    """A rank waits for a transfer that it started."""

    start: int
    """Place of its :class:`Start` among the rank's instructions."""


Instruction = Compute | Start | Wait
_KINDS = {Compute: COMPUTE, Start: START, Wait: WAIT}


@dataclass(frozen=True)
class StepPlan:
    """What every rank does in a step.

    Attributes:
        role_R: role of each rank.
        roles: instructions of each role.
        communicators: the process groups of each communicator, as lists of ranks.
    """

    role_R: Sequence[int]
    roles: Sequence[Sequence[Instruction]]
    communicators: dict[str, list[list[int]]]

    @property
    def can_defer(self) -> bool:
        """Whether it has transfers that can wait."""
        return any(isinstance(one, Start) and one.can_wait for role in self.roles for one in role)

    @property
    def compute_s(self) -> float:
        """Compute time of the busiest role, seconds; the unit of a program's compute."""
        return max(sum(one.seconds for one in role if isinstance(one, Compute)) for role in self.roles)


class Operation(NamedTuple):
    """A transfer of one process group in every step."""

    group: int
    members: list[int]
    start: Start
    use: Use
    share_of: dict[int, float]
    """The share that it takes, alone, of each link that can be full."""


class Row(NamedTuple):
    """What a rank does next."""

    instruction: Instruction
    operation: int = 0
    """Number of the operation that it starts or waits for."""
    place: int = 0
    """The rank's place among the members."""
    pays: bool = False
    """Whether the rank counts its wait as time in its payload collectives."""


class Laid(NamedTuple):
    """A plan on the links of a fabric."""

    plan: StepPlan
    groups: list[list[int]]
    """The members of each process group."""
    operations: list[Operation]
    """Group by group, in their order."""
    rows_R: list[list[Row]]


def lay(plan: StepPlan, use: Callable[[Start, list[int]], Use], *, has_tenants: bool) -> Laid:
    """Match what the ranks start and wait for, and find the links that can be full.

    A process group runs one operation at a time, so a link is never full where the largest shares of all groups fit.

    Raises:
        InputError: where the members of a process group do not start the same transfers in the same order.
    """
    groups = [(name, members) for name, parts in plan.communicators.items() for members in parts]
    operations: list[Operation] = []
    place_of: dict[tuple[str, int], tuple[int, int]] = {}
    """The first operation of a rank on a communicator, and its place among the members."""
    most: dict[int, dict[int, float]] = {}
    """What a group takes of a link at most, by link and group."""
    for g, (name, members) in enumerate(groups):
        place_of |= {(name, rank): (len(operations), place) for place, rank in enumerate(members)}
        known: dict[tuple[object, ...], Use] = {}
        for start in _started(plan, name, members):
            key = (start.op, start.payload_bytes, start.parts)
            if key not in known:
                known[key] = use(start, members)
            share_of = dict(zip(known[key].link_U.tolist(), known[key].share_U.tolist(), strict=True))
            operations.append(Operation(g, members, start, known[key], share_of))
            for link, share in share_of.items():
                of_group = most.setdefault(link, {})
                of_group[g] = max(of_group.get(g, 0.0), share)
    full = {link for link, shares in most.items() if len(shares) > 1 and sum(shares.values()) > 1.0 + _SAME}
    full |= {UPLINK} if has_tenants else set()
    operations = [
        one._replace(share_of={link: min(share, 1.0) for link, share in one.share_of.items() if link in full})
        for one in operations
    ]
    return Laid(plan, [members for _, members in groups], operations, _rows_R(plan, operations, place_of))


def _rows_R(
    plan: StepPlan, operations: list[Operation], place_of: dict[tuple[str, int], tuple[int, int]]
) -> list[list[Row]]:
    """What every rank does, with the operations that it starts and waits for."""
    payload, sets, rows_R = payload_R(plan), {one.group: frozenset(one.members) for one in operations}, []
    for rank, role in enumerate(plan.role_R):
        rows, begun = list[Row](), dict.fromkeys(plan.communicators, 0)
        for one in plan.roles[role]:
            if isinstance(one, Compute):
                rows.append(Row(one))
            elif isinstance(one, Start):
                if (one.communicator, rank) not in place_of:
                    raise InputError(f"program: rank {rank} is in no process group of communicator {one.communicator}")
                first, place = place_of[one.communicator, rank]
                rows.append(Row(one, first + begun[one.communicator], place))
                begun[one.communicator] += 1
            else:
                of_start = rows[one.start]
                group, _, start, *_ = operations[of_start.operation]
                pays = start.op != "send" and sets[group] == payload[rank]
                rows.append(of_start._replace(instruction=one, pays=pays))
        rows_R.append(rows)
    return rows_R


def tables(plan: StepPlan, use: Callable[[Start, list[int]], Use], *, has_tenants: bool) -> Program:
    """The engine's tables of a plan; it raises InputError as :func:`lay` does."""
    _, groups, operations, rows_R = lay(plan, use, has_tenants=has_tenants)
    uses, whole_s = _simplified(operations, has_tenants=has_tenants), max(plan.compute_s, 1e-300)
    rows = [row for rows in rows_R for row in rows]
    computes = [row.instruction if isinstance(row.instruction, Compute) else Compute(0.0) for row in rows]
    starts, taken = [one.start for one in operations], [one.use for one in operations]
    group_O, sizes = np.array([one.group for one in operations], np.int64), np.array([*map(len, groups)], np.int64)
    return Program(
        first_R=_bounds([*map(len, rows_R)]),
        kind_I=np.array([_KINDS[type(row.instruction)] for row in rows], np.int64),
        share_I=np.array([one.seconds / whole_s for one in computes], np.float64),
        operation_I=np.array([row.operation for row in rows], np.int64),
        micro_I=np.array([one.micro_batch for one in computes], np.int64),
        pays_I=np.array([row.pays for row in rows], np.bool_),
        group_O=group_O,
        op_O=np.array([OPS.index(one.op) for one in starts], np.int64),
        bytes_O=np.array([one.payload_bytes for one in starts], np.float64),
        last_O=np.array([*(group_O[1:] != group_O[:-1]), True][: len(operations)], np.bool_),
        every_O=np.array([one.every for one in starts], np.int64),
        can_wait_O=np.array([one.can_wait for one in starts], np.bool_),
        alone_O=np.array([one.alone_s for one in taken], np.float64),
        latency_O=np.array([one.latency_s for one in taken], np.float64),
        is_private_O=np.array([len(links) == 0 for links, _ in uses], np.bool_),
        first_member_N=_bounds(sizes),
        rank_M=np.array([rank for members in groups for rank in members], np.int64),
        place_I=np.array([row.place for row in rows], np.int64),
        first_handed_O=_bounds(sizes[group_O]),
        uses=Uses(
            weight_O=np.array([one.weight for one in taken], np.float64),
            top_O=np.array([float(shares.max(initial=0.0)) or 1.0 for _, shares in uses], np.float64),
            first_use_O=_bounds([len(links) for links, _ in uses]),
            link_U=np.concatenate([np.zeros(0, np.int64), *(links for links, _ in uses)]).astype(np.int64),
            share_U=np.concatenate([np.zeros(0), *(shares for _, shares in uses)]).astype(np.float64),
        ),
        links=int(max([UPLINK, *(int(links.max(initial=0)) for links, _ in uses)])) + 1,
    )


def _bounds(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of so many begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def payload_R(plan: StepPlan) -> list[frozenset[int]]:
    """The ranks of the process group that carries each rank's payload: of the last collective that it waits for.

    The live agent has the same rule: time in collectives of these very ranks is the rank's time in the payload. Waits
    in other groups (tensor, pipeline, experts) lie behind the start of the step; a delay there moves only the others.

    Returns:
        For each rank; empty for one that waits for no collective.
    """
    group_of = {
        (name, rank): members for name, parts in plan.communicators.items() for members in parts for rank in members
    }
    names = [_payload_of(role) for role in plan.roles]
    return [frozenset(group_of.get((names[role], rank), ())) for rank, role in enumerate(plan.role_R)]


def _payload_of(role: Sequence[Instruction]) -> str:
    """The communicator of the last collective with a payload that a role waits for in every step, or in some; or ""."""
    waited = [role[one.start] for one in role if isinstance(one, Wait)]
    transfers = [start for start in waited if isinstance(start, Start)]
    collectives = [start for start in transfers if start.op != "send" and start.payload_bytes > BARRIER_BYTES]
    always = [start for start in collectives if start.every <= 1]
    return (always or collectives)[-1].communicator if collectives else ""


def _started(plan: StepPlan, name: str, members: list[int]) -> list[Start]:
    """The transfers of one process group, which all its members start in the same order."""
    transfers: list[Start] | None = None
    for rank in members:
        own = [one for one in plan.roles[plan.role_R[rank]] if isinstance(one, Start) and one.communicator == name]
        if transfers is not None and own != transfers:
            raise InputError(
                f"program: ranks {members[0]} and {rank} start different transfers on communicator {name}; "
                "allowed: the same ones in the same order on all members of a process group"
            )
        transfers = own
    return transfers or []


def _simplified(operations: list[Operation], *, has_tenants: bool) -> _Uses:
    """The links and shares of every operation, equal links as one, without links that are never fuller than another."""
    by_link: dict[int, dict[int, float]] = {}
    for o, one in enumerate(operations):
        for link, share in one.share_of.items():
            by_link.setdefault(link, {})[o] = round(share / _SAME) * _SAME
    kinds: dict[tuple[tuple[int, float], ...], bool] = {}
    for link, shares in by_link.items():
        signature = tuple(shares.items())
        kinds[signature] = kinds.get(signature, False) or (link == UPLINK and has_tenants)
    uses: list[tuple[list[int], list[float]]] = [([], []) for _ in operations]
    numbers, kept, is_few = count(UPLINK + 1), list[dict[int, float]](), len(kinds) <= MAX_PRUNED_LINKS
    for signature, is_uplink in sorted(kinds.items(), key=lambda item: (not item[1], -sum(s for _, s in item[0]))):
        own = dict(signature)
        if is_few and not is_uplink and any(_is_within(own, other) for other in kept):
            continue
        kept.append(own)
        link = UPLINK if is_uplink else next(numbers)
        for o, share in signature:
            uses[o][0].append(link)
            uses[o][1].append(min(share, 1.0))
    return [(np.array(links, np.int64), np.array(shares)) for links, shares in uses]


def _is_within(own: dict[int, float], other: dict[int, float]) -> bool:
    """Whether a link is never fuller than another one."""
    return own.keys() <= other.keys() and all(share <= other[o] + _SAME for o, share in own.items())
