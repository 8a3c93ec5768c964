"""What a sweep leaves in its folder when it is over, made from its ledger: winner, judged again, pictures, page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceenv.trainers.evaluation.comparison import load_comparison
from paceenv.trainers.sweep.ledger import Ledger
from paceenv.trainers.sweep.outcome.sweep_results import Results
from paceenv.trainers.sweep.outcome.winner import ROBUSTNESS, WINNER, judge_again, robust_json, write_winner
from paceenv.trainers.sweep.trial import PpoTask, StaticTask
from paceenv.ui import output

PARETO, PARAMETERS, PAGE = "pareto.png", "parameters.png", "sweep.html"


def finish(ledger: Ledger, task: StaticTask | PpoTask) -> dict[str, Any]:
    """Write everything and return what there is to say, as plain data."""
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
        said["robustness"] = robust_json(judge_again(results, comparison, results.config.robustness))
        output.write_json(said["robustness"], str(ledger.folder / ROBUSTNESS))
    _draw(results, ledger.folder)
    return said


def _draw(results: Results, folder: Path) -> None:
    from paceenv.trainers.sweep.outcome import (  # slow to import, and `show` does without
        sweep_page,
        sweep_plots,
        tensorboard,
    )
    from paceenv.trainers.sweep.outcome.importance import importance

    shares = importance(results)
    sweep_plots.pareto(results, folder / PARETO)
    sweep_plots.parameters(results, shares, folder / PARAMETERS)
    sweep_page.write_page(results, shares, folder / PAGE)
    tensorboard.write_board(results, folder)
