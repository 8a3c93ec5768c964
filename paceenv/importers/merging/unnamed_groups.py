"""Process groups that no file names: which ranks are in one, and whether they send to each other or all meet.

The members of a collective end it together. So, once clocks are aligned, ranks whose collectives of an unnamed group
all end together are its members. A kernel that sends and receives is an all-to-all where that holds, else a transfer
between ranks that nothing names.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Final

import numpy as np

from paceenv.importers.profiler.collective_names import SEND_RECV
from paceenv.importers.timelines import UNNAMED_GROUP, Collective, Step

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
    """The same steps with a name for each group that has members; what is alone in its group has none.

    Args:
        steps_of: of all ranks on one clock.
        common: steps that all ranks have.
    """
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
