"""What a sweep leaves in its folder when it is over, made from its ledger: winner, judged again, pictures, page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceenv import output
from trainers.contest import load_contest
from trainers.sweep.ledger import Ledger
from trainers.sweep.results import Results
from trainers.sweep.task import PpoTask, StaticTask
from trainers.sweep.winner import CONTEST, ROBUSTNESS, judge_again, robust_json, write_winner

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
        contest = load_contest(ledger.folder / CONTEST)
        output.say("the winner again, on fresh seeds")
        said["robustness"] = robust_json(judge_again(results, contest, results.config.robustness))
        output.write_json(said["robustness"], str(ledger.folder / ROBUSTNESS))
    _draw(results, ledger.folder)
    return said


def _draw(results: Results, folder: Path) -> None:
    from trainers.sweep import board, page, plots  # slow to import, and `show` does without
    from trainers.sweep.importance import importance

    shares = importance(results)
    plots.pareto(results, folder / PARETO)
    plots.parameters(results, shares, folder / PARAMETERS)
    page.write_page(results, shares, folder / PAGE)
    board.write_board(results, folder)
