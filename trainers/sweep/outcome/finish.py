"""The files of a finished sweep, made from its ledger: winner, second evaluation, pictures, page."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paceenv.trainers.evaluation.comparison import load_comparison
from paceenv.trainers.sweep.ledger import Ledger
from paceenv.trainers.sweep.outcome.sweep_results import Results
from paceenv.trainers.sweep.outcome.winner import ROBUSTNESS, WINNER, evaluate_again, robust_json, write_winner
from paceenv.trainers.sweep.trial import PpoTask, StaticTask
from paceenv.ui import output

PARETO, PARAMETERS, PAGE, BOARD = "pareto.png", "parameters.png", "sweep.html", "tensorboard"


def finish(ledger: Ledger, task: StaticTask | PpoTask) -> dict[str, Any]:
    """Write all files; returns a summary as plain data.

    Args:
        ledger: all trials and their results.
        task: what a trial does.
    """
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
    _draw(results, ledger.folder)
    return said


def _draw(results: Results, folder: Path) -> None:
    from paceenv.trainers.sweep.outcome import sweep_page, sweep_plots  # slow to import, and `show` does without
    from paceenv.trainers.sweep.outcome.importance import importance

    shares = importance(results)
    sweep_plots.pareto(results, folder / PARETO)
    sweep_plots.parameters(results, shares, folder / PARAMETERS)
    sweep_page.write_page(results, shares, folder / PAGE)
    _write_board(results, folder / BOARD)


def _write_board(results: Results, folder: Path) -> None:
    """Write TensorBoard's event files: every candidate and the best so far, one run per cluster searched by itself."""
    from tensorboardX import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    for cluster in results.clusters:
        mine, best = [candidate for candidate in results.candidates if candidate.cluster == cluster], None
        with SummaryWriter(str(folder / (cluster or "all"))) as writer:
            for i, candidate in enumerate(mine):
                for name, value in (*candidate.values.items(), *candidate.parameters.items()):
                    writer.add_scalar(f"{'candidate' if name in candidate.values else 'parameter'}/{name}", value, i)
                if best is None or results.goodness(candidate) > results.goodness(best):
                    best = candidate
                    writer.add_text("best", f"`{candidate.label}`, trial {candidate.trial}", i)
                for name in results.objectives:
                    writer.add_scalar(f"best/{name}", best.values[name], i)
