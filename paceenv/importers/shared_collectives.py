"""What the files of several ranks say of the collectives that they share: one clock, groups, sizes.

Collectives end together for their members, up to what the network takes to let them go. So a rank's clock is shifted by
the median difference of those ends to those of other ranks, as ``paceenv.live.record.merge_segments`` does for our own.
How well the ends then agree is the error that remains. Kernels of 2023, of CUDA graphs, and those whose launch was not
recorded name neither their process group nor a size: ends and other files tell.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

import numpy as np

from paceenv.core.errors import InputError
from paceenv.importers.collective_names import SEND_RECV
from paceenv.importers.timelines import UNNAMED_GROUP, Collective, Step, Timeline

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
_LETTING_GO_S: Final = 100e-6
"""By how much networks let members go apart, however short the collective."""
_TOGETHER: Final = 0.5
"""Share of the shorter of two durations within which ends are together."""
_MORE_THAN_A_PAIR: Final = 3
"""Members of a group that sends and receives: a pair may be two stages of a pipeline."""

Steps = dict[int, dict[int, Step]]
"""By rank, then by number."""
_Kind = tuple[str, str]
"""Group and operation."""
_Place = tuple[int, str, str, int]
"""Step, group, operation, and place among its like in the step."""
Meetings = dict[_Place, dict[int, Collective]]
"""All collectives of all ranks: where each stands, the same one of each rank."""


def align_clocks(timelines: list[Timeline]) -> tuple[dict[int, float], dict[int, int]]:
    """Shifts (s) of all ranks' clocks to that of the first, and of step numbers: breadth first, along shared groups.

    Raises InputError if a rank shares too few collectives with the others.
    """
    usual_s = float(np.median([step.end_s - step.start_s for t in timelines for step in t.steps]))
    shift_s, renumber = dict[int, float](), dict[int, int]()
    known: dict[_Place, float] = {}  # ends on the first rank's clock
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
    numbers = {step.iteration for t in timelines if t.rank in known for step in t.steps}
    if numbers.isdisjoint(step.iteration for step in one.steps):
        named = ", ".join(f"rank {t.rank} has {len(t.steps)}" for t in timelines[:8])
        why = f"no step that all ranks have ({named}); allowed: files of the same steps of one job"
        return InputError(f"{one.path}: {why}")
    return InputError(
        f"{one.path}: rank {one.rank} shares fewer than {MIN_SHARED} collectives with the other ranks, so its clock "
        "cannot be aligned; allowed: profiles of the same steps"
    )


def _renumbered(ends: dict[_Place, float], offset: int) -> dict[_Place, float]:
    return {(step + offset, *rest): end_s for (step, *rest), end_s in ends.items()} if offset else ends  # type: ignore[misc]


def _compare(mine: dict[_Place, float], other: dict[_Place, float], step_s: float) -> tuple[float, int] | None:
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


def _apart(mine: dict[_Place, float], other: dict[_Place, float]) -> tuple[float, float] | None:
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


def find_meetings(steps_of: Steps) -> Meetings:
    """The same collectives of all ranks beside each other."""
    met: Meetings = defaultdict(dict)
    for rank, steps in steps_of.items():
        for i, step in steps.items():
            for key, c in step.placed():
                met[i, *key][rank] = c
    return met


def ends_apart(met: Meetings) -> tuple[float, float, int]:
    """In nine of ten shared collectives, s: how far ends lie from their middle, and first ends before last begins.

    The last number says how many collectives are shared.
    """
    shared = [list(of.values()) for (_, group, *_), of in met.items() if group and len(of) > 1]
    ends = [[c.end_s for c in members] for members in shared]
    apart = [max(abs(np.array(end_s) - np.median(end_s))) for end_s in ends]
    early = [max(c.start_s for c in members) - min(c.end_s for c in members) for members in shared]
    error_s, early_s = (float(np.quantile(some or [0.0], 0.9)) for some in (apart, early))
    return error_s, early_s, len(shared)


def name_groups(steps_of: Steps, common: list[int], world_size: int) -> None:
    """Give each group a name whose members end together, on one clock, and none to others.

    All collectives of a job of two ranks are of both.
    """
    met: dict[_Kind, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, steps in steps_of.items():
        for i in common:
            for c in steps[i].collectives:
                if c.group.startswith(UNNAMED_GROUP):
                    met[c.group, c.op][rank].append(c)
    if not met:
        return
    names: dict[tuple[int, str, str], str] = {}
    for key, of_rank in met.items():
        clusters = _clusters(of_rank, all_meet=len(steps_of) == world_size == 2)
        for number, members in enumerate(clusters):
            is_group = len(members) > 1
            if key[1] == SEND_RECV:
                is_group &= len(clusters) == 1 or min(map(len, clusters)) >= _MORE_THAN_A_PAIR
            names |= {(rank, *key): f"{key[0]}/{number}" for rank in members if is_group}
    for rank, c in ((rank, c) for rank, steps in steps_of.items() for step in steps.values() for c in step.collectives):
        if c.group.startswith(UNNAMED_GROUP):
            c.group = names.get((rank, c.group, c.op), "")
            c.op = "all_to_all" if c.op == SEND_RECV and c.group else c.op


def _clusters(of_rank: Mapping[int, list[Collective]], *, all_meet: bool) -> list[list[int]]:
    """Ranks whose collectives are as many and end together; each is compared with the first of each cluster."""
    clusters: list[list[int]] = []
    for rank, mine in of_rank.items():
        for cluster in clusters:
            other = of_rank[cluster[0]]
            if len(mine) == len(other) and (_end_together(mine, other) or (all_meet and mine[0].op != SEND_RECV)):
                cluster.append(rank)
                break
        else:
            clusters.append([rank])
    return clusters


def _end_together(mine: list[Collective], other: list[Collective]) -> bool:
    apart_s = np.median([abs(a.end_s - b.end_s) for a, b in zip(mine, other, strict=True)])
    least_s = np.median([min(a.end_s - a.start_s, b.end_s - b.start_s) for a, b in zip(mine, other, strict=True)])
    share = 0.0 if mine[0].op == SEND_RECV else _TOGETHER
    return bool(apart_s <= max(_LETTING_GO_S, share * least_s))


def fill_sizes(met: Meetings) -> None:
    """Take the size that nobody says of a collective from other ranks, or else from all other steps."""
    said: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for place, of_rank in met.items():
        for key in (place, place[1:]) if place[1] else ():
            said[key] |= {c.bytes for c in of_rank.values() if c.bytes}
    for place, of_rank in met.items():
        sizes = said[place] or said[place[1:]]
        for c in of_rank.values():
            c.bytes = min(sizes) if not c.bytes and len(sizes) == 1 else c.bytes
