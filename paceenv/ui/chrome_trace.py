"""Traces as pictures one can walk through: the JSON trace event format of chrome://tracing and ui.perfetto.dev.

Turns the rows of a trace (``paceenv.core.trace``) or anything stamped alike into events and streams them to a file;
needs numpy only. A job is a process, a rank a thread, an operation a complete event ("X"), a series over time a counter
("C"); names are metadata events ("M"). The format counts in microseconds. Its events on one thread must nest, and a
viewer silently mangles those that do not; so times are whole nanoseconds here (what ends when the next begins ends
exactly there), and what a rank does beside something else goes to a thread of its own.

Format: "Trace Event Format" of the Chromium project, JSON object form.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceenv.core.files import open_atomic

LANE = 1_000_000
"""Threads of one rank are this far apart: rank, rank + LANE, ... for operations that overlap."""


class ChromeTraceWriter:
    """Stream events to ``path``: a context manager that leaves a whole file or none; gzipped where it ends in .gz.

    ``about`` are the file's own notes (the viewer's "metadata"), JSON values by name.

    Args:
        about: notes by name; None for no notes.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        self._path, self._about, self._stack = Path(path), dict(about or {}), ExitStack()
        self._separator = ""
        self._busy_until_ns: dict[tuple[int, int], list[int]] = defaultdict(list)

    def __enter__(self) -> ChromeTraceWriter:
        self._file: IO[bytes] = self._stack.enter_context(open_atomic(self._path))
        if self._path.suffix == ".gz":  # no name and no date inside: the same events give the same bytes
            self._file = self._stack.enter_context(gzip.GzipFile("", "wb", 6, self._file, 0))  # type: ignore[arg-type]
        self._write('{"traceEvents":[\n')
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(self._about)}}}\n')
        self._stack.__exit__(kind, error, traceback)

    def process(self, pid: int, name: str, threads: Mapping[int, str]) -> None:
        """Name a job and its ranks; ranks are shown in their order."""
        self._event({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        self._event({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for tid, thread in threads.items():
            self._thread(pid, tid, thread, tid)

    def operations(self, pid: int, columns: Mapping[str, ArrayLike]) -> None:
        """Add operations: columns ``rank``, ``op``, ``start_s``, ``end_s`` of a trace, one value a row or one for all.

        Every other column becomes an argument of the event. Rows of one rank may come in any order within a call; calls
        must follow each other in time. Operations without length are left out.
        """
        names = list(columns)
        rows = np.broadcast_arrays(*(np.asarray(columns[name]) for name in names))
        given: dict[str, NDArray[Any]] = {name: np.ravel(row) for name, row in zip(names, rows, strict=True)}
        start_ns, end_ns = (np.rint(1e9 * given.pop(name)).astype(np.int64) for name in ("start_s", "end_s"))
        rank, op = given.pop("rank"), given.pop("op")
        for i in np.lexsort((-end_ns, start_ns, rank)):
            if end_ns[i] <= start_ns[i]:
                continue
            r, start, end = int(rank[i]), int(start_ns[i]), int(end_ns[i])
            event = {"ph": "X", "pid": pid, "tid": self._lane(pid, r, start, end), "name": str(op[i])}
            arguments = {name: column[i].item() for name, column in given.items()}
            self._event(event | ({"args": arguments} if arguments else {}), ts=start, dur=end - start)

    def counter(self, pid: int, name: str, at_s: ArrayLike, values: Mapping[str, ArrayLike]) -> None:
        """Add a counter of a job."""
        at_ns = np.rint(1e9 * np.asarray(at_s)).astype(np.int64)
        series = {key: np.broadcast_to(np.asarray(value, np.float64), at_ns.shape) for key, value in values.items()}
        for i, at in enumerate(at_ns):
            arguments = {key: float(f"{value[i]:.6g}") for key, value in series.items()}
            self._event({"ph": "C", "pid": pid, "tid": 0, "name": name, "args": arguments}, ts=int(at))

    def _lane(self, pid: int, rank: int, start_ns: int, end_ns: int) -> int:
        """The first thread of the rank that is free at ``start_ns``, made where there is none."""
        lanes = self._busy_until_ns[pid, rank]
        lane = next((k for k, until_ns in enumerate(lanes) if until_ns <= start_ns), len(lanes))
        if lane == len(lanes):
            lanes.append(end_ns)
            if lane:
                self._thread(pid, rank + lane * LANE, f"rank {rank}, beside it", rank)
        lanes[lane] = end_ns
        return rank + lane * LANE

    def _thread(self, pid: int, tid: int, name: str, sort_index: int) -> None:
        for key, arguments in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": sort_index})):
            self._event({"ph": "M", "pid": pid, "tid": tid, "name": key, "args": arguments})

    def _event(self, event: Mapping[str, Any], **ns: int) -> None:
        """Write an event; times are written out exactly, which a float of microseconds would not be after an hour."""
        text = json.dumps(event, separators=(",", ":"), ensure_ascii=False, allow_nan=False)[:-1]
        times = "".join(f',"{key}":{value // 1000}.{value % 1000:03d}' for key, value in ns.items())
        self._write(f"{self._separator}{text}{times}}}")
        self._separator = ",\n"

    def _write(self, text: str) -> None:
        self._file.write(text.encode())
