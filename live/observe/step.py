"""One step as plain data, and the roles of its operations for the estimator.

The estimator knows one payload collective and, in some jobs, a barrier that ends the step. A real step has any number
of collectives. So a job's ``Shape`` is learned from its first steps: its usual collectives, the process group whose
transfers count as the payload, and whether a barrier ends the step.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceenv.core.timing import BARRIER_BYTES
from paceenv.live.observe.batch import POINT_TO_POINT, THREAD, Kind
from paceenv.live.observe.log import Group

LEARNING_ITERATIONS = 8
"""The shape is learned from this many first steps of a job."""
RELEARN_ITERATIONS = 16
"""After this many irregular steps in a row, they become the usual ones."""
OUTLIER, RECENT_STEPS = 50.0, 64
"""A step this many times the median of recent ones was stopped from outside (a debugger, a suspended process)."""
NO_COLLECTIVES = (*POINT_TO_POINT, "wait", "")

Operation = tuple[int, float, float]
"""One interval in which this rank was blocked: its kind, start and end in seconds on the rank's own monotonic time."""


class Step(NamedTuple):
    """One step of one rank.

    Attributes:
        iteration: ticks since the agent was attached, the same on every rank; of several in one step the last.
        start_s: exit of the last operation of the step before, seconds.
        end_s: exit of the last operation of this step, seconds.
        pace_start_s: start of this rank's delay, near ``start_s``.
        pace_end_s: end of this rank's delay.
        operations: the intervals in which this rank was blocked, in order of their start.
        comm_s: time in the payload collectives, for the estimator, seconds.
        barrier_s: time in the barrier that ends the step, for the estimator, seconds.
        regular: false for a step that is recorded but not used by the estimator.
        mark: why it is irregular, if known.
        ticks: ticks of the optimizer in this step.
        still_s: time in which the compute stream stood still for collectives on others; not a number if unknown.
    """

    iteration: int
    start_s: float
    end_s: float
    pace_start_s: float
    pace_end_s: float
    operations: Sequence[Operation]
    comm_s: float
    barrier_s: float
    regular: bool
    mark: str
    ticks: int = 1
    still_s: float = math.nan

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def delay_s(self) -> float:
        return self.pace_end_s - self.pace_start_s


class Shape:
    """The usual step of this job, learned while it runs.

    ``payload_group`` carries the payload, together with groups of the same ranks, as sharded training has for weights
    and gradients.
    ``barrier_alone_s`` is the shortest barrier seen while learning, seconds.
    """

    def __init__(self, groups: Mapping[int, Group], kinds: Sequence[Kind]) -> None:
        self._groups, self._kinds = groups, kinds
        self._words: list[int] = []
        self._carries: list[bool] = []
        self._first: list[tuple[int, Sequence[Operation]]] = []
        self._usual: int | None = None
        self._other: int | None = None
        self._other_in_a_row = 0
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._usual_s, self._outliers, self._accepted = float("inf"), 0, 0
        self.has_barrier, self.barrier_alone_s = False, 0.0
        self.payload_group = -1

    @property
    def known(self) -> bool:
        return self._usual is not None

    def signature(self, operations: Sequence[Operation]) -> int:
        """A number for the step's collectives, whatever their order and their sizes, which change with the batch."""
        words, found = self._words, 0
        while len(words) < len(self._kinds):
            words.append(_word(self._kinds[len(words)]))
        for operation in operations:
            found += words[operation[0]]
        return found

    def observe(self, operations: Sequence[Operation], step_s: float) -> bool:
        """Take in a step; returns whether it is regular."""
        now = self.signature(operations)
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
        kinds = [self._kinds[operation[0]] for operation in operations]
        collectives = [kind for kind in kinds if _is_collective(kind)]
        payloads = [kind for kind in collectives if not _only_synchronises(kind)]
        self.payload_group = payloads[-1].group if payloads else -1
        self.has_barrier = bool(collectives) and _only_synchronises(collectives[-1])
        if self.has_barrier and payloads:
            # by kind and size and not by times, which differ from rank to rank: the ranks must agree
            last, barrier = payloads[-1], collectives[-1]
            self.has_barrier = barrier.op == "barrier" or self._size(barrier.group) > self._size(last.group)
        self.barrier_alone_s = min(self.barrier_s(o) for kind, o in self._first if kind == self._usual)
        self._first.clear()
        self._carries.clear()

    def _members(self, number: int) -> str:
        """The ranks of a group; of one whose ranks are not known a text that no other group has."""
        group = self._groups.get(number)
        return group.listed if group is not None and group.listed is not None else f"group {number}"

    def _size(self, number: int) -> int:
        group = self._groups.get(number)
        return group.size if group is not None else 0

    def comm_s(self, operations: Sequence[Operation]) -> float:
        """Time in collectives of the payload's group, and of groups with the same members, seconds."""
        carries = self._carries
        while len(carries) < len(self._kinds):
            new = self._kinds[len(carries)]
            alike = new.group == self.payload_group or self._members(new.group) == self._members(self.payload_group)
            carries.append(alike and _is_collective(new) and not _only_synchronises(new))
        found_s = 0.0
        for kind, start_s, end_s in operations:
            if carries[kind]:
                found_s += end_s - start_s
        return found_s

    def barrier_s(self, operations: Sequence[Operation]) -> float:
        """Time in the barrier that ends the step, seconds; 0 in a job without one."""
        if not self.has_barrier:
            return 0.0
        for kind, start_s, end_s in reversed(operations):
            if _is_collective(self._kinds[kind]):
                return end_s - start_s
        return 0.0


def _is_collective(kind: Kind) -> bool:
    return kind.op not in NO_COLLECTIVES and kind.side != THREAD


def _only_synchronises(kind: Kind) -> bool:
    return kind.op == "barrier" or kind.bytes <= BARRIER_BYTES


def _word(kind: Kind) -> int:
    """Where a sum of words is the same, the kinds are the same, as good as certainly."""
    if not _is_collective(kind):
        return 0
    name = f"{kind.op} {kind.group}".encode()
    return zlib.crc32(name) << 32 | zlib.crc32(name + b"!")
