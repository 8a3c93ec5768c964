"""On SIGTERM a process leaves the agent's last output, and then ends exactly as it would have, less than 1 s later.

Launchers end the ranks of a failed job with SIGTERM, most often while they wait in a collective: there, Python runs no
signal handler, and a handler of ours alone would keep such a rank alive. So the interpreter's wake-up descriptor tells
a thread, which needs nothing of the main thread. Nothing is installed where the script has a handler or a wake-up
descriptor of its own, and a handler that it sets later has its usual effect. Where it takes the descriptor later, a
tick gives SIGTERM its default back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from types import FrameType

from paceenv.live.record.housekeeping import background

PATIENCE_S = 0.7
_DEFAULT = signal.SIG_DFL
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group that wrote to a socket."""


class LastWords:
    """Calls ``leave`` on a thread when SIGTERM comes, waits :data:`PATIENCE_S` at most, and lets the signal kill."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave, self._process = leave, os.getpid()
        self._handler = self._handle  # one object, to be recognised
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._left = threading.Event()

    def install(self) -> None:
        """Install the handler, on the main thread only, and where there is none."""
        if not _on_main_thread() or signal.getsignal(signal.SIGTERM) is not _DEFAULT:
            return
        before = signal.set_wakeup_fd(-1)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            theirs.setblocking(False)
        except OSError:  # no descriptor is left: then without last words
            return
        if background("paceenv-last-words", lambda: self._listen(ours)) is None:
            return
        self._ends = ours, theirs
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handler)
        _installed.add(self)

    def look(self) -> None:
        """Where the script has taken the wake-up descriptor, nobody here hears SIGTERM: give it its default back.

        Where nobody has one any more (``asyncio`` leaves it so), take it again. On the main thread only.
        """
        if self._ends is None or not _on_main_thread() or signal.getsignal(signal.SIGTERM) is not self._handler:
            return
        ours = self._ends[1].fileno()
        with contextlib.suppress(OSError, ValueError):  # the script has closed ours
            descriptor = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
            if descriptor in (-1, ours):
                return
            signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, _DEFAULT)

    def remove(self) -> None:
        """Everything is as before, unless the script has changed it meanwhile."""
        if self._ends is None or not _on_main_thread():
            return
        _installed.discard(self)
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, _DEFAULT)
        theirs = self._ends[1]
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor not in (-1, theirs.fileno()):
            signal.set_wakeup_fd(descriptor)
        self._ends = None
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                theirs.send(b"\0")  # the thread ends
        theirs.close()

    def _listen(self, ours: socket.socket) -> None:
        with ours:
            while True:
                data, ancillary, *_ = ours.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
                # a forked child shares the socket until it has removed this
                if not any(_CREDENTIALS.unpack(sent[2])[0] == self._process for sent in ancillary):
                    continue
                if data == b"\0":
                    return
                if signal.SIGTERM in data and signal.getsignal(signal.SIGTERM) is self._handler:
                    self._say_it_and_die()

    def _say_it_and_die(self) -> None:
        if (thread := background("paceenv-leaving", self._leave)) is not None:
            thread.join(PATIENCE_S)
        self._left.set()
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # the default; Python itself allows it in the main thread
        os.kill(self._process, signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, as soon as it runs Python code: nothing of the script may run any more."""
        try:
            if os.getpid() == self._process:
                self._left.wait(PATIENCE_S + 0.2)
        finally:  # a handler of the script's may raise meanwhile, as a DataLoader's does that lost a worker
            signal.signal(number, _DEFAULT)
            os.kill(os.getpid(), number)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_installed: weakref.WeakSet[LastWords] = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    """A signal for a child that is just being born waits until the child has the default again: Python drops it."""
    if _installed:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None and signal.SIGTERM not in mask:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _in_a_fork() -> None:
    for one in list(_installed):
        with contextlib.suppress(Exception):
            one.remove()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_a_fork)
