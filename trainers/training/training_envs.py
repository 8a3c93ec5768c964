"""The environments of a training: a batch for each shape of cluster, all together as one ``VecEnv`` of SB3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from paceenv.core import signals
from paceenv.core.errors import out_of_range
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies.networks import ObservationEMA
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import shape_of
from paceenv.trainers.evaluation.suites import Case
from paceenv.trainers.training.train_config import Environment


class NativeVecEnv(VecEnv):
    """Batches of ``PacingVectorEnv`` as one: the rows of all batches in order; a step is one call per batch.

    Episodes are long and of one length, so all rows would end in the same step, and Stable-Baselines3 would ask its
    critic row by row, all at once. ``reset`` therefore spreads the rows' first ends evenly.

    Args:
        seed: row ``n`` gets ``seed + n``.
        memory_intervals: appends to the signals the averages that the policy will keep, over one time scale or
            several (``paceenv.policies.networks``); 0: none.
        change_intervals: appends the mean change of the signals over so many control intervals; 0: not.
    """

    def __init__(
        self,
        envs: Sequence[PacingVectorEnv],
        seed: int = 0,
        *,
        memory_intervals: int | Sequence[int] = 0,
        change_intervals: int = 0,
    ) -> None:
        if isinstance(envs, PacingVectorEnv):
            raise out_of_range("envs", envs, "a list of batches", "NativeVecEnv")
        other = [env.autoreset_mode for env in envs if env.autoreset_mode is not AutoresetMode.SAME_STEP]
        if other:
            raise out_of_range("autoreset_mode", other[0].value, f"{AutoresetMode.SAME_STEP.value}", "NativeVecEnv")
        self.envs, self.render_mode = list(envs), None
        self._env_of = [env for env in envs for _ in range(env.num_envs)]
        self._ends = np.cumsum([env.num_envs for env in envs])[:-1]
        rows, first = len(self._env_of), envs[0]
        self._memory, space = ObservationEMA(memory_intervals, change_intervals), first.single_observation_space
        if self._memory.entries:
            most = 2.0 if change_intervals else 1.0  # a signal from -1 to 1 changes by 2 at most
            space = Box(-most, most, (signals.SIGNALS + self._memory.entries,), np.float32)
        super().__init__(rows, space, first.single_action_space)
        self._seed_base, self._seeded = seed, False
        self._actions: NDArray[np.float32] = np.zeros((rows, *(first.single_action_space.shape or ())), np.float32)
        self._return_E, self._length_E = np.zeros(rows), np.zeros(rows, np.int64)

    def reset(self) -> NDArray[np.float32]:
        observations, base = [], self._seed_base
        for env in self.envs:
            seed = None if self._seeded else base
            observations.append(env.reset(seed=seed)[0])
            env.desync_episodes()
            base += env.num_envs
        self._seeded = True
        self._return_E[:], self._length_E[:] = 0.0, 0
        self.reset_infos = [{} for _ in range(self.num_envs)]
        observation = np.concatenate(observations)
        self._memory.update(observation)
        return self._remembered(observation, np.arange(self.num_envs))

    def _remembered(self, observation_EO: NDArray[np.float32], started: NDArray[np.int64]) -> NDArray[np.float32]:
        """Observations and their averages; the averages of ``started`` begin here."""
        self._memory.start(started, observation_EO)
        return np.concatenate([observation_EO, self._memory.mean_BO], axis=1)

    def step_async(self, actions: NDArray[np.float32]) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        actions = np.split(self._actions, self._ends)
        results = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        observation, reward, _, truncated = (np.concatenate([of_batch[i] for of_batch in results]) for i in range(4))
        self._return_E += reward
        self._length_E += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended = np.flatnonzero(truncated)
        last = observation.copy()
        final = np.concatenate([info.get("final_obs", np.full(len(rows), None)) for _, rows, *_, info in results])
        for n in ended:
            last[n] = final[n]
        self._memory.update(last)
        last = self._remembered(last, ended[:0])
        for n in ended:
            infos[n] = {
                "terminal_observation": last[n],
                "TimeLimit.truncated": True,
                "episode": {"r": float(self._return_E[n]), "l": int(self._length_E[n]), "t": 0.0},
            }
        self._return_E[truncated], self._length_E[truncated] = 0.0, 0
        return self._remembered(observation, ended), reward.astype(np.float32), truncated, infos

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Take a seed for the next :meth:`reset`; row ``n`` gets ``seed + n``."""
        if seed is not None:
            self._seed_base, self._seeded = seed, False
        return [self._seed_base + n for n in range(self.num_envs)]

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of the batch of each row."""
        return [getattr(self._env_of[n], attr_name) for n in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the batches of these rows, which all rows of a batch share."""
        for n in self._get_indices(indices):
            setattr(self._env_of[n], attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method once for each batch that has one of these rows; every row gets its batch's answer."""
        rows, answers = [self._env_of[n] for n in self._get_indices(indices)], dict[int, Any]()
        for env in rows:
            if id(env) not in answers:
                answers[id(env)] = getattr(env, method_name)(*method_args, **method_kwargs)
        return [answers[id(env)] for env in rows]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


def make_batches(config: Environment) -> list[PacingVectorEnv]:
    """One batch for each shape of cluster (ranks, process groups, program).

    Rows are in proportion to the weights of a batch's clusters, with at least one row for each cluster. One environment
    over all shapes would draw them by chance instead, which is noisier where few rows share many clusters.
    """
    shapes: dict[tuple[int, int, str], list[tuple[Case, Cluster]]] = {}
    for share in config.shares():
        cluster = share.load()
        shapes.setdefault(shape_of(cluster), []).append((share, cluster))
    weights = [sum(share.weight for share, _ in members) for members in shapes.values()]
    rows = _apportioned(config.environments, weights, [len(members) for members in shapes.values()])
    batches = []
    for members, count in zip(shapes.values(), rows, strict=True):
        env = PacingVectorEnv(
            count,
            [cluster for _, cluster in members],
            weights=[share.weight for share, _ in members],
            mechanisms=config.mechanisms,
            interval_iterations=config.interval_iterations,
            episode_intervals=config.episode_intervals,
            cv_weight=config.cv_weight,
            threads=config.threads,
            limits=config.limits,
            autoreset_mode=AutoresetMode.SAME_STEP,
        )
        if config.pool_segments:
            env.keep_episodes()
        batches.append(env)
    return batches


def _apportioned(total: int, weights: Sequence[float], least: Sequence[int]) -> list[int]:
    """``total`` rows in proportion to ``weights``, by largest remainder, but no part with fewer than its ``least``."""
    if total <= sum(least):
        return list(least)
    spare = total - sum(least)
    exact = [spare * weight / sum(weights) for weight in weights]
    rows = [low + int(share) for low, share in zip(least, exact, strict=True)]
    by_remainder = sorted(range(len(rows)), key=lambda i: int(exact[i]) - exact[i])
    for i in by_remainder[: total - sum(rows)]:
        rows[i] += 1
    return rows
