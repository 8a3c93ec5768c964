"""The PettingZoo environment: its checkers, and parity with evaluation and scalar env."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.envs.multi_agent import PacingParallelEnv
from paceenv.envs.pacing_env import PacingEnv
from paceenv.policies.base import Policy
from paceenv.policies.rollout import run
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start

MECHANISMS = ("phase_shift", "slack")
INTERVALS = 12


class Scripted(Policy):
    """Plays a table of actions ``(K, R, A)``, whatever it sees, and keeps what it saw."""

    name = "scripted"

    def __init__(self, action_KRA: NDArray[np.float32]) -> None:
        self._action_KRA = action_KRA

    def reset(self, rows: int) -> None:
        self.seen: list[NDArray[np.float32]] = []

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        self.seen.append(signals_BO.copy())
        return pacing.decode_action(self._action_KRA[len(self.seen) - 1], MECHANISMS)


@pytest.mark.parametrize("cluster", ["two-jobs", "unequal-slack"])
def test_the_same_actions_give_the_run_of_an_evaluation_bit_for_bit(cluster: str) -> None:
    seed, env = 7, PacingParallelEnv(cluster, mechanisms=MECHANISMS)
    action_KRA = np.random.default_rng(1).uniform(-1.0, 1.0, (INTERVALS, len(env.possible_agents), 4))
    policy = Scripted(action_KRA.astype(np.float32))
    evaluated = run(policy, start(load_cluster(cluster), np.array([seed])), 20 * (INTERVALS + 1))
    step_KT = evaluated.step_ET[0].reshape(INTERVALS + 1, 20)

    views, _ = env.reset(seed=seed)
    for k, action_RA in enumerate(policy._action_KRA):
        np.testing.assert_array_equal(np.stack(list(views.values())), policy.seen[k])
        views, _, _, _, infos = env.step(dict(zip(env.agents, action_RA, strict=True)))
        assert infos["rank_0"]["step_mean_s"] == step_KT[k + 1].mean()
    assert len({tuple(view) for view in policy.seen[-1].tolist()}) > 1, "ranks see different things"


def test_one_action_for_all_ranks_gives_the_scalar_environment() -> None:
    together, alone = PacingParallelEnv("two-jobs"), PacingEnv("two-jobs", mechanisms="phase_shift")
    together.reset(seed=3), alone.reset(seed=3)
    action = np.array([-0.5, 0.6], np.float32)
    for _ in range(6):
        views, rewards, _, _, infos = together.step(dict.fromkeys(together.agents, action))
        view, reward, _, _, info = alone.step(action)
        assert set(rewards.values()) == {reward}
        assert infos["rank_5"]["step_mean_s"] == info["step_mean_s"]
        assert any(np.array_equal(view, each) for each in views.values()), "its observer is one of the ranks"


def test_pettingzoo_s_own_tests_pass() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the module makes one of PettingZoo's games in a way that is deprecated
        from pettingzoo.test import parallel_api_test, parallel_seed_test
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(PacingParallelEnv(episode_intervals=8), num_cycles=30)
        parallel_seed_test(lambda: PacingParallelEnv(episode_intervals=8))


def test_an_action_for_each_rank_or_one_clear_line() -> None:
    env = PacingParallelEnv(episode_intervals=1)
    env.reset(seed=0)
    actions = {agent: np.zeros(2, np.float32) for agent in env.agents}
    with pytest.raises(InputError, match="actions: rank_3 is missing or unknown; allowed: one action for each"):
        env.step({agent: action for agent, action in actions.items() if agent != "rank_3"})
    with pytest.raises(InputError, match=r"action of rank_0 = \[nan, 0.0\]; allowed: numbers from"):
        env.step(actions | {"rank_0": np.array([np.nan, 0.0], np.float32)})
    assert set(env.step(actions)[3].values()) == {True}
    assert (env.agents, env.step({})) == ([], ({}, {}, {}, {}, {}))
    with pytest.raises(InputError, match="mechanisms = "):
        PacingParallelEnv(mechanisms=("magic",))
