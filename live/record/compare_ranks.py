"""What the snapshots of a job's ranks say side by side and none of them alone: who is late, however constantly.

The step is common to all, so the last rank to arrive is the one that spends the most of it outside collectives. What
another rank spends outside less than that, it waits. Times outside are compared, not those inside: the network's noise
is in those, mostly the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from paceenv.live.record.history import FLOOR_S, FLOOR_SHARE, arrival_of
from paceenv.live.record.snapshot import EARLY, LATE, ON_TIME, Snapshot, number

EVIDENCE: Final = "all ranks side by side, on average"


def compare_ranks(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """The snapshots, each with its ``arrival`` from the comparison with the ranks of its process group.

    As it is, where a rank of the group or its times are missing. Ranks are compared over the iterations that each kept,
    which are the same but for the newest few.
    """
    groups: dict[float | None, list[int]] = {}
    for i, snapshot in enumerate(snapshots):
        groups.setdefault(number(snapshot, "group", "number"), []).append(i)
    found = list(snapshots)
    for together in groups.values():
        group = [snapshots[i] for i in together]
        times = [seconds for snapshot in group if (seconds := number(snapshot, "own", "mean_s")) is not None]
        sizes = {number(snapshot, "group", "members") for snapshot in group}
        if len(times) < 2 or len(times) != len(group) or sizes != {float(len(group))}:
            continue
        typical_s, margin_s = median(times), max(_margin_s(snapshot) for snapshot in group)
        for i, seconds in zip(together, times, strict=True):
            found[i] = snapshots[i] | {"arrival": _compared(seconds, max(times), typical_s, margin_s)}
    return found


def _compared(own_s: float, longest_s: float, typical_s: float, margin_s: float) -> dict[str, Any]:
    if longest_s - own_s > margin_s:
        return arrival_of(EARLY, longest_s - own_s, 0.0, None, EVIDENCE)
    if own_s - typical_s > margin_s:
        return arrival_of(LATE, 0.0, own_s - typical_s, None, EVIDENCE)
    return arrival_of(ON_TIME, 0.0, 0.0, None, EVIDENCE)


def _margin_s(snapshot: Snapshot) -> float:
    """Below this a difference is chance or not worth a name, seconds: three standard errors of a difference of two."""
    error_s = number(snapshot, "own", "error_s") or 0.0
    return max(FLOOR_S, FLOOR_SHARE * (number(snapshot, "step", "mean_s") or 0.0), 3.0 * math.sqrt(2.0) * error_s)
