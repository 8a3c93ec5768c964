"""Numbers and ranks in the words of the page: durations with a unit, shares, counts, runs of ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import chain, pairwise

MAX_RUNS = 8
"""Most runs of ranks that are listed; of more, the ranks are counted."""
MAX_NUMBERS = 1_000_000
IN_VAIN = ("Timed out waiting", "onnection closed by peer", "onnection reset by peer")
"""In the exceptions of ranks that waited for another one."""
_LIST = re.compile(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")


def duration(seconds: float | None) -> str:
    """Seconds with three digits and a unit that suits them; ``-`` for unknown."""
    if seconds is None:
        return "-"
    size = abs(seconds)
    if size < 1e-9:
        return "0 µs"  # what is left of sums that cancel
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (600.0, 1.0, "s"), (36000.0, 1 / 60, "min")):
        if size < 0.9995 * limit:
            return f"{seconds * factor:.3g} {unit}" if size * factor < 99.95 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def percent(share: float | None) -> str:
    """A share as a percentage with one digit; ``-`` for unknown."""
    return "-" if share is None else f"{100.0 * share:.1f} %"


def count(value: float | None) -> str:
    """A whole number with thousands set apart; ``-`` for unknown."""
    return "-" if value is None else f"{int(value):,}"


def name_ranks(ranks: Collection[int]) -> str:
    """Ranks in words, runs joined: ``ranks 0-3, 7``; evenly spaced ones as ``ranks 0, 8, ..., 56``."""
    ranks = sorted(set(ranks))
    steps = {later - earlier for earlier, later in pairwise(ranks)}
    if len(ranks) > 4 and len(steps) == 1 and steps != {1}:
        return f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    shown = format_list(ranks).split(",")
    if len(shown) > MAX_RUNS:
        return f"{count(len(ranks))} ranks ({', '.join(shown[: MAX_RUNS // 2])}, ...)"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def steps_left_out(dropped: int, recorded: int, rank: int, lacks: int) -> str:
    """A line on steps that not all ranks have, and the rank that lacks most of them."""
    return f"{dropped} of {recorded} steps left out, as not all ranks have them: rank {rank} lacks {lacks}"


def format_list(numbers: Iterable[int]) -> str:
    """Whole numbers in ascending order with runs joined: ``0-3,7``."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@lru_cache(4096)
def read_list(text: str) -> tuple[int, ...]:
    """The numbers of a text as :func:`format_list` writes it; none where it is anything else, as a file may hold."""
    if not _LIST.fullmatch(text):
        return ()
    spans = [range(int(edge[0]), int(edge[-1]) + 1) for edge in (part.split("-") for part in text.split(","))]
    return tuple(chain(*spans)) if sum(map(len, spans)) <= MAX_NUMBERS else ()
