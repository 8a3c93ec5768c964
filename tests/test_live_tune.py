"""Mode tune without a job: the plan that all ranks share, the tuner's decisions, its errors and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.live.decide.canary import BlockPlan
from paceenv.live.decide.tune_plan import TunePlan, Turn, Word
from paceenv.live.decide.tuner import ERROR, FIRST_ROUNDS, NOTHING_LEFT, Arm, Tuner

STEP_S, LEAD, LEASE = 0.2, 5, 1 << 30
BLOCKS = BlockPlan(12, 2, 12, 4)


class Job:
    """A job whose mean step falls by ``gains`` of the candidates, and its tuner."""

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
        self.plan = TunePlan(seed, blocks or [BLOCKS] * len(gains))
        self.tuner = Tuner([f"c{k}" for k in range(len(gains))], self.plan, **options)
        self.random = np.random.default_rng(seed)
        self.words: list[Word] = []
        self.lost_s = self.time_s = 0.0
        """Against no pacing, while searching."""

    def run(self, most: int, until: Callable[[Tuner], bool] = lambda tuner: False) -> Tuner:
        for _ in range(most):
            if self.iteration % 10 == 0:
                word = self.tuner.decide(self.iteration, LEAD, self.lease)
                self.words += [word] if word is not None else []
                if until(self.tuner):
                    break
            turn = self.plan.turn(self.iteration)
            plain_s = STEP_S * math.exp(self.random.normal(0.0, self.noise))
            step_s = plain_s * (1.0 - (self.gains[turn.arm] if turn.arm is not None else 0.0))
            if self.tuner.phase in ("taste", "search"):
                self.lost_s += step_s - plain_s
                self.time_s += step_s
            self.step_s += step_s
            self.iteration += 1
            if self.iteration % self.ticks == 0:
                turn = self.plan.turn(self.iteration - 1, self.ticks)
                self.tuner.add(self.iteration - 1, turn, self.step_s, self.ticks)
                self.step_s = 0.0
        return self.tuner

    def decided(self) -> Tuner:
        return self.run(200_000, lambda tuner: tuner.searches > 0)


def word(number: int = 1, **changes: Any) -> Word:
    return Word(number, 0, LEASE, "search", (0, 1, 2), 0)._replace(**changes)


# ------------------------------------------------------------------------------------------------------- the plan


@given(
    seed=st.integers(0, 2**64 - 1),
    lengths=st.lists(st.sampled_from([8, 12, 20, 60]), min_size=1, max_size=5),
    begin=st.integers(0, 100),
)
def test_every_candidate_has_a_pair_in_every_round(seed: int, lengths: list[int], begin: int) -> None:
    plan = TunePlan(seed, [BlockPlan(length, length // 3, 0, 4) for length in lengths])
    arms = tuple(range(len(lengths)))
    plan.hear(word(arms=arms, begin=begin))
    assert plan.turn(begin - 1) == Turn(None)
    cycle, firsts = plan.round_iterations(arms), dict.fromkeys(arms, 0)
    for number in range(2):
        turns = [plan.turn(begin + number * cycle + i) for i in range(cycle)]
        for arm, length in enumerate(lengths):
            mine = [turn for turn in turns if turn.pair == (begin, number, arm)]
            assert [turn.arm for turn in mine].count(arm) == length == len(mine) - length
            assert [turn.counted for turn in mine] == 2 * [i >= length // 3 for i in range(length)]
            firsts[arm] += mine[0].arm == arm
        for at, turn in enumerate(turns[1:], 1):
            ends = turn.pair != turns[at - 1].pair
            assert (plan.pair_end(begin + number * cycle + at) == begin + number * cycle + at) == ends
    assert set(firsts.values()) == {1}


def test_ranks_that_heard_the_same_agree_and_a_missing_word_means_none() -> None:
    rank0, rank1 = (TunePlan(7, [BLOCKS] * 3) for _ in range(2))
    rank0.hear(word(until_iteration=500))
    assert all(rank1.turn(i) == Turn(None) for i in range(600))  # it has heard nothing
    rank1.hear(word(until_iteration=500))
    assert [rank0.turn(i) for i in range(600)] == [rank1.turn(i) for i in range(600)]
    assert {rank0.turn(i).arm for i in range(500)} == {None, 0, 1, 2}
    assert {rank0.turn(i) for i in range(500, 600)} == {Turn(None)}
    longer = word(2, until_iteration=900)
    before = [rank0.turn(i) for i in range(500)]
    rank0.hear(longer)
    assert [rank0.turn(i) for i in range(500)] == before  # to prolong changes nothing that was said
    assert {rank0.turn(i).arm for i in range(500, 900)} == {None, 0, 1, 2}
    rank0.hear(word(1, phase="none", arms=()))  # an old word
    assert rank0.words[-1] == longer


def test_a_word_takes_over_at_its_iteration() -> None:
    plan = TunePlan(7, [BLOCKS] * 3)
    plan.hear(word())
    plan.hear(word(2, from_iteration=240, begin=240, phase="deployed", arms=(2,)))
    assert {plan.turn(i).arm for i in range(240)} == {None, 0, 1, 2}
    deployed = [plan.turn(i).arm for i in range(240, 240 + 50 * 12)]
    assert set(deployed) == {None, 2}
    assert deployed.count(None) <= 0.2 * len(deployed)
    plan.hear(word(3, from_iteration=900, phase="none", arms=()))
    assert {plan.turn(i) for i in range(900, 1200)} == {Turn(None)}


def test_a_taste_is_one_round_of_short_blocks() -> None:
    plan = TunePlan(7, [BLOCKS] * 3)
    plan.hear(word(phase="taste", begin=10, from_iteration=10))
    turns = [plan.turn(i) for i in range(10, 60)]
    assert [t.pair is not None for t in turns] == 24 * [True] + 26 * [False]
    assert [t.arm for t in turns].count(1) == 4
    assert not any(t.counted for t in turns)


def test_words_travel_as_text() -> None:
    for one in (word(), word(9, phase="deployed", arms=(1,)), word(3, phase="none", arms=())):
        assert Word.parse(one.text(), 3) == one


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        '[1, 0, 9, "search", [3], 0]',
        '[1, 0, 9, "search", [1, 1], 0]',
        '[1, 0, 9, "deployed", [0, 1], 0]',
        '[1, 0, 9, "taste", [], 0]',
        '[1, 0, 9, "none", [0], 0]',
        '[1, 0, 9, "else", [0], 0]',
        '[1, -1, 9, "search", [0], 0]',
        '[true, 0, 9, "search", [0], 0]',
        "[" * 5000,
    ],
)
def test_what_is_no_word_is_none(text: str) -> None:
    assert Word.parse(text, 3) is None


# ------------------------------------------------------------------------------------------------------ the tuner


@pytest.mark.parametrize("best", [1])
def test_the_best_candidate_wins_and_is_deployed(best: int) -> None:
    gains = [0.02, 0.01, -0.03]
    gains[best] = 0.12
    job = Job(gains, seed=best)
    tuner = job.decided()
    assert tuner.winner == best
    assert (job.words[-1].phase, job.words[-1].arms) == ("deployed", (best,))
    assert tuner.arms[best].gain is not None
    assert 0.12 in tuner.arms[best].gain
    assert all(arm.dropped for k, arm in enumerate(tuner.arms) if k != best)
    assert f"winner: c{best} helps by 1" in tuner.text(STEP_S)


@pytest.mark.parametrize("ticks", [5])
def test_a_search_among_steps_of_several_iterations_ends_likewise(ticks: int) -> None:
    job = Job((0.0, 0.1), noise=0.01, blocks=[BlockPlan(24, 8, 24, 12)] * 2, ticks=ticks)
    job.run(20_000, lambda tuner: tuner.winner is not None)
    assert job.tuner.winner == 1
    assert job.tuner.arms[1].value == pytest.approx(0.1, abs=0.02)
    assert job.tuner.searched_s == pytest.approx(0.2 * job.tuner._iterations, rel=0.1)


def test_where_nothing_helps_none_is_deployed_and_the_next_search_waits_longer_each_time() -> None:
    job = Job([0.0, -0.01, 0.002], noise=0.01)
    first = job.decided()
    assert first.winner is None
    assert first.phase == "none"
    assert "winner: none" in first.text(STEP_S)
    ends = [job.iteration]
    for searches in (2, 3):
        job.run(200_000, lambda tuner, searches=searches: tuner.searches == searches)
        ends.append(job.iteration)
    pauses = [w.from_iteration for w in job.words if w.phase == "search" and len(w.arms) == 3]
    waited = [begin - end for begin, end in zip(pauses[1:], ends, strict=False)]
    assert waited[1] > 1.1 * waited[0]


def test_a_candidate_that_surely_hurts_is_dropped_at_once_and_the_loss_stays_in_its_bound() -> None:
    for seed in range(3):
        job = Job([0.0, -0.3, 0.05], seed=seed, noise=0.01)
        tuner = job.run(100_000, lambda tuner: bool(tuner.arms[1].dropped))
        assert tuner.arms[1].dropped
        assert tuner.arms[1].pairs <= 1
        job.run(100_000, lambda tuner: tuner.searches > 0)
        assert tuner.winner == 2
        assert job.lost_s <= 0.01 * job.time_s


@pytest.mark.parametrize("hurts", [-0.02, -0.5])
def test_a_search_whose_candidates_all_hurt_ends_with_none_and_loses_little(hurts: float) -> None:
    """The bound is on the time of at least ``FIRST_ROUNDS``; what one round costs cannot be known before it."""
    for seed in range(3):
        job = Job([hurts, hurts, hurts, hurts], seed=seed, noise=0.01)
        assert job.decided().winner is None
        every = FIRST_ROUNDS * job.plan.round_iterations(range(4)) * STEP_S
        assert job.lost_s <= 0.01 * max(job.time_s, every) + 4 * 12 * STEP_S * -hurts
        job.run(100_000, lambda tuner: tuner.phase == "taste")
        assert job.lost_s <= 0.012 * job.iteration * STEP_S
    assert job.tuner.why == NOTHING_LEFT


def test_a_block_of_few_steps_does_not_hide_what_candidates_cost() -> None:
    """An evaluation left one step of a block, whose error is not known, and no loss was sure any more."""
    whole, short = (Job([-0.5, -0.5], noise=0.01) for _ in range(2))
    add, begin = short.tuner.add, short.plan.round_iterations((0, 1), taste=True) + LEAD

    def interrupted(iteration: int, turn: Turn, step_s: float, ticks: int) -> None:
        if turn.pair is None or iteration >= begin or turn.arm is None or iteration % 4 == 0:
            add(iteration, turn, step_s, ticks)

    short.tuner.add = interrupted  # type: ignore[method-assign]
    for job in (whole, short):
        assert job.decided().winner is None
    assert short.lost_s <= 5.0 * whole.lost_s
    assert len(short.words) <= len(whole.words) + 2


def test_a_word_that_was_not_sent_is_not_followed() -> None:
    job = Job([0.1, 0.0], noise=0.01)
    drafted = job.tuner.draft(0, LEAD, LEASE)
    assert drafted is not None
    assert not job.plan.words
    job.tuner.abandon()
    assert job.decided().winner == 0
    deployed = job.words[-1]
    job.gains = [-0.1, 0.0]
    while (drafted := job.tuner.draft(job.iteration, LEAD, LEASE)) is None or drafted.phase != "none":
        job.run(1)
    job.tuner.abandon()  # the end could not be said: the winner still paces, and its end is said again
    assert job.plan.words[-1] == deployed
    assert (job.tuner.winner, job.tuner.searches) == (0, 1)
    job.run(20)
    assert job.plan.words[-1].phase == "none"


def test_a_candidate_that_failed_is_in_no_later_search() -> None:
    """It would be a placebo: the rank on which it failed does not pace by it again."""
    job = Job([0.1, -0.02], noise=0.01)
    assert job.decided().winner == 0
    job.tuner.give_up(0, "policy c0 raised")
    job.run(200_000, lambda tuner: tuner.searches > 1 and tuner.phase == "none")
    first_end = next(n for n, word in enumerate(job.words) if word.phase == "none")
    later = [word for word in job.words[first_end:] if word.phase in ("taste", "search")]
    assert {arm for word in later for arm in word.arms} == {1}
    assert job.tuner.winner is None
    alone = Job([0.1], noise=0.01)
    alone.run(50)
    alone.tuner.give_up(0, "policy c0 raised")
    alone.run(100_000)
    assert sum(word.phase == "taste" for word in alone.words) == 1


def test_a_winner_that_stops_paying_is_rolled_back_and_a_later_search_finds_the_new_best() -> None:
    job = Job([0.1, 0.0], noise=0.01)
    assert job.decided().winner == 0
    job.gains = [-0.1, 0.1]
    job.run(100_000, lambda tuner: tuner.phase == "none")
    assert job.tuner.winner is None
    assert "c0 hurts" in job.tuner.why
    job.run(100_000, lambda tuner: tuner.phase == "deployed")
    assert job.tuner.winner == 1


def test_a_search_without_a_verdict_ends() -> None:
    job = Job([0.02, 0.0], noise=0.5, most_pairs=8)
    tuner = job.decided()
    assert tuner.winner is None
    assert "after 8 pairs no candidate surely helps" in tuner.why


def test_a_deployed_candidate_that_fails_is_rolled_back() -> None:
    job = Job([0.1, 0.0], noise=0.01)
    assert job.decided().winner == 0
    job.tuner.give_up(0, "policy c0 raised")
    job.run(1000, lambda tuner: tuner.phase == "none")
    assert job.tuner.why == "policy c0 raised"


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
        winner = Job(gains, seed=seed, noise=0.05, most_pairs=32).decided().winner
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

    monkeypatch.setattr("paceenv.live.decide.tuner.student_t_quantile", quantile)
    one, other = Arm("one", BLOCKS), Arm("other", BLOCKS)
    one.seen = other.seen = (0.0, 1e-4, 8)
    for one.evaluations, other.evaluations in ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3), (4, 4)):
        one.better_by(other, 0.05)
    assert len(set(spent)) == len(spent) == 7
    assert sum(spent) <= 0.05
