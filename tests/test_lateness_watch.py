"""The watch of ranks step by step: known late ranks, invariances, and the stated rate of false alarms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceenv.core.errors import InputError
from paceenv.core.lateness import watch
from paceenv.core.lateness.common_place import HOST, in_common
from paceenv.core.lateness.watch import Findings, find_late_ranks, lateness_of

Array = np.ndarray[Any, Any]


def steps(count: int, ranks: int, cv: float, seed: int = 0) -> Array:
    """Work of equal ranks that all vary, and that share a variation of 5 %, ``(count, ranks)``."""
    rng = np.random.default_rng(seed)
    return (1.0 + cv * rng.normal(size=(count, ranks))) * (1.0 + 0.05 * rng.normal(size=(count, 1)))


def watched(own_TR: Array, alike: Any = None) -> Findings:
    return find_late_ranks(own_TR, np.median(own_TR, axis=1), alike=alike)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_lateness_is_the_difference_to_the_median_of_the_others(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    own_TR = np.concatenate([rng.normal(size=(20, ranks)), rng.integers(0, 2, (20, ranks)), np.full((1, ranks), 3.0)])
    own_TR[:, -1] = own_TR[:, 0]
    own_TR[10:30:2, :2] = math.nan
    for own_R, late_R in zip(own_TR, lateness_of(own_TR), strict=True):
        for rank in range(ranks):
            others = np.delete(own_R, rank)
            known = others[~np.isnan(others)]
            np.testing.assert_allclose(late_R[rank], own_R[rank] - np.median(known) if len(known) else math.nan)


@pytest.mark.parametrize(("ranks", "slow", "cv"), [(2, 0.5, 0.1), (8, 0.2, 0.05), (64, 0.1, 0.02)])
def test_a_rank_that_turns_slow_is_named_with_its_begin_and_amount(ranks: int, slow: float, cv: float) -> None:
    own_TR = steps(400, ranks, cv)
    own_TR[200:, 1] *= 1.0 + slow
    found = watched(own_TR)
    named = found.named
    assert [span.rank for span in named] == [1]
    assert abs(named[0].first - 200) <= 3
    [late] = found.late
    assert late.kind == watch.SINCE
    assert abs(late.late_s - slow) <= 4.0 * late.error_s + 0.005
    assert found.pattern == watch.SINCE


@pytest.mark.parametrize(
    ("slowed", "late", "past"),
    [
        ([(0, 960, 6, 1.1)], {6: (watch.CHRONIC, [0])}, {}),
        ([(300, 340, 2, 1.4)], {}, {2: (watch.ONCE, [300])}),
        ([(300, 301, 5, 21.0)], {}, {5: (watch.ONCE, [300])}),
        ([(k, k + 60, 4, 1.4) for k in (100, 400, 700)], {}, {4: (watch.SOMETIMES, [100, 400, 700])}),
    ],
    ids=["from the first step on", "once", "one huge step", "now and then"],
)
def test_kinds_of_lateness(slowed: list[tuple[int, int, int, float]], late: Any, past: Any) -> None:
    own_TR = steps(960, 8, 0.02)
    for first, end, rank, times in slowed:
        own_TR[first:end, rank] *= times
    found = watched(own_TR)
    assert (found.pattern == watch.CHRONIC) == bool(late)
    for rows, expected in ((found.late, late), (found.past, past)):
        assert {row.rank: row.kind for row in rows} == {rank: kind for rank, (kind, _) in expected.items()}
        for row in rows:
            assert [span.first for span in row.spans] == pytest.approx(expected[row.rank][1], abs=3)
    for row in found.past:
        assert row.spans[-1].last == pytest.approx(slowed[-1][1] - 1, abs=3)
        assert row.late_s == pytest.approx(slowed[-1][3] - 1.0, rel=0.1)
    assert {span.rank for span in found.named} == ({slowed[0][2]} if slowed[0][3] < 20.0 else set())


def test_ranks_that_are_late_one_after_the_other_take_turns() -> None:
    own_TR = steps(960, 4, 0.03)
    for t in range(960):
        own_TR[t, t // 60 % 4] *= 1.5
    found = watched(own_TR)
    assert found.pattern == watch.IN_TURNS
    assert {row.rank for row in (*found.late, *found.past)} == {0, 1, 2, 3}


def test_variation_of_all_ranks_names_nobody() -> None:
    found = watched(steps(600, 16, 0.15))
    assert found.named == ()
    assert found.pattern == watch.VARIATION
    assert found.lost_s == pytest.approx(0.15 * 1.77, rel=0.15)  # mean of the largest of 16 normal variables


def test_ranks_are_compared_with_their_like_only() -> None:
    own_TR = steps(200, 8, 0.02)
    own_TR[:, 4:] *= 3.0
    own_TR[:, 7] *= 1.2
    alike = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {row.rank for row in watched(own_TR, alike=alike).late} == {7}
    assert {span.rank for span in watched(own_TR, alike=[[0, 1, 2, 3], [4]]).named} == set()


NOISE: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "heavy tails": lambda rng, shape: rng.standard_t(3, size=shape) / math.sqrt(3.0),
    "stalls": lambda rng, shape: rng.normal(size=shape) + (rng.random(shape) < 0.003) * rng.exponential(30.0, shape),
    "autocorrelated": lambda rng, shape: _autocorrelated(rng, shape, 0.6),
    "unequal": lambda rng, shape: rng.normal(size=shape) * np.linspace(1.0, 4.0, shape[1]),
}


def _autocorrelated(rng: np.random.Generator, shape: tuple[int, int], phi: float) -> Array:
    noise = rng.normal(size=shape)
    for t in range(1, shape[0]):
        noise[t] = phi * noise[t - 1] + math.sqrt(1.0 - phi * phi) * noise[t]
    return noise


@pytest.mark.parametrize("kind", NOISE)
def test_false_alarms_stay_below_the_stated_rate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stated: one in 200 steps, with no smallest difference. Two jobs of 800 steps may have 8, and by chance 15."""
    monkeypatch.setattr(watch, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(watch, "STEPS_PER_FALSE_ALARM", 200.0)
    alarms = 0
    for seed in range(2):
        noise_TR = NOISE[kind](np.random.default_rng(seed), (800, 6))
        alarms += len(watched(10.0 + 0.5 * noise_TR).named)
    assert alarms <= 15


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(6)), st.integers(-8, 8), st.integers(0, 50))
def test_order_scale_and_what_all_share_do_not_matter(order: list[int], power: int, seed: int) -> None:
    own_TR = steps(120, 6, 0.04, seed)
    own_TR[60:, 2] *= 1.35
    step_s = 2.0

    def story(table_TR: Array, unit: float) -> list[tuple[int, int, int]]:
        named = find_late_ranks(table_TR, unit * step_s).named
        return sorted((span.rank, span.first, span.named) for span in named)

    first = story(own_TR, 1.0)
    assert [rank for rank, _, _ in first] == [2]
    assert story(own_TR[:, order], 1.0) == [(order.index(rank), since, named) for rank, since, named in first]
    assert story(2.0**power * own_TR, 2.0**power) == first
    assert story(own_TR + 0.25 * np.arange(120)[:, None], 1.0) == first


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(
        st.lists(
            st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, 1e300]), min_size=5, max_size=5
        ),
        min_size=1,
        max_size=40,
    ),
)
def test_no_step_breaks_the_watch(ranks: int, table: list[list[float]]) -> None:
    found = find_late_ranks([row[:ranks] for row in table], [row[-1] for row in table])
    assert all(0 <= row.rank < ranks for row in (*found.late, *found.past))


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_least_lateness_that_is_named_is_named(ranks: int) -> None:
    own_TR = steps(100, ranks, 0.05)
    least_s = float(watched(own_TR).least_s_R[1])
    for share, named in ((1.3, {1}), (0.5, set[int]())):
        late_TR = own_TR + share * least_s * (np.arange(ranks) == 1)
        assert {late.rank for late in find_late_ranks(late_TR, 1.0).late} == named


def test_iterations_may_have_gaps_but_must_ascend() -> None:
    own_TR = steps(60, 4, 0.02)
    own_TR[40:, 1] += 0.5
    assert find_late_ranks(own_TR, 1.0, 10 + 2 * np.arange(60)).named[0].first == 90
    for wrong in (np.zeros(60), np.arange(59)):
        with pytest.raises(InputError, match="iterations that ascend"):
            find_late_ranks(own_TR, 1.0, wrong)
    with pytest.raises(InputError, match="allowed: \\(steps, ranks\\)"):
        find_late_ranks(own_TR[0], 1.0)


RANKS = range(64)
HOSTS = {rank: f"node{rank // 8}" for rank in RANKS}


@pytest.mark.parametrize(
    ("late", "says"),
    [
        (range(8, 16), "all late ranks are on host node1: 8 of its 8 ranks"),
        ([8, 9, 10, 12, 13, 15], "all late ranks are on host node1: 6 of its 8 ranks"),
        ([*range(8), *range(24, 32)], "all late ranks are on hosts node0, node3: 16 of their 16 ranks"),
        ([3, 11, 19, 27, 35, 43, 51, 59], "all late ranks have local rank 3: 8 of its 8 ranks"),
        ([3, 11, 19, 35, 51], "all late ranks have local rank 3: 5 of its 8 ranks"),
        *((late, "") for late in ([], [5], [5, 40], [1, 9, 18, 40], range(64))),
    ],
)
def test_late_ranks_have_a_host_or_a_local_rank_in_common_or_nothing(late: list[int], says: str) -> None:
    assert in_common(late, RANKS, {HOST: HOSTS}) == says


def test_of_two_ranks_one_that_is_always_much_later_is_named_within_forty_rows() -> None:
    """Eight rows tell little of how long noise lasts; that must not price out a lateness of many deviations."""
    for seed in range(20):
        noise_TR = np.random.default_rng(seed).normal(size=(40, 2))
        for t in range(1, 40):
            noise_TR[t] += 0.5 * noise_TR[t - 1]
        own_TR = 1.0 + 0.01 * noise_TR + np.array([0.0, 0.5])
        assert [late.rank for late in find_late_ranks(own_TR, 1.5, steps_T=4.0).late] == [1], seed
