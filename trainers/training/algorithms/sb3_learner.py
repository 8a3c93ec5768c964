"""What the algorithms of Stable-Baselines3 and sb3-contrib share: environments, curve, averaged actor, state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback

from paceenv.core import signals
from paceenv.policies.learned import Learned
from paceenv.policies.networks.actor_weights import actor_of
from paceenv.policies.networks.forward import Cell
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine.simulator import training_seed
from paceenv.trainers.training.algorithms.learner import Curve, Layers, Learner, Saved
from paceenv.trainers.training.batches import training_envs
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.trainers.training.vec_env import NativeVecEnv, NullConstraint

RANGE_QUANTILES = (0.001, 0.999)
"""Quantiles of a signal at the end of training that its calibrated range covers."""
RANGE_SEED = 3_000_000
"""First episode for the calibrated range, which then does not depend on the length of the run."""


class _Rows(BaseCallback):
    """Adds one row to the learning curve every few steps of the batch and moves the constraint's multipliers."""

    def __init__(self, curve: Curve, constraint: NullConstraint | None, steps: int) -> None:
        super().__init__()
        self._curve, self._constraint, self._steps = curve, constraint, steps
        self._rewards: list[float] = []

    def _on_training_start(self) -> None:
        """A row and a rollout's costs end with the rollout, after which a run may be interrupted."""
        self._rewards.clear()
        if self._constraint is not None:
            self._constraint.forget()

    def _on_step(self) -> bool:
        self._rewards.append(float(self.locals["rewards"].mean()))
        if len(self._rewards) == self._steps:
            costs = self._constraint.update() if self._constraint is not None else {}
            self._curve.add(self.num_timesteps, reward=float(np.mean(self._rewards)), **costs)
            self._rewards.clear()
        return True


class Average:
    """The mean of the actor's weights over the last share of a run, which wavers less than any one of them."""

    def __init__(self) -> None:
        self.layers: Layers = []
        self.count = 0

    def add(self, new: Layers) -> None:
        """Take in the weights of one more moment."""
        self.count += 1
        if not self.layers:
            self.layers = [(weight.copy(), bias.copy()) for weight, bias in new]
        for mean, latest in zip(self.layers, new, strict=True):
            for a, b in zip(mean, latest, strict=True):
                a += (b - a) / np.float32(self.count)


class Sb3Learner(Learner):
    """A model of Stable-Baselines3 on the native environments.

    Args:
        config: of the training.
        clusters: replaces configs by name, for example by a fresh calibration.
        curve: where rows go.
    """

    squashes = False
    """Whether the actor's action is a tanh of its last layer."""
    cell: str | None = None
    """The recurrent cell whose two pairs of weights come before the actor's layers."""

    def __init__(self, config: TrainConfig, clusters: Mapping[str, Cluster] | None, curve: Curve) -> None:
        self.config, self.section = config, getattr(config, config.algorithm)
        self.envs = training_envs(config, clusters)
        self.model = self._model()
        # for the whole run, not for one call of learn()
        self.model.lr_schedule = lambda _: (
            self.section.learning_rate * max(1.0 - self.model.num_timesteps / self.section.total_timesteps, 0.0)
        )
        self.model.set_logger(curve.logger)
        self.average = Average()
        self.rollout_timesteps = self._steps() * self.envs.num_envs
        self._rows = _Rows(curve, self.envs.constraint, self._steps())

    @abstractmethod
    def _model(self) -> BaseAlgorithm:
        """The model, with its environments."""

    @abstractmethod
    def _steps(self) -> int:
        """Steps of the batch in a rollout."""

    def actor(self) -> Layers:
        """The actor's pairs of weight and bias as float32 arrays, input to output."""
        return actor_of(self._policy_arrays(), "tanh", self.label).weights

    def _policy_arrays(self) -> dict[str, NDArray[Any]]:
        return {name: value.numpy() for name, value in self.model.policy.state_dict().items()}

    @abstractmethod
    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers of the model, by the names that a checkpoint gives them."""

    @property
    def timesteps(self) -> int:  # type: ignore[override]
        return int(self.model.num_timesteps)

    def advance(self, segment: int, rollouts: int) -> None:
        pool = self.config.environment.pool_segments
        episodes = segment % pool if pool else segment
        self.envs.seed(training_seed(self.config.seed, episodes * 16 * self.envs.num_envs))
        self.model._last_obs = None  # which starts new episodes
        for _ in range(rollouts):
            self.model.learn(self.rollout_timesteps, callback=self._rows, reset_num_timesteps=False)
            if self.timesteps > (1.0 - self.section.average_last) * self.section.total_timesteps:
                self.average.add(self.actor())

    def policy(self) -> Learned:
        return self.with_layers([(w.copy(), b.copy()) for w, b in self.average.layers or self.actor()], {})

    def with_layers(self, layers: Layers, options: Mapping[str, Any]) -> Learned:
        return network_policy(self.config, layers, squashes=self.squashes, cell=self.cell)

    def calibrated_range(self, policy: Learned) -> dict[str, tuple[float, float]]:
        return range_in(self.envs, policy, training_seed(self.config.seed, RANGE_SEED))

    def state(self) -> Saved:
        arrays: dict[str, NDArray[Any]] = {f"policy.{name}": value for name, value in self._policy_arrays().items()}
        for name, optimizer in self._optimizers().items():
            for place, state in optimizer.state_dict()["state"].items():
                arrays |= {f"{name}.{place}.{key}": np.asarray(value) for key, value in state.items()}
        arrays |= {f"average.{i}.{k}": a for i, pair in enumerate(self.average.layers) for k, a in enumerate(pair)}
        if self.envs.constraint is not None:
            arrays["multiplier"] = self.envs.constraint.multiplier_C
        return Saved(arrays, {"timesteps": self.timesteps, "averaged": self.average.count})

    def restore(self, saved: Saved) -> None:
        weights = {name: torch.from_numpy(np.array(value)) for name, value in under(saved.arrays, "policy.").items()}
        self.model.policy.load_state_dict(weights)
        for name, optimizer in self._optimizers().items():
            content: dict[str, Any] = optimizer.state_dict()
            content["state"] = {}
            for at, value in under(saved.arrays, f"{name}.").items():
                place, key = at.split(".")
                content["state"].setdefault(int(place), {})[key] = torch.from_numpy(np.array(value))
            optimizer.load_state_dict(content)
        self.model.num_timesteps = int(saved.plain["timesteps"])
        self.average.layers, self.average.count = pairs(saved.arrays, "average"), saved.plain["averaged"]
        if self.envs.constraint is not None:
            self.envs.constraint.multiplier_C[:] = saved.arrays["multiplier"]


def network_policy(config: TrainConfig, layers: Layers, *, squashes: bool = False, cell: str | None = None) -> Learned:
    """A network that gives actions, as the environment of a config describes it.

    Args:
        config: of the training.
        layers: of the network; with a ``cell`` its two pairs of weights come first.
        squashes: as in :class:`Learned`.
        cell: kind of the recurrent cell; None: without.
    """
    environment = config.environment
    return Learned(
        layers if cell is None else layers[2:],
        environment.mechanisms,
        preference=environment.default_preference,
        preference_range=environment.preference_range,
        memory_intervals=environment.memory_intervals,
        change_intervals=environment.change_intervals,
        interval_iterations=environment.interval_iterations,
        squashes=squashes,
        cell=None if cell is None else Cell(cell, *layers[:2]),
    )


def range_in(envs: NativeVecEnv, policy: Learned, seed: int, intervals: int = 96) -> dict[str, tuple[float, float]]:
    """For each signal, between which values it lies while a policy that gives actions is running.

    Args:
        envs: the environments.
        policy: the policy.
        seed: of the episodes.
        intervals: control intervals to run.
    """
    envs.seed(seed)
    views, observation = [], envs.reset()
    policy.reset(envs.num_envs)
    for _ in range(intervals):
        views.append(observation[:, : signals.SIGNALS])
        observation, _, ended, _ = envs.step(np.clip(policy.action(observation), -1.0, 1.0))  # type: ignore[assignment]
        policy.restart(ended)
    return ranges_of(np.concatenate(views))


def ranges_of(views_BO: NDArray[np.float32]) -> dict[str, tuple[float, float]]:
    """The calibrated range that covers nearly all of some views."""
    low, high = np.quantile(views_BO, RANGE_QUANTILES, axis=0)
    return {name: (round(float(a), 4), round(float(b), 4)) for name, a, b in zip(signals.NAMES, low, high, strict=True)}


def pairs(arrays: Mapping[str, NDArray[Any]], name: str) -> Layers:
    """The pairs of weights that stand under a name in a checkpoint's arrays.

    Args:
        arrays: by name.
        name: of the network.
    """
    count = sum(key.startswith(f"{name}.") for key in arrays) // 2
    return [(arrays[f"{name}.{i}.0"].copy(), arrays[f"{name}.{i}.1"].copy()) for i in range(count)]


def under(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Those arrays whose names begin with ``prefix``, by the rest of their names.

    Args:
        arrays: by name.
        prefix: of the names to keep.
    """
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def linear_layers(*modules: torch.nn.Module) -> Layers:
    """Weights and biases of the linear modules among ``modules``, as float32 arrays."""
    linear = [m for m in modules if isinstance(m, torch.nn.Linear)]
    return [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in linear]
