"""Appends a rank's iterations to the segments of its trace (``paceenv.live.record.segments``).

It takes batches on the housekeeping thread and keeps their records in bounded memory until a flush. A flush opens the
file, appends with one ``write`` and closes it again: no descriptor is held that the job might close and open anew as
something else, and none is shared with a child. A killed process loses only what was not flushed; a reader takes
everything before a torn end.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceenv.live.observe.batch import Batch
from paceenv.live.record.run_folder import rank_file
from paceenv.live.record.segments import MAX_FLUSHES, flush_bytes

PENDING_BYTES: Final = 1 << 20
"""A flush is due when this much waits."""
KEPT_BYTES: Final = 8 << 20
"""If it cannot be written, the newest records are kept up to this size."""
FILE_BYTES: Final = 64 << 20
MAX_FILES: Final = 8
"""Of a rank; from :data:`FILE_BYTES` on a next one begins, and the oldest goes."""


class TraceRecorder:
    """Takes batches and appends them to the segments of one rank.

    ``attempt`` is the start of the job's processes; while it is "", nothing is written, and it may be set at any time.

    Args:
        job: what the trace's metadata says of the job, its ``name`` and more.
        rank: what they say of this rank, its number as ``rank`` and more.
        flush_s: seconds between two flushes, unless there is much to write.
    """

    def __init__(
        self, folder: str | Path, job: Mapping[str, Any], rank: Mapping[str, Any], *, flush_s: float = 30.0
    ) -> None:
        self.attempt, self._folder, self._job, self._rank = "", Path(folder), dict(job), dict(rank)
        self._flush_s, self._flushed_s, self._waiting = flush_s, time.monotonic(), deque[Batch]()
        self._rows = self._dropped = 0
        self._number, self._size, self._flushes = -1, 0, 0  # of the current file; -1 before the first
        self._own: list[Path] = []
        self._began_unix_s = time.time()
        self._kinds_written = self._marks_written = 0

    @property
    def counts(self) -> dict[str, int]:
        """``rows``: iterations and operations written; files as ``segments``; iterations ``dropped``."""
        return {"rows": self._rows, "dropped": self._dropped, "segments": self._number + 1}

    def add(self, batch: Batch) -> None:
        """Take in iterations that are over, on any thread, without waiting for the one that writes."""
        self._waiting.append(batch)
        self._forget_oldest()

    def write(self, final: bool) -> None:
        """Append what waits, if it is due or ``final``; on one thread only, about once a second.

        Raises why it cannot be written; then it waits for the next time.
        """
        due = self._bytes() >= PENDING_BYTES or time.monotonic() - self._flushed_s >= self._flush_s
        if not (final or due) or not self._waiting or not self.attempt:
            return
        batches = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            self._append(batches)
            self._flushed_s = time.monotonic()
        except Exception:
            self._waiting.extendleft(reversed(batches))
            self._forget_oldest()
            raise

    def _bytes(self) -> int:
        return sum(batch.nbytes for batch in tuple(self._waiting))

    def _forget_oldest(self) -> None:
        with contextlib.suppress(IndexError, RuntimeError):  # another thread takes them
            while len(self._waiting) > 1 and self._bytes() > KEPT_BYTES:
                self._dropped += len(self._waiting.popleft().iterations_T)

    def _append(self, batches: list[Batch]) -> None:
        newest = batches[-1]  # its tables hold all entries
        descriptor = self._open()
        try:
            kinds, marks = newest.kinds[self._kinds_written :], newest.marks[self._marks_written :]
            job = self._job | {"attempt": self.attempt}
            header = {"source": "paceenv live", "job": job, "rank": self._rank, "began_unix_s": self._began_unix_s}
            content = flush_bytes(batches, kinds, marks, None if self._size else header)
            written = 0
            while written < len(content):  # once, except where a disk is filling up
                written += os.write(descriptor, memoryview(content)[written:])
        except BaseException:  # also one that the handler of a signal raises
            if not self._size:  # else the next flush finds the file longer than it should be, and begins a new one
                with contextlib.suppress(OSError):
                    self._own.pop().unlink()
                self._number -= 1
            raise
        finally:
            os.close(descriptor)
        self._size += len(content)
        self._flushes += 1
        self._kinds_written += len(kinds)
        self._marks_written += len(marks)
        self._rows += sum(len(batch.iterations_T) + len(batch.operations_N) for batch in batches)

    def _open(self) -> int:
        """The current file, if it is as this process left it and not full; else a new one."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        usable = 0 < self._size < FILE_BYTES and self._flushes < MAX_FLUSHES
        if usable and self._own[-1].parent == self._folder / self.attempt:
            with contextlib.suppress(OSError):  # removed or replaced, say
                descriptor = os.open(self._own[-1], flags)
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_size == self._size:
                    return descriptor
                os.close(descriptor)
        number = self._number + 1
        while True:
            path = rank_file(self._folder, self.attempt, self._rank["rank"], f"-{number:03d}.pace")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                break
            except FileExistsError:  # left by an agent that this process had before
                number += 1
        self._number, self._size, self._flushes = number, 0, 0
        self._kinds_written = self._marks_written = 0
        self._own.append(path)
        while len(self._own) > MAX_FILES:
            self._own.pop(0).unlink(missing_ok=True)
        return descriptor
