"""PPO of Stable-Baselines3."""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm

from paceenv.trainers.training.algorithms.learner import Layers
from paceenv.trainers.training.algorithms.sb3_learner import Sb3Learner, linear_layers


class PpoLearner(Sb3Learner):
    """On-policy: each rollout is learned from in a few epochs and then forgotten."""

    label = "PPO, stable-baselines3"

    def _model(self) -> BaseAlgorithm:
        ppo = self.section
        return PPO(
            "MlpPolicy",
            self.envs,
            n_steps=ppo.n_steps,
            batch_size=min(ppo.batch_size, ppo.n_steps * self.envs.num_envs),
            n_epochs=ppo.n_epochs,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
            ent_coef=ppo.ent_coef,
            policy_kwargs={
                "net_arch": list(ppo.net_arch),
                "activation_fn": torch.nn.Tanh,
                "log_std_init": ppo.log_std_init,
            },
            seed=self.config.seed,
            device="cpu",
        )

    def _steps(self) -> int:
        return int(self.section.n_steps)

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"adam": self.model.policy.optimizer}

    def actor(self) -> Layers:
        policy: Any = self.model.policy
        return linear_layers(*policy.mlp_extractor.policy_net, policy.action_net)
