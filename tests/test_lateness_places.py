"""What late ranks have in common: the shortest description, and none where a list of ranks is as short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core.lateness.common_place import (
    HOST,
    NEIGHBOURS,
    RACK,
    REMAINDER,
    STAGE,
    CommonPlace,
    describe,
    find_common_place,
)

RANKS = range(64)
PLACES = {HOST: {rank: f"node{rank // 8}" for rank in RANKS}, RACK: {rank: f"rack{rank // 16}" for rank in RANKS}}


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        (range(8, 16), "all late ranks are on host node1: 8 of its 8 ranks"),
        ([8, 9, 10, 12, 13, 15], "all late ranks are on host node1: 6 of its 8 ranks"),
        (range(16, 32), "all late ranks are on rack rack1: 16 of its 16 ranks"),
        ([*range(8), *range(24, 32)], "all late ranks are on hosts node0, node3: 16 of their 16 ranks"),
        ([3, 11, 19, 27, 35, 43, 51, 59], "all late ranks have local rank 3, on 8 of 8 hosts"),
        ([3, 11, 19, 35, 51], "all late ranks have local rank 3, on 5 of 8 hosts"),
    ],
)
def test_hosts_racks_and_local_ranks_are_found(late: list[int], expected: str) -> None:
    found = find_common_place(late, RANKS, PLACES)
    assert found is not None
    assert describe(found) == expected


@pytest.mark.parametrize("late", [[], [5], [5, 40], [1, 9, 18, 40], range(64)])
def test_ranks_without_anything_in_common_are_just_ranks(late: list[int]) -> None:
    assert find_common_place(late, RANKS, PLACES) is None


def test_without_hosts_numbers_can_say_it() -> None:
    neighbours = find_common_place(range(8, 16), RANKS, {})
    assert neighbours == CommonPlace(NEIGHBOURS, (8, 15), 8, 8)
    assert describe(neighbours) == "the late ranks are neighbours: 8 to 15"
    every = find_common_place(range(3, 64, 8), RANKS, {})
    assert every == CommonPlace(REMAINDER, (8, 3), 8, 8)
    assert "remainder 3 modulo 8" in describe(every)


def test_a_stage_is_found_and_a_property_that_a_rank_lacks_is_left_out() -> None:
    stages = {rank: rank // 4 for rank in range(16)}
    found = find_common_place(range(4, 8), range(16), {HOST: {0: "a"}, STAGE: stages})
    assert found is not None
    assert (found.key, found.values) == (STAGE, (1,))
    assert describe(found) == "all late ranks have stage 1: 4 of its 4 ranks"


@given(st.sets(st.integers(0, 63), max_size=20))
def test_what_is_found_is_true(late: set[int]) -> None:
    found = find_common_place(late, RANKS, PLACES)
    if found is not None and found.key in PLACES:
        there = {rank for rank in RANKS if PLACES[found.key][rank] in found.values}
        assert late <= there
        assert (found.late, found.ranks) == (len(late), len(there))
