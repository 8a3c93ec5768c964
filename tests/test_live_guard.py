"""The guard: whatever a policy returns, a delay is a number within every limit; a policy that fails is let go."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core import pacing, signals
from paceenv.core.limits import Limits
from paceenv.live.decide.guard import MAX_THRESHOLD, QUIET_AFTER_MARK, Guard, GuardedPolicy, PolicyFault
from paceenv.policies.base import Policy

ANY = st.floats(allow_nan=True, allow_infinity=True)
OPEN = {"quiet_first": 0, "budget_s_per_minute": 60.0}


def _allowed_s(guard: Guard, asked_s: float, **of: Any) -> float:
    return guard.allowed_s(asked_s, **({"iteration": 1000, "now_s": 0.0, "step_s": 1.0, "slack_s": None} | of))


@given(
    asked=ANY, step=ANY, slack=st.none() | ANY, now=st.lists(ANY, max_size=5), slept=ANY, iteration=st.integers(0, 99)
)
def test_an_allowed_delay_is_within_every_limit(
    asked: float, step: float, slack: float | None, now: list[float], slept: float, iteration: int
) -> None:
    limits = Limits()
    guard = Guard(limits)
    for now_s in [*now, 0.0]:
        delay_s = guard.allowed_s(asked, iteration=iteration, now_s=now_s, step_s=step, slack_s=slack)
        assert math.isfinite(delay_s)
        assert 0.0 <= delay_s <= limits.cap_s
        if delay_s > 0.0:
            assert delay_s <= min(asked, limits.cap_share * step)
            assert slack is None or delay_s <= pacing.SLACK_GAIN * slack
            assert iteration >= limits.quiet_first
        guard.taken(slept, now_s)


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 1.0)), min_size=1, max_size=120),
    budget_s=st.floats(0.1, 60.0),
)
def test_no_minute_sees_more_than_its_budget(steps: list[tuple[float, float]], budget_s: float) -> None:
    guard, now_s, taken = Guard(Limits(cap_s=1.0, cap_share=1.0, budget_s_per_minute=budget_s, quiet_first=0)), 7.0, []
    for gap_s, asked_s in steps:
        now_s += gap_s
        delay_s = _allowed_s(guard, asked_s, now_s=now_s)
        now_s += delay_s
        guard.taken(delay_s, now_s)
        taken.append((now_s, delay_s))
    for end_s, _ in taken:
        assert sum(d for t, d in taken if end_s - 60.0 < t <= end_s) <= budget_s * (1 + 1e-9) + 1e-9


@given(jumps=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_a_clock_that_steps_buys_no_more_than_a_burst(jumps: list[float]) -> None:
    guard, now_s = Guard(Limits(cap_s=1.0, cap_share=1.0, budget_s_per_minute=5.0, quiet_first=0)), 0.0
    for jump_s in jumps:
        now_s += jump_s
        delay_s = _allowed_s(guard, 1.0, now_s=now_s)
        assert 0.0 <= delay_s <= guard.limits.burst_s
        guard.taken(delay_s, now_s)
        assert _allowed_s(guard, 1.0, now_s=now_s - 1e6) <= 1e-9  # what is spent stays spent when the clock goes back
        now_s -= 1e6


def test_the_tightest_limit_decides_and_is_counted() -> None:
    guard = Guard(Limits(cap_s=0.05, cap_share=0.1, **OPEN))
    assert _allowed_s(guard, 0.03) == 0.03
    assert _allowed_s(guard, 1.0) == 0.05
    assert _allowed_s(guard, 1.0, step_s=0.2) == pytest.approx(0.02)
    assert _allowed_s(guard, 1.0, slack_s=0.01) == pytest.approx(0.7 * 0.01)
    assert _allowed_s(guard, 1.0, slack_s=0.0) == 0.0
    assert guard.cut == {"cap": 1, "share": 1, "slack": 2}
    assert guard.allowed_hold_s(0.03, iteration=5, step_s=0.1) == pytest.approx(0.01), "no rank stands still: no slack"
    assert guard.allowed_hold_s(0.03, iteration=5, step_s=math.nan) == 0.0


def test_a_stop_in_a_delay_is_a_debt_with_an_end() -> None:
    guard = Guard(Limits(cap_s=0.1, cap_share=1.0, quiet_first=0))
    guard.taken(3600.0, 3600.0)
    assert _allowed_s(guard, 0.1, now_s=3601.0) == 0.0
    assert _allowed_s(guard, 0.1, now_s=3600.0 + 130.0) == 0.1


def test_there_is_no_delay_in_and_shortly_after_what_is_marked() -> None:
    guard = Guard(Limits(**OPEN))
    delays = []
    for i in range(20):
        if i in (2, 3, 13):
            guard.quiet(i)
        delays.append(_allowed_s(guard, 0.01, iteration=i))
    quiet = 1 + QUIET_AFTER_MARK
    assert [d > 0.0 for d in delays] == [True] * 2 + [False] * (1 + quiet) + [True] * 4 + [False] * quiet + [True]


class Scripted(Policy):
    """Returns or raises whatever the test says."""

    name = "scripted"

    def __init__(self, answer: Callable[[np.ndarray], Any]) -> None:
        self._answer, self.calls = answer, 0

    def act(self, signals_BO: np.ndarray) -> np.ndarray:
        self.calls += 1
        answer: np.ndarray = self._answer(signals_BO)
        return answer


def _view(value: float = 0.0) -> np.ndarray:
    return np.full((1, signals.SIGNALS), value, np.float32)


def _raise(error: BaseException) -> Any:
    raise error


def _with(value: Any, index: int = pacing.WINDOW) -> np.ndarray:
    settings = pacing.off(1)
    settings[0, 0, index] = value
    return settings


FAULTS: dict[str, Callable[[np.ndarray], Any]] = {
    "raises": lambda _: _raise(ValueError("of two\nlines")),
    "exits": lambda _: _raise(SystemExit(3)),
    "shape": lambda _: np.zeros((1, 2)),
    "text": lambda _: np.full((1, len(pacing.MECHANISMS), 2), "0.1"),
    "complex": lambda _: pacing.off(1) + 1j,
    "nan window": lambda _: _with(math.nan),
    "huge window": lambda _: _with(1.5),
    "negative window": lambda _: _with(-1e-9),
    "huge threshold": lambda _: _with(MAX_THRESHOLD * 2, pacing.THRESHOLD),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_policy_that_fails_is_let_go_with_a_reason(fault: str) -> None:
    inner = Scripted(FAULTS[fault])
    policy = GuardedPolicy(inner)
    with pytest.raises(PolicyFault, match=r"policy scripted (raised|returned)") as first:
        policy.act(_view())
    with pytest.raises(PolicyFault) as second:
        policy.act(_view())
    assert str(first.value) == str(second.value)
    assert "\n" not in str(first.value)
    assert inner.calls == 1


def test_an_interrupt_of_the_user_is_not_the_policy_s_fault() -> None:
    with pytest.raises(KeyboardInterrupt):
        GuardedPolicy(Scripted(lambda _: _raise(KeyboardInterrupt()))).act(_view())


class Clock:
    """A clock that a policy moves by the seconds it takes, one after the other."""

    def __init__(self, *took_s: float) -> None:
        self._took_s, self.now_s = iter(took_s), 0.0

    def __call__(self) -> float:
        return self.now_s

    def act(self, _: np.ndarray) -> np.ndarray:
        self.now_s += next(self._took_s)
        return pacing.off(1)


@pytest.mark.parametrize(
    ("took_s", "calls"), [((1.0,), 1), ((0.03, 0.03, 0.03), 3), ((0.03, 0.03, 0.001, 0.03, 0.21), 5)]
)
def test_a_policy_that_takes_too_long_is_let_go(took_s: tuple[float, ...], calls: int) -> None:
    clock = Clock(*took_s)
    policy = GuardedPolicy(Scripted(clock.act), limit_s=0.02, clock=clock)
    for _ in range(calls - 1):
        policy.act(_view())
    with pytest.raises(PolicyFault, match=r"took \d+ ms to decide; allowed: 20 ms"):
        policy.act(_view())
