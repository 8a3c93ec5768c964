"""Train SAC of Stable-Baselines3 by hand: the same environment, an algorithm that learns from what it has kept.

You learn: which settings make an off-policy algorithm fit a batch of environments: updates for each decision, warm-up,
entropy. ``save_network`` makes a policy file of the agent and checks that it acts alike. It prints the gain in
throughput over no pacing before and after training, and the same for the fixed setting of the cluster's own config.

    python examples/sb3_sac.py --timesteps 60000
"""

import argparse
import tempfile
from pathlib import Path

import torch
from gymnasium.vector import AutoresetMode
from stable_baselines3 import SAC

from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies import save_network
from paceenv.trainers.evaluation.evaluate import evaluate
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.trainers.training.vec_env import NativeVecEnv

CLUSTER, MECHANISM = "two-jobs", "phase_shift"


def scores(policies: list[str], seeds: int) -> list[str]:
    """Gains in throughput over no pacing on the same noise, with 95 % intervals."""
    suite = Suite(name="example", cases=[Case(cluster=CLUSTER)], seeds=seeds, iterations=1280)
    result = evaluate(policies, suite)
    found = [result.score(policy, suite.cases[0]) for policy in policies]
    return [f"{one.gain:+.2%} ({one.gain_ci95[0]:+.2%} to {one.gain_ci95[1]:+.2%})" for one in found]


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timesteps", type=int, default=60_000, help="decisions to train on (%(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="environments side by side (%(default)s)")
    parser.add_argument("--seeds", type=int, default=32, help="of the score (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the training (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=Path(tempfile.gettempdir()) / "sb3_sac.safetensors")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    mode = AutoresetMode.SAME_STEP  # as Stable-Baselines3 expects
    envs = PacingVectorEnv(options.rows, CLUSTER, mechanisms=MECHANISM, cv_weight=0.1, autoreset_mode=mode)
    model = SAC(
        "MlpPolicy",
        NativeVecEnv([envs], seed=2**63 + options.seed),
        learning_rate=1e-3,
        learning_starts=min(5_000, options.timesteps // 4),
        batch_size=256,
        tau=0.01,
        gamma=0.9,
        train_freq=1,  # one step of the whole batch: as many decisions as rows
        gradient_steps=2,
        ent_coef="auto_0.05",  # the default start of 1 would drown rewards of a few hundredths
        policy_kwargs={"net_arch": {"pi": [64, 64], "qf": [128, 128]}, "activation_fn": torch.nn.Tanh},
        seed=options.seed,
        device="cpu",
    )
    save_network(options.out, model, mechanisms=[MECHANISM])
    [before] = scores([str(options.out)], options.seeds)
    model.learn(options.timesteps)
    save_network(options.out, model, mechanisms=[MECHANISM])
    after, static = scores([str(options.out), "static"], options.seeds)
    print(f"{CLUSTER}: throughput against no pacing, {options.seeds} seeds, 95 % interval")
    print(f"  before training  {before}")
    print(f"  after {model.num_timesteps:,} decisions  {after}")
    print(f"  the config's fixed setting  {static}")
    print(f"wrote {options.out}; next: paceenv evaluate {options.out} --suite demo")
    return options.out


if __name__ == "__main__":
    main()
