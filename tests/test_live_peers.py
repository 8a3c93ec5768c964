"""What ranks tell each other while the job runs: one that paces no more ends it on all, and all change over or none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_jobs import results, run_ranks
from torch._C._distributed_c10d import HashStore, Store

from paceenv import live
from paceenv.live import store_messages
from paceenv.live.control_file import ControlReader, Wish, write_wish
from paceenv.live.decide.experiment import Experiment
from paceenv.live.decide.live_policy import find_policy, needed_policy
from paceenv.live.loop import Loop
from paceenv.live.options import make_options
from paceenv.live.store_messages import Peers

ATTEMPT, POLICY = "20261123T053000-3f2a91", "static:slack=0.02/0.4"


class Rank:
    """A rank whose training stands still: :meth:`look` is its background thread, :meth:`tick` its next iteration."""

    def __init__(self, rank: int, store: HashStore, ranks: int, folder: Path | None = None, **options: Any) -> None:
        made = make_options({"mode": "canary", "seed": 3} | options)
        self.loop = Loop(made, needed_policy(made.mode, POLICY, made.candidates))
        self.loop.rank, self.loop.world_size, self.loop.attempt, self.loop.permitted = rank, ranks, ATTEMPT, True
        self.peers = Peers(self.loop, store)
        self.reader = ControlReader(folder, self.loop, self.peers) if folder is not None else None

    def look(self) -> None:
        if self.reader is not None:
            self.reader.look(False)
            self.reader.agree(False)
        self.peers.look(False)

    def tick(self, iteration: int) -> None:
        self.loop.log.count = iteration
        change = self.loop._change
        if change is not None and iteration >= change[2]:
            self.loop._change_over(*change)
        while self.loop.log.chores:
            chore, arguments = self.loop.log.chores.popleft()
            chore(*arguments)


def in_blocks(rank: Rank) -> Experiment:
    assert isinstance(rank.loop.control.chosen, Experiment)
    return rank.loop.control.chosen


def job(ranks: int, folder: Path | None = None, **options: Any) -> list[Rank]:
    store = HashStore()
    return [Rank(rank, store, ranks, folder, **options) for rank in range(ranks)]


def pass_by(ranks: Sequence[Rank], iteration: int) -> list[str]:
    """All ranks look, twice because the first may have come before the last one spoke; the modes in force then."""
    for _ in range(2):
        for rank in ranks:
            rank.look()
    for rank in ranks:
        rank.tick(iteration)
    return [rank.loop.state for rank in ranks]


def wish(folder: Path, mode: str = "active", **changes: Any) -> Wish:
    asked = Wish("w1", ATTEMPT, mode, POLICY, None, 100)._replace(**changes)
    write_wish(folder, asked)
    return asked


def test_one_rank_that_stops_ends_pacing_on_all_and_they_say_why() -> None:
    ranks = job(3)
    assert pass_by(ranks, 10) == ["canary"] * 3
    ranks[1].loop.control.downgrade("rolled back, as pacing hurts by 2.0 %")
    assert pass_by(ranks, 11) == ["observe"] * 3
    assert ranks[2].loop.reason == "on rank 1: rolled back, as pacing hurts by 2.0 %"
    switched_off = job(2)
    switched_off[0].loop.detach("stopped by the kill file")
    assert pass_by(switched_off, 11) == ["off", "observe"]


def test_a_candidate_that_stops_on_one_rank_stops_on_all_and_the_others_go_on() -> None:
    ranks = job(2, candidates=f"{POLICY};paper")
    for rank in ranks:
        rank.loop.control.pacer = SimpleNamespace(follow=lambda *given: None)  # type: ignore[assignment]
    ranks[0].loop.control._give_up(1, "raised RuntimeError")
    assert pass_by(ranks, 10) == ["canary"] * 2
    assert in_blocks(ranks[1]).out == {1: "on rank 0: raised RuntimeError"}
    ranks[1].loop.control._give_up(0, "raised ValueError")
    assert pass_by(ranks, 11) == ["observe"] * 2


def test_all_ranks_change_over_before_the_same_iteration(tmp_path: Path) -> None:
    ranks = job(3, tmp_path, mode="observe")
    wish(tmp_path)
    for rank in ranks[:2]:
        rank.look()
    assert not any(rank.loop.changing for rank in ranks)  # the third one has not spoken
    assert ranks[0].reader is not None
    assert ranks[0].reader.state() == {"id": "w1", "refused": "", "waiting": True}
    assert pass_by(ranks, 99) == ["observe"] * 3
    assert pass_by(ranks, 100) == ["active"] * 3
    ranks[1].loop.control.downgrade("a policy fault of the new mode")
    assert pass_by(ranks, 100) == ["observe"] * 3


@pytest.mark.parametrize("why", ["policy", "late"])
def test_where_one_rank_refuses_none_changes_over(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = job(3, tmp_path, mode="canary")
    other: dict[str, Any] = {"policy": "learned", "sha256": find_policy("learned").sha256}
    wish(tmp_path, **(other if why == "policy" else {}))
    with monkeypatch.context() as changed:
        if why == "policy":
            changed.setattr("paceenv.live.control_file.find_policy", lambda name: find_policy(None))
        else:
            ranks[1].loop.log.count = 100
        ranks[1].look()
    assert pass_by(ranks, 100) == ["canary"] * 3
    assert not any(rank.loop.changing for rank in ranks)
    for rank in ranks:
        assert rank.reader is not None
        said = (rank.reader.state() or {})["refused"]
        assert (said == "not every rank followed by iteration 100") == (rank is not ranks[1])
        assert said


def test_a_rank_that_learns_too_late_that_all_follow_observes_and_so_do_all(tmp_path: Path) -> None:
    ranks = job(2, tmp_path, mode="observe")
    wish(tmp_path)
    for rank in (ranks[0], ranks[1], ranks[0]):
        rank.look()
    ranks[1].loop._change = None
    ranks[0].tick(100)
    ranks[1].tick(100)
    ranks[1].loop.change("active", find_policy(POLICY), 100)
    ranks[1].tick(101)
    assert [rank.loop.state for rank in ranks] == ["active", "observe"]
    assert pass_by(ranks, 102) == ["observe"] * 2


def test_a_second_request_waits_for_the_first_and_observe_for_nobody(tmp_path: Path) -> None:
    ranks = job(2, tmp_path, mode="observe")
    wish(tmp_path)
    pass_by(ranks, 10)
    wish(tmp_path, "canary", id="w2", from_iteration=120)
    assert pass_by(ranks, 20) == ["observe"] * 2
    assert ranks[0].reader is not None
    assert "an earlier request waits for iteration 100" in (ranks[0].reader.state() or {})["refused"]
    wish(tmp_path, "observe", id="w3", from_iteration=0)
    pass_by(ranks, 30)
    assert pass_by(ranks, 130) == ["observe"] * 2


def test_without_a_store_nothing_is_said_and_a_store_that_fails_changes_nothing() -> None:
    rank, other = job(2)
    Peers(rank.loop, None).look(False)

    class Broken(Store):
        def check(self, keys: list[str]) -> bool:
            raise ConnectionError("gone")

    broken = Broken()
    with pytest.raises(Exception, match="gone"):
        Peers(other.loop, broken).look(False)
    assert other.loop.state == "canary"


def stopped_on_one() -> str:
    """A job that goes on until no rank paces any more; rank 1 stops by itself."""
    store_messages.POLL_S = 0.05
    agent, pacing, iteration, until_s = (
        live.attach(policy=POLICY, mode="canary"),
        torch.ones(1),
        0,
        time.monotonic() + 60,
    )
    while pacing.item():
        pacing.fill_(float(agent.state == "canary" and time.monotonic() < until_s))
        dist.all_reduce(pacing)
        agent.tick()
        time.sleep(0.005)
        iteration += 1
        if iteration == 100 and dist.get_rank() == 1:
            agent._loop.downgrade("enough")
    agent.detach()
    return agent.reason


@pytest.mark.slow
def test_in_a_real_job_a_stop_on_one_rank_reaches_all(tmp_path: Path) -> None:
    assert results(run_ranks(stopped_on_one, 2, tmp_path)) == ["on rank 1: enough", "enough"]
