"""The native batch against Gymnasium's own: autoreset modes, seeds, options, clusters of several shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from paceenv.core.errors import InputError
from paceenv.envs.episode_batch import UNPACED
from paceenv.envs.pacing_env import PacingEnv, PacingVectorEnv
from paceenv.envs.registration import SCENARIOS, register_envs
from paceenv.sim.engine.simulator import Simulator
from paceenv.trainers.evaluation.static_search import search_static
from paceenv.trainers.evaluation.suites import Case, Suite

register_envs()

ROWS, INTERVALS = 4, 3


def played(envs: VectorEnv[Any, Any, Any], steps: int = 11) -> Iterator[tuple[Any, ...]]:
    """What a batch returns to the same calls: resets with seeds and without, and steps."""
    random = np.random.default_rng(5)
    yield envs.reset(seed=3)
    for t in range(steps):
        if t == 4:
            yield envs.reset(seed=[7, None, 8, None])
        if t == 9:
            yield envs.reset()
        yield envs.step(random.uniform(-1, 1, envs.action_space.shape or ()).astype(np.float32))


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Equal to the byte: types, keys, masks."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where}, {key}")
        return
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
    if theirs.dtype == object:
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=where)
    else:
        assert ours.tobytes() == theirs.tobytes(), where


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(
    "arguments",
    [
        {"cluster": "two-jobs"},
        {"cluster": ["two-jobs", "one-job-imbalanced", "one-job"], "weights": [2, 1, 0]},
        {"cluster": "unequal-slack", "reward": "raw"},
    ],
    ids=["paired", "several clusters", "raw"],
)
def test_the_batch_does_as_sync_vector_env_does(mode: AutoresetMode, arguments: dict[str, Any]) -> None:
    """Every call of a run, in each autoreset mode: observation, reward, ends, info with masks."""
    given = {"episode_intervals": INTERVALS, "interval_iterations": 5, **arguments}
    copies = SyncVectorEnv([lambda: PacingEnv(**given)] * ROWS, autoreset_mode=mode)
    batch = PacingVectorEnv(ROWS, autoreset_mode=mode, **given)
    assert batch.metadata["autoreset_mode"] is mode
    with closing(copies), closing(batch):
        calls = zip(played(batch), played(copies), strict=True)
        for k, (ours, theirs) in enumerate(calls):
            for name, a, b in zip(
                ("observation", "reward", "terminated", "truncated"), ours[:-1], theirs, strict=False
            ):
                assert_same(a, b, f"call {k}, {name}")
            assert_same(ours[-1], theirs[-1], f"call {k}, info")


@pytest.mark.parametrize("make", [PacingEnv, lambda: PacingVectorEnv(2)])
def test_options_that_cannot_be_honoured_are_refused(make: Any) -> None:
    envs = make()
    first = envs.reset(seed=1)[0]
    with pytest.raises(InputError, match="options: unknown reset_mask; allowed: no options"):
        envs.reset(options={"reset_mask": np.ones(2, bool)})
    np.testing.assert_array_equal(envs.reset(seed=1)[0], first, err_msg="nothing has changed")


def test_async_vector_env_steps_our_environment() -> None:
    envs = AsyncVectorEnv([lambda: PacingEnv(episode_intervals=2)] * 2, daemon=True)
    with closing(envs):
        first, _ = envs.reset(seed=0)
        np.testing.assert_array_equal(first, PacingVectorEnv(2).reset(seed=0)[0])
        actions = np.full((2, 2), -1.0, np.float32)
        ends = [envs.step(actions)[3].tolist() for _ in range(3)]
    assert ends == [[False, False], [True, True], [False, False]]


# Rewards


def test_paired_rewards_are_raw_ones_less_those_of_the_unpaced_copy() -> None:
    arguments = {"cluster": ["two-jobs", "one-job"], "mechanisms": ("slack", "phase_shift")}
    paired, raw = (PacingVectorEnv(6, reward=reward, **arguments) for reward in ("paired", "raw"))
    without = PacingVectorEnv(6, reward="raw", **arguments)
    off, random = np.full((6, 4), -1.0, np.float32), np.random.default_rng(0)
    for envs in (paired, raw, without):
        envs.reset(seed=9)
    for _ in range(5):
        action = random.uniform(-1, 1, (6, 4)).astype(np.float32)
        _, reward, *_, info = paired.step(action)
        _, plain, *_, raw_info = raw.step(action)
        _, passive, *_, passive_info = without.step(off)
        np.testing.assert_array_equal(reward, plain - passive)
        np.testing.assert_array_equal(info["passive_reward"], passive)
        np.testing.assert_array_equal(info["passive_step_mean_s"], passive_info["step_mean_s"])
        np.testing.assert_array_equal(info["gain"], passive_info["step_mean_s"] / info["step_mean_s"] - 1.0)
        assert "gain" not in raw_info
    assert paired.step(action)[1].any()
    paired.reset(seed=9)
    assert not paired.step(off)[1].any(), "no pacing earns exactly nothing"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_registered_scenario_pays_unless_it_is_the_null(name: str) -> None:
    gymnasium.make(f"paceenv/{name}-v0").reset(seed=0)
    case, mechanism = Case(cluster=SCENARIOS[name]["cluster"]), SCENARIOS[name]["mechanisms"]
    suite = Suite(name=name, cases=[case], mechanisms=[mechanism], seeds=16, iterations=300)
    assert (search_static(suite).gain_SCE.mean(axis=2).max() > 0.01) == (name != "Null")


# Frames


def test_a_picture_has_one_size_and_changes_with_what_happened() -> None:
    envs = PacingVectorEnv(2, "two-jobs", render_mode="rgb_array")
    with pytest.raises(gymnasium.error.ResetNeeded):
        envs.render()
    envs.reset(seed=0)
    before = envs.render()
    envs.step(np.tile(np.float32([-1.0, 0.5]), (2, 1)))
    frames = envs.render()
    assert before is not None
    assert frames is not None
    for frame in (*before, *frames):
        assert isinstance(frame, np.ndarray)
        assert (frame.shape, frame.dtype) == ((480, 800, 3), np.uint8)
        assert frame.std() > 20.0
    assert not np.array_equal(before[0], frames[0])


# Episodes that come again: what is kept of them changes no result, and their unpaced copies run once


def repeating(**changed: Any) -> PacingVectorEnv:
    return PacingVectorEnv(6, ["two-jobs", "one-job-imbalanced"], episode_intervals=5, **changed)


def course(env: PacingVectorEnv, *seeds: tuple[int, int]) -> list[Any]:
    """What every step says, from some seeds on for so many steps each, with actions that differ."""
    found, rng = list[Any](), np.random.default_rng(0)
    for seed, steps in seeds:
        found.append(env.reset(seed=seed)[0])
        env.desync_episodes()
        for _ in range(steps):
            observation, reward, _, truncated, _ = env.step(rng.uniform(-1, 1, (6, 2)).astype(np.float32))
            found += [observation, reward, truncated, *env._batch.terms.values()]
    return found


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("reward", ["paired", "raw"])
def test_results_do_not_depend_on_kept_episodes(mode: AutoresetMode, reward: Any) -> None:
    """Seeds come again, also after fewer steps and for more of them."""
    plain, keeping = (repeating(autoreset_mode=mode, reward=reward) for _ in range(2))
    keeping.keep_episodes()
    courses = [course(env, (7, 6), (7, 6), (20, 3), (20, 8)) for env in (plain, keeping)]
    for one, other in zip(*courses, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_unpaced_copy_of_an_episode_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env, runs, plain = repeating(), list[bool](), Simulator.run
    env.keep_episodes()

    def counting(self: Simulator, *arguments: Any) -> Any:
        runs.append(any(self is one for one in env._batch.simulators[UNPACED:]))
        return plain(self, *arguments)

    monkeypatch.setattr(Simulator, "run", counting)
    course(env, (7, 40))
    first = sum(runs)
    runs.clear()
    course(env, (7, 40))
    assert len(runs) > 80, "the paced episodes run"
    assert sum(runs) < 0.1 * first, "but for those that had only started"
