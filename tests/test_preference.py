"""One policy for the whole trade-off: the preference from the environment to the network, its file and its spelling."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.envs.pacing_env import PacingEnv, PacingVectorEnv
from paceenv.live.decide.live_policy import find_policy
from paceenv.policies import names
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import load_cluster

INPUTS = signals.SIGNALS + 1
OFF = np.array([-1.0, -1.0], np.float32)


def network(seed: int = 0, inputs: int = INPUTS) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(b, a)).astype(np.float32), rng.normal(size=b).astype(np.float32))
        for a, b in ((inputs, 16), (16, 2))
    ]


def learned(default: float = 0.5) -> Learned:
    return Learned(network(), ("slack",), preference=default, preference_range=(0.0, 2.0))


def saved_at(folder: Path, name: str = "mine.safetensors") -> Path:
    save_policy(folder / name, PolicyFile(learned(), {"step_cv": (-0.5, 0.5)}))
    return folder / name


# The environment


def test_every_episode_has_its_own_preference_and_shows_it_last() -> None:
    envs = PacingVectorEnv(400, episode_intervals=2, cv_weight=(0.0, 2.0), reward="raw", autoreset_mode="SameStep")
    observation, _ = envs.reset(seed=0)
    assert envs.single_observation_space.shape == (INPUTS,)
    shown = observation[:, -1]
    assert 0.0 <= shown.min() < 0.02
    assert 0.78 < shown.max() <= 0.8
    assert np.quantile(shown, [0.25, 0.5, 0.75]) == pytest.approx([0.2, 0.4, 0.6], abs=0.06), "uniform as it is seen"
    _, reward, _, _, info = envs.step(np.tile(OFF, (400, 1)))
    weight_E, sd_s = info["cv_weight"], info["step_cv"] * info["step_mean_s"]
    np.testing.assert_array_equal(np.float32(weight_E / (0.5 + weight_E)), shown)
    np.testing.assert_allclose(reward, info["throughput_ratio"] - weight_E * sd_s / info["reference_step_s"])
    observation, *_, info = envs.step(np.tile(OFF, (400, 1)))
    np.testing.assert_array_equal([final[-1] for final in info["final_obs"]], shown, err_msg="the old episode's")
    assert np.mean(observation[:, -1] == shown) < 0.1, "the next episode has another"


def test_the_preference_moves_nothing_else() -> None:
    """The same seeds give the same clusters and noise, so that policies can be compared at different weights."""
    plain, drawn = (PacingVectorEnv(3, "two-jobs", cv_weight=w) for w in (0.5, (0.0, 1.0)))
    np.testing.assert_array_equal(plain.reset(seed=4)[0], drawn.reset(seed=4)[0][:, :-1])
    actions = np.zeros((3, 2), np.float32)
    np.testing.assert_array_equal(plain.step(actions)[0], drawn.step(actions)[0][:, :-1])


@pytest.mark.parametrize(
    "wrong", [(1.0, 0.0), (0.5, 0.5), (-1.0, 1.0), (0.0, float("inf")), (0.0,), (0.0, 1.0, 2.0), (float("nan"), 1.0)]
)
def test_a_range_that_is_none_is_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match=r"cv_weight = \(.*\); allowed: a number of at least 0, or two, the lower one"):
        PacingEnv(cv_weight=wrong)


# The policy


def test_the_network_sees_the_preference_as_the_environment_shows_it() -> None:
    envs = PacingVectorEnv(5, "two-jobs", cv_weight=(0.0, 2.0))
    observation, _ = envs.reset(seed=1)
    weight_E = envs.step(np.tile(OFF, (5, 1)))[4]["cv_weight"].tolist()
    policy = learned()
    for row, weight in zip(observation, weight_E, strict=True):
        following = policy.with_preference(weight)
        view = row[None, :-1]
        np.testing.assert_array_equal(following.inputs(view), row[None])
        np.testing.assert_array_equal(following.act(view), pacing.decode_action(policy.action(row[None]), ("slack",)))
    said = [policy.with_preference(w) for w in weight_E]
    assert len({float(one.action(one.inputs(view))[0, 0]) for one in said}) == len(weight_E)
    assert policy.preference == 0.5, "a copy follows another one"


@pytest.mark.parametrize(
    ("inputs", "arguments", "expected"),
    [
        (INPUTS, {}, "preference = None; allowed: a number with 11 inputs, None with 10; the network has 11"),
        (signals.SIGNALS, {"preference": 0.5}, "preference = 0.5; allowed: a number with 11 inputs"),
        (INPUTS, {"preference": -1.0}, "preference = -1.0; allowed: 0 to inf"),
        (INPUTS, {"preference": 3.0, "preference_range": (0.0, 2.0)}, "preference = 3.0; allowed: 0 to 2"),
    ],
)
def test_a_preference_that_does_not_fit_is_refused(inputs: int, arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        Learned(network(inputs=inputs), ("slack",), **arguments)


# Its spelling, on command lines and live


def test_a_file_is_told_its_preference_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cluster = saved_at(tmp_path), load_cluster("null-jitter")
    monkeypatch.setattr(names, "released", lambda: path)
    for text, preference in (
        (path, 0.5),
        (f"{path}:preference=1.5", 1.5),
        ("learned", 0.5),
        ("learned:preference=0", 0),
    ):
        simulated, live = select_policy(str(text), cluster), find_policy(str(text))
        assert isinstance(simulated, Learned)
        assert isinstance(live.policy, Learned)
        assert simulated.preference == live.policy.preference == preference
        assert live.fault == ""
        assert live.sha256 is not None
        assert live.calibrated_range == simulated.calibrated_range == {"step_cv": (-0.5, 0.5)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{file}:preference=2.5", "preference = 2.5; allowed: 0 to 2"),
        ("{file}:preference=nan", "preference = nan; allowed: 0 to 2"),
        ("{file}:preference=much", "preference = 'much'; allowed: a number"),
        ("{file}:preferenc=1", "unknown option preferenc; allowed: preference="),
        ("{old}:preference=1", "policy old: preference = 1; allowed: no preference, as it was trained for one"),
        ("learned", "policy learned: none is released yet; allowed: a .safetensors file"),
        ("learnt:preference=1", "no such file; allowed: passive, paper, adaptive, static, learned"),
        ("learnt", "did you mean learned?"),
    ],
)
def test_what_is_wrong_with_a_spelling_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setattr(names, "released", lambda: tmp_path / "unreleased.safetensors")
    save_policy(tmp_path / "old.safetensors", PolicyFile(Learned(network(inputs=signals.SIGNALS), ("slack",))))
    files = {"file": saved_at(tmp_path), "old": tmp_path / "old.safetensors", "missing": tmp_path / "no.safetensors"}
    spelled = text.format(**files)
    with pytest.raises(InputError, match=re.escape(expected)):
        select_policy(spelled, load_cluster("null-jitter"))
    assert expected in find_policy(spelled).fault, "live observes for the same reason"
