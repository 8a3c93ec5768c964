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
from paceenv.importers.profiler.collective_events import MARKED, device_collectives, host_collectives
from paceenv.importers.profiler.device_activity import device_activity
from paceenv.importers.profiler.device_steps import (
    STEP,
    Device,
    find_device,
    host_marks,
    stepping_processes,
)
from paceenv.importers.profiler.event_columns import EventTable, Integers, read_events
from paceenv.importers.timelines import Collective, Step, Timeline, inside_of, union

UNKNOWN_RANK: Final = "unknown_rank"
SOURCE: Final = "PyTorch profiler"
_CALLS: Final = ("c10d::", "record_param_comms")
"""How the CPU's calls of collectives begin."""
_WRAPPER: Final = "autograd::engine::evaluate_function"
"""Around an operation and the hooks that run before and after it, which may wait."""
_IN_NAME: Final = tuple(
    re.compile(rf"{word}[_\-]?(\d{{1,6}})(?!\d)", re.IGNORECASE) for word in ("rank", "worker", "(?<![a-z])r")
)
"""Where a file's name may say which rank it is of, the best first."""


def import_kineto(path: str | Path) -> tuple[Timeline, str]:
    """One rank's timeline, and a note on damage, or "". Raises InputError if the file is no profile with steps."""
    file = EventFile(path)
    timeline = _timeline(file, read_events(file))
    return timeline, f"{path}: {file.damage}" if file.damage else ""


def _timeline(file: EventFile, table: EventTable) -> Timeline:
    processes = stepping_processes(table)
    if len(processes) > 1:
        named = ", ".join(processes[:4])
        raise InputError(f"{file.path}: steps of {len(processes)} processes ({named}); allowed: one file per rank")
    distributed = file.value("distributedInfo")
    said = distributed if isinstance(distributed, dict) else {}
    (rank, unknown), device = _rank(file.path, said.get("rank")), find_device(table)
    steps: Sequence[Step]
    if device is None:
        steps = _host_steps(table)
    else:
        collectives = device_collectives(table, device)
        steps = device_activity(table, device, collectives, rank)
    if not steps:
        raise InputError(
            f"{file.path}: no ProfilerStep# in {file.events} events; allowed: a profile of a job that calls "
            "prof.step() at the end of every step"
        )
    base_ns = file.value("baseTimeNanoseconds")
    base_s = base_ns * 1e-9 if is_number(base_ns) else 0.0
    about: dict[str, Any] = {"host": host} if isinstance(host := file.value("host_name"), str) else {}
    about |= {"world_size": size} if (size := _number(said.get("world_size"))) else {}
    about |= {UNKNOWN_RANK: unknown} if unknown else {}
    return Timeline(
        rank,
        file.path,
        tuple(step.shifted(base_s) for step in steps),
        about,
        _notes(device),
    )


def _notes(device: Device | None) -> tuple[str, ...]:
    if device is None:
        return ()
    others = f"{device.left_out} operations of other devices are left out" if device.left_out else ""
    is_early = (device.launch_D < 0) & (device.step_D < 0) & bool(len(device.number_T) and device.launch_D.max() >= 0)
    early = "operations launched before the profile began are left out, with their step" if is_early.any() else ""
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
        Step(number, begin_s, end_s, tuple(inside[i]), *inside_of(busy, begin_s, end_s))
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


def _rank(path: Path, said: Any) -> tuple[int, str]:
    """Which rank a file is of, or 0 and why that is unknown: a file by itself needs none."""
    if (rank := _number(said)) is not None:
        return rank, ""
    for pattern in _IN_NAME:
        if (named := pattern.search(path.name)) is not None:
            return int(named[1]), ""
    return 0, f"{path}: neither distributedInfo nor its name says which rank it is; allowed: rank3.json"
