"""``paceenv live status`` as a user meets it: tables and worst ranks."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import toy_jobs
from live_samples import ATTEMPT, run_python, snapshot

from paceenv.core.errors import InputError
from paceenv.live.live_command import application
from paceenv.live.record.course import Course
from paceenv.live.record.findings import in_short
from paceenv.live.record.run_folder import RunFolder, write_status
from paceenv.live.record.side_by_side import Job
from paceenv.live.record.summary import summarise
from paceenv.report.recordings import find_recordings

NOW_S = time.time()


def live(*arguments: str) -> None:
    """Run ``paceenv live`` in this process; errors come out as the command line gets them."""
    application(args=list(arguments), prog_name="paceenv live", standalone_mode=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of four ranks that has ended, but for rank 3, which nobody has heard of for a while."""
    folder = tmp_path / "run"
    for rank in range(4):
        write_status(folder, snapshot(rank, unix_time_s=time.time() - (100.0 if rank == 3 else 0.0), final=rank < 3))
    return folder


def test_status_has_a_line_per_rank(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live("status", str(run))
    out = capsys.readouterr().out
    assert f"job: attempt {ATTEMPT}, 4 ranks" in " ".join(out.split())
    assert out.count("node1") == 2
    assert out.count("│ ended") == 3
    assert re.search(r"silent 1\d\d s", " ".join(out.split()))
    assert "helps by 8.1 % [7.2, 9.0]" in out


def test_a_rank_that_has_not_ended_and_is_silent_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for snapshot_ in toy_jobs.run(toy_jobs.SHAPES["ddp"](2), 2, iterations=160):
        rank = snapshot_["rank"]
        write_status(tmp_path, snapshot_ | {"attempt": ATTEMPT, "unix_time_s": time.time() - 40.0 * rank})
    first = re.compile("rank 1: nothing heard for 40(.[0-9])? s; the rest is from before")
    [page] = find_recordings([tmp_path]).pages().values()
    live("status", str(tmp_path))
    for said in (page, capsys.readouterr().out):
        assert first.match(said.splitlines()[2 if said is page else 1])
        assert "shows where it stands" in " ".join(said.split())
        assert "all ranks arrive on time" not in said
        assert said.count("on time") == 1, "rank 0"


def test_agents_write_on_in_a_hang_and_say_that_no_step_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, still_s in enumerate((50.0, 41.0)):
        write_status(tmp_path, snapshot(rank, unix_time_s=time.time(), still_s=still_s, final=False, at="train.py:9"))
    live("status", str(tmp_path))
    statuses = RunFolder(tmp_path).statuses(ATTEMPT)
    for said in (capsys.readouterr().out, summarise(statuses)):
        assert "no step has ended for 41 s; ranks 0-1 are at train.py:9" in " ".join(said.split())
    ended = Course(Job([one | {"final": True, "ended": "SIGTERM"} for one in statuses])).silent
    assert ended == [
        "the last step ended 41 s before the job did: it hung, evaluated or saved; ranks 0-1 were at train.py:9"
    ]
    assert Course(Job([one | {"final": True} for one in statuses])).silent == [], "a job may evaluate at its end"


@pytest.mark.parametrize(
    ("still_s", "step", "age_s", "says"),
    [
        (41.0, {"p99_s": 0.1}, 0.0, "no step has ended for 41 s: the job hangs, evaluates or saves"),
        (20.0, {"p99_s": 0.1}, 0.0, ""),  # no step was measured: it may be the first compilation
        (8.0, {"p99_s": 0.1, "longest_s": 1.2}, 0.0, "no step has ended for 8 s; the longest before took 1.2 s: the"),
        (4.0, {"p99_s": 0.1, "longest_s": 1.2}, 0.0, ""),
        (8.0, {"p99_s": 1.0, "longest_s": 1.2}, 0.0, ""),
        (8.0, {"p99_s": 0.1, "longest_s": 9.0}, 0.0, ""),  # an evaluation, perhaps
        (31.0, {"p99_s": 0.1, "longest_s": 90.0}, 0.0, "no step has ended for 31 s; the longest before took 90 s: the"),
        (0.0, {"p99_s": 0.1, "longest_s": 1.2}, 20.0, ""),  # it wrote that when a step had just ended
    ],
)
def test_steps_have_stopped_by_the_job_s_own_measure(
    still_s: float, step: dict[str, float], age_s: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    changed = {"unix_time_s": NOW_S - age_s, "still_s": still_s, "step": step, "final": False, "world_size": 200}
    said = "".join(Course(Job([snapshot(rank, **changed) for rank in range(2)])).silent)
    assert said.startswith(says)
    assert bool(said) == bool(says)


def test_where_all_ranks_are_silent_the_job_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        write_status(tmp_path, snapshot(rank, unix_time_s=time.time() - 9000.0 - 2.0 * rank, final=False))
    live("status", str(tmp_path))
    assert "the job is gone or cut off: nothing heard for 150 min from any rank" in capsys.readouterr().out
    statuses = RunFolder(tmp_path).statuses(ATTEMPT)
    assert summarise(statuses).splitlines()[2].startswith("the job is gone")
    assert in_short(statuses)["ended"], "no trace of it is called healthy"
    write_status(tmp_path, snapshot(3, unix_time_s=time.time() - 20000.0, final=False))
    live("status", str(tmp_path))
    assert "for 150 min from any rank, for longer from rank 3; the rest" in capsys.readouterr().out


def test_delays_are_told_of_ranks_that_are_paced_now(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, state in enumerate(("canary", "off", "observe")):
        write_status(run, snapshot(rank, state=state))
    live("status", str(run))
    assert capsys.readouterr().out.count("2 ms") == 2, "of rank 0, and of rank 3"
    for rank in range(4):
        write_status(run, snapshot(rank, state="observe"))
    live("status", str(run))
    said = "2,360 delays taken of 2,400 asked for, 4.8 s in all iterations of all ranks"
    assert said in " ".join(capsys.readouterr().out.split())


def test_status_for_machines(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live("status", str(run), "--json", "-")
    printed = json.loads(capsys.readouterr().out)
    assert [entry["rank"] for entry in printed["ranks"]] == [0, 1, 2, 3]
    assert (printed["attempt"], printed["attempts"], printed["notes"]) == (ATTEMPT, [ATTEMPT], [])
    live("status", str(run), "--json", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == printed


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("status", "{run}", "--json", "{run}"), "is a folder"),
        (("status", "{run}", "--watch", "--json", "-"), "allowed: without --json"),
    ],
)
def test_bad_input_is_one_clear_line(run: Path, arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        live(*(argument.format(run=run) for argument in arguments))


def test_looking_at_a_run_needs_nothing_heavy(run: Path) -> None:
    code = (
        "import sys; from paceenv.live.live_command import application\n"
        "application(args=['status', sys.argv[1]], standalone_mode=False)\n"
        "print('LOADED', *sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = run_python(code, str(run))
    loaded = done.stdout.rsplit("LOADED", 1)[1].split()
    assert not {"torch", "pyarrow", "pydantic", "numba", "gymnasium", "prometheus_client"} & set(loaded)


def test_watching_goes_on_while_a_rank_has_not_ended(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            write_status(run, snapshot(3, unix_time_s=time.time()))

    monkeypatch.setattr("paceenv.live.live_command.time.sleep", sleep)
    live("status", str(run), "--watch")
    assert len(slept) == 2
    assert min(slept) >= 2.0


def test_many_ranks_fit_on_a_screen_and_are_silent_only_after_several_of_their_periods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)  # the statuses are of then, and only one is old
    blocks = {"iterations": 16, "first": 0, "steps": [16] * 16, "own_s": [0.07] * 16, "step_s": [0.1] * 16}
    odd: dict[int, dict[str, Any]] = {77: {"state": "observe", "reason": "the policy is not there"}}
    odd |= {100: {"unix_time_s": NOW_S - 4000.0}, 153: {"parts": {"compute_s": 0.09}}}
    odd |= {60: {"unix_time_s": NOW_S - 60.0}}  # in a small job it would be silent
    for rank in range(196):  # of 200, on 25 hosts
        usual = {"host": f"node{rank // 8:04d}", "unix_time_s": NOW_S, "final": False, "own": {"blocks": blocks}}
        one = usual | {"parts": {"compute_s": 0.07}} | odd.get(rank, {})
        write_status(tmp_path, snapshot(rank, world_size=200, **one))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    def enough(seconds: float) -> None:
        raise InterruptedError

    monkeypatch.setattr("paceenv.live.live_command.time.sleep", enough)
    with pytest.raises(InterruptedError):
        live("status", str(tmp_path), "--watch")
    lines = capsys.readouterr().out.replace("\x1b[H\x1b[2J", "").rstrip().splitlines()
    assert len(lines) <= 24
    shown = [line.split()[0] for line in lines if line.strip()[:1].isdigit()]
    assert shown[:3] == ["100", "77", "153"]
    assert len(shown) == 10
    assert all(len(line) <= 80 + line.count("\x1b") * 8 for line in lines), lines
