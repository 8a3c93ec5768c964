"""The state of a job's ranks as their statuses show it: who is silent or missing, and which ranks are worst."""

from __future__ import annotations

import calendar
import time
from collections.abc import Sequence

from paceenv.live.record.run_folder import status_period_s
from paceenv.live.record.snapshot import EARLY, LATE, Snapshot, number, text

SILENT_S, SILENT_PERIODS = 30.0, 5.0
"""A rank without a new status for this long, and for so many of its periods, is called silent."""


def patience_s(world_size: int) -> float:
    """Seconds without a word after which a rank of such a job is called silent."""
    return max(SILENT_S, SILENT_PERIODS * status_period_s(world_size))


def age_s(snapshot: Snapshot, now_s: float) -> float | None:
    """Seconds since a rank wrote its status; None if it does not say when.

    Args:
        snapshot: the rank's last status.
        now_s: the present, seconds since 1970.
    """
    written_s = number(snapshot, "unix_time_s")
    return None if written_s is None else max(now_s - written_s, 0.0)


def is_silent(snapshot: Snapshot, now_s: float) -> bool:
    """Whether a rank that has not ended has been silent for too long.

    Args:
        snapshot: the rank's last status.
        now_s: the present, seconds since 1970.
    """
    age = age_s(snapshot, now_s)
    return not snapshot.get("final") and age is not None and age > patience_s(int(number(snapshot, "world_size") or 1))


def missing(snapshots: Sequence[Snapshot]) -> int:
    """Number of ranks without a status."""
    size = max((number(s, "world_size") or 0.0 for s in snapshots), default=0.0)
    return max(int(size) - len(snapshots), 0)


def overdue(snapshots: Sequence[Snapshot], attempt: str, now_s: float) -> int:
    """Number of ranks that should have had a status by now: none while the job is young.

    Args:
        snapshots: the last statuses that are there.
        attempt: its name, which holds when it began.
        now_s: the present, seconds since 1970.
    """
    try:
        began_s = float(calendar.timegm(time.strptime(attempt[:15], "%Y%m%dT%H%M%S")))
    except ValueError:
        began_s = 0.0
    size = max((int(number(s, "world_size") or 1) for s in snapshots), default=1)
    return missing(snapshots) if now_s - began_s > patience_s(size) else 0


def is_downgraded(snapshot: Snapshot) -> bool:
    """Whether another mode is in force than the requested one."""
    return text(snapshot, "state") != text(snapshot, "mode")


def worst(snapshots: Sequence[Snapshot], number_of_ranks: int, now_s: float) -> list[Snapshot]:
    """The ranks to look at first: silent, downgraded, late (the latest first), then by their own time of a step.

    Args:
        snapshots: the ranks' last statuses.
        number_of_ranks: at most so many are returned.
        now_s: the present, seconds since 1970.
    """

    def order(snapshot: Snapshot) -> tuple[float, ...]:
        verdict = text(snapshot, "arrival", "verdict")
        late_s = (number(snapshot, "arrival", "late_s") or 0.0) if verdict == LATE else 0.0
        own_s = number(snapshot, "own", "mean_s") or 0.0
        return (
            -float(is_silent(snapshot, now_s)),
            -float(is_downgraded(snapshot)),
            -late_s,
            float(verdict == EARLY),
            -own_s,
            float(snapshot["rank"]),
        )

    return sorted(snapshots, key=order)[:number_of_ranks]
