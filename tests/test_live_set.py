"""``paceenv live set``: a running job changes over on all ranks before the same iteration, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import commands
import pytest

from paceenv.core.errors import InputError
from paceenv.live.control_file import ControlReader, make_wish, read_wish, write_wish
from paceenv.live.decide.live_policy import find_policy
from paceenv.live.identity import Identity
from paceenv.live.live_command import application
from paceenv.live.loop import Loop
from paceenv.live.observe.log import Delay
from paceenv.live.options import make_options
from paceenv.live.record.run_folder import write_status
from paceenv.live.record.snapshot import SCHEMA
from paceenv.live.record.summary import summarise
from paceenv.live.store_messages import Peers

DEADLINE_S = 240.0
SET = """
from paceenv.live import store_messages; store_messages.LEAD_S = 3.0
from paceenv.cli.application import main; main()
"""


def status(**changes: Any) -> dict[str, Any]:
    known = {"rank": 0, "world_size": 2, "attempt": "20261123T053000-3f2a91", "iterations": 1000, "final": False}
    return known | {"unix_time_s": time.time(), "step": {"mean_s": 0.1}} | changes


def loop(mode: str = "observe", attempt: str = "20261123T053000-3f2a91", permitted: bool = True) -> Loop:
    made = Loop(make_options({"mode": mode, "job": "j"}), find_policy("paper"))
    made.identity = Identity(attempt, 2 if permitted else None)
    return made


def reader_of(folder: Path, watched: Loop) -> ControlReader:
    return ControlReader(folder, watched, Peers(watched, None))


def test_all_ranks_reach_the_iteration_after_they_have_read_it() -> None:
    slow = status(rank=1, unix_time_s=time.time() - 50.0, iterations=700)
    wish = make_wish([status(), slow], "active", "paper")
    assert 1200 + 200 <= wish.from_iteration <= 1200 + 260  # 700 and 50 s of 0.1 s each, and 20 s ahead
    assert make_wish([status(world_size=4000)], "active", "paper").from_iteration >= 1000 + 400
    assert make_wish([status()], "off", None).from_iteration == 0


@pytest.mark.parametrize(
    ("mode", "policy", "statuses", "why"),
    [
        ("probe", None, [status()], "mode = 'probe'; allowed: one of off, observe"),
        ("active", None, [status()], "no policy was given"),
        ("active", "nothing-like-this", [status()], "no such file"),
        ("active", "paper", [status(step={"mean_s": None})], "no rank has measured a step yet"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(
    mode: str, policy: str | None, statuses: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        make_wish(statuses, mode, policy)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"schema": "other"}', '{"schema": "paceenv.live.control/1"}']
)
def test_a_file_that_is_no_request_changes_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text(content)
    watched = loop()
    reader = reader_of(tmp_path, watched)
    reader.look(False)
    assert not watched.changing
    assert (reader.state() or {})["refused"]


def test_a_fifo_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "control.json")
    reader_of(tmp_path, loop()).look(False)
    with pytest.raises(InputError, match="not a regular file"):
        read_wish(tmp_path / "control.json")


def test_a_request_is_for_one_start_of_the_job_and_needs_an_agent_on_every_rank(tmp_path: Path) -> None:
    wish = make_wish([status()], "active", "paper")
    write_wish(tmp_path, wish)
    other = loop(attempt="20261123T053001-000000")
    reader_of(tmp_path, other).look(False)
    assert not other.changing
    alone = loop(permitted=False)
    (refused := reader_of(tmp_path, alone)).look(False)
    assert not alone.changing
    assert "not every rank" in (refused.state() or {})["refused"]
    followed = loop()
    (reader := reader_of(tmp_path, followed)).look(False)
    assert followed.changing
    assert reader.state() == {"id": wish.id, "refused": "", "waiting": True}


def test_ranks_whose_processes_are_gone_are_asked_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceenv.live.record.run_folder.is_gone", lambda process: True)
    write_status(tmp_path, status(schema=SCHEMA))
    with pytest.raises(InputError, match="no rank of attempt"):
        application(args=["set", str(tmp_path), "--mode", "off"], standalone_mode=False)


def test_a_change_that_comes_during_another_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, policy = loop(), find_policy("paper")
    watched.change("shadow", policy, 0)
    monkeypatch.setattr(watched.control.chosen, "final", lambda: watched.change("off", policy, 0))
    watched._tick()
    assert watched.changing
    watched._tick()
    assert (watched.state, watched.changing) == ("off", False)


def test_only_a_mode_that_decides_takes_iterations_in_on_the_training_thread() -> None:
    watched, policy = loop(), find_policy("paper")
    for mode, here in (("shadow", True), ("observe", False), ("shadow", True)):
        watched.change(mode, policy, 0)
        watched._tick()
        watched._tick()
        assert (watched.state, watched._takes_here) == (mode, here)


def test_delays_count_in_every_mode_that_follows_and_look_present_only_in_their_own() -> None:
    watched, policy = loop(), find_policy("paper")
    told = []
    for mode in ("active", "shadow", "observe"):
        watched.change(mode, policy, 0)
        watched._tick()
        watched._tick()
        if mode == "active":
            watched.control.settle(Delay(0.0, 1.0, 1.5), watched.log.count)
        delays = watched.control.delays()
        told.append([delays[name] for name in ("taken", "total_s", "max_s", "mean_s")])
        page = summarise([status(pacing=delays | {"asked": 2}, **watched.control.snapshot())])
        assert "1 delays taken of 2 asked for, 500 ms in all iterations of all ranks, longest 500 ms" in page
    assert told == [[1, 0.5, 0.5, 0.5], [1, 0.5, 0.5, None], [1, 0.5, 0.5, None]]


def test_another_cluster_config_under_the_same_name_is_not_followed(tmp_path: Path) -> None:
    file, watched = tmp_path / "cluster.yaml", loop()
    file.write_text("pacing: {mechanism: slack, threshold: 0.02, window: 0.4}\n")
    write_wish(tmp_path, make_wish([status()], "active", f"static:{file}"))
    file.write_text("pacing: {mechanism: slack, threshold: 0.9, window: 0.4}\n")  # on another host
    (reader := reader_of(tmp_path, watched)).look(False)
    assert not watched.changing
    assert "another one here" in (reader.state() or {})["refused"]


def test_agents_that_are_off_for_good_are_asked_for_nothing(tmp_path: Path) -> None:
    off = {"schema": SCHEMA, "state": "off", "reason": "stopped by the kill file K"}
    for rank in range(2):
        write_status(tmp_path, status(rank=rank, **off))
    with pytest.raises(InputError, match="rank 0 does not follow: the agent is off for good: stopped by the kill file"):
        application(["set", str(tmp_path), "--mode", "observe"], standalone_mode=False)
    assert not (tmp_path / "control.json").exists()


def running(folder: Path) -> dict[str, Any]:
    """What ``paceenv live status`` knows."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "run").rglob("rank*.json"))]
    return {s["rank"]: s for s in found}


@pytest.mark.slow
def test_a_running_job_goes_through_the_modes(tmp_path: Path) -> None:
    script = str(commands.ROOT / "tests" / "helpers" / "live_spawned.py")
    environ = os.environ | {"PYTHONPATH": str(commands.ROOT), "OMP_NUM_THREADS": "1"}
    agent = ["--out", "run", "--quiet-first", "5"]
    log = tmp_path / "job.log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "paceenv.live", *agent, script, "1000000"], cwd=tmp_path, env=environ, stderr=output
        )
    try:
        until_s = time.monotonic() + DEADLINE_S
        while len(found := running(tmp_path)) < 2 or any(not s["regular"] for s in found.values()):
            assert time.monotonic() < until_s
            time.sleep(0.2)
        for mode in ("active", "off"):
            policy = ["--policy", "static:stagger=0/0.5"] if mode != "off" else []
            asked = commands.python("-c", SET, "live", "set", "run", "--mode", mode, *policy, "--wait", folder=tmp_path)
            assert asked.returncode == 0, asked.stderr
            assert "2 ranks have changed over" in asked.stdout + asked.stderr
            changed = running(tmp_path).values()
            assert {s["state"] for s in changed} == {mode}
            lines = {e["text"] for s in changed for e in s["events"] if f"mode {mode} from iteration" in e["text"]}
            assert len(lines) == 1 or mode == "off", lines  # the same iteration on both ranks
    finally:
        (tmp_path / "over").touch()
        ended_with = job.wait(DEADLINE_S)
    assert ended_with == 0, log.read_text()
