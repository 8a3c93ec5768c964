"""PPO of RLlib's new API stack on the native batch of environments.

You learn: RLlib takes the whole batch through ``gym_env_vectorize_mode="vector_entry_point"``, one call a step instead
of one per environment; it needs the autoreset mode NEXT_STEP, in which the step after the end of an episode only
resets. The trained actor becomes a policy file. It prints the paired return an episode while it learns (0 is what no
pacing gets), and the gain in throughput over no pacing before and after.

    pip install '/path/to/checkout[sweep]' dm-tree lz4 ormsgpack
    python examples/rllib_ppo.py --iterations 12
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import ray
import torch
from gymnasium.vector import AutoresetMode
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

from paceenv.envs.pacing_env import PacingEnv, PacingVectorEnv
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.evaluation.evaluate import evaluate
from paceenv.trainers.evaluation.suites import Case, Suite

CLUSTER, MECHANISM = "two-jobs", "phase_shift"


def make(context: dict[str, Any]) -> gymnasium.Env | gymnasium.vector.VectorEnv:
    """One environment, of which RLlib reads the spaces, or a batch, if it says how many it wants."""
    options = {"cluster": CLUSTER, "mechanisms": MECHANISM, "cv_weight": 0.1}
    if "num_envs" in context:
        return PacingVectorEnv(context["num_envs"], autoreset_mode=AutoresetMode.NEXT_STEP, **options)
    return PacingEnv(**options)


def save(module: Any, path: Path) -> None:
    """The actor's layers as a policy file. Its last layer gives means and, after them, logarithms of deviations."""
    actor = [*module.encoder.actor_encoder.net.mlp, *module.pi.net.mlp]
    linear = [layer for layer in actor if isinstance(layer, torch.nn.Linear)]
    layers = [(layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy()) for layer in linear]
    layers[-1] = tuple(part[:2].copy() for part in layers[-1])  # the means: threshold and window
    save_policy(path, PolicyFile(Learned(layers, (MECHANISM,))))


def score(path: Path, seeds: int) -> str:
    """Gain in throughput over no pacing with its 95 % interval, every rank on its own view."""
    suite = Suite(name="example", cases=[Case(cluster=CLUSTER)], seeds=seeds, iterations=1280)
    found = evaluate([str(path)], suite).score(str(path), suite.cases[0])
    return f"{found.gain:+.2%} ({found.gain_ci95[0]:+.2%} to {found.gain_ci95[1]:+.2%})"


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=12, help="of training, 4096 decisions each (%(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="environments side by side (%(default)s)")
    parser.add_argument("--seeds", type=int, default=32, help="of the score (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the training (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=Path(tempfile.gettempdir()) / "rllib_ppo.safetensors")
    options = parser.parse_args(argv)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    register_env("paceenv", make)
    config = (
        PPOConfig()
        .environment("paceenv")
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=options.rows,
            gym_env_vectorize_mode="vector_entry_point",
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=4096, minibatch_size=1024, num_epochs=10, lr=2e-3, gamma=0.9, lambda_=0.9
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
        .debugging(seed=options.seed, log_level="ERROR")
    )
    algorithm = config.build_algo()
    try:
        save(algorithm.get_module(), options.out)
        print(f"{CLUSTER}: throughput against no pacing, {options.seeds} seeds, 95 % interval")
        print(f"  before training  {score(options.out, options.seeds)}")
        for number in range(1, options.iterations + 1):
            found = algorithm.train()["env_runners"]
            if number % max(options.iterations // 5, 1) == 0:
                print(
                    f"  iteration {number:2d}: paired return of an episode {found.get('episode_return_mean', 0):+.3f}"
                )
        save(algorithm.get_module(), options.out)
        print(f"  after training   {score(options.out, options.seeds)}")
    finally:
        algorithm.stop()
        ray.shutdown()
    print(f"wrote {options.out}; next: paceenv evaluate {options.out} --suite demo")
    return options.out


if __name__ == "__main__":
    main()
