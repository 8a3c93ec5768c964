"""The Gymnasium environment: what it takes, returns and refuses."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, get_args

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence
from stable_baselines3 import PPO
from stable_baselines3.common import env_checker
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.envs.pacing_env import PacingEnv, PacingVectorEnv
from paceenv.envs.registration import ENV_ID, register_envs
from paceenv.ui.config_files import AnyMechanism

register_envs()

Action = np.ndarray[Any, np.dtype[np.float32]]
OFF: Action = np.array([-1.0, -1.0], np.float32)


# The checks of Gymnasium and Stable-Baselines3


@pytest.mark.parametrize("mechanisms", [("slack",), ("slack", "phase_shift", "paper")])
def test_gymnasium_s_checker_has_nothing_to_say(mechanisms: tuple[str, ...]) -> None:
    check_env(gymnasium.make(ENV_ID, mechanisms=mechanisms, episode_intervals=3).unwrapped)


def test_stable_baselines3_has_nothing_to_say_and_trains_on_it_in_its_usual_way() -> None:
    for mode in (None, "rgb_array"):
        env_checker.check_env(PacingEnv(episode_intervals=3, render_mode=mode), warn=True, skip_render_check=False)
    arguments = {"episode_intervals": 4, "interval_iterations": 5}
    envs = VecNormalize(make_vec_env(ENV_ID, n_envs=2, seed=0, env_kwargs=arguments))
    model = PPO("MlpPolicy", envs, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
    model.learn(64)
    assert model.num_timesteps == 64
    assert len(model.ep_info_buffer or ()) == 16, "every episode of 4 steps is counted"


@pytest.mark.parametrize(
    "code",
    [
        'import gymnasium; gymnasium.make("paceenv:paceenv/Pacing-v0")',
        'import gymnasium, paceenv; gymnasium.spec("paceenv/Pacing-v0")',
        'import paceenv.live, gymnasium, paceenv.envs; gymnasium.spec("paceenv/Pacing-v0")',
    ],
    ids=["module prefix", "paceenv after gymnasium", "paceenv.envs, however late"],
)
def test_the_environment_is_found_in_a_fresh_interpreter(code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def steps_of(rows: int, threads: int, seed: int = 3) -> list[tuple[Any, ...]]:
    """What a reset and eight steps return; a row's actions depend on its number alone."""
    with closing(PacingVectorEnv(rows, threads=threads, episode_intervals=6)) as envs:
        returned: list[tuple[Any, ...]] = [envs.reset(seed=seed)]
        kept = copy.deepcopy(returned)
        actions = [np.random.default_rng(n).uniform(-1.0, 1.0, (8, 2)).astype(np.float32) for n in range(rows)]
        for action_EA in np.stack(actions, axis=1):
            returned.append(envs.step(action_EA))
            kept.append(copy.deepcopy(returned[-1]))
    assert data_equivalence(returned, kept, exact=True), "what was returned does not change"
    return kept


def test_a_row_is_the_same_in_any_batch_with_any_threads_and_another_with_another_seed() -> None:
    batch = steps_of(3, 1)
    for rows, threads in ((3, 2), (2, 1), (1, 1)):
        for ours, again in zip(batch[1:], steps_of(rows, threads)[1:], strict=True):
            assert all(np.array_equal(a[:rows], b) for a, b in zip(ours[:4], again[:4], strict=True))
    assert not np.array_equal(batch[1][0], steps_of(3, 1, seed=6)[1][0])


# Behaviour


def test_spaces_and_docstring_agree_with_the_definitions() -> None:
    env, entries = PacingEnv(mechanisms=("phase_shift", "paper")), signals.DEFINITIONS
    low, high = min(s.low for s in entries), max(s.high for s in entries)
    assert env.observation_space == gymnasium.spaces.Box(low, high, (len(entries),), np.float32)
    assert env.observation_space == gymnasium.spaces.Box(-1.0, 1.0, (len(entries),), np.float32)
    assert env.action_space == gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    documented = PacingEnv.__doc__ or ""
    assert f"Box(-1, 1, ({len(entries)},), float32)" in documented
    for i, s in enumerate(entries):
        [row] = [line for line in documented.splitlines() if line.startswith(f"    | {i} |")]
        _, _, name, meaning, least, most, scale, _ = (cell.strip() for cell in row.split("|"))
        assert (name.strip("`"), meaning, float(least), float(most)) == (s.name, s.meaning, s.low, s.high)
        assert scale == "not squashed" if s.scale == 0.0 else float(scale) == s.scale
    assert f"| 0 to {pacing.MAX_WINDOW:g} |" in documented
    for m in pacing.DEFINITIONS:
        assert f"    | `{m.name}` | {m.compares} | 0 to {m.max_threshold:g} |" in documented
        assert f"{m.max_threshold:g} (`{m.name}`)" in documented
    assert "TABLE" not in documented
    assert "SIGNALS" not in documented


def test_configs_accept_the_mechanisms_that_are_defined() -> None:
    assert set(get_args(AnyMechanism)) == set(pacing.MECHANISMS)


def test_info_has_the_raw_terms_of_the_reward() -> None:
    env = PacingEnv(cv_weight=0.75, reward="raw")
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(OFF)
    sd_s = info["step_cv"] * info["step_mean_s"]
    assert reward == pytest.approx(info["throughput_ratio"] - 0.75 * sd_s / info["reference_step_s"])
    assert info["throughput_ratio"] == pytest.approx(info["reference_step_s"] / info["step_mean_s"])
    assert (terminated, truncated) == (False, False)


def test_seed_repeats_reset_without_seed_goes_on() -> None:
    env = PacingEnv()
    first, _ = env.reset(seed=11)
    second, _ = env.reset()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(env.reset(seed=11)[0], first)
    np.testing.assert_array_equal(env.reset()[0], second)


@pytest.mark.parametrize("seed", [2**64, 2**64 - 1])
def test_any_non_negative_integer_is_a_seed(seed: int) -> None:
    observation, _ = PacingVectorEnv(2).reset(seed=seed)
    np.testing.assert_array_equal(observation[0], PacingEnv().reset(seed=seed)[0])


def test_seeds_that_are_none_are_refused() -> None:
    with pytest.raises((gymnasium.error.Error, InputError)):
        PacingEnv().reset(seed=-1)
    with pytest.raises((gymnasium.error.Error, InputError)):
        PacingVectorEnv(2).reset(seed=-1)
    with pytest.raises(InputError, match="seed = '2 numbers'; allowed: one for each of 3 rows"):
        PacingVectorEnv(3).reset(seed=[1, 2])


def test_step_before_reset_and_after_the_end_is_refused() -> None:
    env = PacingEnv(episode_intervals=1)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(OFF)
    for _ in range(2):
        env.reset()
        assert env.step(OFF)[3]
        with pytest.raises(gymnasium.error.ResetNeeded, match="the episode has ended"):
            env.step(OFF)


def test_actions_outside_the_box_act_as_clipped() -> None:
    def observed(action: list[float]) -> np.ndarray[Any, Any]:
        env = PacingEnv(cluster="two-jobs", mechanisms=("phase_shift",))
        env.reset(seed=0)
        return np.stack([env.step(np.array(action, np.float32))[0] for _ in range(4)])

    np.testing.assert_array_equal(observed([-7.0, 50.0]), observed([-1.0, 1.0]))
    np.testing.assert_array_equal(observed([-np.inf, np.inf]), observed([-1.0, 1.0]))
    assert not np.array_equal(observed([-1.0, 1.0]), observed([-1.0, -1.0]))


def test_an_action_that_is_not_a_number_is_refused_with_its_row_if_there_are_several() -> None:
    env = gymnasium.make("paceenv/Pacing-v0")
    env.reset(seed=0)
    with pytest.raises(InputError, match=r"^environment: action = \[nan, 0.5\]; allowed: numbers from -1 to 1"):
        env.step(np.array([np.nan, 0.5], np.float32))
    envs = PacingVectorEnv(3, episode_intervals=1)
    envs.reset(seed=0)
    actions = np.zeros((3, 2), np.float32)
    actions[2, 1] = np.nan
    with pytest.raises(InputError, match=r"action of row 2 = \[0.0, nan\]"):
        envs.step(actions)
    envs.step(np.zeros((3, 2), np.float32))  # ends all episodes: the next step's actions count for nothing
    envs.step(actions)


@pytest.mark.parametrize("make", [PacingEnv, PacingVectorEnv, partial(gymnasium.make, "paceenv/Pacing-v0")])
def test_an_unknown_argument_is_refused_with_the_names_of_all(make: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"argument mechanism = 'slack'; allowed: the arguments .*cluster, weights"):
        make(mechanism="slack")
    with pytest.raises(InputError, match=r"did you mean mechanisms\?"):
        make(mechanism="slack")


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2), ()])
def test_actions_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    env = PacingEnv()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=re.escape(f"actions have shape {shape}; allowed: (2,)")):
        env.step(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"episode_intervals": -3}, "episode_intervals = -3; allowed: an integer of at least 1"),
        ({"mechanisms": ()}, "mechanisms = (); allowed: one or more different ones of slack, phase_shift, paper"),
        ({"mechanisms": ("slack", "slack")}, "mechanisms = ('slack', 'slack'); allowed"),
        ({"cv_weight": -1.0}, "cv_weight = -1.0; allowed: a number of at least 0"),
        ({"cv_weight": (0.0, 1.0)}, "cv_weight = (0.0, 1.0); allowed: a number of at least 0"),
        ({"interval_iterations": 2.5}, "interval_iterations = 2.5; allowed: an integer of at least 1"),
        ({"limits": None}, "limits = None; allowed: a paceenv.core.limits.Limits"),
        ({"cluster": "null-jiter"}, "did you mean null-jitter?"),
        ({"reward": "gain"}, "reward = 'gain'; allowed: paired or raw"),
        ({"render_mode": "human"}, "render_mode = 'human'; allowed: None, rgb_array"),
        ({"autoreset_mode": "Never", "num_envs": 2}, "autoreset_mode = 'Never'; allowed: one of NextStep, SameStep"),
        ({"cluster": []}, "clusters: none given; allowed: at least one"),
        ({"cluster": ["null-jitter"], "weights": [1.0, 2.0]}, "allowed: one non-negative number for each cluster"),
        ({"threads": 0}, "threads = 0; allowed: an integer of at least 1"),
    ],
)
def test_bad_arguments_get_one_line(arguments: dict[str, Any], expected: str) -> None:
    of_a_batch = {"threads", "num_envs", "autoreset_mode"} & set(arguments)
    for kind in (PacingVectorEnv,) if of_a_batch else (PacingEnv, PacingVectorEnv):
        with pytest.raises(InputError, match=re.escape(expected)):
            kind(**arguments)
