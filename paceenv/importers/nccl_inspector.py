"""Reader of NCCL Inspector's JSON (NCCL's profiler plugin ``ext-profiler/inspector``): one file per process.

Each record is one finished collective or send or receive of a communicator: its number there, size, time and bandwidth;
with ``NCCL_INSPECTOR_DUMP_VERBOSE=1`` also when its kernels began and ended. The plugin keeps only what finished last
between two dumps (version 4.0), or a ring (since 4.1), so numbers may be missing.

Format: versions 4.0 to 4.4. Since 4.3 a record has no header of its own; that of the dump before it counts.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceenv.core.errors import InputError
from paceenv.importers.collective_names import op_name
from paceenv.importers.dump_steps import steps_of
from paceenv.importers.packed import Unpacked
from paceenv.importers.timelines import Collective, Timeline

SOURCE: Final = "NCCL Inspector"
MAX_RECORD: Final = 1 << 20
"""Bytes of a record."""
HOW_TO: Final = "allowed: logs written with NCCL_INSPECTOR_DUMP_VERBOSE=1 and short dump intervals, without gaps"
_MOST_US: Final = 1e18
_OF_ONE_RANK: Final = ("all_gather", "reduce_scatter")
"""Of these NCCL counts one rank's part (``inspector.cc`` multiplies it by the ranks for its bandwidths)."""


@dataclass(frozen=True)
class Communicator:
    """A communicator as one process knows it: its id on all ranks, its name, its size, and the own rank."""

    id: str
    name: str
    ranks: int
    rank: int


class Record(NamedTuple):
    """A finished collective, or a send or receive; times are seconds."""

    comm: Communicator
    op: str  # NCCL's name, such as ``AllReduce``
    number: int  # in the communicator, of its collectives of this operation or of its transfers
    size_bytes: float  # message size as NCCL counts it
    time_s: float  # execution time
    begin_s: float  # of its first kernel, since 1970; not-a-number without verbose output
    end_s: float  # when the last one ended


@dataclass(frozen=True)
class InspectorLog:
    """The records of one process, in their order."""

    path: Path
    process: str  # host and process number
    communicators: tuple[Communicator, ...]  # those that records name
    records: tuple[Record, ...]
    is_gpu_timed: bool  # whether all times are those of the device
    notes: tuple[str, ...] = ()  # what is damaged or was dropped


def is_inspector(head: str) -> bool:
    """Whether a file that begins like this is one."""
    return any(f'"{key}"' in head for key in ("coll_perf", "p2p_perf", "dump_stats", "inspector_output_format_version"))


def read_inspector(path: str | Path) -> InspectorLog:
    """A process's records. Memory is less than the file's size. Raises InputError if there are none."""
    path, records = Path(path), list[Record]()
    comms = dict[tuple[str, int], Communicator]()
    header, about = dict[str, Any](), dict[str, Any]()
    dropped, unread, is_gpu_timed = 0, 0, True
    unpacked = Unpacked(path)
    for text in _records(unpacked):
        try:
            record = json.loads(text)
            header, about = {**(record.get("header") or header)}, {**(record.get("metadata") or about)}
            dropped += max(int((record.get("dump_stats") or {}).get("coll_dropped_since_last_dump", 0)), 0)
            for kind in ("coll", "p2p"):
                if not record.get(f"{kind}_perf"):
                    continue
                op, number, times, source = _measured(record[f"{kind}_perf"], kind)
                key = str(header["id"]), int(header["rank"])
                comm = Communicator(key[0], str(header.get("comm_name", "")), int(header.get("n_ranks", 0)), key[1])
                if not 0 <= key[1] < 1 << 31:
                    raise ValueError("no rank")
                records.append(Record(comms.setdefault(key, comm), sys.intern(op), number, *times))
                is_gpu_timed &= source in {"kernel_gpu", ""}
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            unread += 1
    if not records:
        why = unpacked.damage or f"{unread} records that cannot be read"
        raise InputError(f"{path}: no collective of NCCL Inspector in it ({why}); allowed: its JSON, version 4")
    notes = [f"{path}: damaged, {unpacked.damage}; what came before is used"] if unpacked.damage else []
    notes += [f"{path}: {unread} records cannot be read; skipped"] if unread else []
    notes += [f"{path}: the plugin dropped {dropped} collectives"] if dropped else []
    process = f"{about.get('hostname') or '?'}:{about.get('pid', 0)}"
    return InspectorLog(path, process, tuple(comms.values()), tuple(records), is_gpu_timed, tuple(notes))


def _measured(perf: dict[str, Any], kind: str) -> tuple[str, int, tuple[float, float, float, float], str]:
    """Operation, number, size, time, begin and end (seconds, not-a-number where unknown), and who took the time.

    Raises ValueError, or what else an odd type raises.
    """
    op, sn = str(perf[kind]), int(perf[f"{kind}_sn"])
    size, time_us = (float(perf.get(f"{kind}_{what}", 0.0)) for what in ("msg_size_bytes", "exec_time_us"))
    if not (op and 0 <= sn < 1 << 62 and 0.0 < time_us < _MOST_US and 0.0 <= size < _MOST_US):
        raise ValueError("impossible numbers")
    kernels = (perf.get("event_trace_ts") or {}).get("kernel_events", []) if kind == "coll" else []
    starts, ends = ([float(k.get(f"kernel_{what}_ts", 0.0)) for k in kernels] for what in ("start", "stop"))
    begin_us = min((us for us in starts if 0.0 < us < _MOST_US), default=math.nan)
    end_us = max((us for us in ends if 0.0 < us < _MOST_US), default=math.nan)
    begin_us, end_us = (begin_us, end_us) if begin_us <= end_us else (math.nan, math.nan)
    times = size, time_us * 1e-6, begin_us * 1e-6, end_us * 1e-6
    return op, sn, times, str(perf.get(f"{kind}_timing_source", ""))


def _records(unpacked: Unpacked) -> Iterator[bytes]:
    """The text of each record: a line, or several lines where it is written indented."""
    waiting = b""
    for line in unpacked.lines(MAX_RECORD):
        begins = line[:1] == b"{"
        if waiting and (begins or len(waiting) > MAX_RECORD):
            yield waiting
            waiting = b""
        if begins and line.rstrip()[-1:] == b"}":
            yield line
        elif line[:1] == b"}":
            yield waiting + line.rstrip().rstrip(b",")
            waiting = b""
        elif begins or waiting:
            waiting += line
    if waiting:
        yield waiting


def ranks_of(logs: Sequence[InspectorLog]) -> tuple[list[int], str]:
    """A rank for each process, and how it was found, or why they are only counted.

    A communicator that has all processes numbers them; else their order does.
    """
    by_comm: dict[str, dict[int, int]] = {}
    for i, log in enumerate(logs):
        for comm in log.communicators:
            by_comm.setdefault(comm.id, {})[i] = comm.rank
    for ranks in sorted(by_comm.values(), key=len, reverse=True):
        if len(ranks) == len(logs) and len(set(ranks.values())) == len(logs):
            return [ranks[i] for i in range(len(logs))], ""
    order = sorted(range(len(logs)), key=lambda i: logs[i].process)
    return [order.index(i) for i in range(len(logs))], "no communicator has all processes, so they are only counted"


def timeline_of_log(log: InspectorLog, rank: int) -> Timeline:
    """A rank's timeline. Raises InputError if its records have no time stamps, have gaps, or show no steps."""
    chosen = [one for one in log.records if op_name(one.op) not in {"send", "recv"}]
    if not chosen or any(math.isnan(one.begin_s) for one in chosen):
        raise InputError(f"{log.path}: collectives without time stamps; {HOW_TO}")
    numbers: dict[tuple[Communicator, str], set[int]] = defaultdict(set)
    for one in chosen:
        numbers[one.comm, one.op].add(one.number)
    for comm in log.communicators:
        counted = [of for (where, _), of in numbers.items() if where == comm]
        if missing := sum(max(of) - min(of) + 1 - len(of) for of in counted):
            raise InputError(f"{log.path}: {missing} collectives of communicator {comm.id} are missing; {HOW_TO}")
    placed = []
    for one in sorted(chosen, key=lambda one: one.end_s):
        op, size = op_name(one.op), int(one.size_bytes)
        if op in _OF_ONE_RANK:
            size = min(size * max(one.comm.ranks, 0), 1 << 60)
        collective = Collective(op, one.comm.id, one.begin_s, one.end_s, size)
        placed.append((one.number, collective, (op, f"{op} of {one.comm.id}", size)))
    about = {"world_size": max(comm.ranks for comm in log.communicators)}
    return Timeline(rank, log.path, tuple(steps_of(log.path, placed, HOW_TO)), about)
