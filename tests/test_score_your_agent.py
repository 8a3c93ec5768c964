"""The how-to page on agents of one's own: every block of it is run, in its order, in one folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.policies.policy_file import load_policy
from paceenv.trainers import score_command
from paceenv.trainers.evaluation import score_row
from paceenv.trainers.evaluation.protocol import Protocol, ScoredSplit
from paceenv.trainers.evaluation.suites import Suite
from paceenv.ui import config_files

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "score-your-agent.md"
OWN = {
    "score": "paceenv.trainers.score_command:score",
    "leaderboard": "paceenv.trainers.score_command:leaderboard",
    "policy": "paceenv.policies.hub.policy_command:application",
}


def blocks() -> list[tuple[str, str]]:
    """Language and text of each block, in order."""
    return re.findall(r"^```(sh|python)\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)


def command(line: str) -> None:
    """A line of a shell block; our new commands need no new installation."""
    program, name, *rest = shlex.split(line, comments=True)
    if program == "python":
        runpy.run_path(name, run_name="__main__")
        return
    assert program == "paceenv"
    assert name in application.SUMMARIES
    if name in OWN:
        entry = importlib.metadata.EntryPoint(name, OWN[name], application.GROUP)
        assert application._run_command(entry, rest) == 0
    else:
        assert application.run([name, *rest]) == 0


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the page's own commands, on a protocol of a few short episodes."""
    small = {"version": 1, "seeds": 2, "iterations": 60, "clusters": 2, "drawn_from": ["a"]}
    config_files.write_yaml(tmp_path / "board" / "protocol.yaml", small)
    packaged = score_command.load_protocol

    def load(folder: Path | None = None) -> Protocol:
        return packaged(folder) if folder is not None else Protocol.model_validate(small)

    whole = Protocol.suite

    def suite(self: Protocol, split: ScoredSplit) -> Suite:
        found = whole(self, split)
        return found.model_copy(update={"cases": found.cases[:2]})

    monkeypatch.setattr(Protocol, "suite", suite)
    monkeypatch.setattr(score_command, "load_protocol", load)
    monkeypatch.chdir(tmp_path)
    ran = 0
    for language, text in blocks():
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name is not None
            Path(name[1]).write_text(text)
        else:
            for line in text.splitlines():
                command(line)
                ran += 1
    assert ran >= 8
    assert load_policy("mine.safetensors").policy.mechanisms == ("phase_shift",)
    assert load_policy("actor.safetensors").policy.activation == "silu"
    row = json.loads(Path("mine.json").read_text())
    assert (row["split"], len(row["policies"])) == ("validation", 1)
    assert os.listdir("card")
    assert list(Path("board", "policies").iterdir())


def test_the_page_s_refusals_are_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.zip").write_bytes(b"")
    with pytest.raises(InputError, match=r"mechanisms = ''; allowed: agent.zip:mechanisms="):
        application.run(["evaluate", "agent.zip"])


@pytest.mark.parametrize(
    ("policy", "title"),
    [
        ("runs/ppo", "runs/ppo"),
        ("runs/mine/a.safetensors", "a"),
        ("hf:me/pacing@v1", "hf:me/pacing-v1"),
        ("x" * 99, "x" * 80),
    ],
)
def test_a_row_that_nobody_named_has_a_name_that_a_row_may_have(policy: str, title: str) -> None:
    assert score_row.title_of(policy) == title
    assert re.fullmatch(score_row.NAMES, title)


def test_a_name_that_no_row_may_have_is_refused_before_anything_is_scored() -> None:
    with pytest.raises(InputError, match=r"--name PPO \(v2\): allowed: 1 to 80 letters"):
        application.run(["score", "-p", "passive", "--name", "PPO (v2)"])
