"""Sweeps on a real Ray: a driver that is killed, a node that dies, schedulers, a Tuner that is not ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.cluster_utils import Cluster
from test_sweep import training_sweep

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.policies.policy_file import load_policy
from paceenv.trainers.sweep import ray_tuner
from paceenv.trainers.sweep.sweep_config import Static, SweepConfig
from paceenv.trainers.sweep.sweep_results import Results, last_result
from paceenv.trainers.sweep.trainables import StaticTask, StaticTrial, make_task, static_space
from paceenv.trainers.sweep.winner import finish
from paceenv.ui import config_files

PATIENCE_S = 300.0
"""A driver that takes longer hangs."""
STATIC = """
name: small
static:
  suite: demo
  splits: [held-out]
  mechanisms: [phase_shift]
  optuna: {num_samples: 40, n_startup_trials: 12}
  seeds: 8
  iterations: 1600
"""


@pytest.fixture
def static(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(STATIC)
    return tmp_path / "small.yaml"


def _results(folder: Path) -> list[Path]:
    return sorted(folder.glob("tune/all/[0-9]*/result.json"))


def _wait(condition: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert driver.poll() is None, driver.communicate(timeout=PATIENCE_S)[1]
        assert time.monotonic() < until, "the driver hangs"
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_and_restored_it_has_every_trial_once_and_a_winner(static: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    start = "from paceenv.cli.application import main; main()"
    command = [sys.executable, "-c", start, "sweep", str(static), "-o", str(out), "--json", str(tmp_path / "said.json")]
    often = {**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "0.1"}  # seconds between two of Tune's records
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=often)
    _wait(lambda: len(_results(out)) >= 5, driver)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=PATIENCE_S)
    at_kill = {path: last_result(path) for path in _results(out)}
    before = {path: result for path, result in at_kill.items() if result}
    assert 1 <= len(before) < 40
    assert Results.read(out).best() is not None, "also while it runs"

    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["trials"], said["failed"]) == (40, [])
    assert [path.parent.name for path in _results(out)] == [f"{n:05d}" for n in range(1, 41)]
    results = Results.read(out)
    assert results.candidates[0]["candidate"] == "passive", "no winner is worse than no pacing"
    values = [row["throughput"] for row in results.candidates]
    assert said["winners"][0]["throughput"] == max(values) > 0.0
    kept = [last_result(path)["trial_id"] == result["trial_id"] for path, result in before.items()]
    assert sum(kept) >= len(kept) - 4, "but for those that were not on Tune's record yet, trials do not run again"
    assert {"policy.safetensors", "pareto.png"} <= set(os.listdir(out))


@pytest.mark.slow
def test_three_nodes_of_which_one_is_killed_finish(
    static: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    config = config_files.load(SweepConfig, "sweeps", static)
    out, task = tmp_path / "out", make_task(config)
    config_files.write_yaml(out / "config.yaml", config.model_dump(mode="json"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    killed_after = []
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]

        def kill_one(self: object, iteration: int, trials: list[Any], **info: Any) -> None:
            ended = sum(trial.is_finished() for trial in trials)
            if ended >= 6 and not killed_after:
                killed_after.append(ended)
                cluster.remove_node(nodes.pop(), allow_graceful=False)

        monkeypatch.setattr(ray_tuner.Progress, "on_step_end", kill_one)
        with ray_tuner.connected(cluster.address):
            assert ray.cluster_resources()["CPU"] == 3
            path = ray.get(ray.remote(lambda: __import__("sys").path).remote())
            assert any(
                "runtime_resources" in one and (Path(one) / "paceenv" / "trainers" / "sweep").is_dir() for one in path
            ), "code travels"
            ray_tuner.tune_all(config, task, out)
    finally:
        cluster.shutdown()
    assert killed_after
    assert killed_after[0] < 40, "in the middle"
    results = Results.read(out)
    assert len(results.candidates) == 40
    assert not results.failed


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """A Ray that the tests below share."""

    with ray_tuner.connected(None):
        yield


def _tuned(config: SweepConfig, out: Path) -> Results:

    task = make_task(config)
    config_files.write_yaml(out / "config.yaml", config.model_dump(mode="json"))
    ray_tuner.tune_all(config, task, out)
    finish(out, task)
    return Results.read(out)


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_hyperparameters_are_searched_and_one_that_is_not_allowed_does_not_end_it(tmp_path: Path) -> None:
    asha = {"grace_period": 512, "reduction_factor": 2}
    config = training_sweep(tmp_path, {"choice": [1e-3, 3e-3, 2.0]}, num_samples=5, asha=asha)
    results = _tuned(config, tmp_path / "out")
    assert len(results.failed) == 2
    assert all("sb3.learning_rate = 2.0; allowed: input should be less" in one["error"] for one in results.failed)
    assert {row["decisions"] for row in results.candidates} == {512, 1024}, "some stopped early"
    best = results.best()
    assert best is not None
    assert best["score"] == max(row["score"] for row in results.candidates)
    provenance = load_policy(tmp_path / "out" / "policy.safetensors").provenance
    assert provenance["validation"]["score"] == pytest.approx(max(best["scores"]), abs=1e-4)
    assert provenance["validation_of_seeds"]["scores"] == best["scores"]
    assert (tmp_path / "out" / "winner-train.yaml").is_file()
    trial = tmp_path / "out" / "tune" / "all" / f"{best['trial']:05d}"
    assert list(trial.glob("events.out.tfevents*")), "TensorBoard follows every trial"


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_populations_copy_checkpoints_and_change_hyperparameters(tmp_path: Path) -> None:
    pbt = {"perturbation_interval": 256}
    config = training_sweep(tmp_path, {"loguniform": [1e-3, 1e-1]}, num_samples=4, pbt=pbt)
    results = _tuned(config, tmp_path / "out")
    assert len(results.candidates) == 4
    reported = [path.read_text().splitlines() for path in _results(tmp_path / "out")]
    rates = [{json.loads(line)["config"]["sb3.learning_rate"] for line in lines} for lines in reported]
    assert max(map(len, rates)) > 1, "somebody copied"
    assert all(1e-3 <= rate <= 1e-1 for of_trial in rates for rate in of_trial)
    assert load_policy(tmp_path / "out" / "policy.safetensors").provenance["sweep"]["trial"] == results.best()["trial"]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_our_trainable_and_space_fit_a_tuner_of_others(tmp_path: Path) -> None:

    grid = {"slack": {"threshold": [0.05], "window": [0.1, 0.3]}}
    static = Static.model_validate({"suite": "demo", "splits": ["held-out"], "mechanisms": ["slack"], "grid": grid})
    found = tune.Tuner(
        tune.with_parameters(StaticTrial, task=StaticTask.of(static)),
        param_space=static_space(static),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert {one.metrics["policy"] for one in found} == {"static:slack=0.05/0.1", "static:slack=0.05/0.3"}


def test_an_address_where_nothing_runs_is_one_line(static: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--address .*allowed: auto, or HOST:PORT of a running cluster"):
        application.run(["sweep", str(static), "-o", str(tmp_path / "out"), "--address", "127.0.0.1:1"])
