"""One iteration as plain data, and the roles of its operations for the estimator.

The estimator knows one payload collective and, in some jobs, a barrier that ends the step. A real iteration has any
number of collectives. So a job's ``Shape`` is learned from its first iterations: its usual list of collectives, the
process group whose transfers count as the payload, and whether a barrier ends the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEARNING_ITERATIONS = 8
"""The shape is learned from this many first iterations of a job."""
RELEARN_ITERATIONS = 16
"""After this many irregular iterations in a row, they become the usual ones."""
BARRIER_BYTES = 4096
"""A collective of at most this size only synchronises."""
OUTLIER, RECENT_STEPS = 50.0, 64
"""A step this many times the median of recent ones was stopped from outside (a debugger, a suspended process)."""
POINT_TO_POINT = ("send", "recv")


class Operation(NamedTuple):
    """One interval in which this rank was blocked in an operation, seconds on the rank's own monotonic time."""

    op: str
    group: int
    bytes: int
    start_s: float
    end_s: float


class Iteration(NamedTuple):
    """One iteration of one rank.

    Attributes:
        iteration: ticks since the agent was attached, the same on every rank.
        start_s: exit of the last collective of the iteration before, seconds.
        end_s: exit of the last collective of this iteration, seconds.
        pace_start_s: start of this rank's delay, near ``start_s``.
        pace_end_s: end of this rank's delay.
        operations: the intervals in which this rank was blocked.
        comm_s: time in the payload collectives, for the estimator, seconds.
        barrier_s: time in the barrier that ends the step, for the estimator, seconds.
        regular: false for an iteration that is recorded but not used by the estimator.
        mark: why it is irregular, if known.
    """

    iteration: int
    start_s: float
    end_s: float
    pace_start_s: float
    pace_end_s: float
    operations: tuple[Operation, ...]
    comm_s: float
    barrier_s: float
    regular: bool
    mark: str

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def delay_s(self) -> float:
        return self.pace_end_s - self.pace_start_s


Signature = tuple[tuple[str, int], ...]
"""The collectives of an iteration, sorted: kind and group."""


def signature(operations: Sequence[Operation]) -> Signature:
    """The iteration's collectives, whatever their sizes, which may change with the batch, and their order."""
    return tuple(sorted([(o[0], o[1]) for o in operations if o[0] not in POINT_TO_POINT]))


class Shape:
    """The usual iteration of this job, learned while it runs.

    ``payload_group`` carries the payload. In the last collective of ``waiting_group`` the ranks wait for each other.
    ``barrier_alone_s`` is the shortest barrier seen while learning, seconds.

    Args:
        members: this rank's place in every process group and the group's size, by number of the group.
    """

    def __init__(self, members: Mapping[int, tuple[int, int]]) -> None:
        self._members = members
        self._first: list[tuple[Signature, Sequence[Operation]]] = []
        self._usual: Signature | None = None
        self._other: Signature | None = None
        self._other_in_a_row = 0
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._usual_s, self._outliers, self._accepted = float("inf"), 0, 0
        self.has_barrier, self.barrier_alone_s = False, 0.0
        self.payload_group = self.waiting_group = -1

    @property
    def known(self) -> bool:
        """Whether the shape has been learned."""
        return self._usual is not None

    def observe(self, operations: Sequence[Operation], step_s: float) -> bool:
        """Take in an iteration; returns whether it is regular."""
        now = signature(operations)
        if self._usual is None:
            self._first.append((now, operations))
            if len(self._first) >= LEARNING_ITERATIONS:
                self._settle()
            return False
        if now != self._usual:
            self._other_in_a_row = self._other_in_a_row + 1 if now == self._other else 1
            self._other = now
            if self._other_in_a_row >= RELEARN_ITERATIONS:
                self._usual = now
                self._first = [(now, operations)]
                self._settle()
            return False
        self._other_in_a_row = 0
        return self._is_usual(step_s)

    def _is_usual(self, step_s: float) -> bool:
        """Whether a step is no outlier; enough outliers in a row become usual."""
        if step_s > OUTLIER * self._usual_s and self._outliers < RELEARN_ITERATIONS:
            self._outliers += 1
            return False
        if self._outliers >= RELEARN_ITERATIONS:
            self._steps_s.clear()
            self._accepted = 0
        self._outliers = 0
        self._steps_s.append(step_s)
        if self._accepted % RELEARN_ITERATIONS == 0:
            self._usual_s = sorted(self._steps_s)[len(self._steps_s) // 2]
        self._accepted += 1
        return True

    def _settle(self) -> None:
        """The most frequent signature becomes the usual one; its last occurrence gives payload and barrier."""
        [(self._usual, _)] = Counter(s for s, _ in self._first).most_common(1)
        operations = next(o for kind, o in reversed(self._first) if kind == self._usual)
        collectives = [o for o in operations if o.op not in POINT_TO_POINT]
        payloads = [o for o in collectives if not _only_synchronises(o)]
        self.payload_group = payloads[-1].group if payloads else -1
        self.has_barrier = bool(collectives) and _only_synchronises(collectives[-1])
        if self.has_barrier and payloads:
            # by kind and size and not by times, which differ from rank to rank: the ranks must agree
            last, barrier = payloads[-1], collectives[-1]
            self.has_barrier = barrier.op == "barrier" or self._size(barrier.group) > self._size(last.group)
        if collectives:
            self.waiting_group = collectives[-1].group if self.has_barrier else self.payload_group
        self.barrier_alone_s = min(self.barrier_s(o) for kind, o in self._first if kind == self._usual)
        self._first.clear()

    def _size(self, group: int) -> int:
        return self._members.get(group, (0, 0))[1]

    def comm_s(self, operations: Sequence[Operation]) -> float:
        """Time in the payload collectives, seconds."""
        return sum(o.end_s - o.start_s for o in operations if o.group == self.payload_group and is_payload(o))

    def barrier_s(self, operations: Sequence[Operation]) -> float:
        """Time in the barrier that ends the step, seconds; 0 in a job without one."""
        if not self.has_barrier:
            return 0.0
        last = next((o for o in reversed(operations) if o.op not in POINT_TO_POINT), None)
        return last.end_s - last.start_s if last is not None else 0.0


def is_payload(operation: Operation) -> bool:
    """Whether a collective moves data rather than only synchronise."""
    return operation.op not in POINT_TO_POINT and not _only_synchronises(operation)


def _only_synchronises(operation: Operation) -> bool:
    return operation.op == "barrier" or operation.bytes <= BARRIER_BYTES
