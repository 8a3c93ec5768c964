"""Several candidates in the paired blocks of one run: whose turn it is, how they compare, and who stops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from test_live_control import STEP_S, Job

from paceenv.live.decide.canary import BlockPlan, Slot, block_plan
from paceenv.live.decide.contest import Comparisons, Contest
from paceenv.live.decide.live_policy import find_candidates, find_policy

PLANS = (BlockPlan(60, 20, 40, 40), BlockPlan(240, 80, 340, 40), BlockPlan(12, 4, 0, 12))


def _rows(contest: Contest, pairs: int) -> list[tuple[int, Slot]]:
    places = [contest.place(i) for i in range(contest.after(pairs))]
    return [(place.candidate, place.slot) for place in places]


@given(seed=st.integers(0, 2**64 - 1), first=st.integers(0, 90), every=st.sampled_from([2, 10]))
def test_a_contest_of_one_is_the_canary(seed: int, first: int, every: int) -> None:
    contest = Contest(seed, PLANS[:1], first_iteration=first, holdout_every=every)
    schedule = PLANS[0].schedule(seed, first_iteration=first, holdout_every=every)
    assert contest.after(3) == schedule.after(3)
    for i in range(schedule.after(3)):
        assert contest.place(i).slot == schedule.slot(i)


@given(seed=st.integers(0, 2**64 - 1), first=st.integers(0, 90))
def test_every_candidate_has_whole_pairs_in_blocks_of_its_own_length_in_every_round(seed: int, first: int) -> None:
    contest = Contest(seed, PLANS, first_iteration=first)
    rows = _rows(contest, 4)
    assert not any(slot.on or slot.counted for _, slot in rows[:first])
    compared = [(k, slot) for k, slot in rows if slot.pair >= 0]
    rounds = [list(group) for _, group in itertools.groupby(compared, key=lambda row: row[1].pair)]
    assert len(rounds) == 4
    for one in rounds:
        for k, plan in enumerate(PLANS):
            mine = [slot for candidate, slot in one if candidate == k]
            assert [sum(slot.on == on for slot in mine) for on in (False, True)] == [plan.block_iterations] * 2
            assert sum(slot.counted for slot in mine) == 2 * (plan.block_iterations - plan.settle_iterations)
        turns = [k for k, _ in itertools.groupby(k for k, _ in one)]
        assert sorted(turns) == [0, 1, 2]  # a pair is not torn apart
    for k, plan in enumerate(PLANS):  # before its first pair the memory of each is full
        warm = sum(slot.on for candidate, slot in rows if candidate == k and slot.pair < 0)
        assert warm >= plan.warm_iterations


def test_the_order_is_drawn_anew_for_each_round_and_seed() -> None:
    def order(seed: int, number: int) -> tuple[int, ...]:
        compared = [(k, slot.pair) for k, slot in _rows(Contest(seed, PLANS[::2] * 2), 3) if slot.pair == number]
        return tuple(k for k, _ in itertools.groupby(k for k, _ in compared))

    assert len({order(seed, number) for seed in range(20) for number in range(3)}) > 15
    assert order(5, 1) == order(5, 1)


def _compared(gains: tuple[float, ...], rounds: int, drift: float = 0.0) -> Comparisons:
    contest = Contest(3, [PLANS[0]] * len(gains))
    comparisons = Comparisons([f"p{k}" for k in range(len(gains))], contest, min_gain=0.01, memory_pairs=None)
    random = np.random.default_rng(0)
    for i in range(contest.after(rounds) + 1):
        k, _, slot = contest.place(i)
        step_s = STEP_S * (1.0 - gains[k] * slot.on) * math.exp(random.normal(0.0, 0.02) + drift * i)
        comparisons.add(i, step_s, 0.01 * slot.on)
    comparisons.final()
    return comparisons


def test_each_candidate_has_its_verdict_and_differences_have_students_interval() -> None:
    found = _compared((0.0, 0.2, 0.1), 8, drift=1e-5)
    assert [one.pairs for one in found.of] == [8, 8, 8]
    assert [one.verdict.kind for one in found.of][1:] == ["helps", "helps"]
    assert found.leader == 1
    assert found.verdict is found.of[1].verdict
    one = next(d for d in found.differences() if (d["name"], d["than"]) == ("p2", "p1"))
    by_round = [found.of[2].ratios[r] - found.of[1].ratios[r] for r in range(8)]
    wanted = stats.ttest_1samp(by_round, 0.0).confidence_interval(0.95)
    assert (one["low"], one["high"]) == pytest.approx((-math.expm1(wanted.high), -math.expm1(wanted.low)))
    assert one["low"] < 1.0 - 0.9 / 0.8 < one["high"] < 0.0
    assert found.as_dict()["candidates"][1]["name"] == "p1"
    assert len(found.as_dict()["differences"]) == 3
    assert _compared((0.1,), 4).as_dict()["differences"] == []


def _noisy(job: list[Job], effects: tuple[float, ...]) -> Callable[[float], float]:
    random = np.random.default_rng(3)

    def step_s(delay_s: float) -> float:
        place = job[0].control._contest.place(len(job[0].delays_s) - 1)
        return STEP_S * (1.0 + random.normal(0.0, 0.005)) + effects[place.candidate] * delay_s

    return step_s


def test_a_candidate_that_hurts_stops_and_the_others_go_on() -> None:
    holder: list[Job] = []
    named = find_candidates("static:stagger=0/0.4;static:stagger=0/0.3")
    job = Job(named, "canary", _noisy(holder, (2.0, -1.0)), seed=1)
    holder.append(job)
    contest = Contest(1, [block_plan([one.policy]) for one in named.candidates], first_iteration=50)
    job.run(contest.after(8))
    assert job.control.mode == "canary"
    assert job.control.comparisons.out.keys() == {0}
    assert "hurts" in job.control.comparisons.out[0]
    assert job.control.comparisons.of[1].verdict.kind == "helps"
    paced = [contest.place(i).candidate for i, delay_s in enumerate(job.delays_s) if delay_s and i > contest.after(6)]
    assert set(paced) == {1}
    verdict = job.control.verdict
    assert verdict is not None
    assert verdict.kind == "helps"


def test_one_candidate_is_the_policy_and_a_fault_in_one_is_a_fault() -> None:
    assert find_candidates("adaptive").candidates[0].source == find_policy("adaptive").source
    assert "no such file" in find_candidates("adaptive;nothing-like-this").fault
