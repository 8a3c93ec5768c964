"""Which step each operation of the device belongs to, and when the steps of the device begin and end.

The host runs ahead of the device, by a step and more, and an annotation of the host that is copied to the device covers
only part of what it launched. So an operation belongs to the host's step in which it was launched, which its
correlation id tells. A step of the device begins where everything that was launched before it has ended: a device that
then waits for its host waits in the new step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.importers.collective_names import is_collective_kernel
from paceenv.importers.profiler.event_columns import Array, EventTable, Integers

STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})\Z")
OPTIMIZER: Final = "Optimizer.step#"
"""What PyTorch annotates the host's call of an optimizer with, followed by its class."""
MIN_MARKS: Final = 4
"""Calls of an optimizer from which on they mark steps."""
MAX_STEPS: Final = 100_000
_ON_DEVICE: Final = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_MIN_LAUNCHED: Final = 0.5
"""Share of the device's operations whose launch must be known for steps to follow the launches."""
_UNSEEN: Final = 0.05
"""Share of a step: what the device did for longer, before its first operation in a profile, is missing in that step."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class StepMarks:
    """The profiler's steps as one side annotates them: numbers, begins and ends (us), in the order of time."""

    number_T: Integers
    start_us_T: Array
    end_us_T: Array

    def __len__(self) -> int:
        return len(self.number_T)

    def at(self, time_us_E: Array) -> Integers:
        """Which step each moment lies in, -1 for none; a step lasts until the next one begins."""
        if not len(self):
            return np.full(len(time_us_E), -1, np.int64)
        place_E = np.searchsorted(self.start_us_T, time_us_E, side="right") - 1
        late_E = time_us_E > max(self.end_us_T[-1], self.start_us_T[-1])
        return np.where(late_E, -1, place_E)


@dataclass(frozen=True)
class Device:
    """What one device of a profile did, its D operations in the order of their begin.

    ``event_D`` and ``launch_D`` are places in the table, the latter -1 where the launch is unknown. ``step_D`` counts
    in the steps, which begin at ``begin_us_T`` and end at ``end_us_T``; -1 is what belongs to none. ``left_out`` is how
    many operations of other devices the profile has.
    """

    event_D: Integers
    launch_D: Integers
    step_D: Integers
    is_collective_D: Flags
    number_T: Integers
    begin_us_T: Array
    end_us_T: Array
    left_out: int


def is_runtime(category: str) -> bool:
    """Whether events of a category are calls of the CUDA or ROCm runtime or driver on the host."""
    return category.endswith(("_runtime", "_driver"))


def step_marks(table: EventTable, *, device: bool) -> StepMarks:
    """The annotations ``ProfilerStep#`` of the device or of its host; of several with one number the last counts."""
    number_of = [int(match[1]) if (match := STEP.match(name)) else -1 for name in table.names]
    number_E = np.array([*number_of, -1], np.int64)[table.name_E]
    on_device_E = table.in_categories(lambda category: category == "gpu_user_annotation")
    events = np.flatnonzero((number_E >= 0) & (on_device_E == device))[: 4 * MAX_STEPS]
    last = {int(number): int(event) for number, event in zip(number_E[events], events, strict=True)}
    chosen = np.array(list(last.values()), np.int64)[:MAX_STEPS]
    chosen = chosen[np.argsort(table.start_us_E[chosen], kind="stable")]
    return StepMarks(number_E[chosen], table.start_us_E[chosen], table.end_us_E[chosen])


def stepping_processes(table: EventTable) -> list[str]:
    """The processes of hosts that annotate steps; a rank's profile has one."""
    is_step = table.named(lambda name: STEP.match(name) is not None)
    is_step &= table.in_categories(lambda category: category != "gpu_user_annotation")
    return [table.processes[process] for process in np.unique(table.process_E[is_step]).tolist()]


def host_marks(table: EventTable) -> StepMarks:
    """The host's steps: annotated ones, else those between the ends of its most frequent optimizer's calls."""
    marks = step_marks(table, device=False)
    if len(marks):
        return marks
    is_call = table.named(lambda name: name.startswith(OPTIMIZER))
    is_call &= table.in_categories(lambda category: category in ("user_annotation", "cpu_op"))
    calls = np.flatnonzero(is_call)
    if len(calls) < MIN_MARKS:
        return marks
    often = np.bincount(table.name_E[calls])
    ends_us = np.sort(table.end_us_E[calls[table.name_E[calls] == int(often.argmax())]])[: MAX_STEPS + 1]
    if len(ends_us) < MIN_MARKS:
        return marks
    return StepMarks(np.arange(len(ends_us) - 1), ends_us[:-1], ends_us[1:])


def find_device(table: EventTable) -> Device | None:
    """The device that the profile is about, with its operations in steps; None without any operation of a device.

    Of several devices it is the one with collectives, and of these, or without any, the busiest.
    """
    is_device_E = table.in_categories(lambda category: category in _ON_DEVICE)
    operations = np.flatnonzero(is_device_E)
    if not len(operations):
        return None
    is_collective_E = table.named(is_collective_kernel) & is_device_E
    process = table.process_E[operations]
    weight = np.bincount(process, minlength=len(table.processes)).astype(np.float64)
    weight += len(operations) * np.bincount(process, is_collective_E[operations], len(table.processes))
    mine = operations[process == int(weight.argmax())]
    event_D = mine[np.lexsort((table.end_us_E[mine], table.start_us_E[mine]))]
    launch_D = _launches(table, event_D)
    host = host_marks(table)
    known_D = launch_D >= 0
    if len(host) and known_D.mean() >= _MIN_LAUNCHED:
        step_D = host.at(_launched_us(table, event_D, launch_D))
        marks = host
        first_us, last = table.start_us_E[event_D[0]], int(step_D.max())
        least_us = _UNSEEN * (table.end_us_E[event_D].max() - first_us) / (last + 1)
        if 0 <= step_D[0] < last and first_us - host.start_us_T[step_D[0]] > least_us:
            step_D[step_D == step_D[0]] = -1  # it waited for its host, or ended what was launched before
    else:
        marks = step_marks(table, device=True)
        marks = marks if len(marks) else host
        step_D = marks.at(table.start_us_E[event_D])
    bounds = _bounds(table, event_D, step_D, len(marks))
    left_out = len(operations) - len(mine)
    return Device(event_D, launch_D, step_D, is_collective_E[event_D], marks.number_T, *bounds, left_out)


def _launches(table: EventTable, event_D: Integers) -> Integers:
    """The call that launched each operation, -1 where it is not in the profile."""
    calls = np.flatnonzero(table.in_categories(is_runtime) & (table.correlation_E > 0))
    if not len(calls):
        return np.full(len(event_D), -1, np.int64)
    correlation, first = np.unique(table.correlation_E[calls], return_index=True)
    wanted_D = table.correlation_E[event_D]
    place_D = np.minimum(np.searchsorted(correlation, wanted_D), len(correlation) - 1)
    return np.where(correlation[place_D] == wanted_D, calls[first[place_D]], -1)


def _launched_us(table: EventTable, event_D: Integers, launch_D: Integers) -> Array:
    """When each operation was launched, us. An unknown launch lies halfway between those around it in its stream.

    What was launched before the profile began has none before it; such operations belong to no step.
    """
    order = np.argsort(table.thread_E[event_D], kind="stable")  # streams run their operations in the order of launch
    stream, launch = table.thread_E[event_D[order]], launch_D[order]
    places, known = np.arange(len(order)), launch >= 0
    before = np.maximum.accumulate(np.where(known, places, 0))
    after = np.minimum.accumulate(np.where(known, places, len(order) - 1)[::-1])[::-1]
    at_us = table.start_us_E[launch]
    early, late = (np.where(known[x] & (stream[x] == stream), at_us[x], np.nan) for x in (before, after))
    launched_us = np.empty(len(order))
    launched_us[order] = np.where(np.isnan(early), -np.inf, 0.5 * (early + np.where(np.isnan(late), early, late)))
    return launched_us


def _bounds(table: EventTable, event_D: Integers, step_D: Integers, steps: int) -> tuple[Array, Array]:
    """When each step begins and ends, us; not a number for one without operations."""
    start_us_D, end_us_D = table.start_us_E[event_D], table.end_us_E[event_D]
    first_us_T, last_us_T = np.full(steps, np.inf), np.full(steps, -np.inf)
    inside = step_D >= 0
    np.minimum.at(first_us_T, step_D[inside], start_us_D[inside])
    np.maximum.at(last_us_T, step_D[inside], end_us_D[inside])
    some_T = np.isfinite(first_us_T)
    earlier = end_us_D[(step_D < 0) & (start_us_D < first_us_T.min(initial=np.inf))].max(initial=-np.inf)
    done_us_T = np.maximum.accumulate(np.concatenate([[earlier], last_us_T]))[:-1]
    begin_us_T = np.where(np.isfinite(done_us_T), np.minimum(first_us_T, done_us_T), first_us_T)
    begin_us_T = np.where(some_T, np.maximum.accumulate(np.where(some_T, begin_us_T, -np.inf)), np.nan)
    end_us_T = np.where(some_T, last_us_T, np.nan)
    full = np.flatnonzero(some_T)
    end_us_T[full[:-1]] = begin_us_T[full[1:]]
    return begin_us_T, end_us_T
