"""Where one rank's time went in one step, on its device and on its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

OUTSIDE = "no recorded operation"
"""What a host does where none of its launching threads is inside a recorded range: Python, or nothing."""


@dataclass(frozen=True)
class CollectiveActivity:
    """One collective as a rank ran it, and what the rank did since it had begun the collective before.

    Times are s on the clock of the trace, ``launched_s`` (not a number where unknown) on the host's side of it.
    ``exposed_s`` is the part during which the device did nothing else, ``hidden_s`` the rest. Since the begin of the
    collective before (or of the profile): ``compute_s`` of kernels, ``copy_s`` of copies only, ``host_wait_s`` that the
    device idled because its next operation had not been launched; and on the host, since the launch of the collective
    before, ``host_s`` by what it was in.
    """

    op: str
    group: str
    start_s: float
    end_s: float
    launched_s: float
    exposed_s: float
    hidden_s: float
    compute_s: float
    copy_s: float
    host_wait_s: float
    host_s: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "host_s": dict(self.host_s)}


@dataclass(frozen=True)
class RankActivity:
    """One rank in one step; all times s. Kernels come before copies, these before collectives, then waiting.

    Args:
        rank: of the job.
        iteration: number of the step, as in the trace.
        start_s: begin of the step on the device, on the clock of the trace.
        end_s: its end.
        compute_s: kernels ran, other than collectives.
        to_device_s: only copies from the host to the device ran.
        other_copies_s: only other copies and memory sets ran.
        exposed_s: only collectives ran.
        hidden_s: collectives ran beside kernels or copies; part of the above.
        host_wait_s: nothing ran because the host had not launched the next operation yet.
        idle_s: nothing ran though it had been launched: latency, and waiting for events.
        loader_s: the host was in the data loader's ``__next__``.
        kernels: the kernels that took most of ``compute_s``, by name.
        collectives: in the order of their begin.
    """

    rank: int
    iteration: int
    start_s: float
    end_s: float
    compute_s: float
    to_device_s: float
    other_copies_s: float
    exposed_s: float
    hidden_s: float
    host_wait_s: float
    idle_s: float
    loader_s: float
    kernels: tuple[tuple[str, float], ...]
    collectives: tuple[CollectiveActivity, ...]

    def moved(self, rank: int, iteration: int, add_s: float) -> RankActivity:
        """The same of a rank and step of the trace, on its clock.

        Args:
            rank: in the trace.
            iteration: step in the trace.
            add_s: what the trace's clock is ahead, seconds.
        """
        collectives = tuple(
            replace(c, start_s=c.start_s + add_s, end_s=c.end_s + add_s, launched_s=c.launched_s + add_s)
            for c in self.collectives
        )
        moved = replace(self, rank=rank, iteration=iteration, collectives=collectives)
        return replace(moved, start_s=self.start_s + add_s, end_s=self.end_s + add_s)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {**vars(self), "kernels": [list(kernel) for kernel in self.kernels]}
        return plain | {"collectives": [c.to_json() for c in self.collectives]}
