"""Train PPO of Stable-Baselines3 by hand, and score what comes out as paceenv scores every policy.

You learn: how the native batch of environments becomes a ``VecEnv``, why the reward is paired with an unpaced copy,
how an SB3 actor becomes a policy file, and how a policy is compared with no pacing on seeds that training never saw.
It prints the gain in throughput before and after training, with 95 % intervals. An untrained actor gains, too: its
actions lie in the middle of their range, which is a setting, and here almost any setting helps. The simulated job
shares an uplink with a job of its own period; there a shift of phase pays, and on most clusters nothing does.

    python examples/sb3_ppo.py --timesteps 150000
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from stable_baselines3 import PPO

from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies import save_network
from paceenv.trainers.evaluation.evaluate import evaluate
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.trainers.training.training_envs import NativeVecEnv

CLUSTER, MECHANISM = "two-jobs", "phase_shift"


def make_envs(rows: int, seed: int) -> NativeVecEnv:
    """Rows of the environment as one ``VecEnv``; a step is one call of the compiled engine.

    The reward is the difference to a copy of each row on the same noise that never paces (the default,
    ``reward="paired"``): what the action did. The raw reward says mostly how noisy the episode was.
    """
    mode = AutoresetMode.SAME_STEP  # as Stable-Baselines3 expects
    return NativeVecEnv(
        [PacingVectorEnv(rows, CLUSTER, mechanisms=MECHANISM, cv_weight=0.1, autoreset_mode=mode)], seed
    )


def score(path: Path, seeds: int) -> str:
    """The gain in throughput over no pacing, every rank on its own view, on seeds from 1,000,000 on.

    Training here has those from 2^63 on, as ``paceenv train``, so nothing is scored on what it was trained on.
    """
    suite = Suite(name="example", cases=[Case(cluster=CLUSTER)], seeds=seeds, iterations=1280)
    found = evaluate([str(path)], suite).score(str(path), suite.cases[0])
    return f"{found.gain:+.2%} ({found.gain_ci95[0]:+.2%} to {found.gain_ci95[1]:+.2%})"


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timesteps", type=int, default=150_000, help="decisions to train on (%(default)s)")
    parser.add_argument("--rows", type=int, default=128, help="environments side by side (%(default)s)")
    parser.add_argument("--seeds", type=int, default=32, help="of the score (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the training (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=Path(tempfile.gettempdir()) / "sb3_ppo.safetensors")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    model = PPO(
        "MlpPolicy",
        make_envs(options.rows, seed=2**63 + options.seed),
        n_steps=32,
        batch_size=1024,
        n_epochs=10,
        learning_rate=2e-3,
        gamma=0.9,  # a setting shows what it does within a few control intervals
        gae_lambda=0.9,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh, "log_std_init": -0.5},
        seed=options.seed,
        device="cpu",
    )
    save_network(options.out, model, mechanisms=[MECHANISM])
    print(f"{CLUSTER}: throughput against no pacing, {options.seeds} seeds, 95 % interval")
    print(f"  before training  {score(options.out, options.seeds)}")
    model.learn(options.timesteps)
    save_network(options.out, model, mechanisms=[MECHANISM])
    print(f"  after {model.num_timesteps:,} decisions  {score(options.out, options.seeds)}")
    print(
        f"  mean paired return of the last episodes  {np.mean([e['r'] for e in model.ep_info_buffer]):+.3f} (0: none)"
    )
    print(f"wrote {options.out}; next: paceenv evaluate {options.out} --suite demo")
    return options.out


if __name__ == "__main__":
    main()
