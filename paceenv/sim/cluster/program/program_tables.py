"""From what every rank does in a step to the tables that the engine runs (``paceenv.sim.engine.program_layout``).

A :class:`StepPlan` lists, for each role, computing, started transfers and waits in order; ranks of one role do the
same. Operations are matched by their order on each communicator, as real ones are. Links that never limit anything are
left out, and links that always carry the same are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.timing import BARRIER_BYTES
from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.program.footprint import Use
from paceenv.sim.engine.program_layout import COMPUTE, OPS, START, UPLINK, WAIT, Program

_SAME = 1e-9
"""Shares of a link that differ by less are the same."""
MAX_PRUNED_LINKS = 400


class Compute(NamedTuple):
    """A rank computes."""

    seconds: float
    micro_batch: int = -1
    """Whose length its time follows; -1: none."""
    name: str = "compute"


class Start(NamedTuple):
    """A rank hands a transfer to a communicator and goes on."""

    communicator: str
    op: Op
    payload_bytes: float
    can_wait: bool = False
    """Whether its result is not needed soon, so that it may be held back."""
    every: int = 1
    """It happens in one of so many iterations."""
    name: str = ""
    parts: int = 1
    """So many equal operations one after the other, folded into one; ``payload_bytes`` is of all."""


class Wait(NamedTuple):
    """A rank waits for a transfer that it started."""

    communicator: str
    number: int
    """Of the transfer, counted on this communicator by this rank in this step, from 0."""


Instruction = Compute | Start | Wait


@dataclass(frozen=True)
class StepPlan:
    """What every rank does in a step.

    Attributes:
        role_R: role of each rank.
        roles: instructions of each role.
        communicators: the process groups of each communicator, as lists of ranks.
        replica_R: which samples each rank works on; ranks with the same number share the length of a micro-batch.
    """

    role_R: Sequence[int]
    roles: Sequence[Sequence[Instruction]]
    communicators: dict[str, list[list[int]]]
    replica_R: Sequence[int]

    @property
    def can_defer(self) -> bool:
        """Whether it has transfers that can wait."""
        return any(isinstance(one, Start) and one.can_wait for role in self.roles for one in role)

    @property
    def compute_s(self) -> float:
        """Compute time of the busiest role, seconds; the unit of a program's compute."""
        return max(sum(one.seconds for one in role if isinstance(one, Compute)) for role in self.roles)


_Uses = list[tuple[NDArray[np.int64], NDArray[np.float64]]]


class _Operation(NamedTuple):
    start: Start
    use: Use


def tables(plan: StepPlan, use: Callable[[Start, list[int]], Use], *, has_tenants: bool) -> Program:
    """The engine's tables of a plan.

    Raises:
        InputError: where the members of a process group do not start the same transfers in the same order.
    """
    groups = [(name, members) for name, parts in plan.communicators.items() for members in parts]
    group_of = {(name, rank): n for n, (name, members) in enumerate(groups) for rank in members}
    begun = [_started(plan, name, members) for name, members in groups]
    first_op = np.concatenate([[0], np.cumsum([len(ops) for ops in begun])]).astype(np.int64)
    operations: list[_Operation] = []
    known: dict[tuple[object, ...], Use] = {}
    for n, (_, members) in enumerate(groups):
        for start in begun[n]:
            key = (n, start.op, start.payload_bytes, start.parts)
            if key not in known:
                known[key] = use(start, members)
            operations.append(_Operation(start, known[key]))
    uses = _simplified(operations, first_op, has_tenants=has_tenants)
    rows = _instructions(plan, groups, group_of, first_op)
    payload, sets = payload_R(plan), [frozenset(members) for _, members in groups]
    group_O = np.repeat(np.arange(len(groups)), np.diff(first_op))
    pays = [
        one[0] == WAIT and operations[one[2]].start.op != "send" and sets[group_O[one[2]]] == payload[rank]
        for rank, row in enumerate(rows)
        for one in row
    ]
    counts = np.array([len(members) for _, members in groups], np.int64)
    last_O = np.zeros(len(operations), np.bool_)
    last_O[first_op[1:][np.diff(first_op) > 0] - 1] = True
    link_counts = [len(links) for links, _ in uses]
    return Program(
        first_R=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        kind_I=np.array([one[0] for row in rows for one in row], np.int64),
        share_I=np.array([one[1] for row in rows for one in row], np.float64),
        operation_I=np.array([one[2] for row in rows for one in row], np.int64),
        micro_I=np.array([one[3] for row in rows for one in row], np.int64),
        pays_I=np.array(pays, np.bool_),
        replica_R=np.array(plan.replica_R, np.int64),
        group_O=group_O.astype(np.int64),
        op_O=np.array([OPS.index(one.start.op) for one in operations], np.int64),
        bytes_O=np.array([one.start.payload_bytes for one in operations], np.float64),
        last_O=last_O,
        every_O=np.array([one.start.every for one in operations], np.int64),
        can_wait_O=np.array([one.start.can_wait for one in operations], np.bool_),
        alone_O=np.array([one.use.alone_s for one in operations], np.float64),
        latency_O=np.array([one.use.latency_s for one in operations], np.float64),
        weight_O=np.array([one.use.weight for one in operations], np.float64),
        top_O=_top_O(uses, group_O, has_tenants=has_tenants),
        fan_in_O=np.array([one.use.fan_in for one in operations], np.int64),
        ports_O=np.array([one.use.ports for one in operations], np.int64),
        is_private_O=np.array([count == 0 for count in link_counts], np.bool_),
        first_use_O=np.concatenate([[0], np.cumsum(link_counts)]).astype(np.int64),
        link_U=np.concatenate([np.zeros(0, np.int64), *(links for links, _ in uses)]).astype(np.int64),
        share_U=np.concatenate([np.zeros(0), *(shares for _, shares in uses)]).astype(np.float64),
        first_member_N=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        rank_M=np.array([rank for _, members in groups for rank in members], np.int64),
        place_I=np.array([one[4] for row in rows for one in row], np.int64),
        first_handed_O=np.concatenate([[0], np.cumsum(counts[group_O])]).astype(np.int64),
        links=int(max([UPLINK, *(int(links.max(initial=0)) for links, _ in uses)])) + 1,
    )


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
    begun: dict[str, list[Start]] = {}
    waited: list[Start] = []
    for one in role:
        if isinstance(one, Start):
            begun.setdefault(one.communicator, []).append(one)
        elif isinstance(one, Wait):
            waited.append(begun[one.communicator][one.number])
    collectives = [start for start in waited if start.op != "send" and start.payload_bytes > BARRIER_BYTES]
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


def _instructions(
    plan: StepPlan,
    groups: list[tuple[str, list[int]]],
    group_of: dict[tuple[str, int], int],
    first_op: NDArray[np.int64],
) -> list[list[tuple[int, float, int, int, int]]]:
    """Every rank's instructions as (kind, share, operation, micro-batch, place)."""
    whole_s = max(plan.compute_s, 1e-300)
    rows = []
    for rank, role in enumerate(plan.role_R):
        row, begun = [], dict.fromkeys(plan.communicators, 0)
        for one in plan.roles[role]:
            if isinstance(one, Compute):
                row.append((COMPUTE, one.seconds / whole_s, 0, one.micro_batch, 0))
                continue
            n = group_of.get((one.communicator, rank))
            if n is None:
                raise InputError(f"program: rank {rank} is in no process group of communicator {one.communicator}")
            place = groups[n][1].index(rank)
            if isinstance(one, Start):
                row.append((START, 0.0, int(first_op[n]) + begun[one.communicator], -1, place))
                begun[one.communicator] += 1
            elif one.number >= begun[one.communicator]:
                raise InputError(f"program: rank {rank} waits for a transfer on {one.communicator} before its start")
            else:
                row.append((WAIT, 0.0, int(first_op[n]) + one.number, -1, place))
        rows.append(row)
    return rows


def _simplified(operations: list[_Operation], first_op: NDArray[np.int64], *, has_tenants: bool) -> _Uses:
    """The links and shares of every operation, without links that are never full, equal ones as one.

    A process group runs one operation at a time, so a link is never full where the largest shares of all groups fit.
    """
    group_of_op = np.repeat(np.arange(len(first_op) - 1), np.diff(first_op))
    by_link: dict[int, dict[int, float]] = {}
    for o, one in enumerate(operations):
        for link, share in zip(one.use.link_U.tolist(), one.use.share_U.tolist(), strict=True):
            by_link.setdefault(link, {})[o] = share
    kinds: dict[tuple[tuple[int, float], ...], bool] = {}
    for link, shares in by_link.items():
        largest: dict[int, float] = {}
        for o, share in shares.items():
            group = int(group_of_op[o])
            largest[group] = max(largest.get(group, 0.0), share)
        is_full = len(largest) > 1 and sum(largest.values()) > 1.0 + _SAME
        if is_full or (link == UPLINK and has_tenants):
            signature = tuple((o, round(share / _SAME) * _SAME) for o, share in sorted(shares.items()))
            kinds[signature] = kinds.get(signature, False) or (link == UPLINK and has_tenants)
    uses: list[tuple[list[int], list[float]]] = [([], []) for _ in operations]
    number = UPLINK
    for signature, is_uplink in _pruned(kinds):
        if not is_uplink:
            number += 1
        for o, share in signature:
            uses[o][0].append(UPLINK if is_uplink else number)
            uses[o][1].append(min(share, 1.0))
    return [(np.array(links, np.int64), np.array(shares)) for links, shares in uses]


def _top_O(uses: _Uses, group_O: NDArray[np.int64], *, has_tenants: bool) -> NDArray[np.float64]:
    """The largest share that each operation takes of a link where it meets others; 1 where it meets none."""
    groups_on: dict[int, set[int]] = {UPLINK: {-1}} if has_tenants else {}
    for (links, _), group in zip(uses, group_O, strict=True):
        for link in links.tolist():
            groups_on.setdefault(link, set()).add(int(group))
    met = [[len(groups_on[link]) > 1 for link in links.tolist()] for links, _ in uses]
    return np.array([float(shares[one].max(initial=0.0)) or 1.0 for (_, shares), one in zip(uses, met, strict=True)])


def _pruned(kinds: dict[tuple[tuple[int, float], ...], bool]) -> list[tuple[tuple[tuple[int, float], ...], bool]]:
    """Without links that are never fuller than another one."""
    listed = sorted(kinds.items(), key=lambda item: (not item[1], -sum(share for _, share in item[0])))
    if len(listed) > MAX_PRUNED_LINKS:
        return listed
    kept: list[tuple[tuple[tuple[int, float], ...], bool]] = []
    shares: list[dict[int, float]] = []
    for signature, is_uplink in listed:
        own = dict(signature)
        if not is_uplink and any(
            own.keys() <= other.keys() and all(share <= other[o] + _SAME for o, share in own.items())
            for other in shares
        ):
            continue
        kept.append((signature, is_uplink))
        shares.append(own)
    return kept
