"""The native adapter: ``PacingVectorEnv`` as a Stable-Baselines3 ``VecEnv``, one batch for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from paceenv.env import PacingVectorEnv


class NativeVecEnv(VecEnv):
    """Steps the whole batch by one call of the engine.

    With a ``passive`` batch of the same episodes the reward is the difference to what would have happened without any
    pacing, on the same noise. That takes the same number from every action's reward, so it changes no preference, but
    it removes what cluster and noise contribute, which is several times what pacing does.

    Episodes are long and of one length, so all rows would end in the same step and Stable-Baselines3 would ask its
    critic row by row, all at once. ``reset`` therefore spreads the rows' first ends evenly.
    """

    def __init__(self, env: PacingVectorEnv, seed: int = 0, passive: PacingVectorEnv | None = None) -> None:
        self.env, self.render_mode = env, None  # the base class asks for the mode while it is made
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._seed_base, self._seeded, self._passive = seed, False, passive
        self._off = np.full(env.action_space.shape or (), -1.0, np.float32)
        self._actions: NDArray[np.float32] = np.zeros(env.action_space.shape or (), np.float32)
        self._return_E, self._length_E = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)

    def reset(self) -> NDArray[np.float32]:
        observation, _ = self.env.reset(seed=None if self._seeded else self._seed_base)
        self.env.stagger()
        if self._passive is not None:
            self._passive.reset(seed=None if self._seeded else self._seed_base)
            self._passive.stagger()
        self._seeded = True
        self._return_E[:], self._length_E[:] = 0.0, 0
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return observation

    def step_async(self, actions: NDArray[np.float32]) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        observation, reward, _, truncated, info = self.env.step(self._actions)
        if self._passive is not None:
            reward = reward - self._passive.step(self._off)[1]
        self._return_E += reward
        self._length_E += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for n in np.flatnonzero(truncated):
            infos[n] = {
                "terminal_observation": info["final_obs"][n],
                "TimeLimit.truncated": True,
                "episode": {"r": float(self._return_E[n]), "l": int(self._length_E[n]), "t": 0.0},
            }
        self._return_E[truncated], self._length_E[truncated] = 0.0, 0
        return observation, reward.astype(np.float32), truncated, infos

    def close(self) -> None:
        self.env.close()

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Take a seed for the next :meth:`reset`; row ``n`` gets ``seed + n``."""
        if seed is not None:
            self._seed_base, self._seeded = seed, False
        return [self._seed_base + n for n in range(self.num_envs)]

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("the rows of a native batch share their attributes")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        raise NotImplementedError("the rows of a native batch have no methods of their own")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]
