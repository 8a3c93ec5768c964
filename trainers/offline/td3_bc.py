"""Learning from a data set without an environment: behaviour cloning, and TD3+BC.

Source: Fujimoto and Gu, "A Minimalist Approach to Offline Reinforcement Learning", NeurIPS 2021: TD3 whose actor also
stays near the actions of the data. Two things differ. The observations are on fixed scales, so nothing is normalised
that could be lost at deployment, and the actor's hidden layers are tanh, as a policy file holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from paceenv.core.errors import InputError
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile
from paceenv.trainers.offline.minari_dataset import Transitions
from paceenv.trainers.training.algorithms.sb3_learner import ranges_of

Algorithm = Literal["td3_bc", "bc"]


@dataclass(frozen=True)
class OfflineConfig:
    """Hyperparameters; those of the paper where it has them.

    Attributes:
        algorithm: ``td3_bc``, or ``bc``: its actor's second term alone.
        updates: gradient steps.
        batch_size: transitions in one of them.
        learning_rate: of actor and critics.
        gamma: discount per control interval; a setting shows what it does within a few.
        alpha: weight of the value against staying near the data.
        hidden: width of the two hidden layers.
        seed: of networks and batches.
    """

    algorithm: Algorithm = "td3_bc"
    updates: int = 5000
    batch_size: int = 256
    learning_rate: float = 1e-3
    gamma: float = 0.9
    alpha: float = 2.5
    hidden: int = 64
    seed: int = 0


TAU, POLICY_NOISE, NOISE_CLIP, ACTOR_EVERY = 0.005, 0.2, 0.5, 2
"""Of TD3: the target networks' rate, the noise of the target action and its bound, critic updates for one of the
actor."""


def learn_offline(
    data: Transitions, config: OfflineConfig, on_progress: Callable[[float], None] = lambda updates: None
) -> PolicyFile:
    """A policy from a data set; the same data and config give the same policy on one machine.

    Args:
        data: the data set.
        config: hyperparameters.
        on_progress: called with the updates done.

    Raises:
        InputError: TD3+BC on data with one action only, from which nothing can be learned about any other.
    """
    actions = len(np.unique(data.action_NA, axis=0))
    if actions == 1 and config.algorithm != "bc":
        raise InputError(
            f"data set: one action in all of {len(data.action_NA)} intervals; allowed for {config.algorithm}: at least "
            "two, as nothing can be learned about an action that was never taken"
        )
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        learner = _Learner(data, config, random)
    for update in range(config.updates):
        learner.update(update)
        on_progress(update + 1)
    policy = Learned(learner.layers(), data.mechanisms, config.algorithm, squashes=True)
    record: dict[str, Any] = {
        "algorithm": f"{config.algorithm}, offline",
        "config": asdict(config),
        "dataset": {name: data.record.get(name) for name in ("dataset_id", "algorithm_name", "total_steps", "reward")},
        "actions": actions,
    }
    return PolicyFile(policy, ranges_of(data.view_NO), record)


def _network(inputs: int, hidden: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, hidden), activation()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


class _Learner:
    """Networks, their targets and optimizers over one data set."""

    def __init__(self, data: Transitions, config: OfflineConfig, random: torch.Generator) -> None:
        self._config, self._random = config, random
        self._view, self._action, self._next = map(torch.from_numpy, (data.view_NO, data.action_NA, data.next_view_NO))
        spread = float(data.reward_N.std())
        self._reward = torch.from_numpy(data.reward_N) / (spread if spread > 0.0 else 1.0)
        signals, width = data.view_NO.shape[1], data.action_NA.shape[1]
        self.actor = _network(signals, config.hidden, width, nn.Tanh)
        self._critics = nn.ModuleList([_network(signals + width, config.hidden, 1, nn.ReLU) for _ in range(2)])
        self._actor_target, self._critics_target = copy.deepcopy(self.actor), copy.deepcopy(self._critics)
        self._actor_steps = torch.optim.Adam(self.actor.parameters(), config.learning_rate)
        self._critic_steps = torch.optim.Adam(self._critics.parameters(), config.learning_rate)

    def layers(self) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """The actor's, as a policy file holds them."""
        linear = [layer for layer in self.actor if isinstance(layer, nn.Linear)]
        return [(layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy()) for layer in linear]

    def update(self, number: int) -> None:
        """One gradient step of the critics, and every other time one of the actor; of the actor alone for cloning."""
        pick = torch.randint(len(self._reward), (self._config.batch_size,), generator=self._random)
        view, action = self._view[pick], self._action[pick]
        if self._config.algorithm == "bc":
            self._step(self._actor_steps, functional.mse_loss(torch.tanh(self.actor(view)), action))
            return
        self._learn_values(view, action, self._reward[pick], self._next[pick])
        if number % ACTOR_EVERY == 0:
            wanted = torch.tanh(self.actor(view))
            value = self._critics[0](torch.cat([view, wanted], 1))
            scale = self._config.alpha / value.abs().mean().detach()
            self._step(self._actor_steps, -scale * value.mean() + functional.mse_loss(wanted, action))
            for network, target in ((self.actor, self._actor_target), (self._critics, self._critics_target)):
                for new, old in zip(network.parameters(), target.parameters(), strict=True):
                    old.data.lerp_(new.data, TAU)

    def _learn_values(
        self, view: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, next_view: torch.Tensor
    ) -> None:
        with torch.no_grad():
            noise = torch.randn(action.shape, generator=self._random).mul_(POLICY_NOISE).clamp_(-NOISE_CLIP, NOISE_CLIP)
            after = (torch.tanh(self._actor_target(next_view)) + noise).clamp_(-1.0, 1.0)
            values = [critic(torch.cat([next_view, after], 1)) for critic in self._critics_target]
            target = reward[:, None] + self._config.gamma * torch.minimum(*values)  # truncated, never terminated
        found = [critic(torch.cat([view, action], 1)) for critic in self._critics]
        self._step(self._critic_steps, sum((functional.mse_loss(one, target) for one in found), torch.zeros(())))

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
