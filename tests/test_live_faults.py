"""Faults in real multi-process jobs: the job ends as it would have without the agent, which says once what happened."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from live_jobs import Ended, printed, results, root_and, run_ranks
from live_troubles import BAD, trouble

from paceenv.core import pacing, signals
from paceenv.live.record.run_folder import RunFolder
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy

RANKS = 2


def said(rank: Ended, text: str) -> list[str]:
    """The lines in which the agent of a rank says ``text``; none may come twice."""
    lines = [line for line in rank.output.splitlines() if re.match(r"paceenv live( \[rank \d+\])?: ", line)]
    assert len(set(lines)) == len(lines), rank.output
    return [line for line in lines if text in line]


def healthy(ended: list[Ended]) -> list[tuple[list[float], str]]:
    """What the ranks of a job computed."""
    return [(rank["losses"], rank["digest"]) for rank in results(ended)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[float], str]]:
    """What the job computes without an agent."""
    return healthy(run_ranks(trouble, RANKS, tmp_path_factory.mktemp("alone")))


@pytest.mark.slow
@pytest.mark.parametrize("policy", BAD)
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


def _policy_file(path: Path) -> bytes:
    random, sizes = np.random.default_rng(0), (signals.SIGNALS, 8, 2)
    layers = [(random.normal(0.0, 0.3, (b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in pairwise(sizes)]
    save_policy(path, PolicyFile(Learned(layers, pacing.MECHANISMS[:1]), {}, {}))
    return path.read_bytes()


FILES: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda good: None,
    "empty": lambda good: b"",
    "truncated": lambda good: good[: len(good) // 2],
    "a pickle that runs a command": lambda good: b"cposix\nsystem\n(S'touch ran'\ntR.",
    "with a header of 2^60 bytes": lambda good: (2**60).to_bytes(8, "little") + good[8:],
    "not finite": lambda good: good[:-4] + np.float32(np.nan).tobytes(),
}


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in {"deleted", "a pickle that runs a command"} else pytest.param(kind, marks=pytest.mark.slow)
        for kind in FILES
    ],
)
def test_a_policy_file_that_is_none_means_to_observe(
    kind: str, tmp_path: Path, alone: list[tuple[list[float], str]]
) -> None:
    path = tmp_path / "policy.safetensors"
    content = FILES[kind](_policy_file(path))
    path.unlink() if content is None else path.write_bytes(content)
    ended = run_ranks(trouble, RANKS, tmp_path, mode="active", policy=str(path))
    assert healthy(ended) == alone
    for rank in ended:
        [line] = said(rank, "observes from now on and delays nothing")
        assert str(path) in line
        assert rank.result["summary"]["pacing"]["asked"] == 0
        assert rank.result["summary"]["regular"] > 0
    assert not list(tmp_path.rglob("ran"))


MOUNTS = {
    "full": 'mkdir -p "{out}"; mount -t tmpfs -o size=8k tmpfs "{out}"',
    "read-only": 'mkdir -p "{out}"; mount -t tmpfs -o ro tmpfs "{out}"',
}


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_disk_that_takes_nothing_costs_the_files_only(
    kind: str, tmp_path: Path, alone: list[tuple[list[float], str]]
) -> None:
    root_and("mount")
    out = tmp_path / "out"
    mount = MOUNTS[kind].format(out=out)
    ended = run_ranks(trouble, RANKS, tmp_path, mode="active", out=str(out), mount=mount)
    assert healthy(ended) == alone
    reason = {"full": "No space left", "read-only": "Read-only file system"}[kind]
    for rank in ended:
        assert len(said(rank, reason)) >= 1, rank.output
        assert rank.result["summary"]["mode"] == "active"
        assert rank.result["summary"]["pacing"]["asked"] > 0 or rank.rank == 0


def test_a_metrics_port_that_is_taken_costs_the_metrics_only(
    tmp_path: Path, alone: list[tuple[list[float], str]]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_ranks(trouble, RANKS, tmp_path, mode="observe", metrics_port=port)
    assert healthy(ended) == alone
    [line] = said(ended[0], str(port))
    assert "in use" in line


@pytest.mark.slow
@pytest.mark.parametrize("what", ["killed", "raised"])
def test_a_job_whose_rank_dies_fails_as_without_the_agent(what: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bare = run_ranks(trouble, RANKS, tmp_path, what=what, check=False)
    ended = run_ranks(trouble, RANKS, tmp_path, what=what, check=False, mode="active", out=str(out))
    assert [rank.exit_code for rank in ended] == [rank.exit_code for rank in bare], printed(ended)
    assert [_error(rank) for rank in ended] == [_error(rank) for rank in bare]
    assert all(rank.exit_code for rank in ended)
    run = RunFolder(out)
    [survivor] = [status for status in run.statuses(run.latest()) if status["rank"] == 0]
    assert survivor["final"]
    assert survivor["iterations"] >= 20


def _error(rank: Ended) -> str | None:
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


def test_clocks_that_jump_by_hours_change_nothing(tmp_path: Path, alone: list[tuple[list[float], str]]) -> None:
    ended = run_ranks(trouble, RANKS, tmp_path, mode="active", stepping=True, out=str(tmp_path / "out"))
    assert healthy(ended) == alone
    for rank in ended:
        assert said(rank, "error") == []
