"""The pacing rules and the action codec (contract 1)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core import pacing

anything = st.floats(allow_nan=True, allow_infinity=True)
seconds = st.floats(0.0, 10.0)


@given(a=anything, b=anything, c=anything, d=anything, threshold=anything, window=seconds)
def test_rules_never_leave_window(a: float, b: float, c: float, d: float, threshold: float, window: float) -> None:
    for delay in (
        pacing.slack_delay_s(a, b, c, threshold, window),
        pacing.phase_shift_delay_s(a, b, threshold, window),
        pacing.paper_delay_s(a, b, c, d, threshold, window),
    ):
        assert 0.0 <= delay <= window


@pytest.mark.parametrize(
    ("slack_s", "step_s", "threshold", "window_s", "expected_s"),
    [
        (0.2, 1.0, 0.1, 1.0, pacing.SLACK_GAIN * 0.2),
        (0.2, 1.0, 0.1, 0.05, 0.05),
        (0.2, 1.0, 0.2, 1.0, 0.0),
        (0.2, 4.0, 0.1, 1.0, 0.0),
    ],
    ids=["above threshold", "held by window", "at threshold", "below threshold"],
)
@pytest.mark.parametrize("before_s", [0.0, 0.9])
def test_slack_settles_at_its_gain_from_either_side(
    slack_s: float, step_s: float, threshold: float, window_s: float, expected_s: float, before_s: float
) -> None:
    delay_s, path = before_s, []
    for _ in range(3000):
        delay_s = pacing.slack_delay_s(slack_s, delay_s, step_s, threshold, window_s)
        path.append(delay_s)
    assert delay_s == pytest.approx(expected_s, abs=1e-9)
    assert path in (sorted(path), sorted(path, reverse=True)), "it approaches without overshoot"


def test_phase_shift_delays_by_the_inflation_in_seconds() -> None:
    assert pacing.phase_shift_delay_s(1.5, 1.0, 0.25, 9.0) == pacing.PHASE_SHIFT_GAIN * 0.5
    assert pacing.phase_shift_delay_s(1.5, 1.0, 0.25, 0.125) == 0.125
    assert pacing.phase_shift_delay_s(1.25, 1.0, 0.25, 1.0) == 0.0
    assert pacing.phase_shift_delay_s(1.5, math.inf, 0.0, 1.0) == 0.0, "no baseline yet"


def test_paper_rule_delays_early_ranks_where_waits_vary() -> None:
    early = pacing.paper_delay_s(wait_s=0.3, wait_mean_s=0.2, wait_sd_s=0.1, step_s=1.0, threshold=0.05, window_s=1.0)
    late = pacing.paper_delay_s(wait_s=0.1, wait_mean_s=0.2, wait_sd_s=0.1, step_s=1.0, threshold=0.05, window_s=1.0)
    calm = pacing.paper_delay_s(wait_s=0.3, wait_mean_s=0.2, wait_sd_s=0.04, step_s=1.0, threshold=0.05, window_s=1.0)
    assert (early, late, calm) == (0.2, 0.0, 0.0)


@pytest.mark.parametrize("mechanism", pacing.MECHANISMS)
def test_action_ends_decode_to_the_documented_ranges(mechanism: str) -> None:
    m = pacing.MECHANISMS.index(mechanism)
    actions = np.array([[-1.0, -1.0], [1.0, 1.0], [-1.0, pacing.OFF_BELOW], [-1.0, pacing.OFF_BELOW + 0.01]])
    settings = pacing.decode_action(actions, (mechanism,))
    assert settings.shape == (4, len(pacing.MECHANISMS), 2)
    np.testing.assert_array_equal(
        settings[:3, m], [[0.0, 0.0], [pacing.MAX_THRESHOLD[m], pacing.MAX_WINDOW], [0.0, 0.0]]
    )
    assert 0.0 < settings[3, m, pacing.WINDOW] < 0.05 * pacing.MAX_WINDOW, "it grows from nothing"
    others = np.delete(settings, m, axis=1)
    assert not others.any(), "a mechanism that is not enabled stays off"


def test_infinite_actions_are_clipped_and_not_a_number_is_off() -> None:
    settings = pacing.decode_action(np.array([[math.nan, math.nan], [math.inf, math.inf], [-math.inf, 1]]), ("paper",))
    np.testing.assert_allclose(
        settings[:, pacing.PAPER],
        [[0.0, 0.0], [pacing.MAX_THRESHOLD[pacing.PAPER], pacing.MAX_WINDOW], [0.0, pacing.MAX_WINDOW]],
    )
