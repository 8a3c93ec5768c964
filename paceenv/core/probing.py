"""The plan of probes: which units are delayed when and by how much. It is random, but every rank draws the same from
the seed.

A live rank delays itself by it (``paceenv.live.decide.modes``). The *intended* delays are a pure function of seed,
iteration and unit. The effect of a delay can therefore be separated from all other causes that made a rank late. A
*unit* is delayed as a whole: a process group where the job has several, else each rank by itself. Standard library
only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

HOLD_ITERATIONS: Final = 5
"""A unit keeps its delay for so many iterations, so that effects that need more than one iteration can show."""
REST_SHARE: Final = 1.0 / 3.0
"""Share of the holds in which no unit is delayed; the cost of probing is the difference to these."""
MAX_SHARE: Final = 0.25
"""Share of the other holds in which a unit is delayed, at most; with many units it is one of them on average."""
LEVELS: Final = 4
"""Delays are 1/4, 2/4, 3/4 or all of the probe's bound."""
HEAD_START_SHARE: Final = 1.0 / 3.0
"""Share of the other holds in which all groups but one or so are delayed alike, and that one has the network alone."""
MIN_UNITS: Final = 3
"""With fewer groups, to delay all but one is to delay one."""
_GROUP: Final = "group "


def unit_of(rank: int, group: int, members: int, ranks: int) -> tuple[str, int]:
    """The probing unit of a rank, and how many units the job has.

    A delay of all ranks of a job alike only shifts it in time. Where one group has all ranks, each rank is therefore a
    unit.
    """
    if 1 < members < ranks:
        return f"{_GROUP}{group}", ranks // members
    return f"rank {rank}", ranks


@dataclass(frozen=True)
class Plan:
    """Which units are delayed when."""

    seed: int
    first_iteration: int = 0

    def rests(self, iteration: int) -> bool:
        """Whether ``iteration`` is one in which no unit is delayed."""
        return iteration < self.first_iteration or self._draw(iteration, "rest") < REST_SHARE

    def has_head_start(self, iteration: int, unit: str, units: int) -> bool:
        """Whether units like ``unit`` are all delayed alike in this iteration, except for about one of them.

        A rank does not know the names of other units. Each unit therefore draws for itself, with a chance of one in
        ``units``, whether it goes first. Two may, or none; then the job is only shifted. Single ranks that wait for
        each other have no head starts: a rank that goes first has no partner to communicate with.
        """
        if units < MIN_UNITS or not unit.startswith(_GROUP) or self.rests(iteration):
            return False
        return self._draw(iteration, "head start") < HEAD_START_SHARE

    def level(self, iteration: int, unit: str, units: int) -> float:
        """The delay of a unit before an iteration, as a share of the probe's bound, 0 to 1."""
        if self.rests(iteration):
            return 0.0
        drawn = self._draw(iteration, unit)
        if self.has_head_start(iteration, unit, units):
            return 0.0 if drawn < 1.0 / units else 1.0
        drawn /= min(MAX_SHARE, 1.0 / units)
        return (1.0 + int(drawn * LEVELS)) / LEVELS if drawn < 1.0 else 0.0

    def _draw(self, iteration: int, what: str) -> float:
        """Uniform in [0, 1), the same for all iterations of a hold."""
        named = f"{self.seed} {iteration // HOLD_ITERATIONS} {what}"
        return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=6).digest()) / 2.0**48
