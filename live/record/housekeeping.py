"""The one background thread of a rank: runs a few periodic tasks, and never harms the job.

A task that raises three times in a row is reported once, and tried again. ``stop`` lets every task run a last time,
each with a deadline of its own, so that a hanging file system cannot hold up the end of a job and a busy machine does
not cost its last output. A forked child has no such thread, and ``stop`` does nothing there. The thread takes no
signals: they reach the main thread as usual.

Import the modules of a task before the thread starts: a fork during an import on another thread would leave the child
with a lock that is never released. A task runs no C++ code that gives up the interpreter (pyarrow, say), or only under
:data:`native` (PyTorch's store): at the end of the process, a thread that asks for the interpreter again is unwound
where it stands, and unwinding such code aborts the process.
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

from paceenv.live.log_once import described

_KEPT_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""The thread's own instructions raise these, so a fault handler must see them there."""

NATIVE_S = 5.0
"""The end of the process waits at most this long for :data:`native`."""
MAX_FAILURES = 3
"""Failures in a row before the report; a network file system may be away for a moment."""
MOST_DEADLINES = 3
"""All last runs together take at most this many deadlines: a launcher kills a process some 30 s after it asked."""


@dataclass(slots=True)
class _Task:
    name: str
    period_s: float
    run: Callable[[bool], None]
    due_s: float
    failures: int = 0
    ended: bool = False


class Housekeeping:
    """Runs tasks on one daemon thread until :meth:`stop`.

    ``problem`` is called with one line for an error, once per task, on the thread; it may raise.
    """

    def __init__(self, problem: Callable[[str], None]) -> None:
        self._problem = problem
        self._tasks: list[_Task] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._done = 0  # runs of tasks so far
        self._process = os.getpid()

    def add(self, name: str, period_s: float, run: Callable[[bool], None], first_s: float | None = None) -> None:
        """Add a periodic task, before :meth:`start`; it runs first after one period, or after ``first_s``.

        Tasks due together run in the order they were added.
        """
        self._tasks.append(_Task(name, period_s, run, time.monotonic() + (first_s or period_s)))

    def start(self) -> None:
        """Start the thread; if the system refuses, that is reported and the job goes on without."""
        self._thread = background("paceenv-live", self._run, self._problem)

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Let every task run a last time, and wait for it; returns whether all are done.

        A call in a forked child does nothing and returns True. A call by a task does not wait.

        Args:
            deadline_s: longest time that one task may take, seconds; 0 does not wait, and then nothing is said.
        """
        thread = self._thread
        if os.getpid() != self._process or thread is None:
            return True
        self._stopping.set()
        if thread is threading.current_thread():
            return True
        begun_s = time.monotonic()
        left_s, done = MOST_DEADLINES * deadline_s, -1
        while left_s > 0.0 and done != self._done and thread.is_alive():  # else no task ended for a whole deadline
            done = self._done
            thread.join(min(deadline_s, left_s))
            left_s = begun_s + MOST_DEADLINES * deadline_s - time.monotonic()
        if not thread.is_alive():
            return True
        missing = [task.name for task in self._tasks if not task.ended]
        if missing and deadline_s > 0.0:
            waited_s = time.monotonic() - begun_s
            _say(self._problem, f"not finished {waited_s:.3g} s after the end, and given up: {', '.join(missing)}")
        return not missing

    def _run(self) -> None:
        final = False
        while not final:
            wait_s = min(task.due_s for task in self._tasks) - time.monotonic()
            final = self._stopping.wait(max(wait_s, 0.0))
            now_s = time.monotonic()
            for task in list(self._tasks):
                if final or task.due_s <= now_s:
                    self._attempt(task, final)
                    self._done += 1

    def _attempt(self, task: _Task, final: bool) -> None:
        try:
            task.run(final)
            task.failures = 0
        except Exception as error:
            task.failures += 1
            if task.failures == MAX_FAILURES or (final and task.failures < MAX_FAILURES):
                _say(self._problem, f"{task.name} failed: {described(error)}")
        # counted from the end, so that a process that was stopped for a while does not catch up
        task.due_s = time.monotonic() + task.period_s
        task.ended = final


def _say(problem: Callable[[str], None], text: str) -> None:
    with contextlib.suppress(Exception):
        problem(text)


def background(
    name: str, run: Callable[[], object], problem: Callable[[str], None] = lambda text: None
) -> threading.Thread | None:
    """Start a daemon thread for ``run``: it takes no signals, and an error in it goes to ``problem``.

    None where the system refuses, which ``problem`` hears, too.
    """

    def guarded() -> None:
        with contextlib.suppress(OSError, ValueError):  # signals reach the main thread, and interrupt its waits
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _KEPT_SIGNALS)
        try:
            run()
        except Exception as error:
            _say(problem, f"thread {name} ended: {described(error)}")

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:  # no new threads, or Python is ending
        _say(problem, f"no thread {name}: {error}")
        return None
    return thread


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
