"""SAC of Stable-Baselines3, TQC and CrossQ of sb3-contrib: from a replay buffer. Their mean action is deployed."""

from __future__ import annotations

from typing import Any

import torch
from sb3_contrib import TQC, CrossQ
from stable_baselines3 import SAC
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from paceenv.trainers.training.algorithms.learner import Saved
from paceenv.trainers.training.algorithms.sb3_learner import Sb3Learner

ROW_STEPS = 32
"""Steps of the batch between two rows of the learning curve, as many as in a rollout of the released PPO."""
CRITIC_ARCH = [256, 256]
"""Hidden layers of the critics, which are not deployed."""
_BUFFER = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


class SacLearner(Sb3Learner):
    """Off-policy: what was seen is kept, also in a checkpoint, and learned from again and again."""

    label = "SAC, stable-baselines3"
    squashes = True
    model: OffPolicyAlgorithm

    def _model(self) -> OffPolicyAlgorithm:
        return SAC("MlpPolicy", self.envs, tau=self.section.tau, **self._arguments())

    def _arguments(self, **policy: Any) -> dict[str, Any]:
        """Arguments that the three algorithms share; ``policy`` are more of ``policy_kwargs``."""
        section = self.section
        own = ("buffer_size", "learning_starts", "batch_size", "gamma", "train_freq", "gradient_steps", "ent_coef")
        net_arch = {"pi": list(section.net_arch), "qf": list(CRITIC_ARCH)}
        return {
            **{name: getattr(section, name) for name in own},
            "target_entropy": section.target_entropy,
            "policy_kwargs": {"net_arch": net_arch, "activation_fn": torch.nn.Tanh, **policy},
            "seed": self.config.seed,
            "device": "cpu",
        }

    def _steps(self) -> int:
        return ROW_STEPS

    def advance(self, segment: int, rollouts: int) -> None:
        # actions before learning starts come from the space's own generator, which a checkpoint does not have
        self.model.action_space.seed(torch.initial_seed())  # that of the run and the segment
        super().advance(segment, rollouts)

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        model: Any = self.model
        found = {"actor_adam": model.actor.optimizer, "critic_adam": model.critic.optimizer}
        if model.ent_coef_optimizer is not None:
            found["entropy_adam"] = model.ent_coef_optimizer
        return found

    def state(self) -> Saved:
        saved, model = super().state(), self.model
        buffer: Any = model.replay_buffer
        end = buffer.buffer_size if buffer.full else buffer.pos
        arrays = {f"buffer.{name}": getattr(buffer, name)[:end] for name in _BUFFER}
        if getattr(model, "log_ent_coef", None) is not None:
            arrays["log_ent_coef"] = model.log_ent_coef.detach().numpy()  # type: ignore[attr-defined]
        place = {"pos": buffer.pos, "full": buffer.full, "updates": model._n_updates}
        return Saved({**saved.arrays, **arrays}, {**saved.plain, **place})

    def restore(self, saved: Saved) -> None:
        super().restore(saved)
        model, buffer = self.model, self.model.replay_buffer
        for name in _BUFFER:
            kept = saved.arrays[f"buffer.{name}"]
            getattr(buffer, name)[: len(kept)] = kept
        assert buffer is not None
        buffer.pos, buffer.full = int(saved.plain["pos"]), bool(saved.plain["full"])
        model._n_updates = int(saved.plain["updates"])
        if "log_ent_coef" in saved.arrays:
            with torch.no_grad():
                model.log_ent_coef.copy_(torch.from_numpy(saved.arrays["log_ent_coef"].copy()))  # type: ignore[attr-defined]


class TqcLearner(SacLearner):
    """SAC with critics of quantiles, the highest of which are dropped."""

    label = "TQC, sb3-contrib"

    def _model(self) -> OffPolicyAlgorithm:
        section = self.section
        arguments = self._arguments(n_quantiles=section.n_quantiles, n_critics=section.n_critics)
        drop = section.top_quantiles_to_drop_per_net
        return TQC("MlpPolicy", self.envs, tau=section.tau, top_quantiles_to_drop_per_net=drop, **arguments)


class CrossQLearner(SacLearner):
    """SAC without target networks, with batch renormalisation, which is folded into the layers that are deployed."""

    label = "CrossQ, sb3-contrib"

    def _model(self) -> OffPolicyAlgorithm:
        section = self.section
        arguments = self._arguments(renorm_warmup_steps=section.renorm_warmup_steps)
        return CrossQ("MlpPolicy", self.envs, policy_delay=section.policy_delay, **arguments)


OFF_POLICY: dict[str, type[SacLearner]] = {"sac": SacLearner, "tqc": TqcLearner, "crossq": CrossQLearner}
