"""Steps of a rank from its Flight Recorder dump, which has none: the shortest sequence of collectives that recurs.

A step begins after the longest usual gap. Times are those of the device only with ``TORCH_NCCL_ENABLE_TIMING=1``, and
when a collective ended is known as well as the watchdog looked.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from paceenv.core.errors import InputError
from paceenv.importers.collective_names import op_name
from paceenv.importers.flight_recorder import Dump, Entry
from paceenv.importers.timelines import Collective, Step, Timeline

HOW_TO: Final = "allowed: a dump of a job that ran with TORCH_NCCL_ENABLE_TIMING=1"
SPAN: Final = "allowed: a dump that spans several steps (TORCH_FR_BUFFER_SIZE)"
MIN_STEPS: Final = 3
_REPEATS: Final = 0.9
"""Share of collectives that must recur a period later."""
_MAX_PERIOD: Final = 4096
_MAX_LOOKED_AT: Final = 1 << 16
"""Collectives in which a step is looked for."""

Placed = tuple[int, Collective, tuple[str, str, int]]
"""Number, collective, and what makes it the same one in every step: operation, what it is counted among, bytes."""


def timeline_of(dump: Dump) -> Timeline:
    """A rank's timeline. Raises InputError if its dump shows no steps."""
    placed = [place for entry in dump.entries if (place := _placed(entry)) is not None]
    if not placed:
        untimed = sum(entry.is_done for entry in dump.entries)
        why = f"{untimed} completed collectives without duration" if untimed else "no completed collectives"
        raise InputError(f"{dump.path}: {why}; {HOW_TO}")
    placed.sort(key=lambda entry: (entry[1].end_s, entry[1].start_s))
    last = max((rank for group in dump.groups.values() for rank in group.ranks), default=-1)
    return Timeline(dump.rank, dump.path, tuple(steps_of(dump.path, placed, SPAN)), {"world_size": last + 1})


def _placed(entry: Entry) -> Placed | None:
    """Sequence number, collective and what makes it the same one in every step; None if it cannot be placed in time."""
    if entry.completed_s is None or entry.is_p2p:
        return None
    if entry.duration_ms is not None:
        start_s = entry.completed_s - entry.duration_ms * 1e-3
    elif entry.started_s is not None and entry.started_s <= entry.completed_s:
        start_s = entry.started_s
    else:
        return None
    op, size = op_name(entry.op), entry.bytes
    if op == "all_gather":
        inputs, outputs = entry.items
        size = min(size * outputs // inputs, 1 << 60) if inputs > 0 and outputs > 0 else 0
    collective = Collective(op, entry.group, start_s, entry.completed_s, size)
    return entry.collective_seq, collective, (op, entry.group, size)


def steps_of(path: Path, entries: list[Placed], advice: str) -> list[Step]:
    """Steps of a rank.

    Raises InputError: no sequence recurs.
    """
    keys = [entry[2] for entry in entries]
    period = _period(keys)
    if period is None:
        raise InputError(f"{path}: {len(entries)} collectives, in which no sequence recurs {MIN_STEPS} times; {advice}")
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
    whole = [step for step in steps if counts[step.iteration] == 1]
    if not whole:
        raise InputError(f"{path}: {len(entries)} collectives without a whole step; {advice}")
    return whole


def _period(keys: list[tuple[str, str, int]]) -> int | None:
    """The shortest distance at which the sequence repeats itself."""
    codes = np.unique([repr(key) for key in keys[:_MAX_LOOKED_AT]], return_inverse=True)[1]
    for period in range(1, min(len(codes) // MIN_STEPS, _MAX_PERIOD) + 1):
        if np.mean(codes[period:] == codes[:-period]) >= _REPEATS:
            return period
    return None
