"""Prints where each rank's time went, from profiles, and why ranks are late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from paceenv.core.wording import duration
from paceenv.diagnosis.diagnose import Diagnosis
from paceenv.diagnosis.observed.host_activity import LateHost
from paceenv.importers.profiler.rank_activity import RankActivity
from paceenv.ui import output

ACTIVITY: Final = "Where a step's time went on each device"
MOST_ROWS: Final = 16
_SHOWN: Final = (
    ("kernels", "compute_s"),
    ("copies to it", "to_device_s"),
    ("other copies", "other_copies_s"),
    ("collectives exposed", "exposed_s"),
    ("hidden", "hidden_s"),
    ("waiting for its host", "host_wait_s"),
    ("idle", "idle_s"),
    ("host in data loader", "loader_s"),
)


def activity_table(activity: Sequence[RankActivity], late: Sequence[LateHost]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of where a mean step's time went on each rank's device, those that are late first.

    Args:
        activity: one entry a rank.
        late: hosts that were found to be late.
    """
    of_rank: dict[int, list[RankActivity]] = defaultdict(list)
    for one in activity:
        of_rank[one.rank].append(one)
    first = [one.rank for one in late]
    ranks = [*first, *(rank for rank in sorted(of_rank) if rank not in first)]
    shown = [(title, key) for title, key in _SHOWN if any(getattr(one, key) > 0.0 for one in activity)]
    rows = [
        [str(rank), *(duration(float(np.mean([getattr(one, key) for one in of_rank[rank]]))) for _, key in shown)]
        for rank in ranks
    ]
    return ["rank", *(title for title, _ in shown)], rows


def late_sentences(late: Sequence[LateHost], found: Diagnosis | None) -> list[str]:
    """Why ranks are late; how late is said only once, in the headline where no causes can be named.

    Args:
        late: hosts that were found to be late.
        found: the diagnosis; None where there is none.
    """
    said = {one.rank for one in found.arrivals.late} if found is not None and found.refused else set()
    return [sentence(one.why if one.rank in said else one.text) for one in late]


def print_activity(activity: Sequence[RankActivity], late: Sequence[LateHost], found: Diagnosis | None = None) -> None:
    """Print a row per rank, those that are late first, and a sentence for each of them.

    Args:
        activity: of all ranks.
        late: why ranks are late.
        found: the diagnosis above it.
    """
    if not activity:
        return
    columns, rows = activity_table(activity, late)
    more = f"{len(rows) - MOST_ROWS} more ranks. " if len(rows) > MOST_ROWS else ""
    why = "\n".join(late_sentences(late, found))
    output.print_table(ACTIVITY, columns, rows[:MOST_ROWS], f"{more}{why}".strip())


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."
