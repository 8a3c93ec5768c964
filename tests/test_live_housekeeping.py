"""The background thread: periodic, quiet when something fails, never in the way of the end of a process."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import DEADLINE_S
from live_samples import run_python

from paceenv.live.record.housekeeping import MAX_FAILURES, Housekeeping

PERIOD_S = 0.005


def started(*tasks: tuple[str, Callable[[bool], None]]) -> tuple[Housekeeping, list[str]]:
    """A running thread with ``tasks``, and the list of what it says."""
    said: list[str] = []
    house = Housekeeping(said.append)
    for name, run in tasks:
        house.add(name, PERIOD_S, run)
    house.start()
    return house, said


def test_a_task_that_fails_is_said_once_and_the_others_go_on() -> None:
    failed: list[bool] = []
    calls: list[bool] = []
    often = threading.Event()

    def fail(final: bool) -> None:
        failed.append(final)
        raise RuntimeError("no such luck")

    def run(final: bool) -> None:
        calls.append(final)
        if len(calls) == 2 * MAX_FAILURES:
            often.set()

    house, said = started(("status", fail), ("trace", run))
    assert often.wait(DEADLINE_S)
    assert house.stop(DEADLINE_S)
    assert len(failed) > MAX_FAILURES  # it is tried again
    assert [text.partition(" (")[0] for text in said] == ["status failed: RuntimeError: no such luck"]
    assert calls[-1] is True
    assert house.stop(DEADLINE_S)
    assert calls.count(True) == 1, "a last time"


def test_a_task_that_hangs_cannot_hold_up_the_end() -> None:
    entered, release = threading.Event(), threading.Event()

    def hang(final: bool) -> None:
        entered.set()
        release.wait(DEADLINE_S)

    house, said = started(("the trace", hang), ("the summary", hang))
    assert entered.wait(DEADLINE_S)
    assert not house.stop(0.01)
    assert re.fullmatch(r"not finished 0\.01\d* s after the end, and given up: the trace, the summary", said.pop())
    release.set()
    assert house.stop(DEADLINE_S)


def test_the_end_has_an_end_even_where_every_task_is_slow() -> None:
    said: list[str] = []
    house, release = Housekeeping(said.append), threading.Event()
    for number in range(100):
        house.add(f"task {number}", 1e6, lambda final: release.wait(0.2) and None)
    house.start()
    begun_s = time.monotonic()
    assert not house.stop(0.5)
    assert time.monotonic() - begun_s < DEADLINE_S / 10
    assert said[0].startswith("not finished 1.5")
    release.set()


def test_the_thread_takes_no_signals() -> None:
    masks: list[str] = []

    def look(final: bool) -> None:
        masks.append(Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text())

    house, _ = started(("look", look))
    assert house.stop(DEADLINE_S)
    [mask] = [int(line.split()[1], 16) for line in masks[-1].splitlines() if line.startswith("SigBlk")]
    blocked = {number for number in range(1, 32) if mask >> (number - 1) & 1}
    assert {2, 10, 12, 15} <= blocked  # SIGINT, SIGUSR1, SIGUSR2, SIGTERM
    assert not {6, 7, 8, 11} & blocked


def test_a_forked_child_has_no_thread_and_stops_at_once() -> None:
    code = (
        "import os, sys, threading; from paceenv.live.record.housekeeping import Housekeeping\n"
        "calls = []\n"
        "house = Housekeeping(print)\n"
        "house.add('count', 1e6, calls.append)\n"
        "house.start()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    ok = threading.active_count() == 1 and house.stop(1e6) and not calls\n"
        "    os._exit(0 if ok else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), house.stop(60.0), calls)\n"
    )
    done = run_python(code)
    assert (done.stdout, done.returncode) == ("0 True [True]\n", 0), done.stderr


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
