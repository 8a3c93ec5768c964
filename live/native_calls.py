"""Keeps the end of the process from tearing a thread out of C++ code that gives up the interpreter.

At the end of the process, a thread that asks for the interpreter again is unwound where it stands, and unwinding such
code aborts the process. So calls of that kind (PyTorch's store) belong under :data:`native` on a background thread.
"""

from __future__ import annotations

import atexit
import os
import threading

NATIVE_S = 5.0
"""The end of the process waits at most this long for :data:`native`."""


class _Native:
    """``with native: ...`` on a housekeeping thread; once the process ends, entering it ends the thread instead."""

    def __init__(self) -> None:
        self._ended = False
        self.renew()

    def renew(self) -> None:
        """Make a new lock in a forked child, where the old one may be held for ever."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._ended:
            self._lock.release()
            raise SystemExit

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def end(self) -> None:
        """Refuse new entries, and wait for the current one."""
        self._ended = True
        self._lock.acquire(timeout=NATIVE_S)


native = _Native()
"""Guards calls into C++; nothing in it may wait for a peer longer than a moment."""
launches = _Native()
"""The same for starts of the job's collectives on a thread of ours: those never wait for a peer."""
# registered with this import, so that functions that an agent registers later, for its last output, run before
for _one in (native, launches):
    atexit.register(_one.end)
    os.register_at_fork(after_in_child=_one.renew)
