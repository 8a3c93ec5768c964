"""The ranks that groups connect: whose own work takes longer, whom the others wait for, and what hides it.

A rank is named late only if its work takes longer *and* the members of its groups wait for it. Everything else that
could explain the waits is a reason (:mod:`paceenv.live.record.findings` tells all of it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceenv.core.lateness.watch import (
    CHRONIC,
    FIRST_STEPS,
    VARIATION_SHARE,
    Findings,
    LateRank,
    find_late_ranks,
    lateness_of,
)
from paceenv.core.wording import duration, name_ranks
from paceenv.live.observe.batch import POINT_TO_POINT
from paceenv.live.record.side_by_side import (
    FLOOR_S,
    Blocks,
    Times,
    Traffic,
    Wait,
    find_grid,
    measure_wait,
    medians,
    read_traffic,
    side_by_side,
)
from paceenv.live.record.snapshot import Snapshot, number

CONFIRMED_SHARE = 0.5
"""A rank is named only if the members of its groups wait for at least this share of its longer work."""
MOST_RANKS = 0.75
"""A block counts if at least this share of the ranks that are compared have it."""
SECOND_SHARE = 0.5
"""Further ranks are named down to this share of the latest one's lateness; those below wait for longer than they are
late."""
OTHER_STEP_SHARE = 0.05
"""Ranks whose mean steps over the same iterations differ by more do not share their steps."""
ALIKE_STAGES = 0.2
"""Single pipeline stages are compared where the others differ by at most this share of the lateness."""
RARE = 0.25
"""Unseen collectives in fewer blocks than this share cannot move a median over the blocks."""


@dataclass
class RankSet:
    """The findings about ranks that groups connect. Places are indices into the snapshots, times seconds per step."""

    places: list[int]
    compared: list[int] = field(default_factory=list)
    step_s: float = 0.0
    sides: str = ""
    """Which ranks were compared over how many iterations, in words."""
    stages: dict[int, int] = field(default_factory=dict)
    """Each rank's stage of a pipeline; empty without one."""
    late: dict[int, LateRank] = field(default_factory=dict)
    """By place; spans are numbers of blocks."""
    named: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """Ranks whose work takes longer, but who are not named, and why."""
    margin_s: dict[int, float] = field(default_factory=dict)
    """The least lateness that would have been named."""
    own_s: dict[int, float] = field(default_factory=dict)
    """Own time over the blocks in which the latest rank is late."""
    waits: list[Wait] = field(default_factory=list)
    lost_s: float = 0.0
    """What each rank waits at least, where nobody is late and time is lost."""
    reasons: list[str] = field(default_factory=list)
    """Why nobody in it can be called on time."""

    @property
    def complete(self) -> bool:
        """Whether everything about it could be seen."""
        return not self.reasons

    @property
    def floor_s(self) -> float:
        """Less than this is noise."""
        return max([FLOOR_S, *(m for m in self.margin_s.values() if math.isfinite(m))])


class Job:
    """The snapshots of a job's ranks side by side: what all sets of ranks are judged from."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        by_rank = {s["rank"]: s for s in snapshots if type(s.get("rank")) is int and s["rank"] >= 0}
        self.ranks = sorted(by_rank)
        self.snapshots = [by_rank[rank] for rank in self.ranks]
        newest = max(self.snapshots, key=lambda s: number(s, "unix_time_s") or 0.0)
        self.world_size = int(number(newest, "world_size") or len(self.ranks))
        self.missing = sorted(set(range(min(self.world_size, 1 << 20))) - set(self.ranks))
        grid = find_grid(self.snapshots)
        self.blocks: Blocks | None = side_by_side(self.snapshots, grid) if grid else None
        self.traffic: Traffic = read_traffic(self.snapshots, grid)

    def names(self, places: Sequence[int]) -> list[int]:
        return [self.ranks[place] for place in places]

    def numbers(self, places: Sequence[int], *path: str) -> Times:
        """A number of the snapshots at these places; 0 where it is unknown."""
        return np.array([number(self.snapshots[place], *path) or 0.0 for place in places])

    def span(self, late: LateRank, of: int = -1) -> tuple[int, int]:
        """First iteration of a lateness (of its last span, or of span ``of``), and its last iteration."""
        assert self.blocks is not None
        last = late.spans[-1].last
        return self.blocks.grid.span(late.spans[of].first, self.blocks.grid.length - 1 if last is None else last)


def judge(job: Job, places: list[int]) -> RankSet:
    """What can be said about the ranks at ``places``, which groups connect."""
    rank_set = RankSet(places)
    if len(places) < 2:
        unknown = "no collective is known to connect it with another rank that has a snapshot"
        rank_set.reasons.append("the job has one rank" if job.world_size == 1 else unknown)
        return rank_set
    blocks = job.blocks
    if blocks is None:
        rank_set.reasons.append("no blocks of iterations were measured")
        return rank_set
    _choose_compared(job, blocks, rank_set)
    if len(rank_set.compared) < 2:
        rank_set.reasons.append(f"fewer than two ranks have {FIRST_STEPS} blocks of iterations in common")
        return rank_set
    own_s_RK = blocks.own_s_RK[rank_set.compared]
    known = np.flatnonzero(~np.isnan(own_s_RK).all(axis=0))
    first, last = blocks.grid.span(int(known[0]), int(known[-1]))
    rank_set.sides = f"{name_ranks(job.names(rank_set.compared))} side by side over {last - first + 1} iterations"
    rank_set.stages = _stages(job, rank_set)
    watched = _watch(job, rank_set, own_s_RK, blocks.steps_K)
    _hidden(job, rank_set, blocks.grid.iterations)
    _name(job, rank_set, watched, own_s_RK)
    if not rank_set.named:
        _past_and_lost(job, rank_set, watched)
    return rank_set


def _choose_compared(job: Job, blocks: Blocks, rank_set: RankSet) -> None:
    """The ranks with enough blocks and the same steps as the others."""
    own, step = blocks.own_s_RK[rank_set.places], blocks.step_s_RK[rank_set.places]
    enough = (~np.isnan(own)).sum(axis=1) >= FIRST_STEPS
    short = [place for place, is_enough in zip(rank_set.places, enough, strict=True) if not is_enough]
    if short:
        rank_set.reasons.append(f"{name_ranks(job.names(short))} measured too few iterations")
    if not enough.any():
        return
    common = ~np.isnan(step[enough]).any(axis=0)
    step_s_R = medians(np.where(common[None, :], step, math.nan) if common.any() else step)
    rank_set.step_s = float(np.nanmedian(step_s_R[enough])) if not np.isnan(step_s_R[enough]).all() else 0.0
    others = np.abs(step_s_R - rank_set.step_s) > OTHER_STEP_SHARE * rank_set.step_s + 2.0 * FLOOR_S
    apart = [place for place, is_other in zip(rank_set.places, others & enough, strict=True) if is_other]
    if apart:
        verb = "does" if len(apart) == 1 else "do"
        rank_set.reasons.append(f"{name_ranks(job.names(apart))} {verb} not have the same steps as the other ranks")
    rank_set.compared = [p for p, good in zip(rank_set.places, enough & ~others, strict=True) if good]


def _stages(job: Job, rank_set: RankSet) -> dict[int, int]:
    """The stage of each rank in a pipeline: its place in the group that sends and receives."""
    stages: dict[int, int] = {}
    for operation in job.traffic.operations:
        if operation.op in POINT_TO_POINT:
            for place in operation.places.tolist():
                if place in rank_set.places and job.ranks[place] in operation.group.ranks:
                    stages[place] = operation.group.ranks.index(job.ranks[place])
    return stages


def _watch(job: Job, rank_set: RankSet, own_s_RK: Times, steps_K: Times) -> Findings:
    """When which rank's own work takes longer than that of its like. In a pipeline a rank's like has the same stage."""
    stages = rank_set.stages
    alike: list[list[int]] = [list(range(len(rank_set.compared)))]
    if stages:
        by_stage: dict[int, list[int]] = {}
        for row, place in enumerate(rank_set.compared):
            by_stage.setdefault(stages.get(place, -1), []).append(row)
        replicas = [rows for rows in by_stage.values() if len(rows) > 1]
        alike = replicas or alike
        single = [rank_set.compared[rows[0]] for rows in by_stage.values() if len(rows) == 1] if replicas else []
        if single:
            rank_set.reasons.append(
                f"{name_ranks(job.names(single))} have no rank of the same pipeline stage beside them"
            )
    known_K = (~np.isnan(own_s_RK)).sum(axis=0)
    own_s_RK = np.where(known_K >= MOST_RANKS * known_K.max(initial=0), own_s_RK, math.nan)
    watched = find_late_ranks(own_s_RK.T, rank_set.step_s, alike=alike, steps_T=steps_K)
    rank_set.margin_s = dict(zip(rank_set.compared, watched.least_s_R.tolist(), strict=True))
    if len(alike[0]) == len(rank_set.compared) and len(set(stages.values())) > 1:
        _refuse_unlike_stages(rank_set, watched, own_s_RK)
    return watched


def _refuse_unlike_stages(rank_set: RankSet, watched: Findings, own_s_RK: Times) -> None:
    """Without a second rank of the same stage, longer work may be the model's: layers are not spread evenly."""
    middle_s_R = medians(own_s_RK)
    for late in watched.late:
        others = np.delete(middle_s_R, late.rank)
        alike = len(others) > 1 and float(np.ptp(others)) <= ALIKE_STAGES * late.late_s
        if late.kind == CHRONIC and not alike:
            place = rank_set.compared[late.rank]
            rank_set.refused[place] = "no other rank has its pipeline stage, and stages need not have equal work"


def _hidden(job: Job, rank_set: RankSet, block_iterations: int) -> None:
    """Everything about the set that could not be seen; ranks that it could explain are refused."""
    inside = set(rank_set.places)
    groups = [group for group in job.traffic.groups if inside & set(group.places)]
    unseen = [g for g in groups if g.unseen_per_step * block_iterations >= RARE and len(g.ranks) > 1]
    for group in sorted(unseen, key=lambda group: name_ranks(group.ranks)):
        why = f"collectives of {name_ranks(group.ranks)} could not be seen"
        rank_set.refused |= dict.fromkeys(group.places, why)
        line = f"{group.unseen_per_step:.3g} {why} in a step, as where a compiled graph starts them"
        rank_set.reasons.append(f"{line}: waits in them count as own work")
    if job.missing:
        rank_set.reasons.append(f"{name_ranks(job.missing)} {'has' if len(job.missing) == 1 else 'have'} no snapshot")
    for seconds_R, what in (  # which the own time may include
        (job.traffic.ungrouped_s_R[rank_set.compared], "in collectives whose group is not known"),
        (
            job.numbers(rank_set.compared, "side", "seconds"),
            "in collectives that were put aside: other threads wait for them",
        ),
    ):
        if (seconds := float(seconds_R.max(initial=0.0))) > rank_set.floor_s:
            rank_set.reasons.append(f"up to {duration(seconds)} {what}")


def _name(job: Job, rank_set: RankSet, watched: Findings, own_s_RK: Times) -> None:
    """The late ranks: longer work, that the members of their groups wait for, and that nothing hidden can explain."""
    largest_s = max((late.late_s for late in watched.late), default=0.0)
    rank_set.late = {rank_set.compared[r.rank]: r for r in watched.late if r.late_s >= SECOND_SHARE * largest_s}
    first = watched.late[0].spans[-1].first if watched.late else 0
    known_K = ~np.isnan(own_s_RK).all(axis=0)
    chosen = [k for k in np.flatnonzero(known_K).tolist() if k >= first]
    rank_set.own_s = dict(zip(rank_set.compared, medians(own_s_RK[:, chosen]).tolist(), strict=True))
    compared_R = np.isin(np.arange(len(job.ranks)), rank_set.compared)
    rank_set.waits = [
        measure_wait(operation, compared_R, chosen)
        for operation in job.traffic.operations
        if compared_R[operation.places].sum() > 1
    ]
    # how much longer the median other member waits than a rank does, summed over its groups
    waited_s_R = np.zeros(len(job.ranks))
    for wait in rank_set.waits:
        waited_s_R[wait.places] += np.maximum(-lateness_of(wait.wait_s_E), 0.0)
    waited_s_R = waited_s_R[rank_set.compared]
    paced_s_R = job.numbers(rank_set.compared, "parts", "pacing_s")  # early ranks that are delayed wait for less
    waited_s_R += np.maximum(-lateness_of(paced_s_R), 0.0)
    waited_s = dict(zip(rank_set.compared, waited_s_R.tolist(), strict=True))
    for place, late in rank_set.late.items():
        side_s = number(job.snapshots[place], "side", "seconds") or 0.0
        if place in rank_set.refused:
            continue
        if waited_s[place] < max(CONFIRMED_SHARE * late.late_s, FLOOR_S):
            rank_set.refused[place] = "nobody was seen to wait for it"
        elif late.late_s - side_s < SECOND_SHARE * late.late_s:
            rank_set.refused[place] = "it may be waiting for the collectives of other threads"
        else:
            rank_set.named.append(place)


def _past_and_lost(job: Job, rank_set: RankSet, watched: Findings) -> None:
    rank_set.late |= {rank_set.compared[late.rank]: late for late in watched.past}
    wait_s = float(job.numbers(rank_set.compared, "wait", "mean_s").min())
    certain = rank_set.complete and not rank_set.refused and wait_s > rank_set.floor_s
    if certain and wait_s > VARIATION_SHARE * rank_set.step_s > 0.0:
        rank_set.lost_s = wait_s
