"""PPO of Stable-Baselines3, and RecurrentPPO of sb3-contrib, whose actor has an LSTM before its layers."""

from __future__ import annotations

from typing import Any

import torch
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm

from paceenv.trainers.training.algorithms.sb3_learner import Sb3Learner


class PpoLearner(Sb3Learner):
    """On-policy: each rollout is learned from in a few epochs and then forgotten."""

    label = "PPO, stable-baselines3"

    def _model(self) -> BaseAlgorithm:
        return PPO("MlpPolicy", self.envs, **self._arguments())

    def _arguments(self, **policy: Any) -> dict[str, Any]:
        """Arguments that both algorithms share; ``policy`` are more of ``policy_kwargs``."""
        ppo = self.section
        own = ("n_steps", "n_epochs", "gamma", "gae_lambda", "ent_coef")
        return {
            **{name: getattr(ppo, name) for name in own},
            "batch_size": min(ppo.batch_size, ppo.n_steps * self.envs.num_envs),
            "policy_kwargs": {
                "net_arch": list(ppo.net_arch),
                "activation_fn": torch.nn.Tanh,
                "log_std_init": ppo.log_std_init,
                **policy,
            },
            "seed": self.config.seed,
            "device": "cpu",
        }

    def _steps(self) -> int:
        return int(self.section.n_steps)

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"adam": self.model.policy.optimizer}


class RecurrentPpoLearner(PpoLearner):
    """PPO through time: the LSTM's state begins with nothing in every episode, as on a rank that starts."""

    label = "RecurrentPPO, sb3-contrib"
    cell = "lstm"
    model: RecurrentPPO

    def _model(self) -> RecurrentPPO:
        section = self.section
        policy = {"lstm_hidden_size": section.lstm_hidden_size, "enable_critic_lstm": section.enable_critic_lstm}
        return RecurrentPPO("MlpLstmPolicy", self.envs, **self._arguments(**policy))

    def advance(self, segment: int, rollouts: int) -> None:
        # new episodes begin: with the same bits of state, too, whatever the last segment left
        model: Any = self.model  # the library declares the states as None
        states = model._last_lstm_states
        model._last_lstm_states = RNNStates(*((torch.zeros_like(h), torch.zeros_like(c)) for h, c in states))
        super().advance(segment, rollouts)
