"""Training with Stable-Baselines3's PPO: config in, policy file and learning curve out.

A run is a sequence of segments of a few rollouts. Each segment starts new episodes and seeds every generator from the
run's seed and its own number. After each segment the policy is scored on the validation clusters, and a checkpoint is
written.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger, configure
from stable_baselines3.common.utils import set_random_seed

import paceenv
from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine.simulator import training_seed
from paceenv.trainers.training.batches import make_groups
from paceenv.trainers.training.checkpoint import load_checkpoint, save_checkpoint
from paceenv.trainers.training.selection import VALIDATION_METRICS, Validation
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.trainers.training.vec_env import NativeVecEnv, NullConstraint

RANGE_QUANTILES = (0.001, 0.999)
"""Quantiles of a signal at the end of training that its calibrated range covers."""
RANGE_SEED = 3_000_000
"""First episode for the calibrated range, which then does not depend on the length of the run."""
SEGMENT_ROLLOUTS = 10
"""Length of a segment without a selection."""
CHECKPOINT = "checkpoint.safetensors"
Layers = list[tuple[NDArray[np.float32], NDArray[np.float32]]]


@dataclass(frozen=True)
class Trained:
    """A trained policy with what its file records, and its learning curve as rows of plain numbers."""

    file: PolicyFile
    curve: list[dict[str, float]]
    cpu_s: float


class _Curve(BaseCallback):
    """Collects one row of the learning curve per rollout and moves the constraint's multipliers."""

    def __init__(self, constraint: NullConstraint | None, on_progress: Callable[[float], None]) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []
        self._rewards: list[float] = []
        self._constraint, self._on_progress = constraint, on_progress

    def _on_step(self) -> bool:
        self._rewards.append(float(self.locals["rewards"].mean()))
        return True

    def _on_rollout_end(self) -> None:
        costs = self._constraint.update() if self._constraint is not None else {}
        self.rows.append({"timesteps": self.num_timesteps, "reward": float(np.mean(self._rewards)), **costs})
        for name, value in self.rows[-1].items():
            self.logger.record(f"pacing/{name}", value)
        self._rewards.clear()
        self._on_progress(self.num_timesteps)


class _Average:
    """The mean of the actor's weights over the last share of a run, which wavers less than any one of them."""

    def __init__(self) -> None:
        self.layers: Layers = []
        self.count = 0

    def add(self, new: Layers) -> None:
        self.count += 1
        if not self.layers:
            self.layers = [(weight.copy(), bias.copy()) for weight, bias in new]
        for mean, latest in zip(self.layers, new, strict=True):
            for a, b in zip(mean, latest, strict=True):
                a += (b - a) / np.float32(self.count)


def train(
    config: TrainConfig,
    clusters: Mapping[str, Cluster] | None = None,
    on_progress: Callable[[float], None] = lambda timesteps: None,
    folder: Path | None = None,
    *,
    resume: bool = False,
) -> Trained:
    """Train PPO on a config; the same config and seed give the same policy on one machine.

    Args:
        config: of the training.
        clusters: replaces configs by name, for example by a fresh calibration.
        on_progress: called with the decisions taken so far.
        folder: where checkpoints and TensorBoard's event files go; None: there are none.
        resume: go on from the folder's checkpoint, if there is one.

    Raises:
        InputError: for a checkpoint of another config.
    """
    run = Run(config, clusters, on_progress, folder)
    if resume and folder is not None and (folder / CHECKPOINT).exists():
        run.restore(folder / CHECKPOINT)
    while run.goes_on():
        run.advance()
    return run.result()


class Run:
    """The state of a training run between its segments.

    ``best`` is the policy with the best validation score so far, ``best_score``.

    Args:
        config: of the training.
        clusters: as in :func:`train`.
        on_progress: as in :func:`train`.
        folder: as in :func:`train`.
        validation: of the config's selection, if it exists already; making it takes seconds.
    """

    def __init__(
        self,
        config: TrainConfig,
        clusters: Mapping[str, Cluster] | None = None,
        on_progress: Callable[[float], None] = lambda timesteps: None,
        folder: Path | None = None,
        validation: Validation | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.config, self.folder = config, folder
        self.groups, passive = make_groups(config.environment, clusters), []
        if config.environment.paired or config.constraint is not None:
            passive = make_groups(config.environment, clusters)
        self.constraint = None
        if config.constraint is not None:
            names, flags = [n for g in self.groups for n in g.names], [f for g in self.groups for f in g.is_null]
            self.constraint = NullConstraint(config.constraint, names, flags)
        self.envs = NativeVecEnv(
            [group.env for group in self.groups],
            training_seed(config.seed),
            [group.env for group in passive],
            self.constraint,
            paired=config.environment.paired,
            memory_intervals=config.environment.memory_intervals,
        )
        self.model = _model(config, self.envs)
        self.curve = _Curve(self.constraint, on_progress)
        self._validation = validation
        self.average, self.best_score, self.evaluations_since = _Average(), -np.inf, 0
        self.best = self._policy()
        self.segment, self.cpu_s = 0, 0.0
        # a logger of our own even without a folder: the default one leaves a folder in /tmp for every run
        logger = Logger(None, []) if folder is None else configure(str(folder / "tensorboard"), ["tensorboard"])
        self.model.set_logger(logger)

    @property
    def timesteps(self) -> int:
        """Decisions taken so far."""
        return int(self.model.num_timesteps)

    def goes_on(self) -> bool:
        """Whether there is more to train: decisions left, and patience."""
        selection = self.config.selection
        patient = selection is None or self.evaluations_since < selection.patience
        return patient and self.model.num_timesteps < self.config.ppo.total_timesteps

    def advance(self) -> None:
        """One segment, an evaluation on the validation clusters, a checkpoint."""
        started, ppo, rows = time.process_time(), self.config.ppo, self.envs.num_envs
        every = self.config.selection.every if self.config.selection else SEGMENT_ROLLOUTS
        rollouts = min(every, -(-(ppo.total_timesteps - self.model.num_timesteps) // (ppo.n_steps * rows)))
        set_random_seed((self.config.seed + 1_000_003 * self.segment) % 2**32)  # as many as NumPy takes
        self.envs.seed(training_seed(self.config.seed, self.segment * 16 * rows))
        self.model._last_obs = None  # which starts new episodes
        for _ in range(rollouts):
            self.model.learn(ppo.n_steps * rows, callback=self.curve, reset_num_timesteps=False)
            if self.model.num_timesteps > (1.0 - ppo.average_last) * ppo.total_timesteps:
                self.average.add(_layers(self.model))
        self.segment += 1
        if self.config.selection is not None:
            if self._validation is None:  # only now: a resumed run may have nothing left to evaluate
                self._validation = Validation(self.config.selection)
            self._evaluate(self._validation)
        self.cpu_s += time.process_time() - started
        if self.folder is not None:
            save_checkpoint(self.folder / CHECKPOINT, self.model, self._progress())

    def _evaluate(self, validation: Validation) -> None:
        policy = self._policy()
        found = validation.evaluate(policy)
        self.curve.rows[-1].update(found)
        for name, value in found.items():
            self.model.logger.record(f"validation/{name}", value)
        self.model.logger.dump(self.model.num_timesteps)
        self.evaluations_since += 1
        if found["score"] > self.best_score:
            self.best, self.best_score, self.evaluations_since = policy, found["score"], 0

    def _policy(self) -> Learned:
        """The policy as it stands: the mean over the last share of the run, before that the actor itself."""
        return self._learned([(w.copy(), b.copy()) for w, b in self.average.layers or _layers(self.model)])

    def _learned(self, layers: Layers) -> Learned:
        environment = self.config.environment
        return Learned(
            layers,
            environment.mechanisms,
            preference=environment.default_preference,
            preference_range=environment.preference_range,
            memory_intervals=environment.memory_intervals,
        )

    def result(self) -> Trained:
        """The selected policy, or the last one where nothing selects, with the record for its file."""
        config = self.config
        evaluations = [row for row in self.curve.rows if "score" in row]
        policy = self.best if evaluations else self._policy()
        record: dict[str, Any] = {
            "paceenv": paceenv.__version__,
            "git_commit": git_commit(),
            "config": config.model_dump(mode="json"),
            "seeds": {"first": config.seed, "rows": self.envs.num_envs},
            "algorithm": "PPO, stable-baselines3",
            "timesteps": self.model.num_timesteps,
            "final_reward": round(float(np.mean([row["reward"] for row in self.curve.rows[-10:]])), 4),
        }
        if evaluations:
            best = max(evaluations, key=lambda row: row["score"])  # the first of equals, as in _evaluate
            record["validation"] = {name: round(best[name], 4) for name in VALIDATION_METRICS}
        return Trained(
            PolicyFile(policy, _calibrated_range(self.envs, policy, training_seed(config.seed, RANGE_SEED)), record),
            self.curve.rows,
            self.cpu_s,
        )

    def _progress(self) -> dict[str, Any]:
        arrays: dict[str, NDArray[Any]] = {
            f"average.{i}.{k}": a for i, pair in enumerate(self.average.layers) for k, a in enumerate(pair)
        }
        arrays |= {f"best.{i}.{k}": a for i, pair in enumerate(self.best.layers) for k, a in enumerate(pair)}
        if self.constraint is not None:
            arrays["multiplier"] = self.constraint.multiplier_C
        return {
            "config": self.config.model_dump(mode="json"),
            "segment": self.segment,
            "averaged": self.average.count,
            "best_score": None if self.best_score == -np.inf else self.best_score,
            "looks_since": self.evaluations_since,
            "cpu_s": self.cpu_s,
            "curve": self.curve.rows,
            "arrays": arrays,
        }

    def restore(self, path: Path, *, changed: bool = False) -> None:
        """Go on from a checkpoint; InputError if it is of another config, unless it may be ``changed``.

        What may change is what a run reads anew in each segment: PPO's hyperparameters but for the network's shape.
        """
        progress = load_checkpoint(path, self.model)
        if not changed and progress["config"] != self.config.model_dump(mode="json"):
            raise InputError(f"{path}: of another config; allowed: the one it was started with, or another folder")
        arrays = progress["arrays"]
        self.segment, self.evaluations_since, self.cpu_s = (
            progress["segment"],
            progress["looks_since"],
            progress["cpu_s"],
        )
        self.curve.rows = list(progress["curve"])
        self.average.layers, self.average.count = _pairs(arrays, "average"), progress["averaged"]
        if progress["best_score"] is not None:
            self.best_score = progress["best_score"]
            self.best = self._learned(_pairs(arrays, "best"))
        if self.constraint is not None:
            self.constraint.multiplier_C[:] = arrays["multiplier"]


def _pairs(arrays: Mapping[str, NDArray[Any]], name: str) -> Layers:
    count = sum(key.startswith(f"{name}.") for key in arrays) // 2
    return [(arrays[f"{name}.{i}.0"].copy(), arrays[f"{name}.{i}.1"].copy()) for i in range(count)]


def _model(config: TrainConfig, envs: NativeVecEnv) -> PPO:
    ppo = config.ppo
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=ppo.n_steps,
        batch_size=min(ppo.batch_size, ppo.n_steps * envs.num_envs),
        n_epochs=ppo.n_epochs,
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
    # for the whole run, not for one call of learn()
    model.lr_schedule = lambda _: ppo.learning_rate * max(1.0 - model.num_timesteps / ppo.total_timesteps, 0.0)
    return model


def _layers(model: PPO) -> Layers:
    """The actor's weights and biases as float32 arrays, input to output."""
    policy = model.policy
    modules = [m for m in [*policy.mlp_extractor.policy_net, policy.action_net] if isinstance(m, torch.nn.Linear)]
    return [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in modules]


def _calibrated_range(
    envs: NativeVecEnv, policy: Learned, seed: int, intervals: int = 96
) -> dict[str, tuple[float, float]]:
    """For each signal, between which values it lay while the trained policy was running."""
    envs.seed(seed)
    views, observation = [], envs.reset()
    for _ in range(intervals):
        views.append(observation[:, : signals.SIGNALS])
        observation, *_ = envs.step(np.clip(policy.action(observation), -1.0, 1.0))  # type: ignore[assignment]
    low, high = np.quantile(np.concatenate(views), RANGE_QUANTILES, axis=0)
    return {name: (round(float(a), 4), round(float(b), 4)) for name, a, b in zip(signals.NAMES, low, high, strict=True)}


def git_commit() -> str:
    """The commit of the source tree this runs from, "unknown" outside a checkout; "+" marks local changes."""
    root = Path(__file__).resolve().parents[2]
    try:
        run = {"cwd": root, "capture_output": True, "text": True, "timeout": 10, "check": True}
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], **run).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}{'+' if dirty else ''}"
