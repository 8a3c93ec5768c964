"""Sweeps without Ray: what a trial is, what Tune's files are read as, what a winner leaves, what is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from paceenv.cli import application
from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.policies.names import rule, spelled
from paceenv.policies.policy_file import load_policy
from paceenv.trainers.evaluation.static_search import LEAST_EPISODES, search_static
from paceenv.trainers.evaluation.suites import load_suite, load_suites
from paceenv.trainers.sweep import ray_tuner, trainables
from paceenv.trainers.sweep.sweep_config import FIRST_SEED, SweepConfig
from paceenv.trainers.sweep.sweep_results import CONFIG, Results
from paceenv.trainers.sweep.trainables import StaticTask, TrainingTask, TrainingTrial, make_task, static_space
from paceenv.trainers.sweep.winner import finish
from paceenv.ui import config_files
from paceenv.ui.config_files import names

SUITE = """
name: two
cases:
  - {cluster: two-jobs, weight: 2}
  - {cluster: incast-shallow}
"""
SMALL = {"splits": ["held-out"], "seeds": 3, "iterations": 60, "mechanisms": ["phase_shift"]}
GRID = {"phase_shift": {"threshold": [0.05, 0.3], "window": [0.05, 0.1, 0.3]}}


@pytest.fixture
def suite(tmp_path: Path) -> str:
    (tmp_path / "two.yaml").write_text(SUITE)
    return str(tmp_path / "two.yaml")


def _config(suite: str, **static: Any) -> SweepConfig:
    given = {**SMALL, "suite": suite, **static}
    return SweepConfig.model_validate({"name": "small", "static": given})


def _begun(config: SweepConfig, folder: Path) -> Any:
    config_files.write_yaml(folder / CONFIG, config.model_dump(mode="json"))
    return make_task(config)


def _write(trial: Path, name: str, text: str) -> None:
    trial.mkdir(parents=True, exist_ok=True)
    (trial / name).write_text(text)


def _searched(config: SweepConfig, folder: Path) -> Any:
    """A folder as Ray leaves it after a grid."""
    task = _begun(config, folder)
    space = {key: grid["grid_search"] for key, grid in static_space(task.static).items()}
    for n, values in enumerate(itertools.product(*space.values())):
        given = dict(zip(space, values, strict=True))
        result = {**task.score(given), "config": given, "done": True}
        _write(folder / "tune" / "all" / f"{n:05d}", "result.json", json.dumps(result) + "\n")
    return task


def test_settings_score_as_in_the_search_for_the_best_static_one(suite: str) -> None:
    """One way to evaluate a static setting: on the same seeds, its gains are the same numbers."""
    first = FIRST_SEED - 80  # the search takes seeds after those of the suite
    changed = {"seeds": 8, "first_seed": first, "iterations": 60, "mechanisms": ["phase_shift"]}
    found = search_static(load_suite(suite).model_copy(update=changed))
    task: Any = make_task(_config(suite, seeds=LEAST_EPISODES // 2))  # of two clusters
    for setting, gain_CE in zip(found.settings, found.gain_SCE, strict=True):
        action = pacing.encode_action("phase_shift", *setting["phase_shift"])
        action = dict(zip(("phase_shift.threshold", "phase_shift.window"), action, strict=True))
        assert task.setting(action) == setting
        score = task.score(action)
        assert score["policy"] == spelled(setting)
        assert score["throughput"] == pytest.approx(float(gain_CE.mean(axis=1) @ [2 / 3, 1 / 3]), abs=1e-15)


def test_a_finished_sweep_leaves_what_people_look_at(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = _config(suite, grid=GRID), tmp_path / "out"
    finish(out, _searched(config, out))
    results = Results.read(out)
    best, front = results.best(), results.front()
    assert best is not None
    assert best == front[0]
    assert len(results.candidates) == results.asked == 6
    assert results.is_finished
    assert best["throughput"] == max(row["throughput"] for row in results.candidates)
    assert [row["cv"] for row in front] == sorted((row["cv"] for row in front), reverse=True)
    for other in results.candidates:
        assert any(
            all(a >= b for a, b in zip(results.goodness(f), results.goodness(other), strict=True)) for f in front
        )
    assert (out / "pareto.png").stat().st_size > 1000
    assert rule(best["candidate"]) is not None
    assert load_policy(out / "policy.safetensors").provenance["candidate"] == best["candidate"]
    scores = out / "scores.json"
    options = ["--seeds", "2", "-i", "60", "--json", str(scores)]
    command = ["evaluate", best["candidate"], str(out / "policy.safetensors"), "--suite", suite, *options]
    assert application.run(command) == 0
    gains = {(row["policy"], row["cluster"]): row["throughput_gain"] for row in json.loads(scores.read_text())["rows"]}
    for cluster in ("two-jobs", "incast-shallow"):
        assert gains["policy", cluster] == pytest.approx(gains[best["candidate"], cluster], abs=2e-4)
    capsys.readouterr()
    assert application.run(["sweep", str(out), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["candidate"] == best["candidate"]
    assert application.run(["sweep", str(out)]) == 0
    shown = capsys.readouterr().out
    assert best["candidate"] in shown
    assert "means over 3 seeds x 60 iterations on each cluster of suite " in shown
    with pytest.raises(InputError, match=r"--set with a sweep's folder, .*; allowed: --json"):
        application.run(["sweep", str(out), "--set", "seed=1"])


def test_what_a_killed_sweep_leaves_is_read(suite: str, tmp_path: Path) -> None:
    _begun(_config(suite), tmp_path)
    line = json.dumps({"policy": "passive", "throughput": 0.0, "cv": 0.1, "done": True, "config": {}})
    trials = tmp_path / "tune" / "all"
    _write(trials / "00000", "result.json", f"{line}\n{line[:30]}")
    _write(trials / "00001", "params.json", "{}")
    _write(trials / "00002", "error.txt", "Failure # 1\nTraceback ...\nValueError: no luck\n\n")
    _write(trials / "00003", "error.txt", "RayActorError: lost\n")
    _write(trials / "00003", "result.json", f"{line}\n")
    results = Results.read(tmp_path)
    assert [row["trial"] for row in results.candidates] == [0, 3], "the last one began again"
    assert (results.asked, results.is_finished) == (24, False)
    assert results.failed == [{"trial": 2, "error": "ValueError: no luck"}]
    with pytest.raises(InputError, match="holds no sweep; allowed: the folder of one"):
        Results.read(tmp_path / "nothing")


NET = {"sb3.net_arch": {"choice": [[32], [64]]}}


@pytest.mark.parametrize(
    ("section", "changed", "expected"),
    [
        (
            "static",
            {"grid": {"phase_shift": {"threshold": [1.5], "window": [0.1]}}},
            "threshold of phase_shift = 1.5; allowed: 0 to 1",
        ),
        ("static", {"grid": GRID, "optuna": {}}, "grid or optuna, one of the two"),
        (
            "static",
            {"mechanisms": ["slack", "phase_shift", "stagger"]},
            "a grid of 5760 settings; allowed: at most 4096, by fewer mechanisms or values, or optuna: {}",
        ),
        ("static", {"splits": ["held-out", "held-out"]}, "splits = ['held-out', 'held-out']; allowed: each once"),
        ("static", {"optuna": {"sampler": "cmaes"}}, "optuna.sampler = 'cmaes'; allowed: input should be 'tpe' or"),
        (
            "training",
            {"hyperparameters": NET, "pbt": {"perturbation_interval": 1000}},
            "hyperparameter sb3.net_arch with PBT; allowed: sb3.learning_rate",
        ),
        ("training", {"hyperparameters": {"seed": {"choice": [1]}}}, "hyperparameter seed; allowed: sb3"),
        ("training", {"hyperparameters": {"sb3.gama": {"choice": [0.9]}}}, "hyperparameter sb3.gama; allowed: "),
        ("training", {"hyperparameters": {"distill.gamma": {"choice": [0.9]}}}, "hyperparameter distill.gamma; "),
        (
            "training",
            {"hyperparameters": NET, "asha": {"grace_period": 97}, "set": {"total_timesteps": 96}},
            "asha.grace_period = 97; allowed: at most 96, the decisions of a training",
        ),
    ],
)
def test_what_a_sweep_cannot_do_is_one_line_and_no_folder(
    section: str, changed: dict[str, Any], expected: str, suite: str, tmp_path: Path
) -> None:
    given = {"static": {**SMALL, "suite": suite}, "training": {"train": "ppo"}}[section] | changed
    (tmp_path / "wrong.yaml").write_text(json.dumps({"name": "wrong", section: given}))
    with pytest.raises(InputError, match=re.escape(expected)):
        application.run(["sweep", str(tmp_path / "wrong.yaml"), "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="demo: a config to run needs a folder; allowed: --out FOLDER"):
        application.run(["sweep", "demo"])


def test_a_folder_keeps_its_sweep_and_a_sweep_without_a_result_is_an_error(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(config: SweepConfig, task: StaticTask, folder: Path) -> None:
        _write(folder / "tune" / "all" / "00000", "error.txt", "no luck\n")

    monkeypatch.setattr(ray_tuner, "connected", lambda address: contextlib.nullcontext(2))
    monkeypatch.setattr(ray_tuner, "tune_all", fails)
    (tmp_path / "small.yaml").write_text(_config(suite).model_dump_json())
    command = ["sweep", str(tmp_path / "small.yaml"), "-o", str(tmp_path / "out")]
    with pytest.raises(InputError, match="no trial was finished; trial 0 failed: no luck"):
        application.run(command)
    with pytest.raises(InputError, match=r"begun with static\.seeds = 3, now 4; allowed: the same, or another"):
        application.run([*command, "--set", "static.seeds=4"])


def test_pickles_of_another_user_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / ray_tuner.STATE, "tuner.pkl", "")
    with pytest.raises(InputError, match=r"Tune cannot read it: .*; allowed: another folder"):
        ray_tuner._restored(tmp_path, TrainingTrial)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(InputError, match=r"belongs to user .*; allowed: to go on with a sweep of your own"):
        ray_tuner._restored(tmp_path, TrainingTrial)


TRAIN = """
name: tiny
environment: {clusters: [{cluster: two-jobs}], mechanisms: [phase_shift], episode_intervals: 8, environments: 16}
selection: {suites: [mine.yaml], every: 2, patience: 9, seeds: 2, iterations: 60}
total_timesteps: 1024
sb3: {arguments: {n_steps: 8, batch_size: 64, n_epochs: 1}}
"""
"""A training run of four looks."""


def training_sweep(folder: Path, rates: dict[str, Any], **search: Any) -> SweepConfig:
    """A sweep over two hyperparameters of that run, whose files are in ``folder``."""
    (folder / "tiny.yaml").write_text(TRAIN)
    (folder / "mine.yaml").write_text("name: mine\ncases: [{cluster: two-jobs, split: validation}]\n")
    ranges = {"sb3.learning_rate": rates, "sb3.arguments.gamma": {"uniform": [0.85, 0.95]}}
    training = {"train": str(folder / "tiny.yaml"), "hyperparameters": ranges, "seeds": 2, **search}
    return SweepConfig.model_validate({"name": "tiny", "training": training, "seed": 1})


def test_trials_share_the_validation_that_the_driver_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainables, "Validation", lambda *args, **named: "found")
    sent = pickle.dumps(make_task(training_sweep(tmp_path, {"choice": [1e-3]})))
    monkeypatch.setattr(trainables, "Validation", None)
    assert pickle.loads(sent).validation == "found"


def test_a_training_that_nothing_scores_is_refused_before_what_else_is_wrong() -> None:
    training = {"train": "demo", "set": {"environment.suites": ["demo"]}}
    config = {"name": "x", "training": training | {"hyperparameters": {"sb3.learning_rate": {"choice": [1e-3]}}}}
    with pytest.raises(InputError, match="train: demo: has no selection, which scores the trials"):
        make_task(SweepConfig.model_validate(config))


def test_a_population_shows_the_last_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = training_sweep(tmp_path, {"loguniform": [1e-3, 1e-1]}, pbt={"perturbation_interval": 256})
    config_files.write_yaml(tmp_path / CONFIG, config.model_dump(mode="json"))
    _write(
        tmp_path / "tune" / "all" / "00000",
        "result.json",
        json.dumps({"score": 0.5, "config": {"sb3.learning_rate": 0.01}}),
    )
    assert application.run(["sweep", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "candidate (last values)" in printed
    assert "score: the median of 2 trainings, on the validation clusters of " in printed


def test_the_examples_of_the_trainables_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainables, "Validation", lambda *args, **named: None)  # takes a minute
    for example in re.findall(r"::\n\n((?:    .*\n)+)", str(trainables.__doc__)):
        exec(compile(textwrap.dedent(example), "example", "exec"), ran := vars(trainables).copy())
        assert isinstance(ran["tuner"], tune.Tuner)


@pytest.mark.parametrize("name", names("sweeps"))
def test_the_sweeps_that_ship_can_begin(name: str) -> None:
    config = config_files.load(SweepConfig, "sweeps", name)
    if config.static is not None:
        assert load_suite(config.static.suite).only(config.static.splits).cases
    else:
        assert isinstance(make_task(config), TrainingTask)


def test_a_training_sweep_finds_its_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers change to a folder of their own."""
    monkeypatch.chdir(tmp_path)
    task = make_task(training_sweep(Path(), {"choice": [1e-3]}))
    monkeypatch.chdir("/")
    assert isinstance(task, TrainingTask)
    assert task.train.selection is not None
    assert [case.name for case in load_suites(task.train.selection.suites, "all of it").cases] == ["two-jobs"]
