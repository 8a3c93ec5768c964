"""Who paces in which iteration: blocks with and without pacing in modes canary, active and tune, alike on all ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.live.decide.blocks import EVERY, BlockPlan, Phase, Plan, Turn, Word, shared_seed

LEASE = 1 << 30
BLOCKS = BlockPlan(12, 2, 12, 4)
PLANS = (BlockPlan(60, 20, 40, 40), BlockPlan(240, 80, 340, 40), BlockPlan(12, 4, 0, 12))
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
SEEDS = st.integers(0, 2**64 - 1)


def test_ranks_of_a_job_share_a_seed_and_other_jobs_have_another() -> None:
    seed = shared_seed(TORCHRUN)
    for key, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("TORCHELASTIC_RESTART_COUNT", "2"), ("HOSTNAME", "b")):
        assert shared_seed(TORCHRUN | {key: value}) == seed
    others = [TORCHRUN | x for x in ({"MASTER_PORT": "1"}, {"MASTER_ADDR": "node9"}, {"TORCHELASTIC_RUN_ID": "a"})]
    assert len({seed, *map(shared_seed, others)}) == 4
    named = TORCHRUN | {"SLURM_JOB_ID": "7"}
    assert shared_seed(named) == shared_seed(named | {"MASTER_ADDR": "localhost"})  # as rank 0 may know itself
    assert 0 <= shared_seed({}) < 2**64


@given(seed=SEEDS, begin=st.integers(0, 90), phase=st.sampled_from(["canary", "deployed"]))
def test_every_candidate_has_whole_pairs_in_blocks_of_its_own_length_in_every_round(
    seed: int, begin: int, phase: Phase
) -> None:
    plan = Plan.fixed(seed, PLANS, begin=begin, phase=phase)
    turns = [plan.turn(i) for i in range(plan.after(4))]
    assert {turn.arm for turn in turns[:begin]} <= {None}
    assert not any(turn.pair for turn in turns[: plan.after(0)])
    for k, one in enumerate(PLANS):  # before its first pair the memory of each is full, in one stretch
        warm = [turn.arm == k for turn in turns[: plan.after(0)]]
        assert sum(warm) >= one.warm_iterations
        assert sum(a != b for a, b in itertools.pairwise(warm)) <= 2
        firsts = []
        for number in range(4):
            mine = [turn for turn in turns if turn.pair == (begin, number, k)]
            assert [turn.arm for turn in mine].count(k) == one.block_iterations == len(mine) / 2
            assert [turn.counted for turn in mine] == 2 * [
                i >= one.settle_iterations for i in range(one.block_iterations)
            ]
            firsts.append(mine[0].arm == k)
        assert firsts[0] != firsts[1]
        assert firsts[2] != firsts[3]  # a steady trend cancels
        length = one.block_iterations
        paced = sum(turn.arm == k for turn in turns[plan.after(0) :])
        assert paced == 4 * length * (EVERY[phase] - 1)


def test_the_order_is_drawn_anew_for_each_round_and_seed() -> None:
    def order(seed: int, number: int) -> tuple[int, ...]:
        plan = Plan.fixed(seed, PLANS[::2] * 2)
        pairs = [plan.turn(i).pair for i in range(plan.after(number), plan.after(number + 1))]
        return tuple(k for k, _ in itertools.groupby(pair[2] for pair in pairs if pair))

    assert len({order(seed, number) for seed in range(20) for number in range(3)}) > 15
    assert order(5, 1) == order(5, 1)


def word(number: int = 1, phase: Phase = "search", arms: tuple[int, ...] = (0, 1, 2), begin: int = 0) -> Word:
    return Word(number, begin, LEASE, phase, arms, begin)


@given(seed=SEEDS, lengths=st.lists(st.sampled_from([8, 12, 20, 60]), min_size=1, max_size=5))
def test_a_search_is_asked_where_its_pairs_end(seed: int, lengths: list[int]) -> None:
    plan, arms, begin = Plan(seed, [BlockPlan(x, x // 3, 0, 4) for x in lengths]), tuple(range(len(lengths))), 30
    plan.hear(word(arms=arms, begin=begin))
    assert plan.turn(begin - 1) == Turn(None)
    turns = [plan.turn(begin + i) for i in range(2 * plan.round_iterations(arms))]
    assert {turn.pair for turn in turns} == {(begin, number, arm) for number in range(2) for arm in arms}
    for at, turn in enumerate(turns[1:], 1):
        assert (plan.pair_end(begin + at) == begin + at) == (turn.pair != turns[at - 1].pair)


def test_ranks_that_heard_the_same_agree_and_a_missing_word_means_none() -> None:
    rank0, rank1 = (Plan(7, [BLOCKS] * 3) for _ in range(2))
    said = word()._replace(until_iteration=500)
    rank0.hear(said)
    assert all(rank1.turn(i) == Turn(None) for i in range(600))  # it has heard nothing
    rank1.hear(said)
    assert [rank0.turn(i) for i in range(600)] == [rank1.turn(i) for i in range(600)]
    assert {rank0.turn(i).arm for i in range(500)} == {None, 0, 1, 2}
    assert {rank0.turn(i) for i in range(500, 600)} == {Turn(None)}
    longer = word(2)._replace(until_iteration=900)
    before = [rank0.turn(i) for i in range(500)]
    rank0.hear(longer)
    assert [rank0.turn(i) for i in range(500)] == before  # to prolong changes nothing that was said
    assert {rank0.turn(i).arm for i in range(500, 900)} == {None, 0, 1, 2}
    rank0.hear(word(1, "none", ()))  # an old word
    assert rank0.words[-1] == longer


def test_a_word_takes_over_at_its_iteration() -> None:
    plan = Plan(7, [BLOCKS] * 3)
    plan.hear(word())
    plan.hear(word(2, "deployed", (2,), begin=240))
    assert {plan.turn(i).arm for i in range(240)} == {None, 0, 1, 2}
    deployed = [plan.turn(i).arm for i in range(240, 240 + 50 * 12)]
    assert set(deployed) == {None, 2}
    assert deployed.count(None) <= 0.2 * len(deployed)
    plan.hear(word(3, "none", (), begin=900))
    assert {plan.turn(i) for i in range(900, 1200)} == {Turn(None)}


def test_a_taste_is_one_round_of_short_blocks() -> None:
    plan = Plan(7, [BLOCKS] * 3)
    plan.hear(word(phase="taste", begin=10))
    turns = [plan.turn(i) for i in range(10, 60)]
    assert [t.pair is not None for t in turns] == 24 * [True] + 26 * [False]
    assert [t.arm for t in turns].count(1) == 4
    assert not any(t.counted for t in turns)


def test_words_travel_as_text() -> None:
    for one in (word(), word(9, "deployed", (1,)), word(3, "none", ())):
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
        '[1, 0, 9, "canary", [0], 0]',
        '[1, -1, 9, "search", [0], 0]',
        '[true, 0, 9, "search", [0], 0]',
        "[" * 5000,
    ],
)
def test_what_is_no_word_is_none(text: str) -> None:
    assert Word.parse(text, 3) is None
