"""PPO in one file, with nothing but PyTorch: the structure that CleanRL made popular, on a native batch.

You learn: every line between the environment and a policy file. Rollout, advantages, clipped loss, export; no trainer
hides anything. The environment resets a finished row in the same step, so the value of the last observation of an
episode (``info["final_obs"]``) is added to its last reward: episodes are cut off by time, they do not end.
It prints the paired reward of the rollouts while it learns, and the gain in throughput over no pacing at the end.

    python examples/cleanrl_ppo.py --updates 40
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies import save_network
from paceenv.trainers.evaluation.evaluate import evaluate
from paceenv.trainers.evaluation.suites import Case, Suite

CLUSTER, MECHANISM = "two-jobs", "phase_shift"
STEPS, EPOCHS, MINIBATCH = 32, 8, 1024
GAMMA, LAMBDA, CLIP, VALUE_WEIGHT, LEARNING_RATE = 0.9, 0.9, 0.2, 0.5, 2e-3


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights; a small gain at the end of the actor starts near the middle."""
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    hidden = [layer(inputs, 64, 2**0.5), nn.Tanh(), layer(64, 64, 2**0.5), nn.Tanh()]
    return nn.Sequential(*hidden, layer(64, outputs, gain))


class Agent(nn.Module):
    """A Gaussian actor and a critic."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = network(inputs, actions, 0.01), network(inputs, 1, 1.0)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))

    def distribution(self, view: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.actor(view), self.log_std.exp())

    def value(self, view: torch.Tensor) -> torch.Tensor:
        return self.critic(view)[..., 0]


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=40, help="rollouts that are learned from (%(default)s)")
    parser.add_argument("--rows", type=int, default=128, help="environments side by side (%(default)s)")
    parser.add_argument("--seeds", type=int, default=32, help="of the score (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the training (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=Path(tempfile.gettempdir()) / "cleanrl_ppo.safetensors")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    mode = AutoresetMode.SAME_STEP
    envs = PacingVectorEnv(options.rows, CLUSTER, mechanisms=MECHANISM, cv_weight=0.1, autoreset_mode=mode)
    agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.shape[0])
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE, eps=1e-5)
    view = torch.from_numpy(envs.reset(seed=2**63 + options.seed)[0])
    envs.desync_episodes()  # or all rows would end in the same step
    for update in range(options.updates):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - update / options.updates)
        views, actions, logs, values, rewards, ends, paired = [], [], [], [], [], [], []
        with torch.no_grad():
            for _ in range(STEPS):  # rollout
                distribution = agent.distribution(view)
                action = distribution.sample()
                kept = (view, action, distribution.log_prob(action).sum(-1), agent.value(view))
                for row, value in zip((views, actions, logs, values), kept, strict=True):
                    row.append(value)
                found, gained, _, truncated, info = envs.step(action.numpy().clip(-1.0, 1.0))
                view, reward, end = (torch.from_numpy(x.astype(np.float32)) for x in (found, gained, truncated))
                paired.append(float(reward.mean()))
                if truncated.any():  # the episode would have gone on: what it was still worth
                    last = torch.from_numpy(np.stack([*info["final_obs"][truncated]]))
                    reward[end > 0.0] += GAMMA * agent.value(last)
                rewards.append(reward), ends.append(end)
            advantages, ahead, following = [], torch.zeros(options.rows), agent.value(view)
            for t in reversed(range(STEPS)):  # generalised advantage estimation
                delta = rewards[t] + GAMMA * following * (1.0 - ends[t]) - values[t]
                ahead = delta + GAMMA * LAMBDA * (1.0 - ends[t]) * ahead
                advantages.insert(0, ahead)
                following = values[t]
        flat = [torch.cat(part) for part in (views, actions, logs, values, advantages)]
        for _ in range(EPOCHS):
            for pick in torch.randperm(len(flat[0])).split(MINIBATCH):
                seen, did, log, value, advantage = (part[pick] for part in flat)
                ratio = (agent.distribution(seen).log_prob(did).sum(-1) - log).exp()
                scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.min(ratio * scaled, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * scaled).mean()
                miss = (agent.value(seen) - value - advantage).square().mean()
                optimizer.zero_grad()
                (VALUE_WEIGHT * miss - gain).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if update % max(options.updates // 6, 1) == 0 or update == options.updates - 1:
            print(f"rollout {update + 1:3d}: paired reward {np.mean(paired):+.4f} (0 is what no pacing gets)")

    save_network(options.out, agent.actor, mechanisms=[MECHANISM])
    suite = Suite(name="example", cases=[Case(cluster=CLUSTER)], seeds=options.seeds, iterations=1280)
    found = evaluate([str(options.out)], suite).score(str(options.out), suite.cases[0])
    low, high = found.gain_ci95
    print(f"{CLUSTER}: throughput {found.gain:+.2%} ({low:+.2%} to {high:+.2%}) over no pacing")
    print(f"wrote {options.out}; next: paceenv evaluate {options.out} --suite demo")
    return options.out


if __name__ == "__main__":
    main()
