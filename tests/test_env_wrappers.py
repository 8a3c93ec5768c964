"""Gymnasium's wrappers and Stable-Baselines3's checker on our environments."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from paceenv.envs.pacing_env import PacingEnv, PacingVectorEnv
from paceenv.envs.registration import ENV_ID, register_envs

register_envs()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_recorded_returns_are_those_of_whole_episodes(mode: AutoresetMode) -> None:
    """Gymnasium's statistics of episodes against sums of our own rewards."""
    plain = PacingVectorEnv(3, episode_intervals=4, autoreset_mode=mode, reward="raw")
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(plain)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    total, found = np.zeros(3), 0
    for _ in range(14):
        _, reward, _, truncated, info = envs.step(envs.action_space.sample())
        total += reward
        if truncated.any():
            np.testing.assert_allclose(info["episode"]["r"], total)
            assert info["episode"]["l"].tolist() == [4, 4, 4]
            total[:] = 0.0
            found += 1
            if mode is AutoresetMode.DISABLED:
                envs.reset(options={"reset_mask": truncated})
    assert found >= 2


# Stable-Baselines3


def test_the_checker_of_stable_baselines3_has_nothing_to_say() -> None:
    check_env(PacingEnv(episode_intervals=3), warn=True, skip_render_check=False)
    check_env(PacingEnv(episode_intervals=3, render_mode="rgb_array"), warn=True, skip_render_check=False)


def test_stable_baselines3_trains_on_it_in_its_usual_way() -> None:
    arguments = {"episode_intervals": 4, "interval_iterations": 5}
    envs = VecNormalize(make_vec_env(ENV_ID, n_envs=2, seed=0, env_kwargs=arguments))
    model = PPO("MlpPolicy", envs, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
    model.learn(64)
    assert model.num_timesteps == 64
    assert len(model.ep_info_buffer or ()) == 16, "every episode of 4 steps is counted"
