"""Offline data from the simulator: a behaviour policy in ``paceenv/Pacing-v0``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.envs.episode_batch import Reward
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies.base import Policy
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster
from paceenv.trainers.offline.episodes import Episode

RANDOM = "random"
"""The behaviour that explores: settings drawn at random, each kept for some intervals."""
HOLD_INTERVALS, NULL_SHARE = 8, 0.25
"""How long the random behaviour keeps a setting on average, and how often that is no pacing at all."""

Behave = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def simulated_episodes(
    cluster: Cluster,
    behaviours: Sequence[str],
    *,
    mechanisms: Sequence[str],
    episodes: int,
    intervals: int = 64,
    reward: Reward = "paired",
    cv_weight: float = 0.1,
    seed: int = 0,
    on_done: Callable[[float], None] = lambda done: None,
) -> list[Episode]:
    """Episodes of each behaviour on a cluster, on the same seeds.

    Args:
        cluster: the cluster; random quantities are drawn for each episode.
        behaviours: policies by name or file, or ``random``.
        mechanisms: those that the actions set.
        episodes: of each behaviour.
        intervals: control intervals of an episode.
        reward: ``raw``, the environment's; ``paired``, less that of the same episode without pacing.
        cv_weight: weight of the variation in the reward.
        seed: of the first episode; the others follow.
        on_done: called with the intervals done, of ``len(behaviours) * intervals``.

    Raises:
        InputError: for a behaviour that cannot be made, or that paces by another mechanism.
    """
    found: list[Episode] = []
    for place, name in enumerate(behaviours):
        env = PacingVectorEnv(
            episodes,
            cluster,
            mechanisms=mechanisms,
            episode_intervals=intervals + 1,  # one more, so that none ends here
            cv_weight=cv_weight,
            reward=reward,
            warn_null=False,
        )
        behave = _behave(name, cluster, mechanisms, episodes, seed)
        view, _ = env.reset(seed=seed)
        views, actions, rewards = [view], [], []
        for k in range(intervals):
            actions.append(behave(views[-1]))
            view, gained, *_ = env.step(actions[-1])
            views.append(view)
            rewards.append(gained)
            on_done(place * intervals + k + 1)
        view_EKO, action_EKA, reward_EK = (np.stack(each, axis=1) for each in (views, actions, rewards))
        record = {"source": f"simulated {cluster.name}", "behaviour": name, "reward": reward}
        found += [
            Episode(view_EKO[e], action_EKA[e], reward_EK[e], record | {"seed": seed + e}) for e in range(episodes)
        ]
    return found


def _behave(name: str, cluster: Cluster, mechanisms: Sequence[str], rows: int, seed: int) -> Behave:
    """From views of rows to actions."""
    if name == RANDOM:
        return _explorer(rows, 2 * len(mechanisms), seed)
    policy = select_policy(name, cluster)
    if not isinstance(policy, Policy):
        raise InputError(f"behaviour {name}: it needs to know the future; allowed: random, or another policy")
    policy.reset(rows)

    def behave(view_EO: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            return pacing.encode_action(policy.act(view_EO), mechanisms)
        except ValueError as error:
            raise InputError(f"behaviour {name}: {error}") from None

    return behave


def _explorer(rows: int, width: int, seed: int) -> Behave:
    random = np.random.default_rng(seed)
    now_EA, left_E = np.empty((rows, width), np.float32), np.zeros(rows, np.int64)

    def behave(view_EO: NDArray[np.float32]) -> NDArray[np.float32]:
        drawn_EA = random.uniform(-1.0, 1.0, (rows, width)).astype(np.float32)
        drawn_EA[random.random(rows) < NULL_SHARE] = -1.0
        again_E = left_E == 0
        now_EA[again_E] = drawn_EA[again_E]
        left_E[again_E] = random.geometric(1.0 / HOLD_INTERVALS, int(again_E.sum()))
        left_E[:] -= 1
        return now_EA.copy()

    return behave
