"""The background thread: periodic, quiet when something fails, never in the way of the end of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from live_samples import DEADLINE_S, run_python

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


def test_a_task_runs_again_and_again_and_a_last_time() -> None:
    calls: list[bool] = []
    thrice = threading.Event()

    def run(final: bool) -> None:
        calls.append(final)
        if len(calls) == 3:
            thrice.set()

    house, said = started(("count", run))
    assert thrice.wait(DEADLINE_S)
    assert house.stop(DEADLINE_S)
    assert calls[-1] is True
    assert calls.count(True) == 1
    number = len(calls)
    assert house.stop(DEADLINE_S)
    assert (len(calls), said) == (number, [])


def test_stop_runs_even_what_was_never_due() -> None:
    calls: list[bool] = []
    house = Housekeeping(pytest.fail)
    house.add("rare", 1e6, calls.append)
    house.start()
    assert house.stop(DEADLINE_S)
    assert calls == [True]


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
    assert len(failed) > MAX_FAILURES  # it is tried again, ever more rarely
    assert said == ["status failed: RuntimeError: no such luck"]
    assert calls[-1] is True


def test_a_problem_that_cannot_be_told_stops_nothing() -> None:
    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    calls: list[bool] = []
    house = Housekeeping(fail)
    house.add("status", PERIOD_S, fail)
    house.add("trace", PERIOD_S, calls.append)
    house.start()
    assert house.stop(DEADLINE_S)
    assert calls[-1] is True


def test_a_task_that_hangs_cannot_hold_up_the_end() -> None:
    entered, release = threading.Event(), threading.Event()

    def hang(final: bool) -> None:
        entered.set()
        release.wait(DEADLINE_S)

    house, said = started(("trace", hang))
    assert entered.wait(DEADLINE_S)
    assert not house.stop(0.01)
    assert said == ["the last output was not written within 0.01 s; what is missing is lost"]
    assert house.stop(0.01)
    release.set()


def test_a_task_may_stop_the_thread_without_waiting_for_itself() -> None:
    calls: list[bool] = []
    ended = threading.Event()

    def stop(final: bool) -> None:
        assert house.stop(DEADLINE_S)
        calls.append(final)
        if final:
            ended.set()

    house = Housekeeping(pytest.fail)
    house.add("kill file", PERIOD_S, stop)
    house.start()
    assert ended.wait(DEADLINE_S)
    assert house.stop(DEADLINE_S)
    assert calls == [False, True]


def test_what_is_to_be_done_once_comes_first_and_may_fail() -> None:
    order: list[str] = []
    said: list[str] = []

    def fail() -> None:
        order.append("once")
        raise OSError(98, "Address already in use")

    house = Housekeeping(said.append)
    house.add("count", PERIOD_S, lambda final: order.append("count"))
    house.once("the endpoint", fail)
    house.start()
    assert house.stop(DEADLINE_S)
    assert (order[0], order.count("once"), order[-1]) == ("once", 1, "count")
    assert said == ["the endpoint failed: [Errno 98] Address already in use"]


@pytest.mark.parametrize("period_s", [0.0, -1.0, float("nan")])
def test_periods_must_be_positive(period_s: float) -> None:
    with pytest.raises(ValueError, match=r"status: period_s = .*; allowed: above 0"):
        Housekeeping(pytest.fail).add("status", period_s, print)


def test_tasks_come_before_the_start() -> None:
    house, _ = started()
    with pytest.raises(ValueError, match="before the thread starts"):
        house.add("late", 1.0, print)
    assert house.stop(DEADLINE_S)


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


def test_a_process_may_end_in_the_middle_of_a_task(tmp_path: Path) -> None:
    """Without stop: the interpreter goes away under a thread that writes without pause."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from paceenv.live.record.housekeeping import Housekeeping\n"
        "from live_samples import iterations, recorder\n"
        "target, steps = recorder(Path(sys.argv[1]), segment_rows=1), list(iterations(2000))\n"
        "def write(final):\n"
        "    for step in steps: target.append(step)\n"
        "    target.write(True)\n"
        "house = Housekeeping(print)\n"
        "house.add('trace', 1e-6, write)\n"
        "house.start()\n"
        "time.sleep(0.05)\n"
    )
    for _ in range(3):
        done = run_python(code, str(tmp_path))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_end_waits_for_native_code_and_lets_none_begin(tmp_path: Path) -> None:
    """A thread in C++ would abort the process when the interpreter goes away; a forked child has no such thread."""
    code = (
        "import os, sys, threading, time; from pathlib import Path\n"
        "from paceenv.live.record.housekeeping import Housekeeping, native\n"
        "begun, child_ended = threading.Event(), threading.Event()\n"
        "def work(final):\n"
        "    with native:\n"
        "        begun.set(); child_ended.wait(); time.sleep(0.5); Path(sys.argv[1]).write_text('done')\n"
        "    with native: Path(sys.argv[1]).write_text('once more')\n"
        "house = Housekeeping(print)\n"
        "house.add('work', 1e-6, work)\n"
        "house.start()\n"
        "begun.wait()\n"
        "if not os.fork(): sys.exit()\n"
        "os.wait()  # for ever, if the child waited for the thread\n"
        "child_ended.set()\n"
    )
    done = run_python(code, str(tmp_path / "out"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "out").read_text() == "done"


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
