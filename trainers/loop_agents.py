"""The agents of a closed loop's real runs: the options they are started with, and what they said in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from live.options import Options
from live.snapshot import Snapshot, entry, number, text
from live.testbed.scenario import LoopPlan
from trainers.blocks import Array


def agent_options(plan: LoopPlan, mode: str) -> list[str]:
    """Options of ``python -m live`` for the job that gets the agent. Raises InputError for what it would refuse."""
    settings: dict[str, Any] = {
        "quiet_first": plan.quiet_first,
        "interval_iterations": plan.interval_iterations,
        "block_iterations": plan.block_iterations,
        "cap_s": plan.cap_s,
        "cap_share": plan.cap_share,
        "budget_s_per_minute": plan.budget_s_per_minute,
    }
    Options(**settings)
    named = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", f"{value!r}")]
    return ["--mode", mode, *named]


def agents_say(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """What the ranks' agents said themselves, what limited them, and for how many pairs all of them paced.

    ``paced_pairs`` is None where all paced to the end. A rank that rolled back stopped after the look at which it did;
    blocks after that compare nothing.
    """
    stopped = [s for s in snapshots if text(s, "state") != "canary"]
    taken = sum(number(s, "pacing", "taken") or 0.0 for s in snapshots)
    total_s = sum(number(s, "pacing", "total_s") or 0.0 for s in snapshots)
    cut: Counter[str] = Counter()
    for snapshot in snapshots:
        cut.update({name: int(count) for name, count in (entry(snapshot, "pacing", "cut") or {}).items()})
    return {
        "verdicts": dict(Counter(text(s, "canary", "verdict") or "no verdict" for s in snapshots)),
        "texts": sorted({text(s, "canary", "text") for s in snapshots}),
        "stopped": sorted({text(s, "reason") for s in stopped}),
        "paced_pairs": min((int(number(s, "canary", "pairs") or 0) for s in stopped), default=None),
        "mean_delay_s": total_s / taken if taken else 0.0,
        "delays": int(taken),
        "cut": dict(cut),
    }


def baseline_s(snapshots: Sequence[Snapshot], step_s_T: Array) -> float:
    """The step to which the guard's cap is relative: the agents' own baseline, or the median step where none told."""
    told = [s for snapshot in snapshots if (s := number(snapshot, "step", "baseline_s")) is not None]
    return float(np.median(told) if told else np.median(step_s_T))
