"""What a finished sweep leaves: its winner as a policy file and for ``evaluate``, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter

import paceenv
from paceenv.core import pacing
from paceenv.policies.distilled import constant_policy
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.evaluation.suites import ALL, Comparison
from paceenv.trainers.sweep.sweep_results import COLUMNS, DECISIONS, SCORE, Candidate, Results, values_of
from paceenv.trainers.sweep.trainables import PIECES, StaticTask, TrainingTask, checkpoint_of
from paceenv.ui import config_files, figures

POLICY, WINNER, TRAINING = "policy.safetensors", "winner.yaml", "winner-train.yaml"
PARETO = "pareto.png"
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
    write = _write_trained if isinstance(task, TrainingTask) else _write_static
    config_files.write_yaml(folder / WINNER, write(folder, results, best, task).model_dump(mode="json"))  # type: ignore[arg-type]
    pareto(results, folder / PARETO)
    return said


def _write_static(folder: Path, results: Results, best: Candidate, task: StaticTask) -> Comparison:
    setting = task.setting(best.result["config"])
    policy = constant_policy(setting or {pacing.MECHANISMS[0]: (0.0, 0.0)})
    save_policy(folder / POLICY, PolicyFile(policy, {}, _provenance(results, best)))
    static, description = task.static, f"Found by the sweep {results.config.name}."
    return Comparison(description=description, policies=[best.label], suite=static.suite, splits=static.splits)


def _provenance(results: Results, best: Candidate) -> dict[str, Any]:
    return {
        "paceenv": paceenv.__version__,
        "sweep": results.config.model_dump(mode="json"),
        "trial": best.trial,
        "candidate": best.label,
        "found": values_of(best),
    }


def _write_trained(folder: Path, results: Results, best: Candidate, task: TrainingTask) -> Comparison:
    """The policy of the winning trial's best seed, and its training config where one made it from start to end."""
    from paceenv.trainers.training import training_run  # PyTorch, which static settings do not need

    scores = best.result["scores"]
    seed = task.seeds[int(np.argmax(scores))]
    config = task.config(best.result["config"], seed)
    checkpoint = max(best.folder.glob("checkpoint_*"))
    run = training_run.Run(config)
    run.restore(checkpoint_of(checkpoint, seed), changed=True)  # of other threads
    file, pieces = run.result().file, json.loads((checkpoint / PIECES).read_text())
    about = {"sweep": _provenance(results, best), "pieces": pieces, "validation_of_seeds": {"scores": scores}}
    save_policy(folder / POLICY, PolicyFile(file.policy, file.calibrated_range, {**file.provenance, **about}))
    (folder / TRAINING).unlink(missing_ok=True)
    if len(pieces) == 1:
        config_files.write_yaml(folder / TRAINING, config.model_dump(mode="json"))
    description = f"Found by the sweep {results.config.name}."
    return Comparison(description=description, policies=[POLICY], suite=ALL, splits=["held-out"])


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
