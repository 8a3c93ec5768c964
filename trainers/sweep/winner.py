"""What a finished sweep leaves: its winner as a policy file and for ``evaluate``, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter

import paceenv
from paceenv.core import pacing
from paceenv.policies.distilled import constant_policy
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.sweep.sweep_results import COLUMNS, DECISIONS, SCORE, TUNE, Results, Row, as_json
from paceenv.trainers.sweep.trainables import StaticTask, TrainingTask, checkpoint_of
from paceenv.ui import config_files, figures

POLICY, TRAINING, PARETO = "policy.safetensors", "winner-train.yaml", "pareto.png"
ALL_COLOUR, FRONT_COLOUR, BEST_COLOUR = "#c5cad3", "#4c72b0", "#c44e52"


def finish(folder: Path, task: StaticTask | TrainingTask) -> dict[str, Any]:
    """Write all files; returns a summary as plain data."""
    results = Results.read(folder)
    best = results.best()
    said: dict[str, Any] = {
        "sweep": results.config.name,
        "trials": len(results.candidates) + len(results.failed),
        "failed": list(results.failed),
        "winners": [as_json(best)] if best else [],
    }
    if best is None:
        return said
    about = {"paceenv": paceenv.__version__, "sweep": results.config.model_dump(mode="json"), **as_json(best)}
    if isinstance(task, TrainingTask):
        _write_trained(folder, results, best, task, about)
    else:
        policy = constant_policy(task.setting(best["config"]) or {pacing.MECHANISMS[0]: (0.0, 0.0)})
        save_policy(folder / POLICY, PolicyFile(policy, {}, about))
    pareto(results, folder / PARETO)
    return said


def _write_trained(folder: Path, results: Results, best: Row, task: TrainingTask, about: dict[str, Any]) -> None:
    """The policy of the winning trial's best seed, and its training config unless that changed meanwhile."""
    from paceenv.trainers.training import training_run  # PyTorch, which static settings do not need

    scores = best["scores"]
    seed = task.seeds[int(np.argmax(scores))]
    config = task.config(best["config"], seed)
    checkpoint = max((folder / TUNE / f"{best['trial']:05d}").glob("checkpoint_*"))
    run = training_run.Run(config)
    run.restore(checkpoint_of(checkpoint, seed), may_differ=True)  # of what its population had before
    file = run.result()
    about = {"sweep": about, "validation_of_seeds": {"scores": scores}}
    save_policy(folder / POLICY, PolicyFile(file.policy, file.calibrated_range, {**file.provenance, **about}))
    if results.config.training and results.config.training.pbt is None:
        config_files.write_yaml(folder / TRAINING, config.model_dump(mode="json"))


def pareto(results: Results, path: Path) -> None:
    """All candidates, the front, the winner: the first objective over the second, or over CV or decisions if alone."""
    y, *others = results.objectives
    x = others[0] if others else DECISIONS if y == SCORE else "cv"
    figure, panel = figures.axes(results.config.name, COLUMNS[x], COLUMNS[y])
    for name, axis in ((x, panel.xaxis), (y, panel.yaxis)):
        if name == "throughput":
            axis.set_major_formatter(PercentFormatter(1.0))
    front, best = sorted(results.front(), key=lambda row: row[x]), results.best()
    for rows, style, shade, size, name in (
        (results.candidates, "o", ALL_COLOUR, 3, f"{len(results.candidates)} candidates"),
        (front, "o-", FRONT_COLOUR, 4, "front"),
        ([best] if best else [], "*", BEST_COLOUR, 11, "winner"),
    ):
        panel.plot([row[x] for row in rows], [row[y] for row in rows], style, color=shade, ms=size, lw=1, label=name)
    panel.legend(fontsize=7)
    figures.save(figure, path)
