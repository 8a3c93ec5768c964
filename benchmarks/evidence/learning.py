"""Reference curves of the default task: learners beside the best constant setting, by CPU time, on held-out seeds."""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks._common import figure
from paceenv.policies.names import spelled
from paceenv.policies.policy_file import save_policy
from paceenv.report.section import Section, print_sections
from paceenv.trainers.evaluation.evaluate import SuiteResult, evaluate
from paceenv.trainers.evaluation.static_search import Problem
from paceenv.trainers.evaluation.suites import Suite, load_suite
from paceenv.trainers.training import training_run
from paceenv.trainers.training.train_config import TrainConfig, load_train_config, with_algorithm
from paceenv.ui import figures

Point = tuple[int, float, str]
"""Of a training: decisions, CPU seconds and policy file."""
CONFIG, MOST_S = "demo", 60.0
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "static" / "learning.png"
SEEDS = {"PPO": 5, "SAC": 3, "distill": 3}
SEGMENT = {"PPO": 10, "SAC": 1, "distill": 1}
"""Rollouts of a segment; PPO has those of `paceenv train`."""
DISTILL = {"rounds": 6, "candidates": 8, "net_arch": [64, 64], "every_intervals": 16}
POINTS = 8
"""Policies of a training that are evaluated; their number decides how long the benchmark takes."""
THRESHOLDS, WINDOWS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2), (0.02, 0.04, 0.06, 0.1, 0.2)
"""Of the constants that are tried: finer than the default grid of sweeps."""


def config_of(algorithm: str, seed: int) -> TrainConfig:
    """The config `demo` on one thread, with another algorithm at its defaults."""
    data = with_algorithm(load_train_config(CONFIG).model_dump(), algorithm) | {"seed": seed}
    data["environment"]["threads"] = 1
    if algorithm == "distill":
        data |= {"distill": DISTILL, "total_timesteps": 12_000}
    return TrainConfig.model_validate(data)


def train(folder: Path, algorithm: str, seed: int) -> list[Point]:
    """Train for at most :data:`MOST_S`; what is there at :data:`POINTS` moments."""
    training_run.SEGMENT_ROLLOUTS = SEGMENT[algorithm]
    run, made = training_run.Run(config_of(algorithm, seed)), list[Point]()
    while run.goes_on() and run.cpu_s < MOST_S:
        run.advance()
        path = folder / f"{algorithm}-{seed}-{run.timesteps}.safetensors"
        save_policy(path, run.result())
        made.append((run.timesteps, run.cpu_s, str(path)))
    kept = np.unique(np.linspace(0, len(made) - 1, POINTS).round().astype(int))
    return [made[n] for n in kept]


def best_constant(suite: Suite) -> str:
    """The setting of the config's mechanism with the highest mean gain, on other seeds than the suite's own."""
    settings = [{"phase_shift": pair} for pair in itertools.product(THRESHOLDS, WINDOWS)]
    seeds = np.arange(suite.seeds) + suite.first_seed + 10 * suite.seeds
    problem = Problem([case.load() for case in suite.cases], seeds, suite.iterations)
    gain_S = problem.score(settings)[0].mean(axis=2) @ [case.weight for case in suite.cases]
    return spelled(settings[int(gain_S.argmax())])


def run() -> list[Section]:
    """Train with several learners and seeds, and compare each policy with the best constant on held-out seeds."""
    suite = load_suite(CONFIG)
    training_run.Run(config_of("PPO", 0)).advance()  # compiles
    constant = best_constant(suite)
    with tempfile.TemporaryDirectory() as folder:
        keys = [(algorithm, seed) for algorithm, seeds in SEEDS.items() for seed in range(seeds)]
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
            curves = dict(
                zip(keys, pool.map(functools.partial(train, Path(folder)), *zip(*keys, strict=True)), strict=True)
            )
        result = evaluate([constant, *(file for curve in curves.values() for _, _, file in curve)], suite)
    rows = list[tuple[str, ...]]()
    for (algorithm, seed), curve in curves.items():
        decisions, cpu_s, file = curve[-1]
        gain, ahead = result.total(file), result.total(file, against=constant)
        cells = (f"{cpu_s:.0f}", figure(decisions), figure(decisions / cpu_s), f"{gain.gain:+z.2%}")
        low, high = ahead.gain_ci95
        rows.append((algorithm, str(seed), *cells, f"{ahead.gain:+z.2%} [{low:+z.2%}, {high:+z.2%}]"))
    draw(curves, result, constant)
    text = f"The task of `paceenv train {CONFIG}` on one thread; the best constant there is `{constant}`."
    columns = ("learner", "seed", "CPU s", "decisions", "a CPU s", "gain", "beyond the best constant")
    return [Section("Learning", (text,), columns, rows)]


def draw(curves: Mapping[tuple[str, int], Sequence[Point]], result: SuiteResult, constant: str) -> None:
    """Gain by CPU seconds, a line a seed and a colour a learner."""
    drawn, panel = figures.axes("The default task, held-out seeds", "CPU seconds", "throughput against no pacing, %")
    shades = dict(zip(SEEDS, ("#4c72b0", "#dd8452", "#8172b3"), strict=True))
    for (algorithm, seed), curve in curves.items():
        at_s, gains = [at_s for _, at_s, _ in curve], [100.0 * result.total(file).gain for _, _, file in curve]
        label = algorithm if seed == 0 else None
        panel.plot(at_s, gains, "o-", ms=3, linewidth=1, color=shades[algorithm], label=label)
    panel.axhline(
        100.0 * result.total(constant).gain, color=figures.STATIC_COLOUR, linestyle="--", label="best constant"
    )
    panel.set(xlim=(0.0, None))
    panel.legend(loc="lower right")
    figures.save(drawn, PICTURE)


if __name__ == "__main__":
    print_sections(run())
