"""Training: reproducible to the byte, through a native adapter that equals the environment it wraps."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.utils import set_random_seed

from paceenv.cli import application
from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.policies.learned import Learned
from paceenv.policies.networks import ObservationEMA, time_scales
from paceenv.policies.policy_file import load_policy
from paceenv.sim.engine.simulator import MAX_RUN_SEED, SEEDS_OF_A_RUN, TRAINING_SEEDS, episode_keys, training_seed
from paceenv.trainers.evaluation.suites import MAX_FIRST_SEED, Suite
from paceenv.trainers.training import training_run
from paceenv.trainers.training.sb3_learner import Sb3Learner
from paceenv.trainers.training.train_config import Environment, TrainConfig, load_train_config
from paceenv.trainers.training.training_envs import NativeVecEnv, make_batches
from paceenv.trainers.training.training_run import Run
from paceenv.ui import config_files


def small(timesteps: int) -> list[str]:
    changed = (f"total_timesteps={timesteps}", "environment.environments=32", "sb3.arguments.batch_size=256")
    return [part for assignment in changed for part in ("--set", assignment)]


def _train(out: Path, *extra: str) -> str:
    command = ["train", "demo", "-o", str(out), *small(1024), *extra, "--json", str(out / "summary.json")]
    assert application.run(command) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sha256"] == hashlib.sha256((out / "policy.safetensors").read_bytes()).hexdigest()
    return str(summary["sha256"])


def test_training_is_reproducible_its_seed_is_used_and_the_policy_carries_what_deployment_needs(tmp_path: Path) -> None:
    first, again = _train(tmp_path / "a"), _train(tmp_path / "b")
    assert first == again != _train(tmp_path / "c", "--seed", "1")
    content = load_policy(tmp_path / "a" / "policy.safetensors")
    assert set(content.calibrated_range) == set(signals.NAMES)
    assert all(low <= high for low, high in content.calibrated_range.values())
    assert content.provenance["config"]["total_timesteps"] == 1024
    assert content.provenance["git_commit"]
    assert (tmp_path / "a" / "learning-curve.png").stat().st_size > 1000
    assert (tmp_path / "a" / "config.yaml").exists()


def test_the_adapter_asks_for_a_list() -> None:
    batch = gymnasium.make_vec(
        "paceenv/Pacing-v0",
        num_envs=2,
        vectorization_mode="vector_entry_point",
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    assert NativeVecEnv([batch], 0).num_envs == 2  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"NativeVecEnv: envs = PacingVectorEnv.*; allowed: a list of batches"):
        NativeVecEnv(batch, 0)  # type: ignore[arg-type]


def test_the_adapter_is_the_environment() -> None:
    config = {"episode_intervals": 4, "autoreset_mode": AutoresetMode.SAME_STEP}
    plain, wrapped = PacingVectorEnv(6, **config), NativeVecEnv([PacingVectorEnv(6, **config)], seed=3)  # type: ignore[arg-type]
    observation, _ = plain.reset(seed=3)
    plain.desync_episodes()
    np.testing.assert_array_equal(observation, wrapped.reset())
    random = np.random.default_rng(0)
    ended = 0
    for _ in range(9):
        action = random.uniform(-1, 1, (6, 2)).astype(np.float32)
        observation, reward, _, truncated, info = plain.step(action)
        got, got_reward, done, infos = wrapped.step(action)
        np.testing.assert_array_equal(observation, got)
        np.testing.assert_array_equal(reward.astype(np.float32), got_reward)
        np.testing.assert_array_equal(truncated, done)
        for n in np.flatnonzero(done):
            np.testing.assert_array_equal(infos[n]["terminal_observation"], info["final_obs"][n])
            assert infos[n]["TimeLimit.truncated"] is True
        assert all(not infos[n] for n in np.flatnonzero(~done))
        ended += done.sum()
    assert ended > 6


@pytest.mark.parametrize("held", ["checkpoint.safetensors", "policy.safetensors"])
def test_a_folder_that_holds_a_run_is_not_written_over(held: str, tmp_path: Path) -> None:
    (tmp_path / held).touch()
    for what in (["demo", *small(1024)], ["--job", "null-jitter"]):
        with pytest.raises(InputError, match=r"safetensors of a run; allowed: --resume with its config, or another"):
            application.run(["train", *what, "-o", str(tmp_path)])
    if held == "policy.safetensors":
        with pytest.raises(InputError, match="holds a policy, but no checkpoint to go on from; allowed: another"):
            application.run(["train", "demo", *small(1024), "-o", str(tmp_path), "--resume"])


SELECTED = """
name: selected
environment:
  clusters: [{cluster: two-jobs}, {cluster: one-job, null_case: true}, {cluster: equal-slack, null_case: true}]
  mechanisms: [phase_shift, stagger]
  episode_intervals: 8
  memory_intervals: 4
  environments: 24
selection: {suites: [stagger], every: 2, patience: 1, seeds: 2, iterations: 60}
total_timesteps: 1152
sb3: {arguments: {n_steps: 8, batch_size: 64, n_epochs: 1}}
"""


@pytest.mark.slow
def test_a_training_stops_where_validation_no_longer_improves_and_keeps_its_best(tmp_path: Path) -> None:
    """Clusters of two shapes; the same command on a finished run changes nothing."""
    (tmp_path / "selected.yaml").write_text(SELECTED)
    command = ["train", str(tmp_path / "selected.yaml"), "-o", str(tmp_path / "out")]
    assert application.run(command) == 0
    kept = load_policy(tmp_path / "out" / "policy.safetensors")
    assert kept.policy.memory_intervals == (4,)
    scores = [row["score"] for row in json.loads((tmp_path / "out" / "curve.json").read_text()) if "score" in row]
    assert kept.provenance["validation"]["score"] == round(max(scores), 4)
    assert int(np.argmax(scores)) >= len(scores) - 2, "one look without a better score, and it stops"
    before = (tmp_path / "out" / "policy.safetensors").read_bytes()
    assert application.run([*command, "--resume"]) == 0
    assert (tmp_path / "out" / "policy.safetensors").read_bytes() == before, "nothing left to train"


def test_a_checkpoint_belongs_to_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = small(256)
    assert application.run(["train", "demo", "-o", str(tmp_path), *tiny]) == 0
    assert "policy.safetensors best-static --suite demo\n" in capsys.readouterr().err
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(InputError, match=r"of another config \(seed = 0, now 5\)"):
        application.run(["train", "demo", "-o", str(tmp_path), *tiny, "--seed", "5", "--resume"])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    (tmp_path / "checkpoint.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(InputError, match="not a checkpoint"):
        application.run(["train", "demo", "-o", str(tmp_path), *tiny, "--resume"])


# Seeds


@given(
    run=st.integers(0, MAX_RUN_SEED),
    offset=st.integers(0, SEEDS_OF_A_RUN - 1),
    first=st.integers(0, MAX_FIRST_SEED),
    n=st.integers(0, 2**40),
)
def test_no_seed_of_a_training_is_one_of_an_evaluation(run: int, offset: int, first: int, n: int) -> None:
    seed = training_seed(run, offset)
    assert first + n < seed < 2**64
    assert (seed - TRAINING_SEEDS) // SEEDS_OF_A_RUN == run, "two runs share none"
    training, evaluation = episode_keys([seed]), episode_keys([first + n])
    assert training != evaluation


def test_seeds_out_of_their_domain_are_refused() -> None:
    with pytest.raises(InputError, match=r"first_seed = 9223372036854775808"):
        config_files.parse(Suite, {"name": "s", "first_seed": 2**63, "cases": [{"cluster": "null-jitter"}]}, "test")
    with pytest.raises(InputError, match=r"seed = 2147483648; allowed: .*2147483647"):
        application.run(["train", "demo", "--set", "seed=2147483648", "-o", "unused"])
    with pytest.raises(InputError, match="seeds drawn by a run"):
        training_seed(0, SEEDS_OF_A_RUN)


def test_a_training_seeds_its_episodes_from_its_own_domain_however_long_it_is() -> None:
    data = load_train_config("demo").model_dump(mode="json", exclude_none=True)
    data["total_timesteps"], data["sb3"]["arguments"] = 512, {"batch_size": 256, "n_steps": 8}
    data["environment"]["environments"] = 32
    run = Run(config_files.parse(TrainConfig, data, "test"))
    run.segment = 250_000  # as after half a billion decisions; before, 250 segments reached the score table's episodes
    run.advance()
    seeds = np.concatenate([env._batch.seeds_E for env in run.learner.envs.envs])
    assert (seeds >= np.uint64(TRAINING_SEEDS)).all()


def test_a_training_says_that_its_clusters_are_for_training_and_which_are_nulls() -> None:
    clusters = load_train_config("demo").model_dump(mode="json")["environment"]["clusters"]
    assert [(one["split"], one["null_case"]) for one in clusters] == [("train", False)] * 2 + [("train", True)] * 2


def test_ends_of_episodes_are_valued_as_stable_baselines3_values_them() -> None:
    """It asks its critic row by row, we for all rows at once, which may differ in the last bits."""
    data = load_train_config("demo").model_dump(mode="json", exclude_none=True)
    data["environment"] |= {"environments": 12, "episode_intervals": 4}
    data["sb3"]["arguments"] |= {"n_steps": 8}
    rewards = []
    for is_ours in (True, False):
        learner = Run(config_files.parse(TrainConfig, data, "test")).learner
        assert isinstance(learner, Sb3Learner)
        set_random_seed(0)
        model, callback = learner.model, learner._rows if is_ours else CallbackList([])
        _, heard = model._setup_learn(1, callback)
        model.collect_rollouts(model.env, heard, model.rollout_buffer, model.n_steps)
        rewards.append(model.rollout_buffer.rewards)
        assert model.rollout_buffer.episode_starts[1:].any()
    np.testing.assert_allclose(rewards[0], rewards[1], rtol=1e-5, atol=1e-6)


def test_a_commit_is_only_that_of_our_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    installed = tmp_path / "venv" / "site-packages" / "paceenv" / "trainers" / "training" / "training_run.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(training_run, "__file__", str(installed))
    assert training_run.git_commit() == "unknown"


def test_a_training_takes_several_programs_and_jobs_without_one() -> None:
    slower = {"cluster": "expert-layers", "set": {"fabric.nic_gbps": 50}}
    names = [{"cluster": "expert-layers"}, slower, {"cluster": "null-jitter"}]
    data = {"clusters": names, "mechanisms": ["defer"], "environments": 6}
    batches = make_batches(config_files.parse(Environment, data, "test"))
    assert [batch.num_envs for batch in batches] == [2, 2, 2]
    with pytest.raises(InputError, match="allowed: the same for all clusters of a batch"):
        PacingVectorEnv(4, ["expert-layers", "null-jitter"])


# What a policy remembers: the same in training and where it runs


@pytest.mark.parametrize(("memory", "change"), [(4, 0), ([2, 40], 5)])
def test_training_shows_what_the_policy_will_remember(memory: int | list[int], change: int) -> None:
    """Over several ends of episodes, every row against a policy of its own that is reset where an episode starts."""
    count = signals.SIGNALS + ObservationEMA(memory, change).entries
    layers = [(np.random.default_rng(0).normal(size=(2, count)).astype(np.float32), np.zeros(2, np.float32))]
    own = [Learned(layers, ["slack"], memory_intervals=memory, change_intervals=change) for _ in range(10)]
    batches = [PacingVectorEnv(5, episode_intervals=4, autoreset_mode="SameStep") for _ in range(2)]
    envs = NativeVecEnv(batches, seed=3, memory_intervals=memory, change_intervals=change)
    random, ends, shown = np.random.default_rng(1), 0, np.asarray(envs.reset())
    for n, one in enumerate(own):
        np.testing.assert_array_equal(one.inputs(shown[n : n + 1, : signals.SIGNALS])[0], shown[n])
    for _ in range(11):
        shown, _, done, infos = envs.step(random.uniform(-1, 1, (10, 2)).astype(np.float32))
        for n, one in enumerate(own):
            if done[n]:
                last = infos[n]["terminal_observation"]
                np.testing.assert_array_equal(one.inputs(last[None, : signals.SIGNALS])[0], last)
                one.reset(1)
                ends += 1
            np.testing.assert_array_equal(one.inputs(shown[n : n + 1, : signals.SIGNALS])[0], shown[n])
    assert ends >= 20


def test_several_time_scales_are_the_single_ones_side_by_side() -> None:
    views_TBO = np.random.default_rng(3).uniform(-1, 1, (7, 4, signals.SIGNALS)).astype(np.float32)
    scales = (2, 5, 40)
    together, single = ObservationEMA(scales, 10), [ObservationEMA(scale) for scale in scales]
    change = np.zeros((4, signals.SIGNALS))
    for t, views_BO in enumerate(views_TBO):
        found = together.update(views_BO)
        means = np.concatenate([one.update(views_BO) for one in single], axis=1)
        np.testing.assert_array_equal(found[:, : -signals.SIGNALS], means)
        if t:
            change += 0.1 * (np.abs(views_BO - views_TBO[t - 1]) - change)
        np.testing.assert_allclose(found[:, -signals.SIGNALS :], change, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, [0, 2], [2, 2], [2.5], "12", [1] * 17, True, [10**6], None])
def test_time_scales_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"memory_intervals = .*; allowed: an integer from 0 to 10000, or at most 16"):
        time_scales(wrong)
