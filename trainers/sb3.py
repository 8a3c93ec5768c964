"""Training with Stable-Baselines3's PPO: config in, policy file and learning curve out."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

import paceenv
from paceenv import signals
from paceenv.cluster import Cluster, load_cluster
from paceenv.env import PacingVectorEnv
from policies.file import PolicyFile
from policies.learned import Learned
from trainers.config import TrainConfig
from trainers.vec_env import NativeVecEnv

RANGE_QUANTILES = (0.001, 0.999)
"""What the calibrated range of a signal covers of the views met at the end of training."""


@dataclass(frozen=True)
class Trained:
    """A trained policy with what its file records, and its learning curve as rows of plain numbers."""

    file: PolicyFile
    curve: list[dict[str, float]]


class _Curve(BaseCallback):
    """Collects one row of the learning curve per rollout, averages the actor at the end, reports progress."""

    def __init__(self, average_from: float, on_progress: Callable[[float], None]) -> None:
        super().__init__()
        self.layers: list[tuple[Any, Any]] = []
        self._averaged, self._average_from = 0, average_from
        self.rows: list[dict[str, float]] = []
        self._rewards: list[float] = []
        self._on_progress = on_progress

    def _on_step(self) -> bool:
        self._rewards.append(float(self.locals["rewards"].mean()))
        return True

    def _on_rollout_end(self) -> None:
        self.rows.append({"timesteps": self.num_timesteps, "reward": float(np.mean(self._rewards))})
        self._rewards.clear()
        self._on_progress(self.num_timesteps)
        if self.num_timesteps >= self._average_from:
            self._average()

    def _average(self) -> None:
        """Move the mean of the actor's weights towards the present ones."""
        self._averaged += 1
        new = _layers(self.model)  # type: ignore[arg-type]
        if not self.layers:
            self.layers = new
        for mean, latest in zip(self.layers, new, strict=True):
            for a, b in zip(mean, latest, strict=True):
                a += (b - a) / self._averaged


def make_env(config: TrainConfig, clusters: Mapping[str, Cluster] | None = None) -> PacingVectorEnv:
    """The batch that a config trains on; ``clusters`` replaces configs by name (a fresh calibration, say)."""
    env, given = config.environment, clusters or {}
    return PacingVectorEnv(
        env.environments,
        [given.get(c.cluster) or load_cluster(c.cluster) for c in env.clusters],
        weights=[c.weight for c in env.clusters],
        mechanisms=env.mechanisms,
        interval_iterations=env.interval_iterations,
        episode_intervals=env.episode_intervals,
        cv_weight=env.cv_weight,
        threads=env.threads,
    )


def train(
    config: TrainConfig,
    clusters: Mapping[str, Cluster] | None = None,
    on_progress: Callable[[float], None] = lambda timesteps: None,
) -> Trained:
    """Train PPO on a config; the same config and seed give the same policy on one machine."""
    torch.set_num_threads(1)
    ppo, envs = config.ppo, make_env(config, clusters)
    passive = make_env(config, clusters) if config.environment.paired else None
    model = PPO(
        "MlpPolicy",
        NativeVecEnv(envs, config.seed, passive),
        n_steps=ppo.n_steps,
        batch_size=min(ppo.batch_size, ppo.n_steps * config.environment.environments),
        n_epochs=ppo.n_epochs,
        learning_rate=lambda left: ppo.learning_rate * left,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        ent_coef=ppo.ent_coef,
        policy_kwargs={
            "net_arch": list(ppo.net_arch),
            "activation_fn": torch.nn.Tanh,
            "log_std_init": ppo.log_std_init,
        },
        seed=config.seed,
        device="cpu",
    )
    curve = _Curve((1.0 - ppo.average_last) * ppo.total_timesteps, on_progress)
    model.learn(ppo.total_timesteps, callback=curve)
    env = config.environment
    policy = Learned(
        curve.layers or _layers(model),
        env.mechanisms,
        preference=env.default_preference,
        preference_range=env.preference_range,
    )
    record = {
        "paceenv": paceenv.__version__,
        "git_commit": git_commit(),
        "config": config.model_dump(),
        "seeds": {"first": config.seed, "rows": config.environment.environments},
        "algorithm": "PPO, stable-baselines3",
        "final_reward": round(float(np.mean([row["reward"] for row in curve.rows[-10:]])), 4),
    }
    return Trained(PolicyFile(policy, _calibrated_range(envs, policy), record), curve.rows)


def _layers(model: PPO) -> list[tuple[Any, Any]]:
    """The actor's weights and biases as float32 arrays, input to output."""
    policy = model.policy
    modules = [m for m in [*policy.mlp_extractor.policy_net, policy.action_net] if isinstance(m, torch.nn.Linear)]
    return [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in modules]


def _calibrated_range(envs: PacingVectorEnv, policy: Learned, intervals: int = 96) -> dict[str, tuple[float, float]]:
    """For each signal, between which values it lay while the trained policy was running."""
    views = []
    observation, _ = envs.reset()
    for _ in range(intervals):
        views.append(observation[:, : signals.SIGNALS])
        observation, *_ = envs.step(np.clip(policy.action(observation), -1.0, 1.0))
    low, high = np.quantile(np.concatenate(views), RANGE_QUANTILES, axis=0)
    return {name: (round(float(a), 4), round(float(b), 4)) for name, a, b in zip(signals.NAMES, low, high, strict=True)}


def git_commit() -> str:
    """The commit of the source tree this runs from, "unknown" outside a checkout; "+" marks local changes."""
    root = Path(__file__).resolve().parent.parent
    try:
        run = {"cwd": root, "capture_output": True, "text": True, "timeout": 10, "check": True}
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], **run).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}{'+' if dirty else ''}"
