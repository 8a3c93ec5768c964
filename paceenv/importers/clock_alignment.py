"""One clock for ranks that recorded on their own clocks, from the ends of the collectives that they shared.

Collectives end together for their members, up to what the network takes to let them go. So a rank's clock is shifted by
the median difference of those ends to another rank's, as ``paceenv.live.record.merge_segments`` does for our own. How
well the ends then agree is the error that remains.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import numpy as np

from paceenv.core.errors import InputError
from paceenv.importers.collective_names import SEND_RECV
from paceenv.importers.timelines import UNNAMED_GROUP, Collective, Step, Timeline

MIN_SHARED: Final = 3
"""Collectives that two ranks must share for their clocks to be aligned."""
MOST_OFFSET: Final = 16
"""Steps by which two ranks may count differently."""
_AGREES: Final = 0.01
"""Share of a step within which ends of one collective lie when they are compared rightly."""
_LEAST_AGREEMENT_S: Final = 50e-6
_SURE_S: Final = 10e-6
"""Ends that agree as well as that need no other count of steps to be tried."""
_MOST_TRIED: Final = 2000
"""Collectives with which other counts of steps are tried."""
_DOUBTFUL: Final = 5.0
"""Times the usual disagreement from which on ends say nothing."""
_MOST_STEPS: Final = 0.5
"""Share of a rank's steps that another count must match with the other's: collectives of one step agree by any count."""
_NO_CLOCK: Final = 2.0
"""Times the range of nine in ten differences of ends: a clock that is off by less stays, as the network may have done it."""
_CLEARLY: Final = 0.2
"""Ends must disagree this much less for another count of steps to be believed."""

Key = tuple[int, str, str, int]
"""Step, group, operation, and place among its like in the step."""


@dataclass(frozen=True)
class Clocks:
    """What to add to each rank's times, s, and to its step numbers; ``error_s`` is how far ends still lie apart.

    The error is that of nine collectives in ten: how far the ends of their members lie from their middle one.
    """

    shift_s: dict[int, float]
    renumber: dict[int, int]
    error_s: float
    shared: int


def align_clocks(timelines: list[Timeline]) -> Clocks:
    """The clocks of all ranks, on that of the first: breadth first, along groups that ranks share.

    Raises InputError if a rank shares too few collectives with the others.
    """
    ends = {t.rank: _ends(t) for t in timelines}
    kinds = {rank: {(group, op) for _, group, op, _ in mine} for rank, mine in ends.items()}
    usual_s = float(np.median([step.end_s - step.start_s for t in timelines for step in t.steps]))
    agrees_s = max(_AGREES * usual_s, _LEAST_AGREEMENT_S)
    first = timelines[0].rank
    shift_s, renumber = {first: 0.0}, {first: 0}
    reached = set(kinds[first])
    left = [t for t in timelines if t.rank != first]
    while left:
        for t in left:
            if reached.isdisjoint(kinds[t.rank]):
                continue
            known = {rank: add_s for rank, add_s in shift_s.items() if not kinds[rank].isdisjoint(kinds[t.rank])}
            found = _against_known(ends[t.rank], ends, known, agrees_s)
            if found is not None:
                reached |= kinds[t.rank]
                shift_s[t.rank], renumber[t.rank] = found
                ends[t.rank] = _renumbered(ends[t.rank], found[1])
                left.remove(t)
                break
        else:
            raise _cannot(left[0], timelines, set(shift_s))
    return Clocks(shift_s, renumber, *_error(ends, shift_s))


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


def _ends(timeline: Timeline) -> dict[Key, float]:
    """When each collective ended on the rank's own clock."""
    found: dict[Key, float] = {}
    for step in timeline.steps:
        seen: dict[tuple[str, str], int] = defaultdict(int)
        for c in step.collectives:
            if c.group:
                found[step.iteration, c.group, c.op, seen[c.group, c.op]] = c.end_s
                seen[c.group, c.op] += 1
    return found


def _renumbered(ends: dict[Key, float], offset: int) -> dict[Key, float]:
    return {(step + offset, *rest): end_s for (step, *rest), end_s in ends.items()} if offset else ends  # type: ignore[misc]


def _against_known(
    mine: dict[Key, float], ends: dict[int, dict[Key, float]], known: dict[int, float], agrees_s: float
) -> tuple[float, int] | None:
    """Shift and offset of a rank's steps against those whose clocks are known; None if none shares enough with it.

    Known are those with a kind of collective in common, as all counts of steps are tried with each of them.

    A clock stays as it is where only groups that nothing names could tell, and their collectives do not end together.
    """
    best: tuple[float, float, int] | None = None
    for rank, add_s in known.items():
        found = _compare(mine, ends[rank], agrees_s)
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], found[1] + add_s, found[2])
            if best[0] <= agrees_s:
                break
    if best is not None and best[0] > _DOUBTFUL * agrees_s and all(key[1].startswith(UNNAMED_GROUP) for key in mine):
        return 0.0, 0
    return None if best is None else best[1:]


def _compare(mine: dict[Key, float], other: dict[Key, float], agrees_s: float) -> tuple[float, float, int] | None:
    """How far ends lie apart (s), the shift (s) and the offset of steps under which they agree best."""
    found = _apart(mine, other)
    if found is not None and found[0] <= _SURE_S:
        return *found, 0
    few = dict(islice(sorted(mine.items()), _MOST_TRIED))
    steps, theirs = {key[0] for key in few}, {key[0] for key in other}
    least = max(_MOST_STEPS * min(len(steps), len(theirs)), 2)
    offsets = (k for d in range(1, MOST_OFFSET + 1) for k in (-d, d))
    tried = [k for k in offsets if sum(step + k in theirs for step in steps) >= least]
    better = [(*apart, k) for k in tried if (apart := _apart(_renumbered(few, k), other)) is not None]
    best = min(better, default=None)
    if best is not None and best[0] <= agrees_s and (found is None or best[0] < _CLEARLY * found[0]):
        return best
    return None if found is None else (*found, 0)


def _apart(mine: dict[Key, float], other: dict[Key, float]) -> tuple[float, float] | None:
    """The median deviation of the differences of ends from their median, and this; None with too few of them.

    Ranks need not share a group that nothing names, so each of these is looked at alone, and the best one counts.
    """
    shared = mine.keys() & other.keys()
    unnamed = {key[1] for key in shared if key[1].startswith(UNNAMED_GROUP)}
    if unnamed:
        by_group = [[key for key in shared if key[1] == group] for group in unnamed]
        by_group.append([key for key in shared if key[1] not in unnamed])
    else:
        by_group = [list(shared)]
    found = []
    for keys in by_group:
        if len(keys) >= MIN_SHARED:
            differences = np.array([other[key] - mine[key] for key in keys])
            low, middle, high = np.quantile(differences, (0.05, 0.5, 0.95)).tolist()
            apart = float(np.median(np.abs(differences - middle)))
            found.append((apart, 0.0 if abs(middle) <= _NO_CLOCK * (high - low) else middle))
    return min(found, default=None)


def _error(ends: dict[int, dict[Key, float]], shift_s: dict[int, float]) -> tuple[float, int]:
    """How far ends of shared collectives lie from their middle, s, in nine of ten; and how many collectives are."""
    of: dict[Key, list[float]] = defaultdict(list)
    for rank, mine in ends.items():
        for key, end_s in mine.items():
            if not key[1].startswith(UNNAMED_GROUP):
                of[key].append(end_s + shift_s[rank])
    if not of:
        for rank, mine in ends.items():
            for key, end_s in mine.items():
                of[key].append(end_s + shift_s[rank])
    apart = [max(abs(np.array(e) - np.median(e))) for e in of.values() if len(e) > 1]
    return (float(np.quantile(apart, 0.9)) if apart else 0.0), len(apart)


_TOGETHER: Final = 0.005
"""Share of a step within which ends are together, beside what networks take to let members go."""
_LETTING_GO_S: Final = 100e-6
_MORE_THAN_A_PAIR: Final = 3
"""Members of a group that sends and receives: a pair may be two stages of a pipeline."""
_MOST_COMPARED: Final = 1000
"""Collectives of a group by which two ranks are compared."""

Steps = dict[int, dict[int, Step]]
"""By rank, then by number."""
_Ends = dict[tuple[int, int], float]
"""When the collectives of a group ended, s, by step and place in it."""


def name_groups(steps_of: Steps, common: list[int]) -> Steps:
    """The same steps with a name for each group that has members; what is alone in its group has none."""
    ends: dict[tuple[str, str], dict[int, _Ends]] = defaultdict(lambda: defaultdict(dict))
    for rank, steps in steps_of.items():
        for i in common:
            for key, place, c in _placed(steps[i]):
                if len(ends[key][rank]) < _MOST_COMPARED:
                    ends[key][rank][i, place] = c.end_s
    if not ends:
        return steps_of
    step_s = float(np.median([steps[i].end_s - steps[i].start_s for steps in steps_of.values() for i in common]))
    together_s = _TOGETHER * step_s + _LETTING_GO_S
    named: dict[int, dict[tuple[str, str], str]] = {rank: {} for rank in steps_of}
    for key, of_rank in ends.items():
        clusters = _clusters(of_rank, together_s)
        meet = key[1] != SEND_RECV or len(clusters) == 1 or min(map(len, clusters)) >= _MORE_THAN_A_PAIR
        for number, members in enumerate(clusters):
            for rank in members:
                named[rank][key] = f"{key[0]}/{number}" if meet and len(members) > 1 else ""
    return {rank: {i: _renamed(step, named[rank]) for i, step in steps.items()} for rank, steps in steps_of.items()}


def _placed(step: Step) -> list[tuple[tuple[str, str], int, Collective]]:
    """A step's collectives of unnamed groups: group and operation, place among its like."""
    seen: dict[tuple[str, str], int] = defaultdict(int)
    found = []
    for c in sorted(step.collectives, key=lambda c: (c.start_s, c.end_s)):
        if c.group.startswith(UNNAMED_GROUP):
            key = (c.group, c.op)
            found.append((key, seen[key], c))
            seen[key] += 1
    return found


def _clusters(of_rank: dict[int, _Ends], together_s: float) -> list[list[int]]:
    """Ranks whose collectives end together; each is compared with the first of each cluster."""
    found: list[list[int]] = []
    for rank, ends in sorted(of_rank.items()):
        for cluster in found:
            other = of_rank[cluster[0]]
            shared = ends.keys() & other.keys()
            apart = [abs(ends[key] - other[key]) for key in shared]
            if len(shared) >= 0.5 * max(len(ends), len(other)) and float(np.median(apart)) <= together_s:
                cluster.append(rank)
                break
        else:
            found.append([rank])
    return found


def _renamed(step: Step, names: dict[tuple[str, str], str]) -> Step:
    if not any(c.group.startswith(UNNAMED_GROUP) for c in step.collectives):
        return step
    renamed = []
    for c in step.collectives:
        group = names.get((c.group, c.op), "") if c.group.startswith(UNNAMED_GROUP) else c.group
        renamed.append(replace(c, op="all_to_all" if c.op == SEND_RECV and group else c.op, group=group))
    return replace(step, collectives=tuple(renamed))
