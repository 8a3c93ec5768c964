"""The algorithms of Stable-Baselines3 and sb3-contrib by the names of their classes; their mean action is deployed.

A class gets :data:`DEFAULTS`, which learn well on these environments, and a config's own ``sb3.arguments`` over them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import sb3_contrib
import stable_baselines3
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from paceenv.core import signals
from paceenv.core.errors import out_of_range
from paceenv.policies.from_torch import actor
from paceenv.policies.learned import Learned
from paceenv.sim.engine.simulator import training_seed
from paceenv.trainers.training.learner import Curve, Layers, Learner, Saved
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.trainers.training.training_envs import NativeVecEnv, make_batches

RANGE_QUANTILES = (0.001, 0.999)
"""Quantiles of a signal at the end of training that its calibrated range covers."""
RANGE_SEED = 3_000_000
"""First episode for the calibrated range, which then does not depend on the length of the run."""
RANGE_INTERVALS = 96
AVERAGE_LAST = 0.3
"""The policy is the mean of the actor over this last share of the training."""
ROW_STEPS = 32
"""Steps of the batch between two rows of an off-policy learner's curve, as many as in a rollout of PPO."""
CRITIC_ARCH = [256, 256]
"""Hidden layers of off-policy critics, which are not deployed."""
DEFAULTS: dict[type, dict[str, Any]] = {
    OnPolicyAlgorithm: {
        "n_steps": 32,
        "batch_size": 2048,
        "n_epochs": 4,
        "gamma": 0.9,
        "gae_lambda": 0.9,
        "policy_kwargs": {"log_std_init": -0.5},
    },
    OffPolicyAlgorithm: {
        "buffer_size": 200_000,
        "learning_starts": 10_000,
        "batch_size": 512,
        "tau": 0.01,
        "gamma": 0.9,
        "train_freq": 1,
        "gradient_steps": 4,
        "ent_coef": "auto_0.05",
    },
    sb3_contrib.CrossQ: {"policy_kwargs": {"renorm_warmup_steps": 2_000}},  # updates, of which a run has some thousand
}
"""Arguments of a class and of those derived from it, if they take them; a step of an off-policy batch is a decision of
every row."""
_BUFFER = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
_OWN = ("policy", "env", "learning_rate", "seed", "device", "tensorboard_log", "verbose", "_init_setup_model")
"""Arguments of a class that a config cannot set."""
_SHARES = ("gamma", "gae_lambda", "tau", "clip_range")
"""Arguments from 0 to 1, which the classes do not check."""


def algorithm_class(name: str) -> type[OnPolicyAlgorithm | OffPolicyAlgorithm]:
    """The class of an ``algorithm:``; InputError where there is none whose actor a policy file can hold."""
    algorithm = getattr(stable_baselines3, name, None) or getattr(sb3_contrib, name, None)
    is_class = inspect.isclass(algorithm) and issubclass(algorithm, (OnPolicyAlgorithm, OffPolicyAlgorithm))
    if not is_class or name in ("RecurrentPPO", "MaskablePPO", "DQN", "QRDQN"):
        allowed = "distill, or a class of stable_baselines3 or sb3_contrib: PPO, A2C, TRPO, SAC, TQC, CrossQ, TD3, DDPG"
        raise out_of_range("algorithm", name, allowed, "training config")
    return cast("type[OnPolicyAlgorithm | OffPolicyAlgorithm]", algorithm)


class Sb3Learner(Learner):
    """A model of Stable-Baselines3 on the native environments."""

    model: Any
    """On-policy or off-policy; the two have little in common that is declared."""

    def __init__(self, config: TrainConfig, curve: Curve) -> None:
        assert config.sb3 is not None  # as the config has filled in
        self.config, self.section, kind = config, config.sb3, algorithm_class(config.algorithm)
        library = kind.__module__.partition(".")[0].replace("_", "-")
        self.label = f"{config.algorithm}, {library}"
        self.is_off_policy = issubclass(kind, OffPolicyAlgorithm)
        self.envs = NativeVecEnv(
            make_batches(config.environment),
            config.seed << 32,
            memory_intervals=config.environment.memory_intervals,
            change_intervals=config.environment.change_intervals,
        )
        self.model = kind("MlpPolicy", self.envs, seed=config.seed, device="cpu", **self._arguments(kind))
        # for the whole run, not for one call of learn()
        self.model.lr_schedule = lambda _: (
            self.section.learning_rate * max(1.0 - self.model.num_timesteps / config.total_timesteps, 0.0)
        )
        self.model.set_logger(curve.logger)
        self.average = _Average()
        steps = ROW_STEPS if self.is_off_policy else self.model.n_steps
        self.rollout_timesteps = steps * self.envs.num_envs
        self._rows = _Rows(curve, steps)

    def _arguments(self, kind: type) -> dict[str, Any]:
        known = [name for name in inspect.signature(kind).parameters if name not in _OWN]
        given = dict(self.section.arguments)
        for name, value in given.items():
            if name not in known:
                raise out_of_range(f"sb3.arguments.{name}", value, ", ".join(known), f"config {self.config.name}")
            if name in _SHARES and not (isinstance(value, (int, float)) and 0.0 <= value <= 1.0):
                raise out_of_range(f"sb3.arguments.{name}", value, "0 to 1", f"config {self.config.name}")
        defaults: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            defaults |= DEFAULTS.get(base, {})
        arguments = {name: value for name, value in defaults.items() if name in known} | given
        if not self.is_off_policy and "batch_size" in arguments:
            arguments["batch_size"] = min(arguments["batch_size"], arguments["n_steps"] * self.envs.num_envs)
        layers = list(self.section.net_arch)
        policy = {
            "net_arch": {"pi": layers, "qf": CRITIC_ARCH} if self.is_off_policy else layers,
            "activation_fn": torch.nn.Tanh,
            **defaults.get("policy_kwargs", {}),
            **given.get("policy_kwargs", {}),
        }
        return {**arguments, "policy_kwargs": policy}

    def _actor(self) -> Layers:
        """The actor's pairs of weight and bias as float32 arrays, input to output."""
        return list(actor(self.model.policy).layers)

    @property
    def timesteps(self) -> int:  # type: ignore[override]
        return int(self.model.num_timesteps)

    def advance(self, segment: int, rollouts: int) -> None:
        if self.is_off_policy:
            # actions before learning starts come from the space's own generator, which a checkpoint does not have
            self.model.action_space.seed(torch.initial_seed())  # that of the run and the segment
        pool = self.config.environment.pool_segments
        episodes = segment % pool if pool else segment
        self.envs.seed(training_seed(self.config.seed, episodes * 16 * self.envs.num_envs))
        self.model._last_obs = None  # which starts new episodes
        for _ in range(rollouts):
            self.model.learn(self.rollout_timesteps, callback=self._rows, reset_num_timesteps=False)
            if self.timesteps > (1.0 - AVERAGE_LAST) * self.config.total_timesteps:
                self.average.add(self._actor())

    def policy(self) -> Learned:
        return self.with_layers([(w.copy(), b.copy()) for w, b in self.average.layers or self._actor()], {})

    def with_layers(self, layers: Layers, options: Mapping[str, Any]) -> Learned:
        environment = self.config.environment
        return Learned(
            layers,
            environment.mechanisms,
            memory_intervals=environment.memory_intervals,
            change_intervals=environment.change_intervals,
            interval_iterations=environment.interval_iterations,
            squashes=self.is_off_policy,
        )

    def calibrated_range(self, policy: Learned) -> dict[str, tuple[float, float]]:
        self.envs.seed(training_seed(self.config.seed, RANGE_SEED))
        views, observation = [], self.envs.reset()
        for _ in range(RANGE_INTERVALS):
            views.append(observation[:, : signals.SIGNALS])
            observation, _, _, _ = self.envs.step(np.clip(policy.action(observation), -1.0, 1.0))  # type: ignore[assignment]
        return ranges_of(np.concatenate(views))

    def state(self) -> Saved:
        arrays = named("average", self.average.layers)
        for name, content in self.model.get_parameters().items():
            for place, values in content.get("state", {"": content}).items():  # of an optimizer by number
                arrays |= {f"{name}/{place}/{key}": np.asarray(value) for key, value in values.items()}
        plain: dict[str, Any] = {"timesteps": self.timesteps, "averaged": self.average.count}
        if self.is_off_policy:
            buffer = self.model.replay_buffer
            end = buffer.buffer_size if buffer.full else buffer.pos
            arrays |= {f"buffer.{name}": getattr(buffer, name)[:end] for name in _BUFFER}
            if getattr(self.model, "log_ent_coef", None) is not None:
                arrays["log_ent_coef"] = self.model.log_ent_coef.detach().numpy()
            plain |= {"pos": buffer.pos, "full": buffer.full, "updates": self.model._n_updates}
        return Saved(arrays, plain)

    def restore(self, saved: Saved) -> None:
        parameters = self.model.get_parameters()
        for name, content in parameters.items():
            found: dict[Any, dict[str, torch.Tensor]] = {}
            for at, value in under(saved.arrays, f"{name}/").items():
                place, key = at.split("/")
                found.setdefault(int(place) if place else place, {})[key] = torch.from_numpy(np.array(value))
            parameters[name] = {**content, "state": found} if "param_groups" in content else found[""]
        self.model.set_parameters(parameters)
        self.model.num_timesteps = int(saved.plain["timesteps"])
        self.average.layers, self.average.count = pairs(saved.arrays, "average"), saved.plain["averaged"]
        if self.is_off_policy:
            buffer = self.model.replay_buffer
            for name in _BUFFER:
                kept = saved.arrays[f"buffer.{name}"]
                getattr(buffer, name)[: len(kept)] = kept
            buffer.pos, buffer.full = int(saved.plain["pos"]), bool(saved.plain["full"])
            self.model._n_updates = int(saved.plain["updates"])
            if "log_ent_coef" in saved.arrays:
                with torch.no_grad():
                    self.model.log_ent_coef.copy_(torch.from_numpy(saved.arrays["log_ent_coef"].copy()))


class _Rows(BaseCallback):
    """Adds one row to the learning curve every few steps of the batch, and values the ends of episodes."""

    def __init__(self, curve: Curve, steps: int) -> None:
        super().__init__()
        self._curve, self._steps = curve, steps
        self._rewards: list[float] = []

    def _on_training_start(self) -> None:
        """A row ends with the rollout, after which a run may be interrupted."""
        self._rewards.clear()

    def _on_step(self) -> bool:
        self._rewards.append(float(self.locals["rewards"].mean()))
        if len(self._rewards) == self._steps:
            self._curve.add(self.num_timesteps, reward=float(np.mean(self._rewards)))
            self._rewards.clear()
        if isinstance(self.model, OnPolicyAlgorithm):
            self._value_ends(self.model)
        return True

    def _value_ends(self, model: OnPolicyAlgorithm) -> None:
        """Add what the critic expects after the episodes that ended, all at once; SB3 would ask it row by row."""
        ended = np.flatnonzero(self.locals["dones"])
        if len(ended):
            infos = [self.locals["infos"][n] for n in ended]
            last = torch.from_numpy(np.stack([info["terminal_observation"] for info in infos]))
            with torch.no_grad():
                values = model.policy.predict_values(last).numpy()[:, 0]
            self.locals["rewards"][ended] += np.float32(model.gamma) * values
            for info in infos:
                info["TimeLimit.truncated"] = False  # it is accounted for


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


def ranges_of(views_BO: NDArray[np.float32]) -> dict[str, tuple[float, float]]:
    """The calibrated range that covers nearly all of some views."""
    low, high = np.quantile(views_BO, RANGE_QUANTILES, axis=0)
    return {name: (round(float(a), 4), round(float(b), 4)) for name, a, b in zip(signals.NAMES, low, high, strict=True)}


def named(name: str, layers: Layers) -> dict[str, NDArray[Any]]:
    """Layers as arrays of a checkpoint."""
    return {f"{name}.{i}.{k}": array for i, pair in enumerate(layers) for k, array in enumerate(pair)}


def pairs(arrays: Mapping[str, NDArray[Any]], name: str) -> Layers:
    """Layers from such arrays."""
    count = sum(key.startswith(f"{name}.") for key in arrays) // 2
    return [(arrays[f"{name}.{i}.0"].copy(), arrays[f"{name}.{i}.1"].copy()) for i in range(count)]


def under(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Those arrays whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
