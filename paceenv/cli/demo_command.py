"""``paceenv demo``: calibrate, train, compare, draw; one folder of results."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.calibration.compute_noise import noise_cluster
from paceenv.calibration.noise_fit import NoiseFit, NoiseMeasurements, fit_noise
from paceenv.policies.policy_file import save_policy
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.trainers.evaluation import result_plots, score_table
from paceenv.trainers.evaluation.evaluate import SuiteResult, evaluate
from paceenv.trainers.evaluation.static_search import search_static
from paceenv.trainers.evaluation.suites import Case, Suite, load_suite
from paceenv.trainers.training import training_run
from paceenv.trainers.training.train_config import TrainConfig, load_train_config
from paceenv.ui import config_files, figures, output
from paceenv.ui.run_directory import prepare_folder

HEALTHY, IMBALANCED = "AR", "SE"
HELD = {HEALTHY: "ranks healthy but for one", IMBALANCED: "ranks with unequal data in every step"}
"""The two production traces."""
EXPLAINED = "unequal-slack"
"""Shows at a glance what pacing does: two ranks have work after their collective, and the others let them go first."""
NOISY_JITTER_CV = 0.03


def run_demo(out: Path, timesteps: int | None, seed: int) -> SuiteResult:
    """Run all stages of the demo; returns the result of the main suite.

    Args:
        timesteps: decisions of the training; None: as configured.
    """
    started = time.monotonic()
    healthy, imbalanced = (_calibrate(name) for name in (HEALTHY, IMBALANCED))
    config = load_train_config("demo")
    config = config.model_copy(update={"seed": seed})
    config = config if timesteps is None else config.model_copy(update={"total_timesteps": timesteps})
    suite = load_suite("demo")
    clusters = _clusters(suite, healthy)
    plain = noise_cluster(imbalanced, load_cluster("null-jitter"), "calibrated-se")
    for cluster in (*clusters.values(), plain):
        config_files.write_yaml(out / "clusters" / f"{cluster.name}.yaml", cluster.model_dump(exclude_defaults=True))
    shares = _replaced(config.environment.clusters, clusters)
    environment = config.environment.model_copy(update={"clusters": shares})
    policy = _train(config.model_copy(update={"environment": environment}), out)
    suite = suite.model_copy(update={"cases": _replaced(suite.cases, clusters)})
    result, static = _compare(suite, policy)
    nulls = _compare_nulls(plain, policy, static)
    with output.progress("draw"):
        drawn = result_plots.ranks_over_time(load_cluster(EXPLAINED), ["passive", "learned"])
        figures.save(drawn, out / "ranks-over-time.png")
    pages = [_table(one, score_table.differences(one, [str(policy), static])) for one in (result, nulls)]
    config_files.write_text(out / "scores.md", "\n".join(["# Demo", "", *pages]))
    output.say(f"All of it, with pictures and the policy file, is in {out}/ ({time.monotonic() - started:.0f} s)")
    return result


def _calibrate(name: str) -> NoiseFit:
    """The noise of stage 0 of a trace, from its packaged measurements."""
    path = config_files.packaged("measurements") / f"straggler-{name.lower()}.yaml"
    with output.progress(f"calibrate {name}"):
        measured = config_files.load(NoiseMeasurements, "measurements", path)
        fit = fit_noise(measured.stages[0], measured.source)
    output.say(
        f"calibrated production trace {name} ({HELD[name]}) from {path.name}: {fit.workers} ranks, "
        f"mean compute {fit.mean_compute_s.value:.3g} s, "
        f"its distribution within {fit.distance:.1%}"
    )
    return fit


def _clusters(suite: Suite, healthy: NoiseFit) -> dict[str, Cluster]:
    """The suite's clusters with the noise measured on healthy workers; jitter from that up to a noisy cluster's."""
    config = healthy.to_config()
    measured: dict[str, Any] = {key: config["noise"][key] for key in ("common_cv", "persistent_cv")}
    measured["jitter_cv"] = {"loguniform": [max(config["noise"]["jitter_cv"], 1e-3), NOISY_JITTER_CV]}
    clusters = {}
    for case in suite.cases:
        data = case.load().model_dump()
        data["noise"] |= measured
        data["calibration"] = config["calibration"]
        clusters[case.name] = config_files.parse(Cluster, data, f"{case.name} with calibrated noise")
    return clusters


def _replaced(cases: Sequence[Case], clusters: dict[str, Cluster]) -> list[Case]:
    """The cases, with ``clusters`` in place of those of their names."""
    return [one.model_copy(update={"cluster": clusters.get(one.name, one.cluster)}) for one in cases]


def _train(config: TrainConfig, out: Path) -> Path:
    output.say(f"training {config.algorithm} on {config.total_timesteps:,} decisions")
    with output.progress("train", config.total_timesteps) as done:
        trained = training_run.train(config, on_progress=done)
    path = out / "trained.safetensors"  # `learned` is the policy that ships
    digest = save_policy(path, trained.file)
    config_files.write_text(out / "learning-curve.json", json.dumps(trained.curve))
    result_plots.learning_curve(trained.curve, out / "learning-curve.png")
    output.say(f"wrote {path}, sha256 {digest[:16]}")
    return path


def _compare(suite: Suite, policy: Path) -> tuple[SuiteResult, str]:
    with output.progress("best static setting", 1) as done:
        static = search_static(suite, on_done=done).best()
    names = [static, "paper", "adaptive", str(policy), "clairvoyant"]
    with output.progress("compare", len(suite.cases) * (len(names) + 1)) as done:
        return evaluate(names, suite, on_done=done), static


def _compare_nulls(plain: Cluster, policy: Path, static: str) -> SuiteResult:
    """Where pacing has nothing to exploit: plain barrier jobs, one with the measured imbalance."""
    cases = [Case(cluster="null-jitter", null_case=True), Case(cluster=plain, null_case=True)]
    suite = Suite(
        name="nulls",
        description="Plain barrier jobs: independent jitter, and the data imbalance calibrated from the SE trace.",
        cases=cases,
        seeds=32,
    )
    names = [static, "paper", "adaptive", str(policy)]
    with output.progress("compare where pacing cannot help", len(cases) * (len(names) + 1)) as done:
        return evaluate(names, suite, on_done=done)


def _table(result: SuiteResult, said: list[str]) -> str:
    """Print the table of a suite with what is said of it; returns both as Markdown."""
    rows = score_table.cells(score_table.scores(result))
    note = [f"{score_table.GAP_CLOSED} In brackets: 95 % interval.", *said, ""]
    output.print_table(f"Suite {result.suite.name}", score_table.COLUMNS, rows, "\n".join(note))
    return score_table.markdown(result, said)


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("runs/demo"),
    timesteps: Annotated[int | None, typer.Option(min=1, help="Shorter or longer training, in decisions.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0,
) -> None:
    """The guided tour: calibrate a cluster, train a policy, compare it with its baselines, draw the pictures.

    It takes 3 to 8 minutes on two cores. Everything it prints is also written to the output folder.
    """
    run_demo(prepare_folder(out), timesteps, seed)
