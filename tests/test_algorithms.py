"""Every algorithm through the same run: reproducible, resumed to the same bits, deployed as it was trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceenv.core.errors import InputError
from paceenv.policies.distilled import Distilled
from paceenv.policies.policy_file import load_policy, save_policy
from paceenv.trainers.training import training_run
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.ui import config_files

ON_POLICY = {"n_steps": 32, "batch_size": 64, "n_epochs": 1}
REPLAY = {"learning_starts": 256, "batch_size": 32, "buffer_size": 800, "gradient_steps": 1}
TINY: dict[str, dict[str, Any]] = {"PPO": ON_POLICY, "A2C": {"n_steps": 32}, "SAC": REPLAY, "TD3": REPLAY}
TINY |= {"CrossQ": {**REPLAY, "policy_kwargs": {"renorm_warmup_steps": 20}}}
DISTILL = {"rounds": 2, "episode_intervals": 12, "every_intervals": 4, "candidates": 4, "n_epochs": 2}
DISTILL |= {"batch_size": 32, "net_arch": [12], "random_clusters": 2}


PLAIN: dict[str, Any] = {"mechanisms": ["slack"], "suites": ["slack"]}


def config(name: str, **changed: Any) -> TrainConfig:
    data = {
        "name": "tiny",
        "environment": {
            "clusters": [{"cluster": "two-jobs"}, {"cluster": "one-job", "null_case": True}],
            "mechanisms": ["phase_shift"],
            "episode_intervals": 12,
            "memory_intervals": [2, 9],
            "change_intervals": 4,
            "environments": 16,
            "threads": 1,
            "cv_weight": 0.1,
        },
        "selection": {"suites": ["stagger"], "every": 1, "patience": 9, "seeds": 2, "iterations": 40},
        "algorithm": name,
        "total_timesteps": 1200 if name == "distill" else 1024,
        **({"distill": DISTILL} if name == "distill" else {"sb3": {"arguments": TINY[name]}}),
        **changed,
    }
    return config_files.parse(TrainConfig, data, "tiny")


@pytest.mark.slow
def test_other_algorithms_train_and_deploy(tmp_path: Path) -> None:
    for algorithm in ("A2C", "TD3"):
        made = training_run.train(config(algorithm, selection=None, total_timesteps=512), folder=tmp_path / algorithm)
        save_policy(tmp_path / f"{algorithm}.safetensors", made.result())
        assert load_policy(tmp_path / f"{algorithm}.safetensors").policy.memory_intervals == (2, 9)


@pytest.mark.parametrize(
    "algorithm", ["SAC", *(pytest.param(name, marks=pytest.mark.slow) for name in ("PPO", "distill"))]
)
def test_an_interrupted_run_resumes_to_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    whole = training_run.train(config(algorithm), folder=tmp_path / "whole")
    cut = training_run.Run(config(algorithm), folder=tmp_path / "cut")
    cut.advance()
    seen: list[float] = []
    resumed = training_run.train(config(algorithm), folder=tmp_path / "cut", resume=True, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] >= config(algorithm).total_timesteps
    files = [run.result() for run in (whole, resumed)]
    digests = [save_policy(tmp_path / f"{k}.safetensors", file) for k, file in enumerate(files)]
    assert digests[0] == digests[1]
    assert len(whole.curve.rows) >= 2
    assert all({"timesteps", "reward"} <= row.keys() for row in whole.curve.rows)
    scores = [row["score"] for row in whole.curve.rows if "score" in row]
    assert files[0].provenance["validation"]["score"] == pytest.approx(max(scores), abs=1e-4)
    assert list((tmp_path / "cut" / "tensorboard").iterdir())
    kept = load_policy(tmp_path / "0.safetensors").policy
    assert (kept.memory_intervals, kept.change_intervals) == ((2, 9), 4)
    assert isinstance(kept, Distilled) == (algorithm == "distill")
    with pytest.raises(InputError, match="of another config"):
        training_run.train(config(algorithm, seed=3), folder=tmp_path / "cut", resume=True)


def test_actions_before_learning_starts_are_the_same_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "SEGMENT_ROLLOUTS", 1)
    section = {"arguments": {**REPLAY, "learning_starts": 9999, "buffer_size": 1600}}
    tiny = config("SAC", selection=None, sb3=section, total_timesteps=1536)
    whole = training_run.Run(tiny)
    for _ in range(3):
        whole.advance()
        cut = training_run.Run(tiny, folder=tmp_path)
        if whole.segment > 1:
            cut.restore(tmp_path / training_run.CHECKPOINT)
        cut.advance()
    kept, actions = (one.learner.state().arrays["buffer.actions"] for one in (whole, cut))
    np.testing.assert_array_equal(kept, actions)
    assert len(np.unique(kept.reshape(len(kept), -1), axis=0)) == len(kept), "no segment repeats another one's"


@pytest.mark.parametrize("algorithm", ["SAC", pytest.param("CrossQ", marks=pytest.mark.slow)])
def test_the_deployed_action_is_the_actor_s_mean(algorithm: str) -> None:
    run = training_run.Run(config(algorithm, selection=None))
    run.advance()
    learner: Any = run.learner
    learner.average.layers = []
    policy, model = learner.policy(), learner.model
    x = np.random.default_rng(0).uniform(-1, 1, (50, learner.envs.observation_space.shape[0])).astype(np.float32)
    model.policy.set_training_mode(False)
    with torch.no_grad():
        expected = model.actor(torch.from_numpy(x), deterministic=True).numpy()
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(policy.action(x), expected, atol=1e-5)


def _arguments(algorithm: str, **arguments: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "sb3": {"arguments": arguments}, "selection": None}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"algorithm": "distill", "sb3": {}}, "section sb3 with algorithm: distill; allowed: distill"),
        ({"distill": {"rounds": 2}}, "section distill with algorithm: PPO; allowed: sb3"),
        ({"sb3": {"learning_rat": 0.5}}, "unknown key sb3.learning_rat = 0.5; did you mean learning_rate?"),
        ({"algorithm": "distill", "sb3": None, "distill": {"rounds": 0}}, "distill.rounds = 0; allowed: "),
        (
            {"environment": PLAIN | {"memory_intervals": [3, 3]}},
            "memory_intervals = [3, 3]; allowed: an integer from 0 to 10000, or at most 16 different ones",
        ),
        ({"environment": PLAIN | {"cv_weight": [1.0, 0.5]}}, "cv_weight = [1.0, 0.5]; allowed: a number, or two, the"),
        ({"environment": PLAIN | {"cv_weight": -1}}, "environment.cv_weight = -1; allowed: input should be greater"),
        ({"environment": PLAIN | {"cv_weight": [0, 1]}}, "cv_weight with algorithm PPO; allowed: one number"),
        ({"environment": PLAIN | {"preference": 0.5}}, "preference = 0.5; allowed: within the range of cv_weight"),
        ({"environment": PLAIN | {"cv_weight": [0, 1], "preference": 2}}, "preference = 2; allowed: within the range"),
        (_arguments("DQN"), "algorithm = 'DQN'; allowed: distill, or a class of stable_baselines3 or sb3_contrib: PPO"),
        (_arguments("nothing"), "algorithm = 'nothing'; allowed: distill, or a class"),
        (_arguments("SAC", gama=0.5), "sb3.arguments.gama = 0.5; allowed: "),
        (_arguments("SAC", tau=-0.1), "sb3.arguments.tau = -0.1; allowed: 0 to 1"),
        (_arguments("PPO", gamma=1.5), "sb3.arguments.gamma = 1.5; allowed: 0 to 1"),
    ],
)
def test_what_cannot_be_trained_is_one_line(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        training_run.Run(config("PPO", **changed))
