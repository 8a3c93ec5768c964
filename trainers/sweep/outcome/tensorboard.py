"""TensorBoard's event files of a sweep: every candidate, and the best so far, by number of the candidate."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tensorboardX import SummaryWriter

from paceenv.trainers.sweep.outcome.sweep_results import Candidate, Results

FOLDER = "tensorboard"


def write_board(results: Results, folder: Path) -> None:
    """Write them anew, a run for each cluster that was searched by itself; training writes its own as it goes."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for cluster in results.clusters:
        mine = [candidate for candidate in results.candidates if candidate.cluster == cluster]
        with SummaryWriter(str(folder / FOLDER / (cluster or "all"))) as writer:
            _write(writer, mine, results)


def _write(writer: SummaryWriter, candidates: Sequence[Candidate], results: Results) -> None:
    best = None
    for i, candidate in enumerate(candidates):
        for name, value in (*candidate.values.items(), *candidate.parameters.items()):
            writer.add_scalar(f"{'candidate' if name in candidate.values else 'parameter'}/{name}", value, i)
        if best is None or results.goodness(candidate) > results.goodness(best):
            best = candidate
        for name in results.objectives:
            writer.add_scalar(f"best/{name}", best.values[name], i)
        if candidate is best:
            writer.add_text("best", f"`{candidate.label}`, trial {candidate.trial}", i)
