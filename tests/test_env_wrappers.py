"""Stable-Baselines3's checker, wrapper and training on our environments."""

from __future__ import annotations

from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from paceenv.envs.pacing_env import PacingEnv
from paceenv.envs.registration import ENV_ID, register_envs

register_envs()


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
