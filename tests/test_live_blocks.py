"""Who paces in which iteration: blocks with and without pacing in modes canary and active, alike on all ranks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceenv.live.decide.blocks import ACTIVE, CANARY, BlockPlan, Plan, shared_seed

PLANS = (BlockPlan(60, 20, 40), BlockPlan(240, 80, 340), BlockPlan(12, 4, 0))
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


@given(seed=SEEDS, begin=st.integers(0, 90), every=st.sampled_from([CANARY, ACTIVE]))
def test_every_candidate_has_whole_pairs_in_blocks_of_its_own_length_in_every_round(
    seed: int, begin: int, every: int
) -> None:
    plan = Plan(seed, PLANS, begin=begin, every=every)
    turns = [plan.turn(i) for i in range(plan.after(4))]
    assert {turn.arm for turn in turns[:begin]} <= {None}
    assert not any(turn.pair for turn in turns[: plan.after(0)])
    for k, one in enumerate(PLANS):  # before its first pair the memory of each is full, in one stretch
        warm = [turn.arm == k for turn in turns[: plan.after(0)]]
        assert sum(warm) >= one.warm_iterations
        assert sum(a != b for a, b in itertools.pairwise(warm)) <= 2
        firsts = []
        for number in range(4):
            mine = [turn for turn in turns if turn.pair == (number, k)]
            assert [turn.arm for turn in mine].count(k) == one.block_iterations == len(mine) / 2
            assert [turn.counted for turn in mine] == 2 * [
                i >= one.settle_iterations for i in range(one.block_iterations)
            ]
            firsts.append(mine[0].arm == k)
        assert firsts[0] != firsts[1]
        assert firsts[2] != firsts[3]  # a steady trend cancels
        length = one.block_iterations
        paced = sum(turn.arm == k for turn in turns[plan.after(0) :])
        assert paced == 4 * length * (every - 1)


def test_the_order_is_drawn_anew_for_each_round_and_seed() -> None:
    def order(seed: int, number: int) -> tuple[int, ...]:
        plan = Plan(seed, PLANS[::2] * 2)
        pairs = [plan.turn(i).pair for i in range(plan.after(number), plan.after(number + 1))]
        return tuple(k for k, _ in itertools.groupby(pair[1] for pair in pairs if pair))

    assert len({order(seed, number) for seed in range(20) for number in range(3)}) > 15
    assert order(5, 1) == order(5, 1)
