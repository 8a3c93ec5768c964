"""What a finished sweep leaves: its winner as a policy file and for ``evaluate``, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter

import paceenv
from paceenv.core import pacing
from paceenv.policies.distilled import constant_policy
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.sweep.sweep_results import COLUMNS, DECISIONS, SCORE, Candidate, Results, values_of
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
        "winners": results.as_json([best] if best else []),
    }
    if best is None:
        return said
    if isinstance(task, TrainingTask):
        _write_trained(folder, results, best, task)
    else:
        setting = task.setting(best.result["config"])
        policy = constant_policy(setting or {pacing.MECHANISMS[0]: (0.0, 0.0)})
        save_policy(folder / POLICY, PolicyFile(policy, {}, _provenance(results, best)))
    pareto(results, folder / PARETO)
    return said


def _provenance(results: Results, best: Candidate) -> dict[str, Any]:
    return {
        "paceenv": paceenv.__version__,
        "sweep": results.config.model_dump(mode="json"),
        "trial": best.trial,
        "candidate": best.label,
        "found": values_of(best),
    }


def _write_trained(folder: Path, results: Results, best: Candidate, task: TrainingTask) -> None:
    """The policy of the winning trial's best seed, and its training config unless that changed meanwhile."""
    from paceenv.trainers.training import training_run  # PyTorch, which static settings do not need

    scores = best.result["scores"]
    seed = task.seeds[int(np.argmax(scores))]
    config = task.config(best.result["config"], seed)
    checkpoint = max(best.folder.glob("checkpoint_*"))
    run = training_run.Run(config)
    run.restore(checkpoint_of(checkpoint, seed), may_differ=True)  # of what its population had before
    file = run.result().file
    about = {"sweep": _provenance(results, best), "validation_of_seeds": {"scores": scores}}
    save_policy(folder / POLICY, PolicyFile(file.policy, file.calibrated_range, {**file.provenance, **about}))
    if results.config.training and results.config.training.pbt is None:
        config_files.write_yaml(folder / TRAINING, config.model_dump(mode="json"))


def pareto(results: Results, path: Path) -> None:
    """All candidates, the front, the winner: the first objective over the second, or over CV or decisions if alone."""
    y, *others = results.objectives
    x = others[0] if others else DECISIONS if y == SCORE else "cv"
    mine = [c for c in results.candidates if x in c.result]
    front, best = [c for c in results.front() if x in c.result], results.best()
    figure, panel = figures.axes(results.config.name, COLUMNS[x], COLUMNS[y])
    for name, axis in ((x, panel.xaxis), (y, panel.yaxis)):
        if name == "throughput":
            axis.set_major_formatter(PercentFormatter(1.0))

    def draw(candidates: Sequence[Candidate], style: str, **how: object) -> None:
        xs, ys = ([c.result[name] for c in candidates] for name in (x, y))
        panel.plot(xs, ys, style, **how)  # type: ignore[arg-type]

    draw(mine, "o", color=ALL_COLOUR, ms=3, label=f"{len(mine)} candidates")
    draw(sorted(front, key=lambda c: c.result[x]), "o-", color=FRONT_COLOUR, ms=4, lw=1, label="front")
    if best is not None and x in best.result:
        draw([best], "*", color=BEST_COLOUR, ms=11, label="winner")
    panel.legend(fontsize=7)
    figures.save(figure, path)
