"""Sweeps on a real Ray: a driver that is killed, a disk that is full, nodes that die, trials that raise."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweeps import begun, ended, run_here

from paceenv.cli import application
from paceenv.policies.policy_file import load_policy
from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.trainers.sweep.sweep_results import Results
from paceenv.trainers.sweep.sweep_run import LEDGER, Ledger
from paceenv.ui import config_files

PATIENCE_S = 300.0
"""A driver that takes longer hangs."""
STATIC = """
name: small
static:
  suite: demo
  splits: [held-out]
  mechanisms: [phase_shift]
  optuna: {candidates: 48, first_random: 12, open: 3}
  candidates_per_trial: 6
  seeds: 4
  iterations: 2400
robustness: {suite: demo, seeds: 2, iterations: 60}
"""


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """The config's file, and what its sweep comes to without Ray and without trouble."""
    place = tmp_path_factory.mktemp("static")
    (place / "small.yaml").write_text(STATIC)
    run_here(begun(config_files.load(SweepConfig, "sweeps", place / "small.yaml"), place / "here"))
    return place / "small.yaml", ended(place / "here")


def _drive(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from paceenv.cli.application import main; main()", "sweep", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait(condition: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert driver.poll() is None, driver.communicate(timeout=PATIENCE_S)[1]
        assert time.monotonic() < until, "the driver hangs"
        time.sleep(0.01)


def _lines(ledger: Path) -> list[str]:
    return ledger.read_text().splitlines() if ledger.exists() else []


@pytest.mark.slow
def test_killed_and_out_of_space_and_resumed_it_finishes_the_same(
    static: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    """The driver is killed outright, then cannot write, then goes on to the end: no trial is lost or run twice."""
    config, expected = static
    out, ledger = tmp_path / "out", tmp_path / "out" / LEDGER
    command = [str(config), "-o", str(out)]

    driver = _drive(*command)
    _wait(lambda: len(_lines(ledger)) >= 3, driver)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=PATIENCE_S)
    killed_at = _lines(ledger)
    assert 2 <= len(killed_at) - 1 < len(expected)

    driver = _drive(*command)
    _wait(lambda: len(_lines(ledger)) > len(killed_at), driver)
    resource.prlimit(driver.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))  # every write fails from now on
    said = driver.communicate(timeout=PATIENCE_S)[1]
    assert driver.returncode == 2
    assert said.splitlines()[-1] == f"paceenv: error: {ledger}: cannot be written: File too large"
    assert "Traceback" not in said
    full_at = _lines(ledger)
    assert full_at[: len(killed_at)] == killed_at
    assert len(full_at) - 1 < len(expected)

    driver = _drive(*command, "--json", str(tmp_path / "said.json"))
    said = driver.communicate(timeout=PATIENCE_S)[1]
    assert driver.returncode == 0, said
    assert _lines(ledger)[: len(full_at)] == full_at
    assert len(_lines(ledger)) == 1 + len(expected), "no trial twice"
    assert ended(out) == expected
    assert json.loads((tmp_path / "said.json").read_text())["failed"] == []
    assert {"winner.yaml", "policy.safetensors", "robustness.json", "pareto.png"} <= set(os.listdir(out))
    assert not (out / ".tune").exists(), "Ray's own files are not kept"


@pytest.mark.slow
def test_three_nodes_of_which_one_is_killed_come_to_the_same(
    static: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    import ray
    from ray.cluster_utils import Cluster

    from paceenv.trainers.sweep import ray_trials

    sweep = begun(config_files.load(SweepConfig, "sweeps", static[0]), tmp_path / "out")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        killed_after = []

        def kill_one(row: Any) -> None:
            if not killed_after and row["status"] == "done":
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                killed_after.append(len(ended(tmp_path / "out")))

        with ray_trials.connected(cluster.address) as cpus:
            assert cpus == 3
            path = ray.get(ray.remote(lambda: __import__("sys").path).remote())
            assert any(
                "runtime_resources" in one and (Path(one) / "paceenv" / "trainers" / "sweep").is_dir() for one in path
            ), "code travels"
            ray_trials.run_on_ray(sweep, cpus, kill_one)
    finally:
        cluster.shutdown()
    assert len(killed_after) == 1
    assert killed_after[0] < len(static[1]), "in the middle"
    assert ended(tmp_path / "out") == static[1]


TRAIN = """
name: tiny
environment:
  clusters: [{cluster: two-jobs}]
  mechanisms: [phase_shift]
  episode_intervals: 8
  environments: 16
selection: {suites: [stagger], every: 2, patience: 9, seeds: 2, iterations: 60}
total_timesteps: 1024
sb3: {arguments: {n_steps: 8, batch_size: 64, n_epochs: 1}}
"""
"""A training run of four looks."""


def _training(place: Path, **search: Any) -> SweepConfig:
    (place / "tiny.yaml").write_text(TRAIN)
    training = {
        "train": str(place / "tiny.yaml"),
        "hyperparameters": {
            "sb3.learning_rate": {"choice": [1e-3, 3e-3, 2.0]},
            "sb3.arguments.gamma": {"uniform": [0.85, 0.95]},
        },
        "seeds": 2,
        **search,
    }
    robustness = {"suite": "demo", "seeds": 2, "iterations": 60}
    return SweepConfig.model_validate({"name": "tiny", "training": training, "robustness": robustness, "seed": 6})


@pytest.mark.slow
def test_hyperparameters_are_searched_and_trials_that_raise_do_not_end_it(tmp_path: Path) -> None:
    """ASHA on Ray; a learning rate of 2 is an error of the trials that have it, and on record."""
    config = _training(tmp_path, asha={"configs": 4, "reduction": 2, "rungs": 2, "workers": 2})
    (tmp_path / "asha.yaml").write_text(config.model_dump_json())
    out = tmp_path / "out"
    assert application.run(["sweep", str(tmp_path / "asha.yaml"), "-o", str(out)]) == 0
    ledger = Ledger.read(out)
    raised = [row for row in ledger.rows.values() if row["status"] == "failed"]
    assert raised
    assert all(
        "sb3.learning_rate = 2.0; allowed: input should be less than or equal to 1" in row["error"] for row in raised
    )
    assert all(row["work"]["hyperparameters"]["sb3.learning_rate"] == 2.0 for row in raised)
    done = {n: row for n, row in ledger.rows.items() if row["status"] == "done"}
    last = [row for row in done.values() if row["work"]["rung"] == 1]
    assert last, "the best went on"
    for row in last:
        first = done[row["work"]["from"]]["result"]
        assert row["result"]["decisions"] == [1024, 1024]
        assert first["decisions"] == [512, 512]
        assert row["result"]["score"] >= first["score"], "of the best look so far"
    best = Results.of(ledger).best()
    assert best is not None
    assert best.values["score"] == max(row["result"]["score"] for row in last)
    policy = load_policy(out / "policy.safetensors")
    scores = ledger.rows[best.trial]["result"]["scores"]
    assert policy.provenance["validation"]["score"] == pytest.approx(max(scores), abs=1e-4)
    assert policy.provenance["validation_of_seeds"]["scores"] == scores
    assert list((out / "trials").rglob("events.out.tfevents*")), "TensorBoard follows every trial"


def test_nothing_else_imports_ray() -> None:
    rooms = (
        "cli.evaluate_command",
        "trainers.sweep.static_search",
        "trainers.sweep.sweep_run",
        "live",
        "policies.select",
    )
    everything = ", ".join(f"paceenv.{room}" for room in (*rooms, "envs.pacing_env"))
    check = f"import {everything}, sys; print([m for m in ('ray', 'optuna') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_an_address_where_nothing_runs_is_one_line(static: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    from paceenv.core.errors import InputError

    with pytest.raises(InputError, match=r"--address .*allowed: auto, or HOST:PORT of a running cluster"):
        application.run(["sweep", str(static[0]), "-o", str(tmp_path / "out"), "--address", "127.0.0.1:1"])
