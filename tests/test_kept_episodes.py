"""Episodes that come again: what is kept of them changes no result, and their unpaced copies run once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from paceenv.envs.episode_batch import UNPACED
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.sim.engine.simulator import Simulator

ROWS = 6


def make(**changed: Any) -> PacingVectorEnv:
    arguments = {"episode_intervals": 5, **changed}
    return PacingVectorEnv(ROWS, ["two-jobs", "one-job-imbalanced"], **arguments)


def course(env: PacingVectorEnv, seeds: list[tuple[int, int]]) -> list[Any]:
    """What every step says, from some seeds on for so many steps each, with actions that differ."""
    found, rng = list[Any](), np.random.default_rng(0)
    for seed, steps in seeds:
        found.append(env.reset(seed=seed)[0])
        env.desync_episodes()
        for _ in range(steps):
            observation, reward, _, truncated, _ = env.step(rng.uniform(-1, 1, (ROWS, 2)).astype(np.float32))
            found += [observation, reward, truncated, *env._batch.terms.values()]
    return found


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("reward", ["paired", "raw"])
def test_results_do_not_depend_on_it(mode: AutoresetMode, reward: Any) -> None:
    """Seeds come again, also after fewer steps and for more of them."""
    seeds = [(7, 6), (7, 6), (20, 3), (20, 8)]
    plain, keeping = make(autoreset_mode=mode, reward=reward), make(autoreset_mode=mode, reward=reward)
    keeping.keep_episodes()
    for one, other in zip(course(plain, seeds), course(keeping, seeds), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_unpaced_copy_of_an_episode_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env, runs, plain = make(), list[bool](), Simulator.run
    env.keep_episodes()

    def counting(self: Simulator, *arguments: Any) -> Any:
        runs.append(any(self is one for one in env._batch.simulators[UNPACED:]))
        return plain(self, *arguments)

    monkeypatch.setattr(Simulator, "run", counting)
    course(env, [(7, 40)])
    first = sum(runs)
    runs.clear()
    course(env, [(7, 40)])
    assert len(runs) > 80, "the paced episodes run"
    assert sum(runs) < 0.1 * first, "but for those that had only started"
