"""RLlib's new API stack on the native batch: it trains, and every step of every episode reaches it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import numpy as np
import gymnasium
import paceenv.envs
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env
from paceenv.envs.pacing_env import PacingVectorEnv

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
class Counting(PacingVectorEnv):
    decisions, episodes, total = 0, 0, 0.0

    def step(self, actions):
        starting = self._ended.copy()
        found = super().step(actions)
        self.decisions += int((~starting).sum())
        self.episodes += int(found[3].sum())
        self.total += float(found[1].sum())
        return found

register_env("native", lambda given: Counting(given["num_envs"], episode_intervals=4, interval_iterations=5))
config = (
    PPOConfig()
    .environment("native")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=4, gym_env_vectorize_mode="vector_entry_point",
                 rollout_fragment_length=16, batch_mode="truncate_episodes")
    .training(train_batch_size=64, minibatch_size=32, num_epochs=1)
    .debugging(seed=0)
)
algorithm = config.build_algo()
result = algorithm.train()["env_runners"]
print("lifetime", int(result["num_env_steps_sampled_lifetime"]), int(result["num_episodes"]),
      float(result["episode_len_mean"]), float(result["episode_return_mean"]))
envs = algorithm.env_runner.env.unwrapped
print("counted", envs.decisions, envs.episodes, envs.total / max(envs.episodes, 1))
ray.shutdown()
"""


@pytest.mark.slow
def test_rllib_trains_on_the_native_batch_and_loses_no_step() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = {name: [float(x) for x in rest] for name, *rest in map(str.split, done.stdout.splitlines()) if rest}
    steps, episodes, length, mean_return = lines["lifetime"]
    decisions, ended, own_return = lines["counted"]
    assert steps == decisions >= 64, "every decision is a sample, and a step that only starts an episode is none"
    assert episodes == ended > 8
    assert length == 4.0
    assert mean_return == pytest.approx(own_return, abs=1e-6)
