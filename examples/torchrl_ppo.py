"""PPO with TorchRL's building blocks: environment, collector, advantage and loss as modules over TensorDicts.

You learn: ``GymWrapper`` takes the native batch as one environment with a batch size, which leaves resets to TorchRL
(autoreset mode DISABLED); collector, GAE and ``ClipPPOLoss`` are as for any other. The actor becomes a policy file.
It prints the paired reward of the
collected batches (0 is what no pacing gets), and the gain in throughput over no pacing before and after training.

    pip install '/path/to/checkout[torchrl]'
    python examples/torchrl_ppo.py --batches 40
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn

from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.evaluation.evaluate import evaluate
from paceenv.trainers.evaluation.suites import Case, Suite

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about libraries that are not used here
    from torchrl.collectors import Collector
    from torchrl.envs.libs.gym import GymWrapper
    from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

CLUSTER, MECHANISM = "two-jobs", "phase_shift"
STEPS, EPOCHS, MINIBATCH = 32, 8, 1024


def mlp(inputs: int, outputs: int, *more: nn.Module) -> nn.Sequential:
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, outputs), *more)


def save(actor: nn.Sequential, path: Path) -> None:
    """The actor as a policy file: the means of its last layer, squashed by a tanh."""
    layers = [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in actor if hasattr(m, "weight")]
    layers[-1] = tuple(part[:2].copy() for part in layers[-1])  # the other half are deviations
    save_policy(path, PolicyFile(Learned(layers, (MECHANISM,), squashes=True)))


def score(path: Path, seeds: int) -> str:
    """Gain in throughput over no pacing with its 95 % interval, every rank on its own view."""
    suite = Suite(name="example", cases=[Case(cluster=CLUSTER)], seeds=seeds, iterations=1280)
    found = evaluate([str(path)], suite).score(str(path), suite.cases[0])
    return f"{found.gain:+.2%} ({found.gain_ci95[0]:+.2%} to {found.gain_ci95[1]:+.2%})"


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=50, help="collected and learned from (%(default)s)")
    parser.add_argument("--rows", type=int, default=128, help="environments side by side (%(default)s)")
    parser.add_argument("--seeds", type=int, default=32, help="of the score (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the training (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=Path(tempfile.gettempdir()) / "torchrl_ppo.safetensors")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    batch_of_envs = PacingVectorEnv(
        options.rows, CLUSTER, mechanisms=MECHANISM, cv_weight=0.1, autoreset_mode=AutoresetMode.DISABLED
    )
    env = GymWrapper(batch_of_envs)
    env.set_seed(options.seed)
    network = mlp(10, 4, NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(10, 1), in_keys=["observation"])
    advantage = GAE(gamma=0.9, lmbda=0.9, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, critic_coeff=0.5)
    optimizer = torch.optim.Adam(loss_module.parameters(), 2e-3)
    frames = options.rows * STEPS
    total = frames * options.batches
    collector = Collector(
        env, actor, frames_per_batch=frames, total_frames=total, auto_register_policy_transforms=False
    )

    save(network, options.out)
    print(f"{CLUSTER}: throughput against no pacing, {options.seeds} seeds, 95 % interval")
    print(f"  before training  {score(options.out, options.seeds)}")
    for number, batch in enumerate(collector):
        with torch.no_grad():
            advantage(batch)
        flat = batch.reshape(-1)
        for _ in range(EPOCHS):
            for pick in torch.randperm(len(flat)).split(MINIBATCH):
                losses = loss_module(flat[pick])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
        if (number + 1) % max(options.batches // 5, 1) == 0:
            print(f"  batch {number + 1:2d}: paired reward {batch['next', 'reward'].mean():+.4f}")
    collector.shutdown()
    save(network, options.out)
    print(f"  after training   {score(options.out, options.seeds)}")
    print(f"wrote {options.out}; next: paceenv evaluate {options.out} --suite demo")
    return options.out


if __name__ == "__main__":
    main()
