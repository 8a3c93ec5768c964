"""Assembles steps from ticks: what ranks do between two moments at which they meet is one step.

Often that is one iteration of the optimizer. In local SGD the ranks meet in every k-th only; DeepSpeed steps its inner
optimizer once per group of parameters. So a tick without any blocking operation belongs to the step that follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from paceenv.live.observe.batch import STANDSTILL, STREAM, THREAD
from paceenv.live.observe.log import MAX_ROWS, Log, Row, Tick
from paceenv.live.observe.stamps import DeviceStamps
from paceenv.live.observe.step import Operation, Shape, Step

BY_TICKS = 64
"""Where so many first ticks have no blocking operation at all, the tick itself ends a step."""
MEAN_US, LEAST_US, STEP_SHARE, MAX_EVERY = 40.0, 2.0, 2e-4, 64
"""What watching may take of the training thread's time in an iteration, on average. Where it takes more, one iteration
in so many is watched. The first number counts in a young job and where a trace is written; later that share of a step,
but no less than the second number, is enough: of short steps there are many."""
HOST_US, DEVICE_US = (20.0, 6.0), (100.0, 30.0)
"""What it takes to watch an iteration, and each operation or wait of the compute stream in it: with readings of the
host's clock (DDP, from outside: docs/evidence/benchmarks.md), with CUDA events (on an H200: docs/evidence/gpu.md)."""
ALL_WATCHED, YOUNG, LEAST_SHARE = 128, 1024, 64
"""Iterations at the start of a job that are watched anyway, and in which it is young. Later those that are watched lie
no further apart than this part of the iterations so far: a rank that turns late is named soon in a young job, too."""


class Steps:
    """The steps of one rank."""

    def __init__(self, log: Log, settle: Callable[[Any, int], float], *, traced: bool = False) -> None:
        self._log, self._settle, self._traced, self.alone = log, settle, traced, False
        self.shape = Shape(log.groups, log.kinds)
        self.every = 1
        """One iteration in so many is watched, as far as the rank decides on no delay; a step is then a tick."""
        self.watched = 0
        """Ticks of which the rows were taken in."""
        self.irregular = 0
        """Ticks that could not be read, or steps that are unlike the usual ones."""
        self._met = False
        self._last_exit_s: float | None = None
        self._by_ticks = False
        self._forget()

    def _forget(self) -> None:
        self._operations: list[Operation] = []
        self._ticks, self._mark = 0, ""
        self._paced: tuple[float, float] | None = None
        self._still: list[tuple[float, float]] = []

    @property
    def inside(self) -> bool:
        """Whether a step has begun with a tick that does not end it."""
        return self._ticks > 0

    def readable(self, entry: Tick) -> bool:
        """Whether every stamp has passed, or can never be read."""
        stamps = self._log.stamps
        return not isinstance(stamps, DeviceStamps) or stamps.ready_many(stamps_of(entry))

    def release(self, entry: Tick) -> None:
        """Give up a tick that is not read: the next step has no start."""
        self._log.stamps.release(stamps_of(entry))
        self._last_exit_s = None
        self.irregular += 1
        self._forget()

    def add(self, entry: Tick) -> Step | None:
        """Take in a tick that is readable; returns the step that it ends."""
        number, rows, mark, delay, tick = entry
        log, stamps, kinds = self._log, self._log.stamps, self._log.kinds
        if rows is None:
            self._begin_at(entry)
            return None
        self.watched += 1
        logged = rows
        if isinstance(stamps, DeviceStamps):
            rows = self._in_seconds(rows, tick, stamps)
        last_s, last = -math.inf, None
        operations, met = self._operations, False
        for place, operation in enumerate(rows):
            kind, start_s, end_s = operation
            if start_s is None or end_s is None:
                self.release(entry)
                return None
            op, _, _, side = kinds[kind]
            if op == STANDSTILL:
                if side != STREAM:
                    self._still.append((start_s, end_s))
                continue
            operations.append(operation)
            met = met or side != THREAD
            if side != THREAD and end_s > last_s:
                last_s, last = end_s, logged[place][2]
        self._ticks += 1
        self._mark = mark or self._mark
        if delay is not None and (delay_s := self._settle(delay, number)):
            begin_s = stamps.seconds(delay.before)
            self._paced = (begin_s, begin_s + delay_s)
        tick_s = tick
        if isinstance(stamps, DeviceStamps):
            tick_s = stamps.seconds(tick) if tick is not None else math.nan
            if last is not None or tick is not None:
                stamps.rebase(last if last is not None else tick)
            stamps.release(stamps_of(entry))
        if not met and (self._met or not (self.alone or number >= BY_TICKS)):
            if len(operations) > MAX_ROWS:  # the ranks meet too seldom to keep them
                self._last_exit_s = None
                self._forget()
            return None
        self._met = self._met or met
        if self._by_ticks != (log.every > 1):  # from now on a step ends elsewhere
            self._by_ticks, self._last_exit_s = not self._by_ticks, None
        return self._finish(number, last_s if met and not self._by_ticks else tick_s)

    def _begin_at(self, entry: Tick) -> None:
        """Iterations that were not watched are over: the next step begins there."""
        tick, stamps = entry[4], self._log.stamps
        self._forget()
        self._last_exit_s = None if tick is None else stamps.seconds(tick)
        stamps.release(stamps_of(entry))

    def _in_seconds(self, rows: list[Row], tick: Any, stamps: DeviceStamps) -> list[Row]:
        """Rows with seconds in place of events; what ran on another stream than the tick ran beside the step."""
        log = self._log
        known = [stamp for _, start, end in rows for stamp in (start, end) if stamp is not None]
        seconds = iter(stamps.seconds_many(known))
        timed_rows = []
        for kind, start, end in rows:
            if start is not None and end is not None and tick is not None and end.stream != tick.stream:
                kind = log.on_the_side(kind, STREAM)
            start_s = next(seconds) if start is not None else None
            timed_rows.append((kind, start_s, next(seconds) if end is not None else None))
        return timed_rows

    def _finish(self, number: int, end_s: float) -> Step | None:
        start_s, self._last_exit_s = self._last_exit_s, end_s
        operations, ticks, mark, still = self._operations, self._ticks, self._mark, self._still
        paced = self._paced
        self._forget()
        if number >= ALL_WATCHED and start_s is not None:
            self._watch_less(number, len(operations) + len(still), end_s - start_s)
        if len(operations) > 1:
            operations = self._from_outside(operations)
        fits = all(over_s >= begin_s for _, begin_s, over_s in operations)
        if start_s is None or not (fits and end_s > start_s):
            self.irregular += 1
            return None
        shape = self.shape
        regular = not mark and shape.observe(operations, end_s - start_s)
        self.irregular += not regular
        times = start_s, end_s, *(paced or (start_s, start_s))
        comm_s, barrier_s = shape.comm_s(operations), shape.barrier_s(operations)
        still_s = self._still_s(operations, still) if still else math.nan
        return Step(number, *times, operations, comm_s, barrier_s, regular, mark, ticks, still_s)

    def _still_s(self, operations: Sequence[Operation], still: Sequence[tuple[float, float]]) -> float:
        """How long the compute stream stood still for collectives on other streams; not a number if that is not known.

        The compute may wait for a copy, too, and that is the rank's own affair: only waits while a collective runs
        count. Both come in order of their start.
        """
        kinds, found_s, until_s, k = self._log.kinds, 0.0, -math.inf, 0
        aside = [(start_s, end_s) for kind, start_s, end_s in operations if kinds[kind].side == STREAM]
        if not aside:
            return math.nan
        for start_s, end_s in aside:
            start_s = max(start_s, until_s)  # what overlaps an earlier one counts once
            while k < len(still) and still[k][1] <= start_s:
                k += 1
            for begin_s, over_s in still[k:]:
                if begin_s >= end_s:
                    break
                found_s += max(min(end_s, over_s) - max(start_s, begin_s), 0.0)
            until_s = max(until_s, end_s)
        return found_s

    def _watch_less(self, number: int, operations: int, step_s: float) -> None:
        """Watch one iteration in so many, a power of 2, if each takes more than it may.

        Ranks with the same operations agree on it, and one that is behind watches the others' iterations, too.
        """
        fixed_us, each_us = DEVICE_US if self._log.on_device else HOST_US
        allowed_us, most = MEAN_US, min(number // LEAST_SHARE, MAX_EVERY)
        if number >= YOUNG and not self._traced:
            allowed_us = min(max(STEP_SHARE * 1e6 * step_s, LEAST_US), MEAN_US)
        while fixed_us + each_us * operations > allowed_us * self.every and 2 * self.every <= most:
            self.every *= 2

    def _from_outside(self, operations: list[Operation]) -> list[Operation]:
        """In order of their start, without those inside another one: a group may delegate to another, a hook wait."""
        operations.sort(key=lambda operation: (operation[1], -operation[2]))
        outermost, until_s, kinds = list[Operation](), -math.inf, self._log.kinds
        for operation in operations:
            if kinds[operation[0]].side:
                outermost.append(operation)
            elif operation[2] > until_s:
                outermost.append(operation)
                until_s = operation[2]
        return outermost


def stamps_of(entry: Tick) -> list[Any]:
    stamps = [stamp for _, start, end in entry[1] or () for stamp in (start, end)]
    stamps.append(entry[4])
    if entry[3] is not None:
        stamps += [entry[3].before, entry[3].after]
    return [stamp for stamp in stamps if stamp is not None]
