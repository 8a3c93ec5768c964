"""No thread is inside C++ code when the process ends: whoever is, is waited for, and nobody gets in any more."""

from __future__ import annotations

import os
import threading
import time

import pytest
from live_samples import run_python

from paceenv.live.record import housekeeping
from paceenv.live.record.housekeeping import _Native


def test_after_the_end_whoever_wants_in_ends_and_holds_nothing() -> None:
    native = _Native()
    with native:
        pass
    ended: list[str] = []

    def late() -> None:
        try:
            with native:
                ended.append("inside")
        except SystemExit:
            ended.append("ended")  # and so would the thread, without a word

    waiting = threading.Thread(target=late)
    with native:
        waiting.start()
        native._ended = True
    waiting.join()
    assert ended == ["ended"]
    assert not native._lock.locked()


def test_the_end_waits_for_the_one_inside_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    native, begun, go = _Native(), threading.Event(), threading.Event()

    def call() -> None:
        with native:
            begun.set()
            go.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    monkeypatch.setattr(housekeeping, "NATIVE_S", 0.05)
    before_s = time.monotonic()
    native.end()  # it hangs, and is given up
    assert 0.05 <= time.monotonic() - before_s < 30.0
    monkeypatch.setattr(housekeeping, "NATIVE_S", 60.0)
    threading.Timer(0.05, go.set).start()
    native.end()
    assert go.is_set()
    thread.join()


def test_a_child_that_is_forked_while_a_thread_is_inside_can_get_in() -> None:
    begun, go = threading.Event(), threading.Event()

    def call() -> None:
        with housekeeping.native:
            begun.set()
            go.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        free = housekeeping.native._lock.acquire(timeout=5)
        os._exit(0 if free else 1)
    status = os.waitpid(child, 0)[1]
    go.set()
    thread.join()
    assert status == 0


@pytest.mark.slow
def test_a_process_ends_well_while_a_thread_asks_a_store() -> None:
    """Without the guard, such a process is aborted in a part of its ends: 'terminate called without an exception'."""
    code = (
        "import threading, datetime, torch.distributed as dist\n"
        "from paceenv.live.record.housekeeping import native\n"
        "store = dist.TCPStore('127.0.0.1', 0, 1, True, timeout=datetime.timedelta(seconds=20))\n"
        "store.set('a', 'b')\n"
        "def ask():\n"
        "    while True:\n"
        "        with native:\n"
        "            store.get('a')\n"
        "for _ in range(4): threading.Thread(target=ask, daemon=True).start()\n"
        "print('asked', store.get('a'))"
    )
    for _ in range(3):
        done = run_python(code)
        assert (done.returncode, done.stdout, done.stderr) == (0, "asked b'b'\n", "")
