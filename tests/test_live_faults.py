"""Faults in real multi-process jobs: the job ends as it would have without the agent, which says once what happened."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from live_jobs import Ended as Rank
from live_jobs import printed, results, root_and, run_ranks
from live_troubles import trouble, troubles

from paceenv.live.record.run_folder import RunFolder

RANKS, POLICY = 2, "policy.safetensors"


def said(rank: Rank, text: str) -> list[str]:
    """The lines in which the agent of a rank says ``text``; none may come twice."""
    lines = [line for line in rank.output.splitlines() if re.match(r"paceenv live( \[rank \d+\])?: ", line)]
    assert len(set(lines)) == len(lines), rank.output
    return [line for line in lines if text in line]


def healthy(ended: list[Rank]) -> list[tuple[list[float], str]]:
    """What the ranks of a job computed."""
    return [(rank["losses"], rank["digest"]) for rank in results(ended)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    """A job without an agent, then with a policy file that is none, then with a metrics port that is taken."""
    folder = tmp_path_factory.mktemp("together")
    (folder / POLICY).write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")  # a pickle that runs a command
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        runs = [{}, {"mode": "active", "policy": str(folder / POLICY)}, {"mode": "observe", "metrics_port": port}]
        ended = run_ranks(troubles, RANKS, folder, runs=runs)
    assert not list(folder.rglob("ran"))
    return ended


@pytest.fixture
def alone(together: list[Rank]) -> list[tuple[list[float], str]]:
    """What the job computes without an agent."""
    return [(runs[0]["losses"], runs[0]["digest"]) for runs in results(together)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raises", "huge"])
def test_a_policy_that_goes_wrong_is_not_asked_again(
    policy: str, tmp_path: Path, alone: list[tuple[list[float], str]]
) -> None:
    ended = run_ranks(trouble, RANKS, tmp_path, mode="active", policy=policy)
    assert healthy(ended) == alone
    for rank in ended:
        [line] = said(rank, "observes from now on and delays nothing")
        assert f"policy {policy} " in line
        paced = rank.result["summary"]["pacing"]
        assert paced["max_s"] <= 2.0, "a sleep may last longer on a busy machine, but not what was asked for"
    assert ended[1].result["summary"]["pacing"]["taken"] > 0


@pytest.mark.slow
def test_a_bad_policy_file_or_a_port_that_is_taken_costs_nothing_else(
    together: list[Rank], alone: list[tuple[list[float], str]]
) -> None:
    for rank, (_, bad_file, taken_port), plain in zip(together, results(together), alone, strict=True):
        assert [(run["losses"], run["digest"]) for run in (bad_file, taken_port)] == [plain] * 2
        [line] = said(rank, "observes from now on and delays nothing")
        assert POLICY in line
        assert bad_file["summary"]["pacing"]["asked"] == 0
        assert bad_file["summary"]["regular"] > 0
    [line] = said(together[0], "no metrics on")
    assert "in use" in line


def test_a_disk_that_takes_nothing_costs_the_files_only(tmp_path: Path, alone: list[tuple[list[float], str]]) -> None:
    root_and("mount")
    out = tmp_path / "out"
    mount = f'mkdir -p "{out}"; mount -t tmpfs -o size=8k tmpfs "{out}"'
    ended = run_ranks(trouble, RANKS, tmp_path, mode="active", out=str(out), mount=mount)
    assert healthy(ended) == alone
    for rank in ended:
        assert len(said(rank, "No space left")) >= 1, rank.output
        assert rank.result["summary"]["mode"] == "active"
        assert rank.result["summary"]["pacing"]["asked"] > 0 or rank.rank == 0


@pytest.mark.slow
def test_a_job_whose_rank_dies_fails_as_without_the_agent(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bare = run_ranks(trouble, RANKS, tmp_path, what="killed", check=False)
    ended = run_ranks(trouble, RANKS, tmp_path, what="killed", check=False, mode="active", out=str(out))
    assert [rank.exit_code for rank in ended] == [rank.exit_code for rank in bare], printed(ended)
    assert [_error(rank) for rank in ended] == [_error(rank) for rank in bare]
    assert all(rank.exit_code for rank in ended)
    run = RunFolder(out)
    [survivor] = [status for status in run.statuses(run.latest()) if status["rank"] == 0]
    assert survivor["final"]
    assert survivor["iterations"] >= 20


def _error(rank: Rank) -> str | None:
    """The kind of exception that ended a rank."""
    found = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*Error)\b", rank.output, re.MULTILINE)
    return found[-1] if found else None


@pytest.mark.alone
def test_a_rank_that_is_stopped_for_a_while_goes_on(tmp_path: Path, alone: list[tuple[list[float], str]]) -> None:
    ended = run_ranks(trouble, RANKS, tmp_path, mode="active", what="stopped")
    assert healthy(ended) == alone
    for rank in ended:
        assert (rank.result["summary"]["state"], rank.result["summary"]["reason"]) == ("active", "")
        assert rank.result["summary"]["step"]["p99_s"] < 0.2  # the stop is not taken for a step of the job


@pytest.mark.slow
def test_clocks_that_jump_by_hours_change_nothing(tmp_path: Path, alone: list[tuple[list[float], str]]) -> None:
    ended = run_ranks(trouble, RANKS, tmp_path, mode="active", stepping=True, out=str(tmp_path / "out"))
    assert healthy(ended) == alone
    for rank in ended:
        assert said(rank, "error") == []
