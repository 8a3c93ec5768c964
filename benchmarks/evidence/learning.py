"""What trainings by the config `demo` cost and learn, beside the best constant setting, on seeds that neither saw."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks._common import Report, Table, Target, command, figure
from paceenv.core import metrics
from paceenv.core.intervals import Interval
from paceenv.policies.policy_file import save_policy
from paceenv.trainers.evaluation.evaluate import SuiteResult, evaluate
from paceenv.trainers.evaluation.static_search import Problem, Setting, spelled
from paceenv.trainers.evaluation.suites import Case, Suite, load_suite
from paceenv.trainers.training.sb3_learner import Sb3Learner
from paceenv.trainers.training.train_config import TrainConfig, load_train_config
from paceenv.trainers.training.training_run import Run

Array = NDArray[np.float64]
CONFIG, SEEDS, MOST_S = "demo", 5, 60.0
THRESHOLDS, WINDOWS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2), (0.02, 0.04, 0.06, 0.1, 0.2)
"""Of the constants that are tried: finer than the default grid of sweeps."""
PARTS = ("stepping", "update", "policy and the rest")


def _timed(function: Callable[[], Any], spent: list[float]) -> Callable[[], Any]:
    def timed() -> Any:
        started = time.process_time()
        found = function()
        spent[0] += time.process_time() - started
        return found

    return timed


def train(config: TrainConfig, path: Path) -> tuple[int, float, tuple[float, ...]]:
    """Train and save; decisions, CPU seconds, and the share of them in each of :data:`PARTS`."""
    run, stepping, update = Run(config), [0.0], [0.0]
    learner = run.learner
    assert isinstance(learner, Sb3Learner)
    setattr(learner.envs, "step_wait", _timed(learner.envs.step_wait, stepping))  # noqa: B010 (a method, to mypy)
    learner.model.train = _timed(learner.model.train, update)
    while run.goes_on():
        run.advance()
    save_policy(path, run.result().file)
    shares = stepping[0] / run.cpu_s, update[0] / run.cpu_s
    return run.timesteps, run.cpu_s, (*shares, 1.0 - sum(shares))


def best_constant(suite: Suite) -> str:
    """The setting of the config's mechanism with the highest mean gain, on other seeds than the suite's own."""
    settings: list[Setting] = [(("phase_shift", t, w),) for t, w in itertools.product(THRESHOLDS, WINDOWS)]
    seeds = np.arange(suite.seeds) + suite.first_seed + 10 * suite.seeds
    problem = Problem.of([case.load() for case in suite.cases], seeds, suite.iterations)
    gain_S = problem.score(settings).gain_SCE.mean(axis=2) @ [case.weight for case in suite.cases]
    return spelled(settings[int(gain_S.argmax())])


def run() -> Report:
    """Train with several seeds, and compare each policy with the best constant on held-out seeds."""
    config, suite = load_train_config(CONFIG), load_suite(CONFIG)
    config = config.model_copy(update={"environment": config.environment.model_copy(update={"threads": 1})})
    Run(config).advance(1)  # compiles
    constant = best_constant(suite)
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"seed-{seed}.safetensors") for seed in range(SEEDS)]
        found = [train(config.model_copy(update={"seed": n}), Path(file)) for n, file in enumerate(files)]
        result = evaluate([constant, *files], suite)
    rows, data = list[tuple[str, ...]](), list[dict[str, Any]]()
    for seed, (file, (decisions, cpu_s, shares)) in enumerate(zip(files, found, strict=True)):
        gain, ahead = result.total(file), result.total(file, against=constant)
        rate = decisions / cpu_s
        cells = (f"{cpu_s:.0f}", figure(rate), *(f"{share:.0%}" for share in shares))
        rows.append((str(seed), *cells, f"{gain.gain:+.2%}", _interval(Interval(ahead.gain, *ahead.gain_ci95))))
        data.append({"seed": seed, "cpu_s": cpu_s, "rate": rate, "gain": gain.gain, "beyond": ahead.gain})
    clusters = list[tuple[str, ...]]()
    for name, cases in ((suite.name, suite.cases), *((case.name, [case]) for case in suite.cases)):
        constants, ours = (f"{_gain_E(result, some, cases).mean():+.2%}" for some in ([constant], files))
        beyond = metrics.bootstrap_interval(_gain_E(result, files, cases, constant))
        clusters.append((name, constants, ours, _interval(beyond)))
    slowest = max(cpu_s for _, cpu_s, _ in found)
    worst = min(result.total(file, against=constant).gain_ci95[0] for file in files)
    target = Target(
        "better than the best constant, every seed",
        f"surely, in {MOST_S:.0f} CPU s",
        f"lowest end {worst:+.2%}, {slowest:.0f} CPU s",
        worst > 0.0 and slowest <= MOST_S,
    )
    columns = ("seed", "CPU s", "decisions per CPU s", *PARTS, "gain", "beyond the best constant")
    text = f"`paceenv train {CONFIG}` on one thread; the best constant on the same task is `{constant}`."
    tables = (
        Table("trainings", columns, rows),
        Table("by cluster, means of the seeds", ("cluster", "constant", "trained", "beyond the constant"), clusters),
    )
    return Report("Learning", text, {"trainings": data, "constant": constant}, tables, (target,))


def _gain_E(result: SuiteResult, policies: Sequence[str], cases: Sequence[Case], against: str = "passive") -> Array:
    """Mean gain of some policies on some clusters, by seed."""
    gains_C = [np.mean([result.gain_E(policy, case, against) for policy in policies], axis=0) for case in cases]
    return np.average(gains_C, axis=0, weights=[case.weight for case in cases])


def _interval(found: Interval) -> str:
    return f"{found.value:+.2%} [{found.low:+.2%}, {found.high:+.2%}]"


if __name__ == "__main__":
    command(run)
