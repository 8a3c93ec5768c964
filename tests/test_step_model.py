"""A model of step times and distances of distributions, on series whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import log_samples
import numpy as np
import pytest
from scipy import stats

from paceenv.cli import application
from paceenv.core import metrics
from paceenv.core.errors import InputError
from paceenv.diagnosis.step_times.step_model import ModelCheck, check_model, fit_model
from paceenv.importers.step_log import StepLog


def log_of(step_s: np.ndarray, runs: int = 1) -> StepLog:
    n = len(step_s)
    run_V = np.repeat(np.arange(runs), -(-n // runs))[:n]
    return StepLog("a.log", "test", np.arange(n), step_s, np.ones(n, np.int64), np.full(n, np.nan), run_V)


def test_the_distance_is_scipys() -> None:
    random = np.random.default_rng(1)
    for n, m in ((5, 7), (200, 50), (1000, 1000)):
        a, b = random.normal(size=n), np.round(random.normal(0.3, 1.2, size=m), 1)
        assert metrics.ks_distance(a, b) == pytest.approx(stats.ks_2samp(a, b).statistic)
    assert metrics.ks_distance(np.ones(3), np.ones(4)) == 0.0
    assert metrics.ks_distance(np.zeros(3), np.ones(4)) == 1.0


def test_chance_is_exceeded_in_a_twentieth_of_cases() -> None:
    random = np.random.default_rng(2)
    above = [
        metrics.ks_distance(random.normal(size=40), random.normal(size=60)) > metrics.ks_chance(40, 60)
        for _ in range(600)
    ]
    assert 0.01 < np.mean(above) < 0.09
    assert metrics.ks_chance(22) == pytest.approx(0.29, abs=0.005)


def test_a_model_has_the_distribution_and_the_memory_of_its_log() -> None:
    random = np.random.default_rng(4)
    noise = np.zeros(6000)
    for i in range(1, 6000):
        noise[i] = 0.6 * noise[i - 1] + 0.8 * random.normal()
    truth_s = 2.0 * (0.9 + 0.1 * stats.gamma.ppf(stats.norm.cdf(noise), 1.0))
    model = fit_model(log_of(truth_s))
    drawn_s = model.sample(20_000)
    assert metrics.ks_distance(truth_s, drawn_s) < 0.03
    assert model.memory == pytest.approx(0.55, abs=0.1)
    assert np.corrcoef(drawn_s[1:], drawn_s[:-1])[0, 1] == pytest.approx(model.memory, abs=0.1)
    assert truth_s.mean() in model.level_s or model.outlier_share > 0.0


def test_halves_of_a_steady_job_agree_and_of_a_changed_one_do_not() -> None:
    random = np.random.default_rng(5)
    steady = 1.0 + 0.05 * random.gamma(2.0, size=4000)
    same = check_model(log_of(steady))
    assert isinstance(same, ModelCheck)
    assert same.model.distance < 0.06
    assert same.normal.distance > same.model.distance + 0.02
    changed = check_model(log_of(np.concatenate([steady[:2000], 1.1 * steady[2000:]])))
    assert isinstance(changed, ModelCheck)
    assert changed.model.distance > 0.3 > changed.model.chance


def test_runs_are_held_out_where_there_are_enough() -> None:
    check = check_model(log_of(1.0 + 0.05 * np.random.default_rng(6).normal(size=600), runs=6))
    assert isinstance(check, ModelCheck)
    assert check.held_out == "3 runs, fitted to the 3 before"
    assert check.model.values == 300


def test_too_few_values_are_said() -> None:
    with pytest.raises(InputError, match="allowed: at least 20"):
        fit_model(log_of(np.linspace(1.0, 1.1, 12)))
    assert "too few" in str(check_model(log_of(1.0 + 0.01 * np.random.default_rng(7).normal(size=30))))


def test_calibrate_takes_a_log_and_says_why_it_gives_no_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(log_samples.nanogpt(1.0 + 0.05 * np.random.default_rng(8).normal(size=400), 1))
    application.run(["calibrate", str(path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "Kolmogorov-Smirnov distance of the step times" in said
    assert "No cluster config" in said
    application.run(["calibrate", str(path), "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] is None
    assert 0.0 < found["ks"]["model"]["distance"] < 0.2
    with pytest.raises(InputError, match="tells step times, not a cluster"):
        application.run(["calibrate", str(path), "-o", str(tmp_path / "c.yaml")])
    assert not (tmp_path / "c.yaml").exists()


def test_diagnose_takes_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_text(log_samples.srun(log_samples.megatron(1.0 + 0.05 * np.random.default_rng(9).normal(size=900))))
    application.run(["diagnose", str(path)])
    assert "Next: " in capsys.readouterr().out
    application.run(["diagnose", str(path), "--json", "-"])
    assert json.loads(capsys.readouterr().out)["format"] == "Megatron-LM"
    (tmp_path / "own.log").write_text("".join(f"{i} took {90 + i % 7} millis\n" for i in range(50)))
    application.run(["diagnose", str(tmp_path / "own.log"), "--pattern", r"took (?P<ms>\d+)"])
    assert "50 step times" in capsys.readouterr().out
    with pytest.raises(InputError, match="no regular expression"):
        application.run(["diagnose", str(tmp_path / "own.log"), "--pattern", "("])
