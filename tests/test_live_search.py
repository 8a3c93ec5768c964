"""The search of mode tune without a job: its decisions, its errors and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paceenv.live.decide.blocks import BlockPlan, Plan, Turn, Word
from paceenv.live.decide.experiment import Comparison
from paceenv.live.decide.search import ERROR, FIRST_ROUNDS, NOTHING_LEFT, Search

STEP_S, LEAD, LEASE = 0.2, 5, 1 << 30
BLOCKS = BlockPlan(12, 2, 12, 4)


class Job:
    """A job whose mean step falls by ``gains`` of the candidates, and its search."""

    def __init__(
        self,
        gains: Sequence[float],
        *,
        seed: int = 0,
        noise: float = 0.02,
        blocks: Sequence[BlockPlan] | None = None,
        lease: int = LEASE,
        ticks: int = 1,
        **options: Any,
    ) -> None:
        self.gains, self.noise, self.iteration, self.lease = list(gains), noise, 0, lease
        self.ticks, self.step_s = ticks, 0.0
        """Iterations of a step, and its time so far."""
        self.plan = Plan(seed, blocks or [BLOCKS] * len(gains))
        self.search = Search([f"c{k}" for k in range(len(gains))], self.plan, **options)
        self.random = np.random.default_rng(seed)
        self.words: list[Word] = []
        self.lost_s = self.time_s = 0.0
        """Against no pacing, while searching."""

    def run(self, most: int, until: Callable[[Search], bool] = lambda search: False) -> Search:
        for _ in range(most):
            if self.iteration % 10 == 0:
                if (found := self.search.next(self.iteration, LEAD, self.lease)) is not None:
                    self.search.follow(*found)
                    self.words.append(found[0])
                if until(self.search):
                    break
            turn = self.plan.turn(self.iteration)
            plain_s = STEP_S * math.exp(self.random.normal(0.0, self.noise))
            step_s = plain_s * (1.0 - (self.gains[turn.arm] if turn.arm is not None else 0.0))
            if self.search.phase in ("taste", "search"):
                self.lost_s += step_s - plain_s
                self.time_s += step_s
            self.step_s += step_s
            self.iteration += 1
            if self.iteration % self.ticks == 0:
                turn = self.plan.turn(self.iteration - 1, self.ticks)
                self.search.add(turn, self.step_s, self.ticks)
                self.step_s = 0.0
        return self.search

    def decided(self) -> Search:
        return self.run(200_000, lambda search: search.state.searches > 0)


def test_the_best_candidate_wins_and_is_deployed() -> None:
    job = Job([0.02, 0.12, -0.03], seed=1)
    search = job.decided()
    assert search.state.winner == 1
    assert (job.words[-1].phase, job.words[-1].arms) == ("deployed", (1,))
    found = search.arms[1].verdict.gain
    assert found is not None
    assert 0.12 in found
    assert all(arm.dropped for k, arm in enumerate(search.arms) if k != 1)
    assert "winner: c1 helps by 1" in search.text(STEP_S)


def test_a_search_among_steps_of_several_iterations_ends_likewise() -> None:
    job = Job((0.0, 0.1), noise=0.01, blocks=[BlockPlan(24, 8, 24, 12)] * 2, ticks=5)
    job.run(20_000, lambda search: search.state.winner is not None)
    assert job.search.state.winner == 1
    assert job.search.arms[1].value == pytest.approx(0.1, abs=0.02)
    assert job.search.searched_s == pytest.approx(0.2 * job.search._iterations, rel=0.1)


def test_where_nothing_helps_none_is_deployed_and_the_next_search_waits_longer_each_time() -> None:
    job = Job([0.0, -0.01, 0.002], noise=0.01)
    first = job.decided()
    assert first.state.winner is None
    assert first.phase == "none"
    assert "winner: none" in first.text(STEP_S)
    ends = [job.iteration]
    for searches in (2, 3):
        job.run(200_000, lambda search, searches=searches: search.state.searches == searches)
        ends.append(job.iteration)
    pauses = [w.from_iteration for w in job.words if w.phase == "search" and len(w.arms) == 3]
    waited = [begin - end for begin, end in zip(pauses[1:], ends, strict=False)]
    assert waited[1] > 1.1 * waited[0]


def test_a_candidate_that_surely_hurts_is_dropped_at_once_and_the_loss_stays_in_its_bound() -> None:
    for seed in range(3):
        job = Job([0.0, -0.3, 0.05], seed=seed, noise=0.01)
        search = job.run(100_000, lambda search: bool(search.arms[1].dropped))
        assert search.arms[1].dropped
        assert search.arms[1].pairs <= 1
        job.run(100_000, lambda search: search.state.searches > 0)
        assert search.state.winner == 2
        assert job.lost_s <= 0.01 * job.time_s


@pytest.mark.parametrize("hurts", [-0.02, -0.5])
def test_a_search_whose_candidates_all_hurt_ends_with_none_and_loses_little(hurts: float) -> None:
    """The bound is on the time of at least ``FIRST_ROUNDS``; what one round costs cannot be known before it."""
    for seed in range(3):
        job = Job([hurts, hurts, hurts, hurts], seed=seed, noise=0.01)
        assert job.decided().state.winner is None
        every = FIRST_ROUNDS * job.plan.round_iterations(range(4)) * STEP_S
        assert job.lost_s <= 0.01 * max(job.time_s, every) + 4 * 12 * STEP_S * -hurts
        job.run(100_000, lambda search: search.phase == "taste")
        assert job.lost_s <= 0.012 * job.iteration * STEP_S
    assert job.search.state.why == NOTHING_LEFT


def test_a_block_of_few_steps_does_not_hide_what_candidates_cost() -> None:
    """An evaluation left one step of a block, whose error is not known, and no loss was sure any more."""
    whole, short = (Job([-0.5, -0.5], noise=0.01) for _ in range(2))
    add, begin = short.search.add, short.plan.round_iterations((0, 1), "taste") + LEAD

    def interrupted(turn: Turn, step_s: float, ticks: int = 1) -> None:
        if turn.pair is None or short.iteration > begin or turn.arm is None or short.iteration % 4 == 1:
            add(turn, step_s, ticks)

    short.search.add = interrupted  # type: ignore[method-assign]
    for job in (whole, short):
        assert job.decided().state.winner is None
    assert short.lost_s <= 5.0 * whole.lost_s
    assert len(short.words) <= len(whole.words) + 2


def test_a_word_that_was_not_sent_is_not_followed() -> None:
    job = Job([0.1, 0.0], noise=0.01)
    assert job.search.next(0, LEAD, LEASE) is not None
    assert not job.plan.words
    assert job.decided().state.winner == 0
    deployed = job.words[-1]
    job.gains = [-0.1, 0.0]
    while (found := job.search.next(job.iteration, LEAD, LEASE)) is None or found[0].phase != "none":
        job.run(1)
    assert job.plan.words[-1] == deployed  # the end was not said: the winner still paces, and its end is said again
    assert (job.search.state.winner, job.search.state.searches) == (0, 1)
    job.run(20)
    assert job.plan.words[-1].phase == "none"


def test_a_candidate_that_failed_is_in_no_later_search() -> None:
    """It would be a placebo: the rank on which it failed does not pace by it again."""
    job = Job([0.1, -0.02], noise=0.01)
    assert job.decided().state.winner == 0
    job.search.give_up(0, "policy c0 raised")
    job.run(200_000, lambda search: search.state.searches > 1 and search.phase == "none")
    first_end = next(n for n, word in enumerate(job.words) if word.phase == "none")
    later = [word for word in job.words[first_end:] if word.phase in ("taste", "search")]
    assert {arm for word in later for arm in word.arms} == {1}
    assert job.search.state.winner is None
    alone = Job([0.1], noise=0.01)
    alone.run(50)
    alone.search.give_up(0, "policy c0 raised")
    alone.run(100_000)
    assert sum(word.phase == "taste" for word in alone.words) == 1


def test_a_winner_that_stops_paying_is_rolled_back_and_a_later_search_finds_the_new_best() -> None:
    job = Job([0.1, 0.0], noise=0.01)
    assert job.decided().state.winner == 0
    job.gains = [-0.1, 0.1]
    job.run(100_000, lambda search: search.phase == "none")
    assert job.search.state.winner is None
    assert "c0 hurts" in job.search.state.why
    job.run(100_000, lambda search: search.phase == "deployed")
    assert job.search.state.winner == 1


def test_a_search_without_a_verdict_ends() -> None:
    search = Job([0.02, 0.0], noise=0.5, most_pairs=8).decided()
    assert search.state.winner is None
    assert "after 8 pairs no candidate surely helps" in search.state.why


def test_a_word_is_prolonged_in_time_and_nothing_else_is_said() -> None:
    job = Job([0.0, 0.0], noise=0.2, lease=400, most_pairs=10_000)
    job.run(4000)
    assert len(job.words) == pytest.approx(4000 / 200, abs=4)
    assert {w.begin for w in job.words[1:]} == {job.words[1].begin}
    assert all(job.plan.turn(i).pair is not None for i in range(LEAD, 3900, 7) if i > 3400)


@pytest.mark.slow
def test_searches_err_no_more_often_than_stated() -> None:
    """Wrong: a winner that does not help, or one that is worse than another by more than the tolerance."""
    wrong = jobs = 0
    for seed in range(30):
        random = np.random.default_rng(seed)
        gains = random.choice([-0.02, 0.0, 0.0, 0.005, 0.02, 0.03], 4).tolist()
        winner = Job(gains, seed=seed, noise=0.05, most_pairs=32).decided().state.winner
        jobs += 1
        if winner is not None:
            wrong += gains[winner] <= 0.0 or max(gains) - gains[winner] > max(0.01, 0.1 * max(gains)) + 1e-9
    assert wrong / jobs <= ERROR + 2.0 * math.sqrt(ERROR / jobs)


def test_comparisons_of_two_candidates_spend_no_share_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are hardly ever evaluated at the same time, and each evaluation of either one is another look."""
    spent = list[float]()

    def quantile(level: float, degrees: float) -> float:
        spent.append(2.0 * level)
        return -2.0

    monkeypatch.setattr("paceenv.live.decide.experiment.student_t_quantile", quantile)
    one, other = Comparison("one"), Comparison("other")
    one.seen = other.seen = (0.0, 1e-4, 8)
    for one.evaluations, other.evaluations in ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3), (4, 4)):
        one.better_by(other, 0.05)
    assert len(set(spent)) == len(spent) == 7
    assert sum(spent) <= 0.05
