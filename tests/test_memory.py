"""The memory of a learned policy: the same in training and where it runs, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies.learned import Learned
from paceenv.policies.networks import ObservationEMA, time_scales
from paceenv.trainers.training.training_envs import NativeVecEnv

MEMORIES: list[tuple[int | list[int], int]] = [(4, 0), ([2, 40], 5)]
"""Time scales of the means, and that of the mean change."""


def policy(memory_intervals: int | list[int] = 4, change_intervals: int = 0) -> Learned:
    random = np.random.default_rng(0)
    count = signals.SIGNALS + ObservationEMA(memory_intervals, change_intervals).entries
    layers = [(random.normal(size=(2, count)).astype(np.float32), np.zeros(2, np.float32))]
    return Learned(layers, ["slack"], memory_intervals=memory_intervals, change_intervals=change_intervals)


@pytest.mark.parametrize(("memory", "change"), MEMORIES)
def test_training_shows_what_the_policy_will_remember(memory: int | list[int], change: int) -> None:
    """Over several ends of episodes, every row against a policy of its own that is reset where an episode starts."""

    def make() -> PacingVectorEnv:
        return PacingVectorEnv(5, episode_intervals=4, autoreset_mode="SameStep")

    envs = NativeVecEnv([make(), make()], seed=3, memory_intervals=memory, change_intervals=change)
    own = [policy(memory, change) for _ in range(10)]
    random = np.random.default_rng(1)
    shown: Any = envs.reset()
    for n, one in enumerate(own):
        np.testing.assert_array_equal(one.inputs(shown[n : n + 1, : signals.SIGNALS])[0], shown[n])
    ends = 0
    for _ in range(11):
        shown, _, done, infos = envs.step(random.uniform(-1, 1, (10, 2)).astype(np.float32))
        for n, one in enumerate(own):
            if done[n]:
                last = infos[n]["terminal_observation"]
                np.testing.assert_array_equal(one.inputs(last[None, : signals.SIGNALS])[0], last)
                one.reset(1)
                ends += 1
            np.testing.assert_array_equal(one.inputs(shown[n : n + 1, : signals.SIGNALS])[0], shown[n])
    assert ends >= 20


def test_several_time_scales_are_the_single_ones_side_by_side() -> None:
    views_TBO = np.random.default_rng(3).uniform(-1, 1, (7, 4, signals.SIGNALS)).astype(np.float32)
    scales = (2, 5, 40)
    together, single = ObservationEMA(scales, 10), [ObservationEMA(scale) for scale in scales]
    change = np.zeros((4, signals.SIGNALS))
    for t, views_BO in enumerate(views_TBO):
        found = together.update(views_BO)
        for k, one in enumerate(single):
            at = k * signals.SIGNALS
            np.testing.assert_array_equal(found[:, at : at + signals.SIGNALS], one.update(views_BO))
        if t:
            change += 0.1 * (np.abs(views_BO - views_TBO[t - 1]) - change)
        np.testing.assert_allclose(found[:, -signals.SIGNALS :], change, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, [0, 2], [2, 2], [2.5], "12", [1] * 17, True, [10**6], None])
def test_time_scales_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"memory_intervals = .*; allowed: an integer from 0 to 10000, or at most 16"):
        time_scales(wrong)
