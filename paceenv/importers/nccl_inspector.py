"""Reader of NCCL Inspector's JSON (NCCL's profiler plugin ``ext-profiler/inspector``): one file per process.

Each record is one finished collective or send or receive of a communicator: its number there, size, time and bandwidth;
with ``NCCL_INSPECTOR_DUMP_VERBOSE=1`` also when its kernels began and ended. The plugin keeps only what finished last
between two dumps (version 4.0), or a ring (since 4.1), so numbers may be missing.

Format: versions 4.0 to 4.4. Since 4.3 a record has no header of its own; that of the dump before it counts.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.importers.collective_names import op_name
from paceenv.importers.dump_steps import steps_of
from paceenv.importers.packed import open_unpacked
from paceenv.importers.timelines import Collective, Timeline

SOURCE: Final = "NCCL Inspector"
MAX_RECORD: Final = 1 << 20
"""Bytes of a record."""
HOW_TO: Final = "allowed: logs written with NCCL_INSPECTOR_DUMP_VERBOSE=1 and short dump intervals, without gaps"
_MOST_US: Final = 1e18
_OF_ONE_RANK: Final = ("all_gather", "reduce_scatter")
"""Of these NCCL counts one rank's part (``inspector.cc`` multiplies it by the ranks for its bandwidths)."""


class _Header(msgspec.Struct, gc=False):
    id: str | int = ""
    rank: int = -1
    n_ranks: int = 0
    comm_name: str = ""


class _Metadata(msgspec.Struct, gc=False):
    hostname: str = ""
    pid: int = 0


class _Kernel(msgspec.Struct, gc=False):
    kernel_start_ts: float = 0.0
    kernel_stop_ts: float = 0.0


class _Stamps(msgspec.Struct, gc=False):
    kernel_events: list[_Kernel] = []


class _Coll(msgspec.Struct, gc=False):
    op: str = msgspec.field(default="", name="coll")
    sn: int = msgspec.field(default=-1, name="coll_sn")
    size_bytes: float = msgspec.field(default=0.0, name="coll_msg_size_bytes")
    time_us: float = msgspec.field(default=0.0, name="coll_exec_time_us")
    source: str = msgspec.field(default="", name="coll_timing_source")
    stamps: _Stamps | None = msgspec.field(default=None, name="event_trace_ts")


class _P2p(msgspec.Struct, gc=False):
    op: str = msgspec.field(default="", name="p2p")
    sn: int = msgspec.field(default=-1, name="p2p_sn")
    size_bytes: float = msgspec.field(default=0.0, name="p2p_msg_size_bytes")
    time_us: float = msgspec.field(default=0.0, name="p2p_exec_time_us")
    source: str = msgspec.field(default="", name="p2p_timing_source")
    stamps: ClassVar[None] = None


class _Stats(msgspec.Struct, gc=False):
    coll_dropped_since_last_dump: int = 0


class _Record(msgspec.Struct, gc=False):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Coll | None = None
    p2p_perf: _P2p | None = None
    dump_stats: _Stats | None = None


_RECORD: Final = msgspec.json.Decoder(_Record)


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


@dataclass
class _Columns:
    integers: array[int] = field(default_factory=lambda: array("q"))  # communicator, operation, number; and so on
    numbers: array[float] = field(default_factory=lambda: array("d"))  # size, time, bandwidths, begin, end; and so on
    comms: dict[tuple[str, int], tuple[int, Communicator]] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    header: _Header | None = None
    metadata: _Metadata = field(default_factory=_Metadata)
    dropped: int = 0
    is_gpu_timed: bool = True
    unread: int = 0

    def take(self, record: _Record) -> None:
        """Add a record."""
        if record.metadata is not None:
            self.metadata = record.metadata
        if record.header is not None:
            self.header = record.header
        if record.dump_stats is not None:
            self.dropped += max(record.dump_stats.coll_dropped_since_last_dump, 0)
        for perf in (record.coll_perf, record.p2p_perf):
            if perf is not None:
                self._add(perf)

    def _add(self, perf: _Coll | _P2p) -> None:
        header, size, time_us = self.header, perf.size_bytes, perf.time_us
        fits = 0.0 < time_us < _MOST_US and 0.0 <= size < _MOST_US and 0 <= perf.sn < 1 << 62 and perf.op
        if header is None or not fits or not 0 <= header.rank < 1 << 31 or len(self.ops) > 64:
            self.unread += 1
            return
        key = str(header.id), header.rank
        if key not in self.comms:
            comm = Communicator(key[0], header.comm_name, header.n_ranks, header.rank)
            self.comms[key] = len(self.comms), comm
        self.integers.extend((self.comms[key][0], self.ops.setdefault(perf.op, len(self.ops)), perf.sn))
        begin_us, end_us = _stamps(perf.stamps)
        self.numbers.extend((size, time_us * 1e-6, begin_us * 1e-6, end_us * 1e-6))
        self.is_gpu_timed &= perf.source in {"kernel_gpu", ""}


def _stamps(stamps: _Stamps | None) -> tuple[float, float]:
    """When the first kernel began and the last one ended, microseconds; not-a-number where that is unknown."""
    kernels = stamps.kernel_events if stamps else []
    begun = [k.kernel_start_ts for k in kernels if 0.0 < k.kernel_start_ts < _MOST_US]
    ended = [k.kernel_stop_ts for k in kernels if 0.0 < k.kernel_stop_ts < _MOST_US]
    if not begun or not ended or max(ended) < min(begun):
        return float("nan"), float("nan")
    return min(begun), max(ended)


def read_inspector(path: str | Path) -> InspectorLog:
    """A process's records. Memory is less than half of the file's size. Raises InputError if there are none."""
    path = Path(path)
    columns, damage = _Columns(), ""
    try:
        for text in _records(path):
            try:
                columns.take(_RECORD.decode(text))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                columns.unread += 1
    except (OSError, EOFError, zlib.error) as error:
        damage = " ".join(str(error).split())
    if not columns.integers:
        why = damage or f"{columns.unread} records that cannot be read"
        raise InputError(f"{path}: no collective of NCCL Inspector in it ({why}); allowed: its JSON, version 4")
    notes = [f"{path}: damaged, {damage}; what came before is used"] if damage else []
    notes += [f"{path}: {columns.unread} records cannot be read; skipped"] if columns.unread else []
    notes += [f"{path}: the plugin dropped {columns.dropped} collectives"] if columns.dropped else []
    about = columns.metadata
    comm_V, op_V, sn_V = np.array(columns.integers, np.int64).reshape(-1, 3).T.copy()
    size_bytes_V, time_s_V, begin_s_V, end_s_V = np.array(columns.numbers, np.float64).reshape(-1, 4).T.copy()
    return InspectorLog(
        path,
        f"{about.hostname or '?'}:{about.pid}",
        tuple(comm for _, comm in columns.comms.values()),
        tuple(columns.ops),
        comm_V,
        op_V,
        sn_V,
        size_bytes_V,
        time_s_V,
        begin_s_V,
        end_s_V,
        columns.is_gpu_timed,
        tuple(notes),
    )


def _records(path: Path) -> Iterator[bytes]:
    """The text of each record: a line, or several lines where it is written indented."""
    file, stream = open_unpacked(path)
    with file:
        waiting = b""
        while line := stream.readline(MAX_RECORD):
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
