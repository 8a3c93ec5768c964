"""Kinds of lateness: of one rank (chronic, since a step, now and then, once), and of all ranks of a job together.

Both judges use these names and rules: the one of blocks of iterations (``block_comparison``) and the one of single
steps (``watch``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

CHRONIC, SINCE, SOMETIMES, ONCE = "chronic", "since", "now and then", "once"
IN_TURNS, VARIATION, NONE = "in turns", "variation", "none"
PATTERNS: Final = (CHRONIC, SINCE, IN_TURNS, VARIATION, NONE)
ONCE_SHARE: Final = 0.1
"""Lateness that is over, and lasted for at most this share of what was observed, happened once."""
TURNS_SHARE: Final = 0.5
"""Ranks take turns where one of them is late in at least this share of what was observed."""
VARIATION_SHARE: Final = 0.05
"""Time lost to the last rank of each step, below this share of the step, is not worth a line."""


class Pattern(NamedTuple):
    """When a rank is late: its kind, the amount then, and in which blocks."""

    kind: str
    late_s: float
    blocks: list[int]


def kind_of(spans: Sequence[tuple[int, int]], begin: int, end: int) -> str:
    """The kind of a rank's lateness from the spans in which it was late.

    Args:
        spans: first and last step or block of each, in ascending order; at least one.
    """
    if len(spans) > 1:
        return SOMETIMES
    [(first, last)] = spans
    if last >= end:
        return CHRONIC if first <= begin else SINCE
    return kind_of_past(spans, end - begin + 1)


def kind_of_past(spans: Sequence[tuple[int, int]], observed: int) -> str:
    """The kind of lateness that is over: once, or now and then."""
    lasted = spans[-1][1] - spans[0][0] + 1
    return ONCE if len(spans) == 1 and lasted <= max(1, int(ONCE_SHARE * observed)) else SOMETIMES


def pattern_of_all(named: Collection[str], turns: int, covered_share: float, lost_share: float) -> str:
    """The pattern of a set of ranks that wait for each other, one of :data:`PATTERNS`."""
    if named:
        return SINCE if set(named) == {SINCE} else CHRONIC
    if turns > 1 and covered_share >= TURNS_SHARE:
        return IN_TURNS
    return VARIATION if lost_share > VARIATION_SHARE else NONE
