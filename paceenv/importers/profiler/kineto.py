"""Importer of PyTorch profiler traces (Kineto's JSON, ``export_chrome_trace``): one file per rank, gzipped or not.

Steps are the profiler's own (``ProfilerStep#n``, so the job calls ``prof.step()``), on the device's timeline where it
has one. Collectives are NCCL's and RCCL's kernels, or on the CPU what a backend marks (``gloo:all_reduce``). Everything
else that runs on device or CPU is compute. What the events mean is worked out in ``paceenv.importers.profiler``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.importers.collective_names import is_number
from paceenv.importers.json_events import EventFile
from paceenv.importers.profiler.collective_events import MARKED, host_collectives
from paceenv.importers.profiler.device_activity import device_activity
from paceenv.importers.profiler.device_steps import STEP, Device, find_device, host_marks, stepping_processes
from paceenv.importers.profiler.event_columns import EventTable, Integers, read_events
from paceenv.importers.timelines import Collective, Step, Timeline, inside_of, union

_CALLS: Final = ("c10d::", "record_param_comms")
"""How the CPU's calls of collectives begin."""
_WRAPPER: Final = "autograd::engine::evaluate_function"
"""Around an operation and the hooks that run before and after it, which may wait."""
_IN_NAME: Final = tuple(
    re.compile(rf"{word}[_\-]?(\d{{1,6}})(?!\d)", re.IGNORECASE) for word in ("rank", "worker", "(?<![a-z])r")
)
"""Where a file's name may say which rank it is of, the best first."""


def import_kineto(path: str | Path) -> Timeline:
    """One rank's timeline. Raises InputError if the file is no profile with steps."""
    file = EventFile(path)
    table = read_events(file)
    processes = stepping_processes(table)
    if len(processes) > 1:
        named = ", ".join(processes[:4])
        raise InputError(f"{file.path}: steps of {len(processes)} processes ({named}); allowed: one file per rank")
    distributed = file.value("distributedInfo")
    said = distributed if isinstance(distributed, dict) else {}
    rank, device = _rank(file.path, said.get("rank")), find_device(table)
    steps: Sequence[Step] = _host_steps(table) if device is None else device_activity(table, device, rank or 0)
    if not steps:
        raise InputError(
            f"{file.path}: no ProfilerStep# in {file.events} events; allowed: a profile of a job that calls "
            "prof.step() at the end of every step"
        )
    base_ns = file.value("baseTimeNanoseconds")
    base_s = base_ns * 1e-9 if is_number(base_ns) else 0.0
    about: dict[str, Any] = {"host": host} if isinstance(host := file.value("host_name"), str) else {}
    about |= {"world_size": size} if (size := _number(said.get("world_size"))) else {}
    for step in steps:
        step.shift(base_s)
    notes = (file.damage,) * bool(file.damage) + (() if device is None else _left_out(device))
    return Timeline(rank or 0, file.path, tuple(steps), about, notes, is_rank_known=rank is not None)


def _left_out(device: Device) -> tuple[str, ...]:
    others = f"{device.left_out} operations of other devices are left out" if device.left_out else ""
    is_early = len(device.number_T) and device.launch_D.max() >= 0 and device.step_D[0] < 0
    early = "operations from before its first whole step are left out" if is_early else ""
    return tuple(note for note in (others, early) if note)


def _host_steps(table: EventTable) -> list[Step]:
    marks = host_marks(table)
    is_work = table.in_categories(lambda category: category == "cpu_op")
    is_work &= table.named(lambda name: not (name.startswith(_WRAPPER) or MARKED.match(name) or STEP.match(name)))
    is_work &= ~_holding(table, np.flatnonzero(table.named(lambda name: name.startswith(_CALLS))))
    busy = union(table.start_us_E[is_work] * 1e-6, table.end_us_E[is_work] * 1e-6)
    collectives = host_collectives(table)
    begins = marks.start_us_T * 1e-6
    ends = np.append(begins[1:], marks.end_us_T[-1:] * 1e-6)
    inside: dict[int, list[Collective]] = defaultdict(list)
    for place, collective in zip(marks.at(np.array([c.start_s for c in collectives]) * 1e6), collectives, strict=True):
        inside[int(place)].append(collective)
    spans = zip(marks.number_T.tolist(), begins.tolist(), np.maximum(ends, begins).tolist(), strict=True)
    return [
        Step(number, begin_s, end_s, inside[i], *inside_of(busy, begin_s, end_s))
        for i, (number, begin_s, end_s) in enumerate(spans)
    ]


def _holding(table: EventTable, calls: Integers) -> NDArray[np.bool_]:
    """Which events are calls of collectives or have one inside: they may wait for it, as FSDP's hooks do."""
    holds_E = np.zeros(len(table), np.bool_)
    for thread in np.unique(table.thread_E[calls]).tolist():
        mine = np.flatnonzero(table.thread_E == thread)
        at_us = np.sort(table.start_us_E[calls[table.thread_E[calls] == thread]])
        begun = np.searchsorted(at_us, table.start_us_E[mine], side="left")
        holds_E[mine] = np.searchsorted(at_us, table.end_us_E[mine], side="left") > begun
    return holds_E


def _number(said: Any) -> int | None:
    return said if isinstance(said, int) and not isinstance(said, bool) and 0 <= said < 1 << 31 else None


def _rank(path: Path, said: Any) -> int | None:
    """Which rank a file is of, None where neither its content nor its name says it."""
    if (rank := _number(said)) is not None:
        return rank
    named = next((match for pattern in _IN_NAME if (match := pattern.search(path.name)) is not None), None)
    return None if named is None else int(named[1])
