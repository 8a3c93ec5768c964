"""What a file leaves unsaid of its collectives, by what the other ranks' files say and by when all end.

Kernels of 2023, of CUDA graphs, and those whose launch was not recorded name neither their process group nor a size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from paceenv.importers.collective_names import SEND_RECV
from paceenv.importers.timelines import UNNAMED_GROUP, Collective, Step

Steps = dict[int, dict[int, Step]]
"""By rank, then by number."""
_Key = tuple[str, str]
"""Group and operation."""
_LETTING_GO_S: Final = 100e-6
"""By how much networks let members go apart, however short the collective."""
_TOGETHER: Final = 0.5
"""Share of the shorter of two durations within which ends are together."""
_MORE_THAN_A_PAIR: Final = 3
"""Members of a group that sends and receives: a pair may be two stages of a pipeline."""


def name_groups(steps_of: Steps, common: list[int], world_size: int) -> Steps:
    """The same steps, on one clock, with a name for each group whose members end together, and none for others.

    All collectives of a job of two ranks are of both.
    """
    met: dict[_Key, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, steps in steps_of.items():
        for i in common:
            for c in steps[i].in_order:
                if c.group.startswith(UNNAMED_GROUP):
                    met[c.group, c.op][rank].append(c)
    if not met:
        return steps_of
    names: dict[int, dict[_Key, str]] = {rank: {} for rank in steps_of}
    for key, of_rank in met.items():
        clusters = _clusters(of_rank, all_meet=len(steps_of) == world_size == 2)
        for number, members in enumerate(clusters):
            is_group = len(members) > 1
            if key[1] == SEND_RECV:
                is_group &= len(clusters) == 1 or min(map(len, clusters)) >= _MORE_THAN_A_PAIR
            for rank in members:
                names[rank][key] = f"{key[0]}/{number}" if is_group else ""
    return {rank: {i: _renamed(step, names[rank]) for i, step in steps.items()} for rank, steps in steps_of.items()}


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


def _renamed(step: Step, names: Mapping[_Key, str]) -> Step:
    renamed = []
    for c in step.collectives:
        group = names.get((c.group, c.op), "" if c.group.startswith(UNNAMED_GROUP) else c.group)
        is_all_to_all = c.op == SEND_RECV and group and group != c.group
        renamed.append(replace(c, op="all_to_all" if is_all_to_all else c.op, group=group))
    return replace(step, collectives=tuple(renamed))


def fill_sizes(steps_of: Steps) -> Steps:
    """The same steps with the sizes that other ranks say of the same collective, or else all other steps."""
    said: dict[tuple[int, str, str, int], set[int]] = defaultdict(set)
    for steps in steps_of.values():
        for i, step in steps.items():
            for key, c in step.placed():
                for at in (i, -1):
                    said[at, *key] |= {c.bytes} if c.bytes and c.group else set()
    filled_steps: Steps = defaultdict(dict)
    for rank, steps in steps_of.items():
        for i, step in steps.items():
            filled = []
            for key, c in step.placed():
                sizes = said[i, *key] or said[-1, *key]
                filled.append(replace(c, bytes=min(sizes)) if not c.bytes and len(sizes) == 1 else c)
            filled_steps[rank][i] = replace(step, collectives=tuple(filled))
    return filled_steps
