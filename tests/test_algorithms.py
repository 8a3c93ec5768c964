"""Every algorithm through the same run: reproducible, resumed to the same bits, deployed as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import Logger

from paceenv.core.errors import InputError
from paceenv.policies.distilled import Distilled
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, load_policy, save_policy
from paceenv.trainers.training import training_run
from paceenv.trainers.training.algorithm_configs import SECTIONS
from paceenv.trainers.training.algorithms.learner import Curve
from paceenv.trainers.training.algorithms.off_policy import OFF_POLICY
from paceenv.trainers.training.algorithms.random_search import ArsLearner
from paceenv.trainers.training.algorithms.search_learner import SearchLearner
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.ui import config_files

LOG = Logger(None, [])
REPLAY = {"total_timesteps": 1024, "learning_starts": 256, "batch_size": 32, "buffer_size": 800, "gradient_steps": 1}
TINY: dict[str, dict[str, Any]] = {
    "ppo": {"total_timesteps": 1024, "n_steps": 32, "batch_size": 64, "n_epochs": 1},
    "recurrent_ppo": {
        "total_timesteps": 1024,
        "n_steps": 32,
        "batch_size": 64,
        "n_epochs": 1,
        "lstm_hidden_size": 6,
        "net_arch": [5],
    },
    "sac": REPLAY,
    "tqc": REPLAY,
    "crossq": {**REPLAY, "renorm_warmup_steps": 20},
    "cma_es": {"total_timesteps": 16 * 6 * 6 * 2, "population_size": 6, "intervals": 6, "net_arch": [5]},
    "ars": {"total_timesteps": 16 * 6 * 6 * 2, "n_delta": 3, "n_top": 2, "intervals": 6, "net_arch": [5]},
    "distill": {
        "total_timesteps": 1200,
        "rounds": 2,
        "episode_intervals": 12,
        "every_intervals": 4,
        "candidates": 4,
        "n_epochs": 2,
        "batch_size": 32,
        "net_arch": [12],
    },
}


def config(algorithm: str, **changed: Any) -> TrainConfig:
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
        "constraint": None if algorithm == "distill" else {"limit": 0.0, "rate": 50},
        "selection": {"suites": ["stagger"], "every": 1, "patience": 9, "seeds": 2, "iterations": 60},
        "algorithm": algorithm,
        algorithm: TINY[algorithm],
        **changed,
    }
    return config_files.parse(TrainConfig, data, "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", SECTIONS)
def test_an_interrupted_run_resumes_to_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    whole = training_run.train(config(algorithm), folder=tmp_path / "whole")
    cut = training_run.Run(config(algorithm), folder=tmp_path / "cut")
    cut.advance()
    seen: list[float] = []
    resumed = training_run.train(config(algorithm), folder=tmp_path / "cut", resume=True, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] >= config(algorithm).total_timesteps
    digests = [save_policy(tmp_path / f"{k}.safetensors", one.file) for k, one in enumerate((whole, resumed))]
    assert digests[0] == digests[1]
    assert len(whole.curve) >= 2
    assert all({"timesteps", "reward"} <= row.keys() for row in whole.curve)
    scores = [row["score"] for row in whole.curve if "score" in row]
    assert whole.file.provenance["validation"]["score"] == pytest.approx(max(scores), abs=1e-4)
    assert list((tmp_path / "cut" / "tensorboard").iterdir())
    kept = load_policy(tmp_path / "0.safetensors").policy
    assert (kept.memory_intervals, kept.change_intervals) == ((2, 9), 4)
    assert isinstance(kept, Distilled) == (algorithm == "distill")
    with pytest.raises(InputError, match="of another config"):
        training_run.train(config(algorithm, seed=3), folder=tmp_path / "cut", resume=True)


@pytest.mark.parametrize("algorithm", OFF_POLICY)
def test_actions_before_learning_starts_are_the_same_after_an_interruption(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "SEGMENT_ROLLOUTS", 1)
    section = {**TINY[algorithm], "total_timesteps": 1536, "learning_starts": 9999, "buffer_size": 1600}
    tiny = config(algorithm, selection=None, constraint=None, **{algorithm: section})
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


@pytest.mark.parametrize("algorithm", OFF_POLICY)
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


def test_the_deployed_recurrent_action_is_the_actor_s_mean_step_by_step(tmp_path: Path) -> None:
    run = training_run.Run(config("recurrent_ppo", selection=None))
    run.advance()
    learner: Any = run.learner
    learner.average.layers = []
    save_policy(tmp_path / "a.safetensors", PolicyFile(learner.policy()))
    policy, model = load_policy(tmp_path / "a.safetensors").policy, learner.model
    assert isinstance(policy, Learned)
    assert policy.cell is not None
    rng, state, rows = np.random.default_rng(0), None, 7
    starts, seen = np.ones(rows, np.bool_), []
    policy.reset(rows)
    for t in range(40):
        x = rng.uniform(-1, 1, (rows, policy.cell.inputs)).astype(np.float32)
        expected, state = model.policy.predict(x, state, starts, deterministic=True)
        policy.restart(starts)
        seen.append(np.clip(policy.action(x), -1.0, 1.0))
        np.testing.assert_allclose(seen[-1], expected, atol=1e-6)
        starts = rng.random(rows) < 0.1 if t > 5 else np.zeros(rows, np.bool_)
    assert np.ptp(seen) > 1e-3


def test_ars_moves_along_the_best_directions() -> None:
    """On rewards in closed form: by the paper's step, and to their maximum."""
    learner = ArsLearner(
        config("ars", selection=None, constraint=None, ars={"n_delta": 8, "n_top": 4}), None, Curve(LOG)
    )
    goal = np.random.default_rng(1).normal(size=len(learner.weights))
    tried: list[np.ndarray[Any, Any]] = []

    def rewards(networks: list[np.ndarray[Any, Any]]) -> list[float]:
        tried[:] = networks
        return [-float(((x - goal) ** 2).sum()) for x in networks]

    learner._rewards = rewards  # type: ignore[method-assign, assignment]
    before, start = learner.weights.copy(), float(((learner.weights - goal) ** 2).sum())
    found = learner._generation()
    plus, minus = np.array(found[:8]), np.array(found[8:])
    np.testing.assert_allclose((np.array(tried[:8]) + np.array(tried[8:])) / 2, np.tile(before, (8, 1)), atol=1e-12)
    top = np.argsort(-np.maximum(plus, minus))[:4]
    direction = (np.array(tried)[top] - before) / learner.section.delta_std
    spread = np.concatenate([plus[top], minus[top]]).std()
    step = learner.section.learning_rate / (4 * spread) * ((plus - minus)[top] @ direction)
    np.testing.assert_allclose(learner.weights - before, step, rtol=1e-4)
    for learner.generation in range(1, 300):
        learner._generation()
    assert float(((learner.weights - goal) ** 2).sum()) < 0.05 * start


def test_ars_standardises_by_what_its_networks_were_shown() -> None:
    learner = ArsLearner(config("ars", selection=None), None, Curve(LOG))
    x = np.random.default_rng(0).normal(0.3, 0.5, (4000, learner.inputs)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=len(learner.weights))
    plain = learner.with_layers(SearchLearner._layers(learner, weights), {})
    learner._see(x)
    learner._scale()
    mean, spread = x.mean(axis=0), x.std(axis=0)
    expected = plain.action((x[:9] - mean) / spread)
    np.testing.assert_allclose(learner.with_layers(learner._layers(weights), {}).action(x[:9]), expected, atol=1e-3)


def test_a_squashed_action_is_kept_by_the_file(tmp_path: Path) -> None:
    trained = training_run.train(config("sac", selection=None))
    save_policy(tmp_path / "a.safetensors", trained.file)
    kept = load_policy(tmp_path / "a.safetensors").policy
    assert isinstance(kept, Learned)
    assert kept.squashes
    assert np.abs(kept.action(np.full((1, kept.layers[0][0].shape[1]), 1e3, np.float32))).max() <= 1.0


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"algorithm": "dqn"}, "algorithm = 'dqn'; allowed: input should be 'ppo', 'recurrent_ppo', 'distill', 'sac'"),
        ({"algorithm": "sac", "ppo": {"gamma": 0.5}}, "section ppo with algorithm: sac; allowed: sac, the section of"),
        ({"sac": {"gamma": 0.5}}, "section sac with algorithm: ppo; allowed: ppo, the section of the algorithm, or"),
        ({"algorithm": "sac", "sac": {"gama": 0.5}}, "unknown key sac.gama = 0.5; did you mean gamma?"),
        ({"algorithm": "sac", "sac": {"ent_coef": "some"}}, "ent_coef = some; allowed: a number of at least 0, auto"),
        ({"algorithm": "distill", "distill": {"rounds": 0}}, "distill.rounds = 0; allowed: "),
        ({"algorithm": "ars", "ars": {"n_top": 20}}, "n_top = 20; allowed: 1 to 8, which is n_delta"),
        (
            {"environment": {"mechanisms": ["slack"], "suites": ["slack"], "memory_intervals": [3, 3]}},
            "memory_intervals = [3, 3]; allowed: an integer from 0 to 10000, or at most 16 different ones",
        ),
    ],
)
def test_a_wrong_algorithm_or_section_is_one_line(data: dict[str, Any], expected: str) -> None:
    base = {"name": "wrong", "environment": {"mechanisms": ["slack"], "suites": ["slack"]}}
    with pytest.raises(InputError) as caught:
        config_files.parse(TrainConfig, {**base, **data}, "wrong.yaml")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("algorithm", SECTIONS)
def test_a_section_may_be_left_out(algorithm: str) -> None:
    base = {"name": "short", "environment": {"mechanisms": ["slack"], "suites": ["slack"]}, "algorithm": algorithm}
    found = config_files.parse(TrainConfig, base, "short.yaml")
    assert getattr(found, algorithm) == SECTIONS[algorithm]()  # type: ignore[index]
    assert found.with_timesteps(123).total_timesteps == 123
    assert TrainConfig.model_validate(found.model_dump(mode="json")) == found
