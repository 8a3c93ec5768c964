"""The operations of a program as messages: which member sends what to whom and when, and which links that passes.

Messages are counted here, one by one, and not taken from the fast engine's shares of links. Only the names and rates of
the links are common to both (``Tiers``). A message between nodes is cut into as many as there are NICs on its way.

Fairness is a choice, and it is the same in both engines: **one collective is one share**, unless ``fabric.sharing`` is
``flows``. Where two collectives meet on a link, each has half of it, however many messages each of them has there. That
is what a fixed number of channels does, which NCCL gives to a collective of any size. TCP divides a link between flows
instead. Messages of one collective share evenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.program.footprint import UPLINK, Tiers
from paceenv.sim.cluster.program.program_tables import Start, StepPlan
from paceenv.sim.cluster.protocols import Choice
from paceenv.sim.reference.flows import Wiring
from paceenv.sim.reference.network import Resource
from paceenv.sim.reference.schedules import Schedule, all_to_all, double_tree, nothing, trees

FIRST_LOOP_BYTES = 2.0**20
"""What a ring passes around first. Members that are early work ahead of a late one in this part only, as NCCL's buffers
allow no more."""
PIECES = 48
"""In how many pieces a tree, or each hop of a broadcast, passes its payload on."""
ROUNDING = 1e-9
_OPTIONS = {"is_tail": False, "has_latency": True}


@dataclass(frozen=True)
class Operation:
    """A transfer of one process group in every step."""

    start: Start
    members: tuple[int, ...]
    """Its ranks, in the order of their group."""
    is_first: bool
    """Whether none comes before it on its communicator."""
    is_last: bool
    wiring: Wiring


def schedule_of(start: Start, members: Sequence[int], per_node: int, *, is_tree: bool) -> tuple[Schedule, float]:
    """The messages of one operation, and how many bytes pass from one member to the next in all."""
    schedule, edge_bytes = _one_part(start, members, per_node, is_tree=is_tree)
    one = list(schedule.messages)
    for _ in range(start.parts - 1):  # a part begins where all of the one before is through
        first = len(schedule.messages)
        last_part = range(first - len(one), first)
        for m in one:
            after = [first + j for j in m.after] or last_part
            schedule.add((m.sender, m.receiver, m.size_bytes), after, has_latency=m.has_latency, begins=m.begins)
    return schedule, edge_bytes * start.parts


def _one_part(start: Start, members: Sequence[int], per_node: int, *, is_tree: bool) -> tuple[Schedule, float]:
    n, size_bytes = len(members), start.payload_bytes / start.parts
    schedule = Schedule(n)
    if n < 2:
        return schedule, size_bytes
    match start.op:
        case "send":
            schedule.round([(0, 1, size_bytes)], nothing(n))
            return schedule, size_bytes
        case "all_to_all":
            return all_to_all(n, size_bytes), size_bytes / n
        case "broadcast":
            return _chain(schedule, size_bytes), size_bytes
        case "all_reduce" if is_tree:
            trees(schedule, _tree_of_chains(members, per_node), size_bytes / 2.0, PIECES, nothing(n), _OPTIONS)
            return schedule, size_bytes / 2.0
    passes = 2 if start.op == "all_reduce" else 1
    first_bytes = min(FIRST_LOOP_BYTES, size_bytes)
    parts_bytes = [first_bytes, size_bytes - first_bytes] if size_bytes > first_bytes else [first_bytes]
    before = nothing(n)
    for i, part_bytes in enumerate(parts_bytes):
        is_last = i == len(parts_bytes) - 1
        before = schedule.rings([range(n)], part_bytes / n, passes * (n - 1), before, has_latency=is_last)
    return schedule, passes * (n - 1) / n * size_bytes


def _chain(schedule: Schedule, payload_bytes: float) -> Schedule:
    """A broadcast: pieces pass along the group from its first member to its last."""
    hops = schedule.members - 1
    pieces = PIECES * hops
    behind: list[tuple[int, ...]] = [()] * hops
    for piece in range(pieces):
        for hop in range(hops):
            after = behind[hop] + (behind[hop - 1] if hop else ())
            options = {"has_latency": piece == pieces - 1}
            behind[hop] = (schedule.add((hop, hop + 1, payload_bytes / pieces), after, **options),)
    return schedule


def _tree_of_chains(members: Sequence[int], per_node: int) -> list[list[int]]:
    """Parents of every member in two trees: the first on each node has a parent on another, the others form a chain."""
    nodes: dict[int, list[int]] = {}
    for place, rank in enumerate(members):
        nodes.setdefault(rank // per_node, []).append(place)
    chains = list(nodes.values())
    found = []
    for parent_of in double_tree(len(chains)):
        parents = [-1] * len(members)
        for chain, parent in zip(chains, parent_of, strict=True):
            parents[chain[0]] = -1 if parent < 0 else chains[parent][0]
            for before, place in itertools.pairwise(chain):
                parents[place] = before
        found.append(parents)
    return found


class Wires:
    """The links of a fabric, and operations laid on them."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.links = [Resource(f"link {n}", float(rate)) for n, rate in enumerate(tiers.rates_Bps())]

    @property
    def upper(self) -> Resource:
        """The top tier."""
        return self.links[UPLINK]

    def paths(self, sender: int, receiver: int, members: Sequence[int]) -> list[tuple[Resource, ...]]:
        """What the parts of a message between two ranks pass, the receiver's port last."""
        tiers = self.tiers
        a, b = sender // tiers.ranks_per_node, receiver // tiers.ranks_per_node
        if a == b:
            inside = (tiers.inside_link(sender, into=False), tiers.inside_link(receiver, into=True))
            return [tuple(self.links[n] for n in inside)]
        here, there = ([m for m in members if m // tiers.ranks_per_node == node] for node in (a, b))
        found = []
        for x, y in tiers.nic_pairs(here, there):
            numbers = [tiers.nic_link(x, into=False), *tiers.above(x, y), tiers.nic_link(y, into=True)]
            found.append(tuple(self.links[n] for n in numbers if self.links[n].capacity_Bps < math.inf))
        return found

    def laid(self, schedule: Schedule, members: Sequence[int]) -> tuple[Schedule, list[tuple[Resource, ...]]]:
        """A schedule with every message cut into its parts, and what each part passes."""
        cut = Schedule(schedule.members, rounds=schedule.rounds)
        path: list[tuple[Resource, ...]] = []
        parts_of: list[list[int]] = []
        known: dict[tuple[int, int], list[tuple[Resource, ...]]] = {}
        for m in schedule.messages:
            pair = members[m.sender], members[m.receiver]
            if pair not in known:
                known[pair] = self.paths(*pair, members)
            parts, after = known[pair], [j for i in m.after for j in parts_of[i]]
            path += parts
            part = (m.sender, m.receiver, m.size_bytes / len(parts))
            options = {"has_latency": m.has_latency, "begins": m.begins}
            parts_of.append([cut.add(part, after, **options) for _ in parts])
        return cut, path

    def limited(
        self, cut: Schedule, path: list[tuple[Resource, ...]], members: Sequence[int], choice: Choice
    ) -> list[tuple[Resource, ...]]:
        """What each message of one operation passes, the channels of its sender and of its receiver included.

        A member has its channels in each direction; along a tree those inside its node beside those between nodes.
        """
        if choice.channels_Bps == math.inf:
            return path
        own: dict[tuple[str, int, bool], Resource] = {}
        found = []
        for m, links in zip(cut.messages, path, strict=True):
            is_inside = choice.algorithm == "tree" and self._are_near(members[m.sender], members[m.receiver])
            for key in (("out", m.sender, is_inside), ("in", m.receiver, is_inside)):
                links = (own.setdefault(key, Resource(f"channels {key}", choice.channels_Bps)), *links)
            found.append(links)
        return found

    def hop_s(self, sender: int, receiver: int, choice: Choice) -> float:
        """Latency of a message from one rank to another."""
        if self._are_near(sender, receiver):
            return self.tiers.inside_hop_s * choice.inside_hop_share
        return self.tiers.hop_s * choice.hop_share

    def _are_near(self, sender: int, receiver: int) -> bool:
        """Whether two ranks are on one node."""
        return sender // self.tiers.ranks_per_node == receiver // self.tiers.ranks_per_node


def _slowed(path: Sequence[tuple[Resource, ...]], efficiency: float) -> list[tuple[Resource, ...]]:
    """Paths of an operation with links of its own before them, which are slower, so that others have the rest."""
    own = {link: Resource(link.name, efficiency * link.capacity_Bps) for one in path for link in one}
    return [(*(own[link] for link in one), *one) for one in path]


def operations(
    plan: StepPlan,
    wires: Wires,
    choose: Callable[[Start, Sequence[int]], Choice],
    fabric: Fabric,
    *,
    has_tenants: bool,
) -> tuple[list[Operation], dict[tuple[str, int], int]]:
    """The operations of a step group by group, and the first of each communicator and rank.

    Args:
        fabric: says how fast operations are alone, and what counts as one share of a link.
    """
    found: list[tuple[int, Start, tuple[int, ...], Choice, Schedule, list[tuple[Resource, ...]], float]] = []
    first_of: dict[tuple[str, int], int] = {}
    group = 0
    for name, parts in plan.communicators.items():
        for members in parts:
            first_of |= {(name, rank): len(found) for rank in members}
            of_rank = plan.roles[plan.role_R[members[0]]]
            for start in (one for one in of_rank if isinstance(one, Start) and one.communicator == name):
                choice = choose(start, members)
                efficiency, is_lost = fabric.efficiency.get(start.op, 1.0), fabric.unused_rate == "lost"
                # a rate that is lost is as good as bytes that the links carry too
                more = choice.data_share * (efficiency if is_lost else 1.0)
                sent = start._replace(payload_bytes=start.payload_bytes / more)
                is_tree = choice.algorithm == "tree"
                schedule, edge_bytes = schedule_of(sent, members, wires.tiers.ranks_per_node, is_tree=is_tree)
                cut, path = wires.laid(schedule, members)
                path = path if is_lost or efficiency == 1.0 else _slowed(path, efficiency)
                path = wires.limited(cut, path, members, choice)
                found.append((group, start, tuple(members), choice, cut, path, edge_bytes))
            group += 1
    groups_on: dict[Resource, set[int]] = {}
    for group, *_, path, _ in found:
        for resource in {resource for one in path for resource in one}:
            groups_on.setdefault(resource, set()).add(group)
    if has_tenants:
        groups_on.setdefault(wires.upper, set()).add(-1)
    shared = {resource for resource, groups in groups_on.items() if len(groups) > 1}
    made = []
    for o, (group, start, members_, choice, schedule, path, edge_bytes) in enumerate(found):
        weight = _weights(schedule, path, edge_bytes, shared, is_by_flow=fabric.sharing == "flows")
        later_s = [
            wires.hop_s(members_[m.sender], members_[m.receiver], choice) * m.has_latency
            + choice.operation_s * m.begins
            for m in schedule.messages
        ]
        is_first, is_last = (other not in range(len(found)) or found[other][0] != group for other in (o - 1, o + 1))
        made.append(Operation(start, members_, is_first, is_last, Wiring(schedule, path, later_s, weight=weight)))
    return made, first_of


def _weights(
    schedule: Schedule,
    path: Sequence[tuple[Resource, ...]],
    edge_bytes: float,
    shared: set[Resource],
    *,
    is_by_flow: bool,
) -> list[float]:
    """What each message weighs, so that all of the collective weigh as much as the busiest link where it meets others.

    Where flows share a link evenly, they weigh as many times that as pairs of members exchange through that link.
    """
    busy_s: dict[Resource, float] = {}
    pairs_of: dict[Resource, set[tuple[int, int]]] = {}
    for m, one in zip(schedule.messages, path, strict=True):
        for resource in one:
            busy_s[resource] = busy_s.get(resource, 0.0) + m.size_bytes / resource.capacity_Bps
            pairs_of.setdefault(resource, set()).add((m.sender, m.receiver))
    longest_s = max((s for resource, s in busy_s.items() if resource in shared), default=0.0)
    if longest_s == 0.0:
        return [1.0] * len(path)
    if is_by_flow:
        busiest = [r for r, s in busy_s.items() if r in shared and s >= longest_s * (1.0 - ROUNDING)]
        edge_bytes *= max(len(pairs_of[resource]) for resource in busiest)
    parts: dict[tuple[int, int], set[tuple[Resource, ...]]] = {}
    for m, one in zip(schedule.messages, path, strict=True):
        parts.setdefault((m.sender, m.receiver), set()).add(one)
    return [edge_bytes / len(parts[m.sender, m.receiver]) / longest_s for m in schedule.messages]
