"""A barrier that takes long by itself: the ranks find out together, and the last one delays nobody, itself included."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import HashStore

from paceenv.live.decide.control import BARRIER_EVERY
from paceenv.live.decide.live_policy import needed_policy
from paceenv.live.loop import Loop
from paceenv.live.observe.step import Shape, Step
from paceenv.live.options import make_options
from paceenv.live.store_messages import Peers, alone

POLICY = "static:slack=0.0/0.4"
QUIET = 20


class BarrierShape(Shape):
    """The shape of a job that reduces and meets in a barrier, as it is after it was learned."""

    def __init__(self) -> None:
        super().__init__({}, [])
        self.has_barrier, self.barrier_alone_s = True, 0.0


class Rank:
    """A rank whose steps and looks at the store are made by hand."""

    def __init__(self, rank: int, ranks: int, store: Any, **options: Any) -> None:
        made = make_options({"mode": "canary", "seed": 3, "quiet_first": QUIET} | options)
        self.loop = Loop(made, needed_policy(made.mode, POLICY, made.candidates))
        self.loop.rank, self.loop.world_size, self.loop.attempt, self.loop.permitted = rank, ranks, "a", True
        self.peers, self.shape = Peers(self.loop, store), BarrierShape()

    def step(self, iteration: int, barrier_s: float, comm_s: float = 0.05) -> None:
        made = Step(iteration, 0.0, 0.2, 0.0, 0.0, (), comm_s, barrier_s, True, "")
        self.loop.control.observe(made, self.shape, 0, 1)

    @property
    def slack_s(self) -> float:
        assert self.loop.control.pacer is not None
        return self.loop.control.pacer.slack_low_s


def steps(ranks: list[Rank], until: int, first: int = 0, barrier_s: float = 0.012) -> None:
    """Rank 0 and rank 1 take turns to come last; a barrier takes ``barrier_s`` once they are there; rank 2 is early."""
    for iteration in range(first, until):
        for rank in ranks:
            early_s = 0.03 if rank.loop.rank == 2 else 0.001 * ((iteration + rank.loop.rank) % 2)
            rank.step(iteration, barrier_s + early_s)


def look(ranks: list[Rank]) -> None:
    for _ in range(2):
        for rank in reversed(ranks):
            rank.peers.look(False)


def alone_ms(ranks: list[Rank]) -> list[float]:
    pacers = [rank.loop.control.pacer for rank in ranks]
    return [round(1e3 * pacer.barrier_alone_s, 3) for pacer in pacers if pacer is not None]


def test_only_the_rank_that_waits_has_slack_once_the_ranks_have_compared() -> None:
    store = HashStore()
    ranks = [Rank(rank, 3, store) for rank in range(3)]
    steps(ranks, QUIET)
    assert [rank.slack_s > 0.004 for rank in ranks] == [True, True, True], "alone, each takes the barrier for waiting"
    look(ranks)
    steps(ranks, QUIET + 60, QUIET)
    assert alone_ms(ranks) == [12.0, 12.0, 12.0]
    assert [round(1e3 * rank.slack_s) for rank in ranks] == [0, 0, 30]
    said = [event["text"] for event in ranks[0].loop.messages.events if "barrier" in event["text"]]
    assert said == ["a barrier takes 12.0 ms once all ranks are there; the time beyond it is waiting"]


def test_the_ranks_compare_again_as_the_fabric_may_have_changed() -> None:
    store = HashStore()
    ranks = [Rank(rank, 3, store) for rank in range(3)]
    steps(ranks, QUIET)
    look(ranks)
    assert alone_ms(ranks) == [12.0] * 3
    again = QUIET // 2 + BARRIER_EVERY
    steps(ranks, again + 1, QUIET, barrier_s=0.0002)
    look(ranks)
    assert alone_ms(ranks) == [0.2] * 3
    steps(ranks, again + 3 * BARRIER_EVERY, again + 1)
    look(ranks)
    assert alone_ms(ranks) == [12.0] * 3


def test_ranks_that_measured_other_steps_compare_those_that_all_have() -> None:
    assert alone([dict.fromkeys(range(7), 0.01), dict.fromkeys(range(3, 20), 0.02)]) == 0.01
    assert alone([dict.fromkeys(range(6), 0.01), dict.fromkeys(range(3, 20), 0.02)]) is None
    store = HashStore()
    ranks = [Rank(rank, 2, store) for rank in range(2)]
    for rank in ranks:
        for iteration in (1, 2, QUIET):  # the rest of the quiet start was irregular
            rank.step(iteration, 0.012)
    look(ranks)
    assert max(alone_ms(ranks)) <= 1.0
    steps(ranks, QUIET + BARRIER_EVERY, QUIET + 1)
    look(ranks)
    assert alone_ms(ranks) == [12.0] * 2, "asked again"


def test_without_a_store_or_a_rank_that_answers_nothing_changes() -> None:
    store = HashStore()
    ranks = [Rank(0, 3, store), Rank(1, 3, store), Rank(2, 3, None)]
    steps(ranks, QUIET + 1)
    look(ranks)
    assert max(alone_ms(ranks)) <= 1.0
