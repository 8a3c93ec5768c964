"""Gymnasium's wrappers and other libraries' checkers on our environments; what they return is looked at, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium_wrappers
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium_wrappers import NOT_APPLICABLE, SCALAR, VECTOR, Recipe
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from paceenv.envs.pacing_env import PacingEnv, PacingVectorEnv
from paceenv.envs.registration import ENV_ID, register_envs

register_envs()

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "environment.md"


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Let pass what Gymnasium and its video library warn of in their own code; ours still may not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        warnings.filterwarnings("ignore", message="overflow encountered in cast")  # spaces.Box, of float32 as float64
        warnings.filterwarnings("ignore", message=".*(same-step|Overwriting existing videos|avoid).*")
        warnings.filterwarnings("ignore", message=".*is not within the observation space.*")
        yield


@pytest.fixture(autouse=True)
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def test_no_wrapper_of_gymnasium_is_forgotten() -> None:
    modules = {"vector": (gymnasium.wrappers.vector, VECTOR), "scalar": (gymnasium.wrappers, SCALAR)}
    for name, (module, recipes) in modules.items():
        assert set(module.__all__) - set(NOT_APPLICABLE) == set(recipes), name


def test_the_page_of_the_environment_has_the_table_of_what_is_run() -> None:
    assert gymnasium_wrappers.table() in PAGE.read_text()


SHORT = {"episode_intervals": 2, "interval_iterations": 2}
SLOW = {(name, mode) for name in ("RecordVideo", "HumanRendering") for mode in ("SAME_STEP", "DISABLED")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[pytest.mark.slow] if (name, mode.name) in SLOW else [])
        for name in VECTOR
        for mode in gymnasium_wrappers.modes(name)
    ],
)
def test_vector_wrappers_work_on_the_native_batch(name: str, mode: AutoresetMode, tmp_path: Path) -> None:
    recipe, rows = VECTOR[name], 2
    plain = PacingVectorEnv(rows, autoreset_mode=mode, **SHORT)
    with quiet_libraries():
        batch = PacingVectorEnv(rows, autoreset_mode=mode, render_mode=recipe.render_mode, **SHORT)
        envs = recipe.wrap(batch, tmp_path)
        returned = envs.reset(seed=0)
        plain.reset(seed=0)
        envs.action_space.seed(0)
        for _ in range(5):
            action = envs.action_space.sample()
            returned = envs.step(_tensor(action) if name in {"ArrayConversion", "NumpyToTorch"} else action)
            expected = plain.step(np.zeros((rows, 2), np.float32))
            observation = np.asarray(returned[0]["signals"] if name == "FilterObservation" else returned[0])
            if name != "FilterObservation":
                assert observation.shape == envs.observation_space.shape
                assert observation.dtype == envs.observation_space.dtype
            assert np.isfinite(observation.astype(np.float64)).all()
            assert np.shape(returned[1]) == (rows,)
            np.testing.assert_array_equal(np.asarray(returned[3]), expected[3], err_msg="episodes end as without it")
            if mode is AutoresetMode.DISABLED and expected[3].any():
                for one in (envs, plain):
                    one.reset(options={"reset_mask": expected[3].copy()})
        envs.close()
    if name == "RecordVideo":
        assert list((tmp_path / "video").glob("*.mp4"))


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in VECTOR for mode in AutoresetMode if mode not in gymnasium_wrappers.modes(name)],
)
def test_where_a_vector_wrapper_fails_it_fails_on_gymnasium_s_own_vector_environment(
    name: str, mode: AutoresetMode, tmp_path: Path
) -> None:
    batch = PacingVectorEnv(2, autoreset_mode=mode, **SHORT)
    copies = SyncVectorEnv([lambda: PacingEnv(**SHORT)] * 2, autoreset_mode=mode)
    for envs in (copies, batch):
        with quiet_libraries(), pytest.raises((ValueError, BufferError)):
            _play(VECTOR[name], envs, tmp_path)


def _play(recipe: Recipe, envs: Any, folder: Path) -> None:
    """Wrap a vector environment and play it to the end of its first episodes."""
    wrapped = recipe.wrap(envs, folder)
    wrapped.reset(seed=0)
    for _ in range(2):
        wrapped.step(_tensor(np.zeros((2, 2), np.float32)))


def _tensor(action: Any) -> Any:
    import torch

    return torch.from_numpy(action)


@pytest.mark.parametrize("name", SCALAR)
def test_scalar_wrappers_work_on_the_environment(name: str, tmp_path: Path) -> None:
    recipe: Recipe = SCALAR[name]
    with quiet_libraries():
        env = recipe.wrap(
            PacingEnv(episode_intervals=3, interval_iterations=2, render_mode=recipe.render_mode), tmp_path
        )
        ended = 0
        for seed in range(2):
            env.reset(seed=seed)
            env.action_space.seed(seed)
            for _ in range(4):
                action = env.action_space.sample()
                returned = env.step(_tensor(action) if name in {"ArrayConversion", "NumpyToTorch"} else action)
                observation = np.asarray(returned[0])
                space = env.observation_space
                assert observation.shape == (space.shape or ())
                assert np.isfinite(float(returned[1]))
                ended += bool(returned[2] or returned[3])
                if returned[2] or returned[3]:
                    break
        env.close()
    assert ended
    if name == "RecordVideo":
        assert list((tmp_path / "video").glob("*.mp4"))


def test_normalized_observations_have_mean_0_and_spread_1() -> None:
    envs = gymnasium.wrappers.vector.NormalizeObservation(PacingVectorEnv(64, episode_intervals=20))
    envs.reset(seed=0)
    envs.action_space.seed(0)
    seen = np.concatenate([envs.step(envs.action_space.sample())[0] for _ in range(60)][20:])
    assert np.abs(seen.mean(axis=0)).max() < 0.3
    assert seen.std(axis=0) == pytest.approx(np.ones(seen.shape[1]), abs=0.35)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_recorded_returns_are_those_of_whole_episodes(mode: AutoresetMode) -> None:
    """Gymnasium's statistics of episodes against sums of our own rewards."""
    plain = PacingVectorEnv(3, episode_intervals=4, autoreset_mode=mode, reward="raw")
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(plain)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    total, found = np.zeros(3), 0
    for _ in range(14):
        _, reward, _, truncated, info = envs.step(envs.action_space.sample())
        total += reward
        if truncated.any():
            np.testing.assert_allclose(info["episode"]["r"], total)
            assert info["episode"]["l"].tolist() == [4, 4, 4]
            total[:] = 0.0
            found += 1
            if mode is AutoresetMode.DISABLED:
                envs.reset(options={"reset_mask": truncated})
    assert found >= 2


# Stable-Baselines3


def test_the_checker_of_stable_baselines3_has_nothing_to_say() -> None:
    check_env(PacingEnv(episode_intervals=3), warn=True, skip_render_check=False)
    check_env(PacingEnv(episode_intervals=3, render_mode="rgb_array"), warn=True, skip_render_check=False)


def test_stable_baselines3_trains_on_it_in_its_usual_way() -> None:
    arguments = {"episode_intervals": 4, "interval_iterations": 5}
    envs = VecNormalize(make_vec_env(ENV_ID, n_envs=2, seed=0, env_kwargs=arguments))
    model = PPO("MlpPolicy", envs, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
    model.learn(64)
    assert model.num_timesteps == 64
    assert len(model.ep_info_buffer or ()) == 16, "every episode of 4 steps is counted"
