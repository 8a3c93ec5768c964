"""Reader of NCCL Inspector's JSON (NCCL's profiler plugin ``ext-profiler/inspector``): one file per process.

Each record is one finished collective or send or receive of a communicator: its number there, size, time and bandwidth;
with ``NCCL_INSPECTOR_DUMP_VERBOSE=1`` also when its kernels began and ended. The plugin keeps only what finished last
between two dumps (version 4.0), or a ring (since 4.1), so numbers may be missing.

Format: versions 4.0 to 4.4. Since 4.3 a record has no header of its own; that of the dump before it counts.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class InspectorLog:
    """The records of one process, in their order; arrays have the shape (records,)."""

    path: Path
    process: str  # host and process number
    communicators: tuple[Communicator, ...]  # those that records name
    ops: tuple[str, ...]  # names of operations, such as ``AllReduce``
    comm_V: NDArray[np.int64]  # index of the communicator
    op_V: NDArray[np.int64]  # index of the operation
    sn_V: NDArray[np.int64]  # number in the communicator, of its collectives of this operation or of its transfers
    size_bytes_V: NDArray[np.float64]  # message size as NCCL counts it
    time_s_V: NDArray[np.float64]  # execution time, seconds
    begin_s_V: NDArray[np.float64]  # of its first kernel, since 1970; not-a-number without verbose output
    end_s_V: NDArray[np.float64]  # when the last one ended
    is_gpu_timed: bool  # whether all times are those of the device
    notes: tuple[str, ...] = ()  # what is damaged or was dropped


def is_inspector(head: str) -> bool:
    """Whether a file that begins like this is one."""
    return any(f'"{key}"' in head for key in ("coll_perf", "p2p_perf", "dump_stats", "inspector_output_format_version"))


def read_inspector(path: str | Path) -> InspectorLog:
    """A process's records. Memory is less than half of the file's size. Raises InputError if there are none."""
    path, integers, numbers = Path(path), array("q"), array("d")
    comms, ops = dict[tuple[str, int], tuple[int, Communicator]](), dict[str, int]()
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
                op, sn, times, source = _measured(record[f"{kind}_perf"], kind)
                key = str(header["id"]), int(header["rank"])
                comm = Communicator(key[0], str(header.get("comm_name", "")), int(header.get("n_ranks", 0)), key[1])
                if not 0 <= key[1] < 1 << 31 or len(ops) > 64:
                    raise ValueError("no rank, or too many operations")
                integers.extend((comms.setdefault(key, (len(comms), comm))[0], ops.setdefault(op, len(ops)), sn))
                numbers.extend(times)
                is_gpu_timed &= source in {"kernel_gpu", ""}
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            unread += 1
    if not integers:
        why = unpacked.damage or f"{unread} records that cannot be read"
        raise InputError(f"{path}: no collective of NCCL Inspector in it ({why}); allowed: its JSON, version 4")
    notes = [f"{path}: damaged, {unpacked.damage}; what came before is used"] if unpacked.damage else []
    notes += [f"{path}: {unread} records cannot be read; skipped"] if unread else []
    notes += [f"{path}: the plugin dropped {dropped} collectives"] if dropped else []
    return InspectorLog(  # type: ignore[call-arg]
        path,
        f"{about.get('hostname') or '?'}:{about.get('pid', 0)}",
        tuple(comm for _, comm in comms.values()),
        tuple(ops),
        *np.array(integers, np.int64).reshape(-1, 3).T.copy(),
        *np.array(numbers, np.float64).reshape(-1, 4).T.copy(),
        is_gpu_timed,
        tuple(notes),
    )


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
    kinds = [op_name(op) for op in log.ops]
    chosen = np.flatnonzero([kinds[op] not in {"send", "recv"} for op in log.op_V])
    if not np.isfinite(log.begin_s_V[chosen]).all() or not len(chosen):
        raise InputError(f"{log.path}: collectives without time stamps; {HOW_TO}")
    comm_V, op_V, sn_V = log.comm_V[chosen], log.op_V[chosen], log.sn_V[chosen]
    for k, comm in enumerate(log.communicators):
        counted = [np.unique(sn_V[(comm_V == k) & (op_V == op)]) for op in np.unique(op_V[comm_V == k])]
        missing = sum(int(numbers[-1] - numbers[0]) + 1 - len(numbers) for numbers in counted)
        if missing:
            raise InputError(f"{log.path}: {missing} collectives of communicator {comm.id} are missing; {HOW_TO}")
    placed = []
    for i in chosen[np.argsort(log.end_s_V[chosen], kind="stable")].tolist():
        op, group = kinds[log.op_V[i]], log.communicators[log.comm_V[i]].id
        size = int(log.size_bytes_V[i])
        if op in _OF_ONE_RANK:
            size = min(size * max(log.communicators[log.comm_V[i]].ranks, 0), 1 << 60)
        collective = Collective(op, group, float(log.begin_s_V[i]), float(log.end_s_V[i]), size)
        placed.append((int(log.sn_V[i]), collective, (op, f"{op} of {group}", size)))
    about = {"world_size": max(comm.ranks for comm in log.communicators)}
    return Timeline(rank, log.path, tuple(steps_of(log.path, placed, HOW_TO)), about)
