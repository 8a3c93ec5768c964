"""The table of algorithms: its runs are resumed, its numbers are those of the curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.evidence import learners
from paceenv.core.errors import InputError
from paceenv.trainers.training import training_run
from paceenv.trainers.training.algorithm_configs import SECTIONS
from paceenv.trainers.training.checkpoint import save_checkpoint
from paceenv.trainers.training.train_config import TrainConfig


def _run(out: Path, algorithm: str, seed: int, scores: list[tuple[float, float]]) -> None:
    folder = out / algorithm / f"seed-{seed}"
    folder.mkdir(parents=True)
    curve = [
        {"timesteps": 1000 * k, "reward": 0.0, "cpu_s": cpu_s, "gap_closed": score, "null_loss": 0.001, "score": score}
        for k, (cpu_s, score) in enumerate(scores, 1)
    ]
    (folder / "curve.json").write_text(json.dumps([{"timesteps": 0, "reward": 0.0}, *curve]))
    (folder / "policy.safetensors").write_bytes(b"")


def test_the_table_says_what_the_curves_hold(tmp_path: Path) -> None:
    _run(tmp_path, "ppo", 0, [(20, 0.1), (50, 0.5), (130, 0.4)])
    _run(tmp_path, "ppo", 1, [(20, 0.1), (50, 0.3), (130, 0.7)])
    _run(tmp_path, "distill", 0, [(40, 0.6)])
    (tmp_path / "sac" / "seed-0").mkdir(parents=True)
    unfinished = [{"timesteps": 7, "reward": 0.0, "cpu_s": 6.0, "gap_closed": 0.2, "null_loss": 0.0, "score": 0.2}]
    (tmp_path / "tqc" / "seed-5").mkdir(parents=True)
    save_checkpoint(tmp_path / "tqc" / "seed-5" / "checkpoint.safetensors", {}, {"curve": unfinished})
    runs = learners.read_runs(tmp_path)
    assert [(run.algorithm, run.seed) for run in runs] == [("ppo", 0), ("ppo", 1), ("distill", 0), ("tqc", 5)]
    rows = learners.table(runs)
    assert "| ppo | 2 | 60.0% [50.0%, 70.0%] | 0.10 % | 0.600 [0.500, 0.700] | 3,000 | 2.2 |" in rows
    assert "| distill | 1 | 60.0% [60.0%, 60.0%] | 0.10 % | 0.600 [0.600, 0.600] | 1,000 | 0.7 |" in rows
    assert "| ppo | 0.100 | 0.400 | 0.400 | 0.600 | 0.600 |" in learners.table_by_minutes(runs)
    assert "| tqc | 1 | 20.0% [20.0%, 20.0%] | 0.00 % | 0.200 [0.200, 0.200] | 7 | 0.1 |" in rows
    text = learners.page(runs, "A short budget.")
    assert "A short budget." in text
    learners.draw(runs, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("algorithm", SECTIONS)
def test_all_train_on_the_same_clusters_and_inputs(algorithm: str) -> None:
    config, base = learners.config_of(algorithm, 2, 1000), learners.config_of("distill", 0, None)
    assert (config.algorithm, config.seed, config.total_timesteps) == (algorithm, 2, 1000)
    assert config.environment == base.environment
    assert config.selection is not None
    assert base.selection is not None
    assert config.selection.suites == base.selection.suites
    assert (config.constraint is None) == (algorithm == "distill")


def test_an_unknown_algorithm_is_one_line() -> None:
    with pytest.raises(InputError, match="algorithm = 'dqn'; allowed: input should be 'ppo', 'recurrent_ppo'"):
        learners.config_of("dqn", 0, None)


def test_a_budget_in_minutes_is_the_measured_pace_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        timesteps, cpu_s = 0, 0.0

        def __init__(self, config: TrainConfig) -> None:
            assert config.algorithm == "cma_es"

        def advance(self) -> None:
            self.cpu_s += 2.0 if self.timesteps else 50.0  # the first one also compiles
            self.timesteps += 1000

    monkeypatch.setattr(training_run, "Run", Run)
    assert learners.decisions_in("cma_es", 2.0, tmp_path / "cma_es") == 2 * 60 * 500
    monkeypatch.delattr(training_run, "Run")
    assert learners.decisions_in("cma_es", 1.0, tmp_path / "cma_es") == 60 * 500, "not measured again"


def test_minutes_or_decisions(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--timesteps and --minutes; allowed: one of them"):
        learners.main(tmp_path, timesteps=1, minutes=1.0)
