"""What a finished sweep leaves: its winner as a policy file and for ``evaluate``, how it does again, a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

import paceenv
from paceenv.core import pacing, signals
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.evaluation import score_table
from paceenv.trainers.evaluation.comparison import Comparison, load_comparison
from paceenv.trainers.evaluation.evaluate import SuiteResult, evaluate
from paceenv.trainers.evaluation.suites import Suite, load_suite
from paceenv.trainers.sweep.searches import settings_of
from paceenv.trainers.sweep.static_search import Setting, encoded, spelled
from paceenv.trainers.sweep.sweep_config import ROBUSTNESS_SEED, Robustness
from paceenv.trainers.sweep.sweep_results import COLUMNS, SCORE, UNTIL, Candidate, Results
from paceenv.trainers.sweep.sweep_run import Ledger
from paceenv.trainers.sweep.trial import StaticTask, TrainingTask
from paceenv.ui import config_files, figures, output

POLICY, WINNER, TRAINING, ROBUSTNESS = "policy.safetensors", "winner.yaml", "winner-train.yaml", "robustness.json"
PARETO = "pareto.png"
ALL_COLOUR, FRONT_COLOUR, BEST_COLOUR = "#c5cad3", "#4c72b0", "#c44e52"
PERCENT = ("throughput",)


def finish(ledger: Ledger, task: StaticTask | TrainingTask) -> dict[str, Any]:
    """Write all files; returns a summary as plain data."""
    results = Results.of(ledger)
    said: dict[str, Any] = {
        "sweep": results.config.name,
        "trials": len(ledger.rows),
        "failed": [{"trial": row["trial"], "error": row["error"]} for row in results.failed],
        "winners": results.as_json(best for c in results.clusters if (best := results.best(c)) is not None),
    }
    if not write_winner(ledger, results, task):
        return said
    if results.config.robustness is not None:
        comparison = load_comparison(ledger.folder / WINNER)
        output.say("the winner again, on fresh seeds")
        said["robustness"] = robust_json(evaluate_again(results, comparison, results.config.robustness))
        output.write_json(said["robustness"], str(ledger.folder / ROBUSTNESS))
    pareto(results, ledger.folder / PARETO)
    return said


def constant_policy(setting: Setting, name: str = "static") -> Learned:
    """A policy file's network that always sets ``setting``, whatever it sees; to the precision of float32."""
    mechanisms = [m for m, _, _ in setting] or [pacing.MECHANISMS[0]]
    actions = [action for part in setting for action in encoded(*part)] or [-1.0, -1.0]
    values = np.array(actions, np.float32)
    return Learned([(np.zeros((len(values), signals.SIGNALS), np.float32), values)], mechanisms, name)


def write_winner(ledger: Ledger, results: Results, task: StaticTask | TrainingTask) -> list[Path]:
    """Write the winner's files into the run directory; returns them, an empty list where every trial failed."""
    folder = ledger.folder
    winners = {cluster: best for cluster in results.clusters if (best := results.best(cluster)) is not None}
    if not winners:
        return []
    if isinstance(task, TrainingTask):
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
    """Evaluate the winner, or the winner of each cluster, on fresh seeds and, where possible, on other clusters."""
    fresh = {"seeds": robustness.seeds, "first_seed": ROBUSTNESS_SEED, "iterations": robustness.iterations}
    if comparison.tuned:  # each is for its own cluster
        suite: Suite = comparison.chosen().model_copy(update=fresh)
        return evaluate([], suite, tuned=comparison.tuned_for(suite))
    suite = load_suite(robustness.suite).only(["held-out"]).model_copy(update=fresh)
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


def _write_trained(ledger: Ledger, best: Candidate, task: TrainingTask, results: Results) -> list[Path]:
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
        splits=["held-out"] if results.config.robustness else ["validation"],
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


# The picture


def _shown(name: str, values: Sequence[float]) -> list[float]:
    """Values of an objective as axes show them."""
    return [100.0 * value for value in values] if name in PERCENT else list(values)


def _label(name: str) -> str:
    """An objective's axis."""
    return f"{COLUMNS[name]}{', %' if name in PERCENT else ''}"


def _axes_of(results: Results) -> tuple[str, str]:
    """What a Pareto plot has on x and y: the second objective and the first, where there is but one CV or decisions."""
    first, *others = results.objectives
    return (others[0] if others else UNTIL if first == SCORE else "cv"), first


def pareto(results: Results, path: Path) -> None:
    """All candidates, the front, the winner; a panel for each cluster that was searched by itself, at most twelve."""
    clusters = results.clusters[:12]
    columns = min(len(clusters), 3)
    figure, panels = figures.grid(-(-len(clusters) // columns), columns)
    flat = [panel for row in panels for panel in row]
    for cluster, panel in zip(clusters, flat, strict=False):
        _pareto_panel(results, cluster, panel)
    for panel in flat[len(clusters) :]:
        panel.set_axis_off()
    figures.save(figure, path)


def _pareto_panel(results: Results, cluster: str, panel: Axes) -> None:
    x, y = _axes_of(results)
    mine = [c for c in results.candidates if c.cluster == cluster and x in c.values]
    front, best = [c for c in results.front(cluster) if x in c.values], results.best(cluster)

    def draw(candidates: Sequence[Candidate], style: str, **how: object) -> None:
        xs, ys = ([c.values[name] for c in candidates] for name in (x, y))
        panel.plot(_shown(x, xs), _shown(y, ys), style, **how)  # type: ignore[arg-type]

    draw(mine, "o", color=ALL_COLOUR, ms=3, label=f"{len(mine)} candidates")
    draw(sorted(front, key=lambda c: c.values[x]), "o-", color=FRONT_COLOUR, ms=4, lw=1, label="front")
    if best is not None and x in best.values:
        draw([best], "*", color=BEST_COLOUR, ms=11, label="winner")
    panel.set(title=cluster or results.config.name, xlabel=_label(x), ylabel=_label(y))
    panel.legend(fontsize=7)
