"""What the agents of a closed loop's real runs said in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceenv.live.record.snapshot import Snapshot, entry, number, text
from paceenv.trainers.closed_loop.paired_blocks import Array


def summarize_agents(snapshots: Sequence[Snapshot], ranks: int) -> dict[str, Any]:
    """What the ranks' agents said themselves, what limited them, and for how many pairs all of them paced.

    ``paced_pairs`` is None where all paced to the end. A rank that rolled back stopped after the look at which it did;
    blocks after that compare nothing, nor does any where one of the ``ranks`` said nothing at all.
    """
    stopped = [s for s in snapshots if text(s, "state") != "canary"]
    silent = ranks - len(snapshots)
    paced_pairs = min((int(number(s, "canary", "pairs") or 0) for s in stopped), default=None)
    reasons = {text(s, "reason") for s in stopped} | ({f"{silent} of {ranks} agents said nothing"} if silent else set())
    taken = sum(number(s, "pacing", "taken") or 0.0 for s in snapshots)
    total_s = sum(number(s, "pacing", "total_s") or 0.0 for s in snapshots)
    cut: Counter[str] = Counter()
    for snapshot in snapshots:
        cut.update({name: int(count) for name, count in (entry(snapshot, "pacing", "cut") or {}).items()})
    return {
        "verdicts": dict(Counter(text(s, "canary", "verdict") or "no verdict" for s in snapshots)),
        "texts": sorted({text(s, "canary", "text") for s in snapshots}),
        "stopped": sorted(reasons),
        "paced_pairs": 0 if silent else paced_pairs,
        "mean_delay_s": total_s / taken if taken else 0.0,
        "delays": int(taken),
        "cut": dict(cut),
    }


def baseline_s(snapshots: Sequence[Snapshot], step_s_T: Array) -> float:
    """The step to which the guard's cap is relative: the agents' own baseline, or the median step where none told."""
    told = [s for snapshot in snapshots if (s := number(snapshot, "step", "baseline_s")) is not None]
    return float(np.median(told) if told else np.median(step_s_T))
