"""The hand-written policies, the look-ahead plan, and running them on simulated clusters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.policies import names, rules
from paceenv.policies.base import Policy
from paceenv.policies.clairvoyant import HORIZON, MECHANISMS, Clairvoyant, grid, settings_of
from paceenv.policies.rollout import run
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]
EVERY: dict[str, Callable[[], Policy]] = {"passive": rules.passive, "paper": rules.paper}
EVERY |= {"static": lambda: rules.Static({"phase_shift": (0.05, 0.3)}), "adaptive": rules.Adaptive}


def seen(**values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One row of signals, zero where not named."""
    row = np.zeros((1, signals.SIGNALS), np.float32)
    for name, value in values.items():
        row[0, signals.NAMES.index(name)] = value
    return row


@given(name=st.sampled_from(sorted(EVERY)), seed=st.integers(0, 1000), rows=st.integers(1, 5))
def test_settings_are_always_within_their_ranges(name: str, seed: int, rows: int) -> None:
    policy, rng = EVERY[name](), np.random.default_rng(seed)
    policy.reset(rows)
    for _ in range(20):
        decided = policy.act(rng.uniform(-1, 1, (rows, signals.SIGNALS)).astype(np.float32))
        assert decided.shape == (rows, len(pacing.MECHANISMS), 2)
        assert ((decided >= 0.0) & (decided <= 1.0)).all()


@pytest.mark.parametrize("settings", [{"magic": (0.1, 0.1)}, {"slack": (0.1, 1.5)}, {"slack": (math.nan, 0.1)}])
def test_static_refuses_bad_settings(settings: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(InputError, match=r"policy static: (mechanism|(threshold|window) of slack) = .*; allowed: "):
        rules.Static(settings)


def test_static_by_name_has_one_mechanism_or_several_at_once() -> None:
    def of(text: str) -> dict[str, list[float]]:
        policy = names.rule(text, ("phase_shift", 0.1, 0.2))
        assert policy is not None
        assert policy.name == text
        constant = policy.constant()
        assert constant is not None
        return {m: constant[i].tolist() for i, m in enumerate(pacing.MECHANISMS) if constant[i].any()}

    assert of("static") == {"phase_shift": [0.1, 0.2]}
    several = {"slack": [0.02, 0.3], "phase_shift": [0.05, 0.05], "stagger": [0.5, 0.4]}
    assert of("static:slack=0.02/0.3,phase_shift=0.05/0.05,stagger=0.5/0.4") == several


NO_MECHANISM = ("slack=0.02/0.3,slip=0.1/0.1", "slack=0.02/0.3,slack=0.1/0.1", "", "window=0.1")
NO_PAIR = ("slack=0.02", "slack=0.02/wide", "slack=0.02/1.5", "slack=nan/0.1")


@pytest.mark.parametrize("options", [*NO_MECHANISM, *NO_PAIR])
def test_static_by_name_refuses_what_is_no_mechanism_or_no_pair(options: str) -> None:
    allowed = "static:MECHANISM=THRESHOLD/WINDOW" if options in NO_MECHANISM else "threshold/window, both numbers from"
    with pytest.raises(InputError, match=f"policy static:{options}: .*; allowed: {allowed}"):
        names.rule(f"static:{options}")


BARRIER = {"wait_share": 0.5}
"""What a rank sees that waits in a barrier, its collective as fast as ever."""
NO_BARRIER = {
    "wait_share": signals.squash(0.2 * (1.0 - np.exp(-0.5)), 0.05),
    "comm_share": 0.2,
    "comm_inflation": 5 / 7,
}
"""The wait is what the collective takes beyond its baseline."""
BUSY_BARRIER = {
    "wait_share": signals.squash(0.37, 0.05),
    "comm_share": 165 / 348,
    "comm_inflation": signals.squash(np.log(165 / 105), 0.2),
}
"""Both at once: three of four early pairs of the testbed's ``unequal-slack`` on sockets, before any pacing."""


def adapting(step_s: Callable[[int, str], float], intervals: int, view: dict[str, float] | None = None) -> list[str]:
    """The mechanism an adaptive policy has on in each interval, in a job with mean steps ``step_s(t, mechanism)``."""
    policy, on, history, before_s = rules.Adaptive(), "", [], 0.0
    policy.reset(1)
    for t in range(intervals):
        mean_s = step_s(t, on)
        trend = np.log(mean_s / before_s) if before_s else 0.0
        decided = policy.act(seen(step_trend=signals.squash(trend, 0.05), **(view or BARRIER)))[0]
        assert tuple(decided[pacing.STAGGER]) == rules.Adaptive.STAGGER_SETTING, "armed: it holds and probes by itself"
        on = " ".join(
            name for name in ("slack", "phase_shift", "paper") if decided[pacing.MECHANISMS.index(name)].any()
        )
        history.append(on)
        before_s = mean_s
    return history


def test_adaptive_starts_with_slack_at_a_barrier_and_with_phase_shift_without() -> None:
    """Also where the collective is slow beside it: ranks that take different mechanisms keep them, and gain half."""
    views = (
        (BARRIER, "slack", "phase_shift"),
        (NO_BARRIER, "phase_shift", "slack"),
        (BUSY_BARRIER, "slack", "phase_shift"),
    )
    for view, first, second in views:
        history = adapting(lambda t, on: 1.02 if on else 1.0, 200, view)
        assert history[:2] == ["", ""], "the first level needs intervals without pacing"
        assert [on for on in dict.fromkeys(history) if on] == [first, second], "one at a time"


NOISE_T = np.exp(np.random.default_rng(0).normal(0.0, 0.03, 400))
StepTime = Callable[[int, str], float]


def pays(good: str, step_s: float = 0.9) -> StepTime:
    """A job in which one mechanism makes steps shorter and every other one longer."""
    return lambda t, on: step_s if on == good else 1.02 if on else 1.0


COURSES: dict[str, tuple[StepTime, dict[str, float], str, float]] = {
    "phase_shift pays behind a barrier": (pays("phase_shift"), BARRIER, "phase_shift", 0.9),
    "slack pays without a barrier": (pays("slack"), NO_BARRIER, "slack", 0.9),
    "nothing pays": (pays("nothing"), BARRIER, "", 0.8),
    "nothing does anything": (lambda t, on: 1.0, NO_BARRIER, "", 0.8),
    "steps grow": (lambda t, on: (0.9 if on == "slack" else 1.0) * 1.0002**t, BARRIER, "slack", 0.9),
    "steps grow, no barrier": (lambda t, on: (0.9 if on == "slack" else 1.0) * 1.0002**t, NO_BARRIER, "slack", 0.9),
    "noise": (lambda t, on: pays("slack", 0.93)(t, on) * NOISE_T[t], BARRIER, "slack", 0.7),
    "noise, no barrier": (lambda t, on: pays("phase_shift", 0.93)(t, on) * NOISE_T[t], NO_BARRIER, "phase_shift", 0.7),
    "it begins to pay": (lambda t, on: pays("phase_shift" if t > 99 else "x")(t, on), NO_BARRIER, "phase_shift", 0.9),
}
"""Step times by interval and mechanism, what a rank sees, what is on in the last intervals, and in which share."""


@pytest.mark.parametrize("name", COURSES)
def test_adaptive_holds_what_pays_and_backs_off_from_the_rest(name: str) -> None:
    step_s, view, on, least = COURSES[name]
    assert adapting(step_s, 400, view)[250:].count(on) > least * 150


def test_adaptive_ranks_come_into_step_whatever_they_took_for_first() -> None:
    """One of two ranks meets the barrier later; from then on both pause for their measurements together."""
    policy, before_s, on_TB = rules.Adaptive(), 1.0, []
    policy.reset(2)
    for t in range(400):
        mean_s = 0.8 if t and on_TB[-1].all() else 1.0
        trend = signals.squash(np.log(mean_s / before_s), 0.05)
        late = NO_BARRIER if t < 6 else BARRIER
        view = np.concatenate([seen(step_trend=trend, **BARRIER), seen(step_trend=trend, **late)])
        on_TB.append(policy.act(view)[:, pacing.SLACK].any(axis=1))
        before_s = mean_s
    assert on_TB[5].tolist() == [True, False]
    np.testing.assert_array_equal(*np.array(on_TB[200:]).T)
    assert np.mean(on_TB[200:]) > 0.9


@pytest.mark.parametrize(
    ("cluster", "static"),
    [("unequal-slack", rules.Static({"slack": (0.02, 0.4)})), ("two-jobs", rules.Static({"phase_shift": (0.05, 0.4)}))],
    ids=["unequal-slack", "two-jobs"],
)
def test_adaptive_keeps_most_of_the_gain_where_transfers_vary(cluster: str, static: Policy) -> None:
    some = load_cluster(cluster)
    some = some.model_copy(update={"noise": some.noise.model_copy(update={"transfer_cv": 0.03})})
    passive_s, static_s, adaptive_s = (
        run(policy, start(some, np.arange(32)), 2560).step_ET.mean()
        for policy in (rules.passive(), static, rules.Adaptive())
    )
    assert passive_s / adaptive_s - 1.0 > 0.65 * (passive_s / static_s - 1.0)


# Running policies


def test_the_first_interval_is_passive_and_passive_never_delays() -> None:
    some = load_cluster("two-jobs")
    runs = {name: run(make(), start(some, np.arange(3)), 300, interval_iterations=15) for name, make in EVERY.items()}
    for name in EVERY:
        np.testing.assert_array_equal(runs[name].step_ET[:, :15], runs["passive"].step_ET[:, :15])
    assert not runs["passive"].mean_delay_E.any()
    assert runs["static"].mean_delay_E.any()


# The look-ahead plan


def test_plan_is_the_best_candidate_on_the_noise_that_comes(simulator: Make) -> None:
    tenants = [{"compute_s": 0.8, "uplink_work_s": 0.4, "jitter_cv": 0.01, "ranks": 4}]
    sim = simulator(range(4), ranks=4, compute_s=0.8, uplink_work_s=0.4, jitter_cv=0.01, tenants=tenants)
    sim.run(sim.off(), 40)
    planned, iterations = Clairvoyant().plan(sim, 20), HORIZON * 20
    best_E = sim.fork(np.arange(4)).run(planned, iterations).mean(axis=1)
    for tried in settings_of(grid(MECHANISMS)):
        step_E = sim.fork(np.arange(4)).run(np.tile(tried, (4, 1, 1, 1)), iterations).mean(axis=1)
        assert (best_E <= step_E).all()
