"""Importer of Flight Recorder dumps of PyTorch (NCCL): one file per rank, a pickle or JSON, gzipped or not.

A dump is a ring of a rank's last collectives, without steps. A step is the shortest sequence of collectives that
recurs, begun after the longest usual gap. Times are those of the device only with TORCH_NCCL_ENABLE_TIMING=1, and when
a collective ended is known as well as the watchdog looked. Dumps are pickles by default; what is in them is read as
data and never run (``paceenv.importers.plain_pickle``).

Format: version 2 of torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceenv.core.errors import InputError
from paceenv.importers.json_events import EventFile
from paceenv.importers.kineto import ITEM_BYTES, is_number, op_name
from paceenv.importers.packed import content_of, head_of
from paceenv.importers.plain_pickle import MAX_BYTES, is_pickle, read_plain_pickle
from paceenv.importers.timelines import Collective, Step, Timeline

SOURCE: Final = "PyTorch Flight Recorder"
HOW_TO: Final = "allowed: a dump of a job that ran with TORCH_NCCL_ENABLE_TIMING=1"
MIN_STEPS: Final = 3
_REPEATS: Final = 0.9
"""Share of collectives that must recur a period later."""
_MAX_PERIOD: Final = 4096
_MAX_LOOKED_AT: Final = 1 << 16
"""Collectives in which a step is looked for."""
_RANK: Final = re.compile(r"(\d{1,6})(?:\.json)?(?:\.gz)?\Z")

_Entry = tuple[int, Collective, tuple[str, str, int]]


@dataclass(frozen=True)
class Dump:
    """One rank's dump as it is.

    Attributes:
        rank: the rank.
        path: the file.
        entries: collectives and point-to-point operations, oldest first, as the file has them.
        about: everything else at the top of the file, such as ``pg_config``.
        damage: one line on where the file broke off, or "".
    """

    rank: int
    path: Path
    entries: tuple[dict[str, Any], ...]
    about: dict[str, Any]
    damage: str = ""


def read_dump(path: str | Path) -> Dump:
    """A rank's dump. Raises InputError if it is none, or does not say which rank it is of."""
    path = Path(path)
    named = _RANK.search(path.name)
    if named is None:
        raise InputError(f"{path}: its name does not end with the rank; allowed: nccl_trace_rank_3 or rank_3.json")
    entries, damage = _pickled(path) if is_pickle(head_of(path)) else _json(path)
    return Dump(int(named[1]), path, tuple(entries), {}, damage)


def timeline_of(dump: Dump) -> Timeline:
    """A rank's timeline. Raises InputError if its dump shows no steps."""
    untimed, entries = 0, []
    for event in dump.entries:
        entry = _entry(event)
        untimed += entry is None and event.get("state") == "completed"
        if entry is not None:
            entries.append(entry)
    if not entries:
        why = f"{untimed} completed collectives without duration" if untimed else "no completed collectives"
        raise InputError(f"{dump.path}: {why}; {HOW_TO}")
    entries.sort(key=lambda entry: (entry[1].end_s, entry[1].start_s))
    return Timeline(dump.rank, dump.path, tuple(_steps(dump.path, entries)))


def _json(path: Path) -> tuple[list[dict[str, Any]], str]:
    with EventFile(path, "entries") as file:
        events = list(file)
        return events, f"{path}: {file.damage}" if file.damage else ""


def _pickled(path: Path) -> tuple[list[dict[str, Any]], str]:
    """A dump's entries; of a damaged one those that were complete."""
    content, torn = content_of(path, MAX_BYTES)
    found, damage = read_plain_pickle(content)
    entries = found if damage else found.get("entries") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise InputError(f'{path}: a pickle without a list "entries"; allowed: a dump of the Flight Recorder')
    entries = [entry for entry in entries if isinstance(entry, dict)]
    if damage and not any("record_id" in entry for entry in entries):
        raise InputError(f"{path}: {torn or damage}; allowed: a dump of the Flight Recorder")
    return entries, f"{path}: damaged, {torn or damage}; what came before is used" if damage else ""


def _entry(event: dict[str, Any]) -> _Entry | None:
    """Sequence number, collective and what makes it the same one in every step; None if it cannot be placed in time."""
    said, end_ns, group = (
        event.get("profiling_name"),
        event.get("time_discovered_completed_ns"),
        event.get("process_group"),
    )
    duration_ms, start_ns = event.get("duration_ms"), event.get("time_discovered_started_ns")
    number = event.get("collective_seq_id")
    if not (isinstance(said, str) and is_number(end_ns) and isinstance(number, int)) or event.get("is_p2p") is True:
        return None
    end_s = end_ns * 1e-9
    if is_number(duration_ms) and duration_ms >= 0:
        start_s = end_s - duration_ms * 1e-3
    elif is_number(start_ns) and start_ns <= end_ns:
        start_s = start_ns * 1e-9
    else:
        return None
    name = str(group[0]) if isinstance(group, list | tuple) and group else str(event.get("pg_id", 0))
    op, size = op_name(said.partition(":")[2] or said), _bytes(event)
    return number, Collective(op, name, start_s, end_s, size), (op, name, size)


def _bytes(event: dict[str, Any]) -> int:
    sizes, kinds = event.get("input_sizes"), event.get("input_dtypes")
    if not (isinstance(sizes, list | tuple) and isinstance(kinds, list | tuple)):
        return 0
    total = 0.0
    for shape, kind in zip(sizes, kinds, strict=False):
        if (
            isinstance(shape, list | tuple)
            and all(is_number(n) and 0 <= n < 1 << 40 for n in shape)
            and isinstance(kind, str)
        ):
            total += float(np.prod([float(n) for n in shape])) * ITEM_BYTES.get(kind, 0)
    return int(min(total, float(1 << 60)))


def _steps(path: Path, entries: list[_Entry]) -> list[Step]:
    keys = [entry[2] for entry in entries]
    period = _period(keys)
    if period is None:
        raise InputError(
            f"{path}: {len(entries)} collectives, in which no sequence recurs {MIN_STEPS} times; allowed: a dump "
            "that spans several steps (TORCH_FR_BUFFER_SIZE)"
        )
    gaps = np.array([b[1].start_s - a[1].end_s for a, b in pairwise(entries)])
    usual = [float(np.median(gaps[(np.arange(len(gaps)) + 1) % period == k])) for k in range(period)]
    first = int(np.argmax(usual)) if period > 1 else 0
    leads = keys[first]
    per_step = sum(key[1] == leads[1] for key in keys[first : first + period])
    steps = []
    for i in range(first, len(entries) - period + 1, period):
        inside = entries[i : i + period]
        if i == 0 or [entry[2] for entry in inside] != keys[first : first + period]:
            continue  # before the first collective the begin of the step is unknown
        begin_s = max(entries[i - 1][1].end_s, 0.0)
        end_s = max(entry[1].end_s for entry in inside)
        number = next(entry[0] for entry in inside if entry[2] == leads)
        nothing = np.empty(0)
        if end_s > begin_s and 0 <= number // per_step < 1 << 31:
            steps.append(Step(number // per_step, begin_s, end_s, tuple(e[1] for e in inside), nothing, nothing))
    counts = Counter(step.iteration for step in steps)
    return [step for step in steps if counts[step.iteration] == 1]


def _period(keys: list[tuple[str, str, int]]) -> int | None:
    """The shortest distance at which the sequence repeats itself."""
    codes = np.unique([repr(key) for key in keys[:_MAX_LOOKED_AT]], return_inverse=True)[1]
    for period in range(1, min(len(codes) // MIN_STEPS, _MAX_PERIOD) + 1):
        if np.mean(codes[period:] == codes[:-period]) >= _REPEATS:
            return period
    return None
