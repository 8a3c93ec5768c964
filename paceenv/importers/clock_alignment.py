"""One clock for ranks that recorded on their own clocks, from the ends of the collectives that they shared.

Collectives end together for their members, up to what the network takes to let them go. So a rank's clock is shifted by
the median difference of those ends to another rank's, as ``paceenv.live.record.merge_segments`` does for our own. How
well the ends then agree is the error that remains.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import islice
from typing import Final

import numpy as np

from paceenv.core.errors import InputError
from paceenv.importers.timelines import Timeline
from paceenv.importers.unsaid import Steps

MIN_SHARED: Final = 3
"""Collectives that two ranks must share for their clocks to be aligned; fewer must end together as they are."""
_SAME_CLOCK_S: Final = 5e-3
"""Ends that lie no further apart are on one clock already."""
MOST_OFFSET: Final = 16
"""Steps by which two ranks may count differently."""
_AGREES: Final = 0.01
"""Share of a step within which ends of one collective lie when they are compared rightly."""
_LEAST_AGREEMENT_S: Final = 50e-6
_SURE_S: Final = 10e-6
"""Ends that agree as well as that need no other count of steps to be tried."""
_MOST_TRIED: Final = 2000
"""Collectives with which other counts of steps are tried."""
_MOST_STEPS: Final = 0.5
"""Share of a rank's steps that another count must match: collectives of one step alone agree by any count."""
_CLEARLY: Final = 0.2
"""Ends must disagree this much less for another count of steps to be believed."""

Key = tuple[int, str, str, int]
"""Step, group, operation, and place among its like in the step."""


def align_clocks(timelines: list[Timeline]) -> tuple[dict[int, float], dict[int, int]]:
    """Shifts (s) of all ranks' clocks to that of the first, and of step numbers: breadth first, along shared groups.

    Raises InputError if a rank shares too few collectives with the others.
    """
    usual_s = float(np.median([step.end_s - step.start_s for t in timelines for step in t.steps]))
    shift_s, renumber = dict[int, float](), dict[int, int]()
    known: dict[Key, float] = {}  # ends on the first rank's clock
    left = [(t, {(s.iteration, *key): c.end_s for s in t.steps for key, c in s.placed() if c.group}) for t in timelines]
    while left:
        aligned = ((t, mine, _compare(mine, known, usual_s)) for t, mine in left)
        t, mine, found = next((one for one in aligned if one[2] is not None), (*left[0], None))
        if found is None and shift_s:
            raise _cannot(t, timelines, set(shift_s))
        shift_s[t.rank], renumber[t.rank] = found or (0.0, 0)
        known = {key: end_s + shift_s[t.rank] for key, end_s in _renumbered(mine, renumber[t.rank]).items()} | known
        left = [one for one in left if one[0] is not t]
    return shift_s, renumber


def _cannot(one: Timeline, timelines: list[Timeline], known: set[int]) -> InputError:
    """Why a rank's clock cannot be aligned."""
    numbers = {step.iteration for t in timelines if t.rank in known for step in t.steps}
    if numbers.isdisjoint(step.iteration for step in one.steps):
        named = ", ".join(f"rank {t.rank} has {len(t.steps)}" for t in timelines[:8])
        why = f"no step that all ranks have ({named}); allowed: files of the same steps of one job"
        return InputError(f"{one.path}: {why}")
    return InputError(
        f"{one.path}: rank {one.rank} shares fewer than {MIN_SHARED} collectives with the other ranks, so its clock "
        "cannot be aligned; allowed: profiles of the same steps"
    )


def _renumbered(ends: dict[Key, float], offset: int) -> dict[Key, float]:
    return {(step + offset, *rest): end_s for (step, *rest), end_s in ends.items()} if offset else ends  # type: ignore[misc]


def _compare(mine: dict[Key, float], other: dict[Key, float], step_s: float) -> tuple[float, int] | None:
    """The shift (s) and the offset of steps under which ends agree best, None if too few are shared.

    Clocks that are less than half a step apart as the steps are counted would be further apart by any other count.
    """
    if {key[1:3] for key in mine}.isdisjoint(key[1:3] for key in other):
        return None
    agreement = _apart(mine, other)
    if agreement is not None and (agreement[0] <= _SURE_S or abs(agreement[1]) < 0.5 * step_s):
        return agreement[1], 0
    few = dict(islice(sorted(mine.items()), _MOST_TRIED))
    steps, theirs = {key[0] for key in few}, {key[0] for key in other}
    least = max(_MOST_STEPS * min(len(steps), len(theirs)), 2)
    offsets = (k for d in range(1, MOST_OFFSET + 1) for k in (-d, d))
    tried = [k for k in offsets if sum(step + k in theirs for step in steps) >= least]
    better = [(*apart, k) for k in tried if (apart := _apart(_renumbered(few, k), other)) is not None]
    best = min(better, default=None)
    agrees_s = max(_AGREES * step_s, _LEAST_AGREEMENT_S)
    if best is not None and best[0] <= agrees_s and (agreement is None or best[0] < _CLEARLY * agreement[0]):
        return best[1:]
    return None if agreement is None else (agreement[1], 0)


def _apart(mine: dict[Key, float], other: dict[Key, float]) -> tuple[float, float] | None:
    """The median deviation of the differences of ends from their median, and this; None with too few of them.

    A median that is no larger than nine in ten differences lie apart is no other clock: networks let members go that
    far apart. Which nine: those that lie closest, as a GPU's clock may jump by milliseconds within a profile.
    """
    shared = mine.keys() & other.keys()
    differences = np.sort([other[key] - mine[key] for key in shared])
    if not shared or (len(shared) < MIN_SHARED and np.abs(differences).max() > _SAME_CLOCK_S):
        return None
    middle, most = float(np.median(differences)), math.ceil(0.9 * len(differences))
    range_s = float(np.min(differences[most - 1 :] - differences[: len(differences) - most + 1]))
    return float(np.median(np.abs(differences - middle))), 0.0 if abs(middle) <= range_s else middle


def ends_apart(steps_of: Steps) -> tuple[float, int]:
    """How far ends of shared collectives lie from their middle, s, in nine of ten; and how many collectives are."""
    of: dict[Key, list[float]] = defaultdict(list)
    for steps in steps_of.values():
        for i, step in steps.items():
            for key, c in step.placed():
                if c.group:
                    of[i, *key].append(c.end_s)
    apart = [max(abs(np.array(e) - np.median(e))) for e in of.values() if len(e) > 1]
    return (float(np.quantile(apart, 0.9)) if apart else 0.0), len(apart)
