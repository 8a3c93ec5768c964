"""The ranks that groups connect: whose own work takes longer, whom the others wait for, and what hides it.

A rank is named late only if its work takes longer *and* the members of its groups wait for it. Everything else that
could explain the waits is listed as a reason: collectives that the agents could not see or put aside, missing ranks.
"""

from __future__ import annotations

import math
from typing import Any

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
from paceenv.live.record.side_by_side import FLOOR_S, Job, Times, Wait, medians
from paceenv.live.record.snapshot import EARLY, LATE, ON_TIME, UNKNOWN, number

CONFIRMED_SHARE = 0.5
"""A rank is named only if the members of its groups wait for at least this share of its longer work."""
MOST_RANKS = 0.75
"""A block counts if at least this share of the ranks that are compared have it."""
SECOND_SHARE = 0.5
"""Further ranks are named down to this share of the latest one's lateness; those below wait for longer than they are
late."""
NO_LINK = "no collective is known to connect it with another rank that has a snapshot"
OTHER_STEP_SHARE = 0.05
"""Ranks whose mean steps over the same iterations differ by more do not share their steps."""
ALIKE_STAGES = 0.2
"""Single pipeline stages are compared where the others differ by at most this share of the lateness."""
RARE = 0.25
"""Unseen collectives in fewer blocks than this share cannot move a median over the blocks."""
TOO_NOISY_SHARE = 0.25
"""Where this share of the step would still count as noise, early and late cannot be identified."""


def verdict_of(verdict: str, *, early_s: float = 0.0, late_s: float = 0.0) -> dict[str, Any]:
    """The field ``arrival`` of a snapshot: a verdict (of ``snapshot.ARRIVALS``), seconds."""
    return {"verdict": verdict, "early_s": early_s, "late_s": late_s}


def unknown(why: str) -> dict[str, Any]:
    """The field ``arrival`` of a snapshot where early and late cannot be told, and why."""
    return {"verdict": UNKNOWN, "evidence": why}


class RankSet:
    """What can be said about ranks that groups connect. Places are indices into the snapshots, times seconds per step.

    Attributes:
        late: ranks whose work takes or took longer, by place; spans are numbers of blocks.
        named: those of them for whom the others wait.
        refused: ranks that are not named, and why.
        waits: who waits where.
        lost_s: what each rank waits at least, where nobody is late and time is lost.
        reasons: why nobody in it can be called on time.
        verdicts: the verdict on each rank, by place.
    """

    def __init__(self, job: Job, places: list[int]) -> None:
        self.job, self.places = job, places
        self.compared = list[int]()
        self.late: dict[int, LateRank] = {}
        self.named, self.waits, self.reasons = list[int](), list[Wait](), list[str]()
        self.refused: dict[int, str] = {}
        self.step_s = self.lost_s = 0.0
        self._stages: dict[int, int] = {}  # of a pipeline
        self._least_s: dict[int, float] = {}  # the least lateness that would have been named
        self._own_s: dict[int, float] = {}  # over the blocks in which the latest rank is late
        self._judge()
        self.verdicts = {place: self._verdict(place) for place in places}

    def _judge(self) -> None:
        job = self.job
        if len(self.places) < 2 or not job.blocks:
            why = "no step has been measured" if not job.blocks else NO_LINK
            self.reasons.append("the job has one rank" if job.world_size == 1 else why)
            return
        self._choose_compared()
        if len(self.compared) < 2:
            self.reasons.append(f"fewer than two ranks have {FIRST_STEPS} blocks of iterations in common")
            return
        own_s_RK = job.own_s_RK[self.compared]
        watched = self._watch(own_s_RK)
        self._hidden()
        self._name(watched, own_s_RK)
        if not self.named:
            self.late |= {self.compared[late.rank]: late for late in watched.past}
            wait_s = float(job.numbers(self.compared, "wait", "mean_s").min())
            certain = not self.reasons and not self.refused and wait_s > self._floor_s()
            if certain and wait_s > VARIATION_SHARE * self.step_s > 0.0:
                self.lost_s = wait_s

    def _floor_s(self) -> float:
        """Less than this is noise."""
        return max([FLOOR_S, *(least_s for least_s in self._least_s.values() if math.isfinite(least_s))])

    def _choose_compared(self) -> None:
        """The ranks with enough blocks and the same steps as the others."""
        own, step = self.job.own_s_RK[self.places], self.job.step_s_RK[self.places]
        enough = (~np.isnan(own)).sum(axis=1) >= FIRST_STEPS
        if short := [place for place, is_enough in zip(self.places, enough, strict=True) if not is_enough]:
            self.reasons.append(f"{self.job.names(short)} measured too few iterations")
        if not enough.any():
            return
        common = ~np.isnan(step[enough]).any(axis=0)
        step_s_R = medians(np.where(common[None, :], step, math.nan) if common.any() else step)
        self.step_s = float(np.nanmedian(step_s_R[enough])) if not np.isnan(step_s_R[enough]).all() else 0.0
        others = np.abs(step_s_R - self.step_s) > OTHER_STEP_SHARE * self.step_s + 2.0 * FLOOR_S
        if apart := [place for place, is_other in zip(self.places, others & enough, strict=True) if is_other]:
            verb = "does" if len(apart) == 1 else "do"
            self.reasons.append(f"{self.job.names(apart)} {verb} not have the same steps as the other ranks")
        self.compared = [p for p, good in zip(self.places, enough & ~others, strict=True) if good]

    def _watch(self, own_s_RK: Times) -> Findings:
        """When which rank's own work takes longer than that of its like.

        In a pipeline a rank's stage is its place in the group that sends and receives; its like has the same.
        """
        job, alike = self.job, [list(range(len(self.compared)))]
        for operation in job.operations:
            if operation.op in POINT_TO_POINT:
                ranks = operation.group.ranks
                inside = [p for p in operation.places.tolist() if p in self.places and job.ranks[p] in ranks]
                self._stages |= {place: ranks.index(job.ranks[place]) for place in inside}
        by_stage: dict[int, list[int]] = {}
        for row, place in enumerate(self.compared):
            by_stage.setdefault(self._stages.get(place, -1), []).append(row)
        if self._stages and (replicas := [rows for rows in by_stage.values() if len(rows) > 1]):
            alike = replicas
            if single := [self.compared[rows[0]] for rows in by_stage.values() if len(rows) == 1]:
                self.reasons.append(f"{job.names(single)} have no rank of the same pipeline stage beside them")
        known_K = (~np.isnan(own_s_RK)).sum(axis=0)
        own_s_RK = np.where(known_K >= MOST_RANKS * known_K.max(initial=0), own_s_RK, math.nan)
        watched = find_late_ranks(own_s_RK.T, self.step_s, alike=alike, steps_T=job.steps_K)
        self._least_s = dict(zip(self.compared, watched.least_s_R.tolist(), strict=True))
        if len(alike[0]) == len(self.compared) and len(set(self._stages.values())) > 1:
            self._refuse_unlike_stages(watched, own_s_RK)
        return watched

    def _refuse_unlike_stages(self, watched: Findings, own_s_RK: Times) -> None:
        """Without a second rank of the same stage, longer work may be the model's: layers are not spread evenly."""
        middle_s_R = medians(own_s_RK)
        for late in watched.late:
            others = np.delete(middle_s_R, late.rank)
            alike = len(others) > 1 and float(np.ptp(others)) <= ALIKE_STAGES * late.late_s
            if late.kind == CHRONIC and not alike:
                place = self.compared[late.rank]
                self.refused[place] = "no other rank has its pipeline stage, and stages need not have equal work"

    def _hidden(self) -> None:
        """Everything about the set that could not be seen; ranks that it could explain are refused."""
        job, inside = self.job, set(self.places)
        groups = [group for group in job.groups if inside & set(group.places)]
        unseen = [g for g in groups if g.unseen_per_step * job.block_iterations >= RARE and len(g.ranks) > 1]
        for group in sorted(unseen, key=lambda group: name_ranks(group.ranks)):
            why = f"collectives of {name_ranks(group.ranks)} could not be seen"
            self.refused |= dict.fromkeys(group.places, why)
            line = f"{group.unseen_per_step:.3g} {why} in a step, as where a compiled graph starts them"
            self.reasons.append(f"{line}: waits in them count as own work")
        if job.missing:
            self.reasons.append(f"{name_ranks(job.missing)} {'has' if len(job.missing) == 1 else 'have'} no snapshot")
        aside_s_R = job.numbers(self.compared, "side", "seconds")
        for seconds_R, what in (  # which the own time may include
            (job.ungrouped_s_R[self.compared], "in collectives whose group is not known"),
            (aside_s_R, "in collectives that were put aside: other threads wait for them"),
        ):
            if (seconds := float(seconds_R.max(initial=0.0))) > self._floor_s():
                self.reasons.append(f"up to {duration(seconds)} {what}")

    def _name(self, watched: Findings, own_s_RK: Times) -> None:
        """The late ranks: longer work, that members of their groups wait for, and that nothing hidden can explain."""
        job, compared = self.job, self.compared
        largest_s = max((late.late_s for late in watched.late), default=0.0)
        self.late = {compared[r.rank]: r for r in watched.late if r.late_s >= SECOND_SHARE * largest_s}
        first = watched.late[0].spans[-1].first if watched.late else 0
        chosen = [k for k in np.flatnonzero(~np.isnan(own_s_RK).all(axis=0)).tolist() if k >= first]
        self._own_s = dict(zip(compared, medians(own_s_RK[:, chosen]).tolist(), strict=True))
        compared_R = np.isin(np.arange(len(job.ranks)), compared)
        for op, group, places, blocked_s_EK in job.operations:
            among_E = compared_R[places]
            if among_E.sum() > 1:
                blocked_s_E = medians(blocked_s_EK[among_E][:, chosen])
                self.waits.append(Wait(op, group, places[among_E], blocked_s_E - blocked_s_E.min()))
        # how much longer the median other member waits than a rank does, summed over its groups
        waited_s_R = np.zeros(len(job.ranks))
        for wait in self.waits:
            waited_s_R[wait.places] += np.maximum(-lateness_of(wait.wait_s_E), 0.0)
        # early ranks that are delayed wait for less
        paced_s_R = np.maximum(-lateness_of(job.numbers(compared, "parts", "pacing_s")), 0.0)
        waited_s = dict(zip(compared, (waited_s_R[compared] + paced_s_R).tolist(), strict=True))
        for place, late in self.late.items():
            side_s = number(job.snapshots[place], "side", "seconds") or 0.0
            if place in self.refused:
                continue
            if waited_s[place] < max(CONFIRMED_SHARE * late.late_s, FLOOR_S):
                self.refused[place] = "nobody was seen to wait for it"
            elif late.late_s - side_s < SECOND_SHARE * late.late_s:
                self.refused[place] = "it may be waiting for the collectives of other threads"
            else:
                self.named.append(place)

    def _verdict(self, place: int) -> dict[str, Any]:
        late, least_s = self.late.get(place), self._least_s.get(place, math.inf)
        if place not in self.compared:
            return unknown(self.reasons[0])
        if late is not None and place in self.named:
            return verdict_of(LATE, late_s=late.late_s)
        early_s = max((self._earlier_s(place, other) for other in self.named), default=0.0)
        if late is not None and place in self.refused:
            return unknown(f"its own work takes {duration(late.late_s)} longer, but {self.refused[place]}")
        if early_s > max(least_s, FLOOR_S) and math.isfinite(least_s):
            return verdict_of(EARLY, early_s=early_s)
        if self.reasons:
            return unknown(self.reasons[0])
        if not least_s <= TOO_NOISY_SHARE * self.step_s:
            limit = f"no more than {duration(least_s)} late, as far as can be told"
            return unknown(limit if math.isfinite(least_s) else "too few steps to tell whether it is late")
        like = [p for p in self.compared if p != place and self._stages.get(p) == self._stages.get(place)]
        later_s = self._own_s[place] - max((self._own_s[p] for p in like), default=math.inf)
        if later_s > max(least_s, FLOOR_S):
            return unknown(f"its own work takes {duration(later_s)} longer, and varies too much to be sure")
        return verdict_of(ON_TIME)

    def _earlier_s(self, place: int, late: int) -> float:
        """How much earlier a rank is than a late one, seconds. Own times of two stages of a pipeline say nothing."""
        if self._stages.get(place) != self._stages.get(late):
            return self.late[late].late_s
        return self._own_s[late] - self._own_s[place]
