"""``paceenv live status`` as a user meets it: tables, shadow, canary, worst ranks, conditions for a pipeline."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from live_samples import ATTEMPT, run_python, snapshot

from paceenv.cli.live_command import application
from paceenv.core.errors import InputError
from paceenv.live.inspect_status import CONDITIONS, holding
from paceenv.live.record.findings import verdict_of
from paceenv.live.record.run_folder import write_status

NOW_S = time.time()
LATE = verdict_of("late", "ranks 0-3 side by side", late_s=0.02)
INSUFFICIENT = {"verdict": "insufficient evidence", "text": "insufficient evidence: 3 of at least 4 pairs", "pairs": 3}


def live(*arguments: str) -> int:
    """Run ``paceenv live`` in this process; errors come out as the command line gets them."""
    assert isinstance(application, typer.Typer)
    return int(application(args=list(arguments), prog_name="paceenv live", standalone_mode=False) or 0)


def ranks(number: int = 4, **changed: Any) -> list[dict[str, Any]]:
    return [snapshot(rank, world_size=number, unix_time_s=NOW_S, **changed) for rank in range(number)]


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
    assert out.count("ended") == 3
    assert re.search(r"silent 1\d\d s", " ".join(out.split()))
    assert "helps by 8.1 % [7.2, 9.0]" in out


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
        (("status", "{run}/none"), "no such folder"),
        (("status", "{run}", "--attempt", "7"), f"attempt = '7': there is none; allowed: one of {ATTEMPT}"),
        (("status", "{run}", "--json", "{run}"), "is a folder"),
        (("status", "{run}", "--watch", "--json", "-"), "allowed: without --json"),
    ],
)
def test_bad_input_is_one_clear_line(run: Path, arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        live(*(argument.format(run=run) for argument in arguments))


def test_looking_at_a_run_needs_nothing_heavy(run: Path) -> None:
    code = (
        "import sys; from paceenv.cli.live_command import application\n"
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

    monkeypatch.setattr("paceenv.cli.live_command.time.sleep", sleep)
    assert live("status", str(run), "--watch") == 0
    assert len(slept) == 2
    assert min(slept) >= 2.0


def test_a_rank_of_a_large_job_is_silent_only_after_several_of_its_periods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, age_s in enumerate((100.0, 1000.0)):
        write_status(tmp_path, snapshot(rank, world_size=1000, final=False, unix_time_s=time.time() - age_s))
    live("status", str(tmp_path))
    assert capsys.readouterr().out.count("silent") == 1


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("late", {"arrival": LATE}, "rank 2 late by up to 20 ms"),
        ("hurts", {"canary": {"verdict": "hurts", "text": "hurts by 3.0 % [1.0, 5.0]"}}, "pacing hurts by 3.0 %"),
        ("hurts", {"canary": {"candidates": [{"verdict": "hurts", "text": "hurts by 3 %"}]}}, "pacing hurts by 3 %"),
        ("agent-lost", {"final": False, "unix_time_s": NOW_S - 100.0}, "rank 2 silent"),
        ("agent-lost", {"agents": {"count": 3}}, "3 of 4 ranks have an agent"),
        ("agent-lost", {"state": "off", "reason": "switched off by an error"}, "rank 2 off: switched off by an error"),
        ("unpaced", {"state": "observe", "reason": "no policy was given"}, "rank 2 in mode observe, asked for canary"),
        ("undecided", {"canary": INSUFFICIENT}, "3 of at least 4 pairs"),
    ],
)
def test_a_condition_ends_a_pipeline_with_its_code(
    name: str, changed: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for one in ranks():
        write_status(tmp_path, one)
    assert live("status", str(tmp_path), "--json", "-", "--fail-if", name) == 0
    assert json.loads(capsys.readouterr().out)["conditions"] == {}
    bad = ranks()[2] | changed
    assert words in holding([*ranks()[:2], bad, ranks()[3]], ATTEMPT, NOW_S)[name]
    if name != "late":  # which the command finds in the blocks of all ranks
        write_status(tmp_path, bad)
        assert live("status", str(tmp_path), "--fail-if", f"late,{name}") == CONDITIONS[name][0]
        assert words in " ".join(capsys.readouterr().err.split())


def test_an_unknown_condition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--fail-if = 'lost'; allowed: of late, hurts, agent-lost, unpaced"):
        live("status", str(tmp_path), "--fail-if", "lost")


def many(folder: Path) -> None:
    """Recorded statuses of 200 ranks on 25 hosts: rank 77 downgraded, rank 100 silent, 4 not there."""
    blocks = {"iterations": 16, "first": 0, "steps": [16] * 16, "own_s": [0.07] * 16, "step_s": [0.1] * 16}
    for rank in range(196):
        slow = {"compute_s": 0.09 if rank == 153 else 0.07}
        one = snapshot(rank, world_size=200, host=f"node{rank // 8:04d}", unix_time_s=NOW_S, final=False)
        one |= {"own": {"blocks": blocks}, "parts": slow}
        one |= {"state": "observe", "reason": "the policy is not there"} if rank == 77 else {}
        one |= {"unix_time_s": NOW_S - 4000.0} if rank == 100 else {}
        write_status(folder, one)


def test_many_ranks_fit_on_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)  # the statuses are of then, and only one is old
    many(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert live("status", str(tmp_path), "--watch", "--fail-if", "agent-lost") == CONDITIONS["agent-lost"][0]
    lines = capsys.readouterr().out.replace("\x1b[H\x1b[2J", "").rstrip().splitlines()
    assert len(lines) <= 24
    shown = [line.split()[0] for line in lines if line.strip()[:1].isdigit()]
    assert shown[:3] == ["100", "77", "153"]
    assert len(shown) == 10
    assert all(len(line) <= 80 + line.count("\x1b") * 8 for line in lines), lines
