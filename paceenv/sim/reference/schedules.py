"""Collectives as messages: sender, receiver, size, and the messages that must be through before.

Members are counted within their process group, ``per_node`` of them on a node, one node after the other. Sizes in
bytes. A member sends in a round once its send and its receive of the round before are through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Before = list[tuple[int, ...]]
"""For each member what it must have sent and received before it goes on: indices of messages."""
Send = tuple[int, int, float]
"""Sender, receiver, bytes."""
Options = dict[str, bool]
Algorithm = Literal["ring", "hierarchical", "tree"]


def nothing(members: int) -> Before:
    """Where a collective begins."""
    return [()] * members


@dataclass(frozen=True)
class Message:
    """One message; ``after`` are the messages that must be through before it can start."""

    sender: int
    receiver: int
    size_bytes: float
    after: tuple[int, ...]
    round: int
    has_latency: bool
    is_tail: bool
    """Waits for the last gradients of both its ends, not for the first."""
    begins: bool = True
    """Whether it waits for no other message of its operation, or of its part of a folded one."""


@dataclass
class Schedule:
    """The messages of one collective, in an order in which every message follows those it waits for."""

    members: int
    messages: list[Message] = field(default_factory=list)
    rounds: int = 0

    def add(
        self,
        send: Send,
        after: Sequence[int],
        *,
        has_latency: bool = True,
        is_tail: bool = False,
        begins: bool | None = None,
    ) -> int:
        """Add one message to the current round.

        Args:
            after: indices of the messages that must be through before.
            is_tail: whether it waits for the last gradients of its ends instead of the first.
            begins: whether a part of a folded operation begins with it; None: where it waits for no other message.

        Returns:
            Its index.
        """
        begins = not after if begins is None else begins
        self.messages.append(Message(*send, tuple(after), self.rounds, has_latency, is_tail, begins))
        return len(self.messages) - 1

    def round(self, sends: Sequence[Send], before: Before, **options: bool) -> Before:
        """Add a round; members without a message in it keep what they had before. Receivers' buffers wait.

        Returns:
            ``before`` of the next round.
        """
        done: dict[int, list[int]] = {}
        for send in sends:
            index = self.add(send, before[send[0]], **options)
            for member in send[:2]:
                done.setdefault(member, []).append(index)
        self.rounds += 1
        return [tuple(done.get(m, before[m])) for m in range(self.members)]

    def rings(
        self, rings: Sequence[Sequence[int]], chunk_bytes: float, rounds: int, before: Before, **options: bool
    ) -> Before:
        """Add rounds in which every member of each ring sends a chunk to the next member.

        Returns:
            ``before`` of the next round.
        """
        sends = [(ring[i - 1], ring[i], chunk_bytes) for ring in rings for i in range(len(ring))]
        for _ in range(rounds):
            before = self.round(sends, before, **options)
        return before


def buckets(payload_bytes: float, first_bytes: float, tail_bytes: float = 0.0) -> list[float]:
    """A payload cut into its first bucket, the bulk, and the tail that is there only after the compute, in bytes.

    A ring with one late member lets the others run ahead by up to a round each, but only in the bucket that the late
    member has not begun. After a first bucket all are in step. The many buckets of the bulk follow one another without
    a gap and act as one.

    Args:
        first_bytes: the first bucket, at most all but the tail.
    """
    first_bytes = min(first_bytes, payload_bytes - tail_bytes)
    return [first_bytes, payload_bytes - tail_bytes - first_bytes, tail_bytes]


def all_reduce(
    algorithm: Algorithm, nodes: int, per_node: int, parts_bytes: Sequence[float], pieces: int = 1
) -> Schedule:
    """All-reduce of the parts of :func:`buckets`; ``ring`` is one over all ranks (Patarasuk and Yuan 2009).

    Parts follow one another without a gap. The latency of a hop is paid in the last part and hidden behind the bytes of
    the next part in the others.
    """
    members = nodes * per_node
    schedule = Schedule(members)
    before = nothing(members)
    filled = [i for i, part_bytes in enumerate(parts_bytes) if part_bytes > 0.0]
    for i in filled:
        options = {"has_latency": i == filled[-1], "is_tail": i == 2}
        match algorithm:
            case "ring":
                rounds, chunk_bytes = 2 * (members - 1), parts_bytes[i] / members
                before = schedule.rings([range(members)], chunk_bytes, rounds, before, **options)
            case "hierarchical":
                before = _hierarchical(schedule, nodes, per_node, parts_bytes[i], before, options)
            case "tree":
                before = _double_tree(schedule, parts_bytes[i], pieces, before, options)
    return schedule


def _hierarchical(
    schedule: Schedule, nodes: int, per_node: int, payload_bytes: float, before: Before, options: Options
) -> Before:
    """Reduce-scatter in a ring inside each node, a ring between nodes for each rank's share, all-gather inside."""
    inside = [range(a * per_node, (a + 1) * per_node) for a in range(nodes)]
    across = [range(place, schedule.members, per_node) for place in range(per_node)]
    share_bytes = payload_bytes / per_node
    before = schedule.rings(inside, share_bytes, per_node - 1, before, **options)
    before = schedule.rings(across, share_bytes / nodes, 2 * (nodes - 1), before, **options)
    return schedule.rings(inside, share_bytes, per_node - 1, before, **options)


def tree_parents(members: int) -> list[int]:
    """Parent of each member in a binary tree as NCCL builds it; -1 for the root, member 0.

    A member's height is its lowest set bit, every odd one is a leaf; a parent beyond the last is taken from below.
    """

    def parent(m: int) -> int:
        low = m & -m
        above = (m ^ low) | (low << 1)
        return above if above < members else m ^ low

    return [-1, *(parent(m) for m in range(1, members))]


def _double_tree(schedule: Schedule, payload_bytes: float, pieces: int, before: Before, options: Options) -> Before:
    """Two binary trees with half of the payload each (Sanders, Speck and Traeff 2009), passed on piece by piece.

    The second tree is the first one mirrored, or, for an odd number of members, shifted by one, so that inner members
    of one are leaves of the other.
    Pieces go up to the root, reduced on the way, and down again. A last piece alone pays latency.
    """
    n = schedule.members
    if n == 1:
        return before
    return trees(schedule, double_tree(n), payload_bytes / 2.0, pieces, before, options)


def double_tree(members: int) -> list[list[int]]:
    """Parents of every member in either tree; -1 for a root."""
    n, parent_of = members, tree_parents(members)
    found = []
    for name in (list(range(n)), [(m + 1) % n for m in range(n)] if n % 2 else [n - 1 - m for m in range(n)]):
        parents = [-1] * n
        for m in range(1, n):
            parents[name[m]] = name[parent_of[m]]
        found.append(parents)
    return found


def trees(
    schedule: Schedule,
    parents: Sequence[Sequence[int]],
    payload_bytes: float,
    pieces: int,
    before: Before,
    options: Options,
) -> Before:
    """An all-reduce along trees: pieces go up to the root, reduced on the way, and down again.

    Returns:
        ``before`` of what follows.
    """
    n, size_bytes = schedule.members, payload_bytes / pieces
    done: list[tuple[int, ...]] = [()] * n
    for parent_of in parents:
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(parent_of):
            children.setdefault(parent, []).append(child)
        root, *others = _below_first(children)
        up: dict[int, int] = {}
        down: dict[int, int] = {}
        for piece in range(pieces):
            own = {"is_tail": options["is_tail"], "has_latency": options["has_latency"] and piece == pieces - 1}
            for m in reversed(others):
                after = [up[c] for c in children.get(m, [])] + ([up[m]] if piece else [*before[m]])
                up[m] = schedule.add((m, parent_of[m], size_bytes), after, **own)
            for m in others:
                above = [up[c] for c in children[root]] if parent_of[m] == root else [down[parent_of[m]]]
                after = above + ([down[m]] if piece else [])
                down[m] = schedule.add((parent_of[m], m, size_bytes), after, **own)
        for m in range(n):
            below = [i for c in children.get(m, []) for i in (up[c], down[c])]
            done[m] += tuple(below) if m == root else (*below, up[m], down[m])
    schedule.rounds += 1
    return done


def _below_first(children: dict[int, list[int]]) -> list[int]:
    """Members of a tree, every one after its parent."""
    order = list(children[-1])
    for m in order:
        order += children.get(m, [])
    return order


def gather(members: int, payload_bytes: float) -> Schedule:
    """Every member sends its payload to the first, all at once."""
    schedule = Schedule(members)
    schedule.round([(m, 0, payload_bytes) for m in range(1, members)], nothing(members))
    return schedule


def all_to_all(members: int, payload_bytes: float) -> Schedule:
    """Every member sends a part of its payload to every other, all at once."""
    schedule = Schedule(members)
    pairs = [(a, b) for b in range(members) for a in range(members) if a != b]
    schedule.round([(a, b, payload_bytes / members) for a, b in pairs], nothing(members))
    return schedule
