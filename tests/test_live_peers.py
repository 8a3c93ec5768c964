"""What ranks tell each other while the job runs: who paces no more, who changes over, how long a barrier takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from paceenv.live.control_file import ControlReader, Wish, write_wish
from paceenv.live.decide.control import BARRIER_EVERY
from paceenv.live.decide.live_policy import find_policy, needed_policy
from paceenv.live.identity import Identity
from paceenv.live.loop import Loop
from paceenv.live.observe.step import Shape, Step
from paceenv.live.options import make_options
from paceenv.live.store_messages import Peers, alone

ATTEMPT, POLICY = "20261123T053000-3f2a91", "static:slack=0.02/0.4"
QUIET = 20


class Rank:
    """A rank whose training stands still: :meth:`look` is its background thread, :meth:`tick` its next iteration."""

    def __init__(self, rank: int, store: HashStore, ranks: int, folder: Path | None = None, **options: Any) -> None:
        made = make_options({"mode": "canary", "seed": 3} | options)
        self.loop = Loop(made, needed_policy(made.mode, POLICY, made.candidates))
        self.loop.rank, self.loop.world_size, self.loop.identity = rank, ranks, Identity(ATTEMPT, ranks)
        self.peers, self.shape = Peers(self.loop, store), Shape({}, [])
        self.shape.has_barrier, self.shape.barrier_alone_s = True, 0.0  # a job that meets in a barrier, once learned
        self.reader = ControlReader(folder, self.loop, self.peers) if folder is not None else None

    def look(self) -> None:
        if self.reader is not None:
            self.reader.look(False)
            self.reader.agree(False)
        self.peers.look(False)

    def step(self, iteration: int, barrier_s: float) -> None:
        made = Step(iteration, 0.0, 0.2, 0.0, 0.0, (), 0.05, barrier_s, True, "")
        self.loop.control.observe(made, self.shape, 0, 1)

    @property
    def slack_s(self) -> float:
        assert self.loop.control.pacer is not None
        return self.loop.control.pacer.slack_low_s

    def tick(self, iteration: int) -> None:
        self.loop.log.count = iteration
        change = self.loop._change
        if change is not None and iteration >= change[2]:
            self.loop._change_over(change)
        while self.loop.log.chores:
            chore, arguments = self.loop.log.chores.popleft()
            chore(*arguments)


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
        rank.loop.control.pacer = SimpleNamespace()  # type: ignore[assignment]
    ranks[0].loop.control._give_up(1, "raised RuntimeError")
    assert pass_by(ranks, 10) == ["canary"] * 2
    chosen: Any = ranks[1].loop.control.chosen
    assert chosen.out == {1: "on rank 0: raised RuntimeError"}
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


def test_where_one_rank_refuses_none_changes_over(tmp_path: Path) -> None:
    ranks = job(3, tmp_path, mode="canary")
    wish(tmp_path)
    ranks[1].loop.log.count = 100
    ranks[1].look()
    assert pass_by(ranks, 100) == ["canary"] * 3
    assert not any(rank.loop.changing for rank in ranks)
    said = [(rank.reader.state() or {})["refused"] for rank in ranks if rank.reader is not None]
    none = "not every rank followed by iteration 100"
    assert said == [none, "iteration 100 was over already", none]


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


def test_a_store_that_fails_changes_nothing() -> None:
    [rank] = job(1)

    class Broken(Store):
        def check(self, keys: list[str]) -> bool:
            raise ConnectionError("gone")

    rank.loop.world_size, broken = 2, Broken()
    with pytest.raises(Exception, match="gone"):
        Peers(rank.loop, broken).look(False)
    assert rank.loop.state == "canary"


def steps(ranks: Sequence[Rank], until: int, first: int = 0, barrier_s: float = 0.012) -> None:
    """Rank 0 and rank 1 take turns to come last; a barrier takes ``barrier_s`` once they are there; rank 2 is early."""
    for iteration in range(first, until):
        for rank in ranks:
            early_s = 0.03 if rank.loop.rank == 2 else 0.001 * ((iteration + rank.loop.rank) % 2)
            rank.step(iteration, barrier_s + early_s)


def look(ranks: Sequence[Rank]) -> None:
    for _ in range(2):
        for rank in reversed(ranks):
            rank.peers.look(False)


def alone_ms(ranks: Sequence[Rank]) -> list[float]:
    pacers = [rank.loop.control.pacer for rank in ranks]
    return [round(1e3 * pacer.barrier_alone_s, 3) for pacer in pacers if pacer is not None]


def test_only_the_rank_that_waits_has_slack_once_the_ranks_have_compared() -> None:
    ranks = job(3, quiet_first=QUIET)
    steps(ranks, QUIET)
    assert [rank.slack_s > 0.004 for rank in ranks] == [True, True, True], "alone, each takes the barrier for waiting"
    look(ranks)
    steps(ranks, QUIET + 60, QUIET)
    assert alone_ms(ranks) == [12.0, 12.0, 12.0]
    assert [round(1e3 * rank.slack_s) for rank in ranks] == [0, 0, 30]
    said = [event["text"] for event in ranks[0].loop.messages.events if "barrier" in event["text"]]
    assert said == ["a barrier takes 12.0 ms once all ranks are there; the time beyond it is waiting"]
    first = QUIET + 60
    for until, barrier_s in ((QUIET // 2 + 3 * BARRIER_EVERY, 0.0002), (QUIET // 2 + 7 * BARRIER_EVERY, 0.012)):
        steps(ranks, until + 1, first, barrier_s)  # the fabric may have changed
        look(ranks)
        assert alone_ms(ranks) == [round(1e3 * barrier_s, 3)] * 3
        first = until + 1


def test_ranks_that_measured_other_steps_compare_those_that_all_have() -> None:
    assert alone([dict.fromkeys(range(7), 0.01), dict.fromkeys(range(3, 20), 0.02)]) == 0.01
    assert alone([dict.fromkeys(range(6), 0.01), dict.fromkeys(range(3, 20), 0.02)]) is None
    ranks = job(2, quiet_first=QUIET)
    for rank in ranks:
        for iteration in (1, 2, QUIET):  # the rest of the quiet start was irregular
            rank.step(iteration, 0.012)
    look(ranks)
    assert max(alone_ms(ranks)) <= 1.0
    steps(ranks, QUIET + BARRIER_EVERY, QUIET + 1)
    look(ranks)
    assert alone_ms(ranks) == [12.0] * 2, "asked again"


def test_without_a_store_or_a_rank_that_answers_nothing_changes() -> None:
    ranks = job(3, quiet_first=QUIET)
    ranks[2].peers = Peers(ranks[2].loop, None)
    steps(ranks, QUIET + 1)
    look(ranks)
    assert max(alone_ms(ranks)) <= 1.0
