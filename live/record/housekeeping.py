"""The one background thread of a rank: runs a few periodic tasks, and never harms the job.

A task that raises three times in a row is reported once and then tried less and less often. ``stop`` lets every task
finish with a deadline, so that a hanging file system cannot hold up the end of a job. A forked child has no such
thread, and ``stop`` does nothing there. The thread takes no signals: they reach the main thread as usual.

Import the modules of a task before the thread starts: a fork during an import on another thread would leave the child
with a lock that is never released. Calls into C++ that give up the interpreter belong under :data:`native`. At the end
of the process, a thread that asks for the interpreter again is unwound where it stands, and unwinding such code aborts
the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_KEPT_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""The thread's own instructions raise these, so a fault handler must see them there."""

MAX_FAILURES = 3
"""Failures in a row before the report; a network file system may be away for a moment."""
LONGEST_PAUSE = 64
"""Most periods between two tries of a failing task."""
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
"""Guards the parts of a task that run in C++ (pyarrow); nothing in it may wait for a file or a peer."""
# registered with this import, so that functions that an agent registers later, for its last output, run before
atexit.register(native.end)
os.register_at_fork(after_in_child=native.renew)


@dataclass(slots=True)
class _Task:
    name: str
    period_s: float
    run: Callable[[bool], None]
    due_s: float
    failures: int = 0


class Housekeeping:
    """Runs tasks on one daemon thread until :meth:`stop`.

    ``problem`` is called with one line for an error, once per task, on the thread; it may raise.
    """

    def __init__(self, problem: Callable[[str], None]) -> None:
        self._problem = problem
        self._tasks: list[_Task] = []
        self._first: list[tuple[str, Callable[[], object]]] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def add(self, name: str, period_s: float, run: Callable[[bool], None]) -> None:
        """Add a periodic task, before :meth:`start`. Tasks due together run in the order they were added.

        Args:
            name: its name in messages.
            period_s: seconds between two runs, above 0; the first run is after one period.
            run: called with False, and once more with True at the end.

        Raises:
            ValueError: a period that is not positive, or the thread has started.
        """
        if not period_s > 0.0:
            raise ValueError(f"{name}: period_s = {period_s!r}; allowed: above 0")
        if self._thread is not None:
            raise ValueError(f"{name}: tasks must be added before the thread starts")
        self._tasks.append(_Task(name, period_s, run, 0.0))

    def once(self, name: str, run: Callable[[], object]) -> None:
        """Run ``run()`` once, as soon as the thread has started. Call it before :meth:`start`."""
        if self._thread is not None:
            raise ValueError(f"{name}: tasks must be added before the thread starts")
        self._first.append((name, run))

    def start(self) -> None:
        """Start the thread; if the system refuses, that is reported and the job goes on without."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="paceenv-live", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._say(f"no background thread: {error}; nothing will be written or served")
        else:
            self._thread = thread

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Let every task run a last time, and wait at most ``deadline_s`` seconds; returns whether all are done.

        Later calls, and calls in a forked child, do nothing and return True. A call by a task does not wait.
        """
        thread = self._thread
        if os.getpid() != self._process or thread is None:
            return True
        self._stopping.set()
        if thread is threading.current_thread():
            return True
        thread.join(max(deadline_s, 0.0))
        self._thread = None
        if thread.is_alive():
            self._say(f"the last output was not written within {deadline_s:g} s; what is missing is lost")
            return False
        return True

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _KEPT_SIGNALS)
        for name, run in self._first:
            try:
                run()
            except Exception as error:
                self._say(f"{name} failed: {describe(error)}")
        now_s = time.monotonic()
        for task in self._tasks:
            task.due_s = now_s + task.period_s
        final = False
        while not final:
            wait_s = min((task.due_s for task in self._tasks), default=now_s + 60.0) - time.monotonic()
            final = self._stopping.wait(max(wait_s, 0.0))
            now_s = time.monotonic()
            for task in list(self._tasks):
                if final or task.due_s <= now_s:
                    self._attempt(task, final)

    def _attempt(self, task: _Task, final: bool) -> None:
        try:
            task.run(final)
            task.failures = 0
        except Exception as error:
            task.failures += 1
            if task.failures == MAX_FAILURES or (final and task.failures < MAX_FAILURES):
                self._say(f"{task.name} failed: {describe(error)}")
        # counted from the end, so that a process that was stopped for a while does not catch up
        pause = min(2 ** max(task.failures - MAX_FAILURES, 0), LONGEST_PAUSE)
        task.due_s = time.monotonic() + pause * task.period_s

    def _say(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._problem(text)


def describe(error: BaseException) -> str:
    """An exception in one line, with its type where the text alone is not clear."""
    text = " ".join(str(error).split())
    return text if text and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}".rstrip(": ")
