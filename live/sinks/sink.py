"""What all sinks share: their interface, and the handful of numbers they show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from paceenv.live.record.snapshot import Snapshot, number

SCALARS: Final[Mapping[str, tuple[str, ...]]] = {
    "step_mean_seconds": ("step", "mean_s"),
    "wait_mean_seconds": ("wait", "mean_s"),
    "arrival_early_seconds": ("arrival", "early_s"),
    "arrival_late_seconds": ("arrival", "late_s"),
    "latest_rank": ("latest", "rank"),
    "latest_late_seconds": ("latest", "late_s"),
    "delay_mean_seconds": ("pacing", "mean_s"),
    "overhead_mean_seconds": ("overhead", "mean_s"),
}
"""The numbers by name, and where a snapshot has them. ``latest`` is the rank that the findings call the latest one."""


class Sink(Protocol):
    """Takes snapshots. It may raise: the caller reports that once and tries less often."""

    def begin(self) -> None:
        """The first tick, on the training thread: note what only this thread can see. Imports nothing."""

    def write(self, snapshot: Snapshot, final: bool) -> None:
        """Show a snapshot, on a thread of the sinks; ``final`` is the last time.

        Args:
            snapshot: of this rank.
            final: whether it is the last one.
        """


def scalars(snapshot: Snapshot) -> dict[str, float]:
    """The numbers of :data:`SCALARS` that are known."""
    found = {name: number(snapshot, *path) for name, path in SCALARS.items()}
    return {name: value for name, value in found.items() if value is not None}
