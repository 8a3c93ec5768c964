"""Intervals of how often and how long episodes are hold the truth, few or many, as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from paceenv.calibration.two_state_fit import Episodes, find_episodes

TRACES, ITERATIONS, SERIES = 600, 300, 4


def found(share: float, mean_iterations: float, seed: int) -> list[Episodes]:
    """Episodes of series that turn on and off at constant rates; of the traces in which any happens."""
    rng = np.random.default_rng(seed)
    off, on = 1.0 / mean_iterations, share / (1.0 - share) / mean_iterations
    state_BN = rng.random((TRACES, SERIES)) < share
    states: list[NDArray[np.bool_]] = []
    for u_BN in rng.random((ITERATIONS, TRACES, SERIES)):
        state_BN = np.where(state_BN, u_BN > off, u_BN < on)
        states.append(state_BN)
    return [one for one in map(find_episodes, np.stack(states, axis=1)) if one is not None]


@pytest.mark.parametrize(("share", "mean_iterations"), [(0.05, 60.0), (0.1, 40.0), (0.2, 20.0)])
def test_intervals_of_share_and_length_hold_the_truth(share: float, mean_iterations: float) -> None:
    episodes = found(share, mean_iterations, seed=1)
    shares = np.array([share in one.share for one in episodes])
    lengths = np.array([mean_iterations in one.mean_iterations for one in episodes])
    for inside in (shares, lengths):
        assert 0.92 <= np.mean(inside) <= 0.995


def test_one_short_episode_bounds_next_to_nothing() -> None:
    """It may have been the shortest of many: of such traces a tenth would have the truth far outside otherwise."""
    on_TN = np.zeros((200, 4), np.bool_)
    on_TN[50:55, 2] = True
    one = find_episodes(on_TN)
    assert one is not None
    assert one.share.value == pytest.approx(5 / 800)
    assert one.share.low > 0.05 * one.share.value
    assert 20.0 * one.share.value < one.share.high < 0.99
    assert one.mean_iterations.high > 30.0 * one.mean_iterations.value
