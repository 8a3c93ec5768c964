"""The winner of a sweep: as a policy file, as a file for ``paceenv evaluate``, and evaluated again elsewhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import paceenv
from paceenv.core import pacing, signals
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.evaluation import score_table
from paceenv.trainers.evaluation.comparison import Comparison
from paceenv.trainers.evaluation.evaluate import SuiteResult, evaluate
from paceenv.trainers.evaluation.suites import Suite, load_suite
from paceenv.trainers.sweep.ledger import Ledger
from paceenv.trainers.sweep.outcome.sweep_results import Candidate, Results
from paceenv.trainers.sweep.score import Setting, encoded, spelled
from paceenv.trainers.sweep.searches.search import settings_of
from paceenv.trainers.sweep.sweep_config import Robustness
from paceenv.trainers.sweep.trial import PpoTask, StaticTask
from paceenv.ui import config_files

POLICY, WINNER, TRAINING, ROBUSTNESS = "policy.safetensors", "winner.yaml", "winner-train.yaml", "robustness.json"


def constant_policy(setting: Setting, name: str = "static") -> Learned:
    """A policy file's network that always sets ``setting``, whatever it sees; to the precision of float32.

    Args:
        setting: thresholds and windows.
        name: of the policy.
    """
    mechanisms = [m for m, _, _ in setting] or [pacing.MECHANISMS[0]]
    actions = [action for part in setting for action in encoded(*part)] or [-1.0, -1.0]
    values = np.array(actions, np.float32)
    return Learned([(np.zeros((len(values), signals.SIGNALS), np.float32), values)], mechanisms, name)


def write_winner(ledger: Ledger, results: Results, task: StaticTask | PpoTask) -> list[Path]:
    """Write the winner's files into the run directory; returns them, an empty list where every trial failed.

    Args:
        ledger: of the sweep.
        results: of the same ledger.
        task: what its trials share.
    """
    folder = ledger.folder
    winners = {cluster: best for cluster in results.clusters if (best := results.best(cluster)) is not None}
    if not winners:
        return []
    if isinstance(task, PpoTask):
        return _write_trained(ledger, winners[""], task, results)
    static = results.config.static
    assert static is not None  # as the task is one
    about = f"Found by the sweep {results.config.name}."
    common: dict[str, Any] = {
        "description": about,
        "suite": static.suite,
        "splits": static.splits,
        "clusters": task.inputs()["clusters"],
    }
    if static.scope == "each":
        tuned = {cluster: best.label for cluster, best in winners.items()}
        return [_write_comparison(folder, Comparison(tuned=tuned, **common))]
    best = winners[""]
    work = ledger.rows[best.trial]["work"]
    setting = next(s for s in settings_of(work) if spelled(s) == best.label)
    save_policy(folder / POLICY, PolicyFile(constant_policy(setting), {}, _provenance(results, best)))
    return [_write_comparison(folder, Comparison(policies=[best.label], **common)), folder / POLICY]


def evaluate_again(results: Results, comparison: Comparison, robustness: Robustness) -> SuiteResult:
    """Evaluate the winner, or the winner of each cluster, on fresh seeds and, where possible, on other clusters.

    Args:
        results: of the sweep.
        comparison: the winner's file.
        robustness: clusters, seeds and iterations.
    """
    fresh = {key: getattr(robustness, key) for key in ("seeds", "first_seed", "iterations")}
    if comparison.tuned:  # each is for its own cluster
        suite: Suite = comparison.chosen().model_copy(update=fresh)
        return evaluate([], suite, tuned=comparison.tuned_for(suite))
    suite = load_suite(robustness.suite).only(robustness.splits).model_copy(update=fresh)
    return evaluate(comparison.policies, suite)


def robust_json(result: SuiteResult) -> dict[str, Any]:
    """The second evaluation as plain data: for every policy the whole suite, then every cluster."""
    totals = [dataclasses.asdict(result.total(policy)) for policy in result.policies if policy != "passive"]
    suite = result.suite
    about = {"suite": suite.name, "seeds": suite.seeds, "first_seed": suite.first_seed, "iterations": suite.iterations}
    return {**about, "totals": totals, "clusters": score_table.as_json(result)}


def _provenance(results: Results, best: Candidate) -> dict[str, Any]:
    return {
        "paceenv": paceenv.__version__,
        "sweep": results.config.model_dump(mode="json"),
        "trial": best.trial,
        "candidate": best.label,
        "found": dict(best.values),
    }


def _write_trained(ledger: Ledger, best: Candidate, task: PpoTask, results: Results) -> list[Path]:
    """The policy of the winning trial's best seed, and its training config where one made it from start to end."""
    from paceenv.trainers.training import training_run  # PyTorch, which static settings do not need

    row = ledger.rows[best.trial]
    scores = row["result"]["scores"]
    seed = task.seeds()[int(np.argmax(scores))]
    config = task.config(row["work"], seed)
    run = training_run.Run(config)
    run.restore(task.place(best.trial, seed) / training_run.CHECKPOINT, changed=True)
    file = run.result().file
    pieces = _pieces(ledger, best.trial)
    about = {"sweep": _provenance(results, best), "pieces": pieces, "validation_of_seeds": {"scores": scores}}
    record = {**file.provenance, **about}
    save_policy(ledger.folder / POLICY, PolicyFile(file.policy, file.calibrated_range, record))
    written = [ledger.folder / POLICY]
    (ledger.folder / TRAINING).unlink(missing_ok=True)
    if all(piece["hyperparameters"] == pieces[-1]["hyperparameters"] for piece in pieces):
        config_files.write_yaml(ledger.folder / TRAINING, config.model_dump(mode="json"))
        written.append(ledger.folder / TRAINING)
    assert config.selection is not None  # as the task has checked
    comparison = Comparison(
        description=f"Found by the sweep {results.config.name}.",
        policies=[POLICY],
        suite=results.config.robustness.suite if results.config.robustness else "all",
        splits=results.config.robustness.splits if results.config.robustness else ["validation"],
    )
    return [_write_comparison(ledger.folder, comparison), *written]


def _pieces(ledger: Ledger, trial: int | None) -> list[dict[str, Any]]:
    """The trials that a trial goes on from and itself, in order: hyperparameters, and up to how many decisions."""
    found: list[dict[str, Any]] = []
    while trial is not None:
        work = ledger.rows[trial]["work"]
        found.append({"trial": trial, "hyperparameters": work["hyperparameters"], "until": work["until"]})
        trial = work["from"]
    return found[::-1]


def _write_comparison(folder: Path, comparison: Comparison) -> Path:
    config_files.write_yaml(folder / WINNER, comparison.model_dump(mode="json"))
    return folder / WINNER
