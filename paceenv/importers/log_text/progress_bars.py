"""Which of a log's progress bars counts training steps: others count epochs, batches of an evaluation, or files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceenv.importers.log_text.collected import Column


def bars_of_steps(bars: Mapping[str, Column]) -> dict[str, Column]:
    """The bars that may count training steps, the one that ran for the longest time first.

    A bar that waits for a whole run of another one at each of its steps counts epochs, and is left out.

    Args:
        bars: the lines of all bars of one length, by that length: time since the start, seconds; a line or more each.
    """
    names, about = list(bars), []
    for column in bars.values():
        step_V, elapsed_V, _ = column.arrays()
        steps_V, passed_V = np.diff(step_V), np.diff(elapsed_V)
        about.append((steps_V[steps_V > 0].sum(), passed_V[passed_V > 0].sum(), 1 + (steps_V < 0).sum()))
    steps_B, time_s_B, runs_B = np.array(about, np.float64).reshape(-1, 3).T
    found = {}
    for b in np.argsort(-time_s_B, kind="stable"):
        inner_B = (runs_B >= 0.8 * steps_B[b]) & (time_s_B >= 0.25 * time_s_B[b]) & (runs_B > max(runs_B[b], 2))
        if not inner_B.any():
            found[names[b]] = bars[names[b]]
    return found
