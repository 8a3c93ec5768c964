"""The memory of a learned policy: the same in training and where it runs, row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, load_policy, save_policy
from paceenv.trainers.training.vec_env import NativeVecEnv

INPUTS = 2 * signals.SIGNALS + 1


def policy(memory_intervals: int = 4) -> Learned:
    random = np.random.default_rng(0)
    layers = [(random.normal(size=(2, INPUTS)).astype(np.float32), np.zeros(2, np.float32))]
    return Learned(layers, ["slack"], preference=0.5, preference_range=(0.0, 1.0), memory_intervals=memory_intervals)


def test_training_shows_what_the_policy_will_remember() -> None:
    """Over several ends of episodes, every row against a policy of its own that is reset where an episode starts."""

    def make() -> PacingVectorEnv:
        return PacingVectorEnv(5, "two-jobs", mechanisms=("phase_shift",), episode_intervals=4, cv_weight=(0.0, 1.0))

    envs = NativeVecEnv([make(), make()], seed=3, memory_intervals=4)
    own = [policy() for _ in range(10)]
    shown, random = envs.reset(), np.random.default_rng(1)
    for n, one in enumerate(own):
        np.testing.assert_array_equal(one.inputs(shown[n : n + 1, : signals.SIGNALS])[0, :-1], shown[n, :-1])
    ends = 0
    for _ in range(11):
        shown, _, done, infos = envs.step(random.uniform(-1, 1, (10, 2)).astype(np.float32))
        for n, one in enumerate(own):
            if done[n]:
                last = infos[n]["terminal_observation"]
                np.testing.assert_array_equal(one.inputs(last[None, : signals.SIGNALS])[0, :-1], last[:-1])
                one.reset(1)
                ends += 1
            np.testing.assert_array_equal(one.inputs(shown[n : n + 1, : signals.SIGNALS])[0, :-1], shown[n, :-1])
    assert ends >= 20


def test_rows_remember_for_themselves() -> None:
    views_TBO = np.random.default_rng(2).uniform(-1, 1, (9, 6, signals.SIGNALS)).astype(np.float32)
    together, alone = policy(), policy()
    together.reset(6)
    alone.reset(1)
    for views_BO in views_TBO:
        np.testing.assert_array_equal(together.act(views_BO)[2:3], alone.act(views_BO[2:3]))
    forgetful = policy()
    forgetful.reset(1)
    assert not np.array_equal(forgetful.act(views_TBO[-1][2:3]), alone.act(views_TBO[-1][2:3]))


def test_a_policy_file_keeps_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_policy(path, PolicyFile(policy(7)))
    assert load_policy(path).policy.memory_intervals == 7
    with pytest.raises(InputError, match="the network has 25"):
        policy(0)
